"""Diagnostics: notes on errors, the dump of a rank that hangs, guard mode, random delays.

Start with error_notes.py; snapshot.py is the data that it prints.
May use: params, comm, device, autograd, errors.
Must not: change what the engine does. Only delays.py changes when something happens.
"""
