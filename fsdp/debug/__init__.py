"""Diagnostics: notes on errors, the dump of a rank that hangs, guard mode, numbers of a step, names of phases, random delays.

Start with error_notes.py, which has the snapshot of an engine and prints it.
May use: reduction, params, comm, comm.failure, device, autograd, errors, log.
Must not: change what the engine does. Only delays.py changes when something happens.
"""
