"""What people are told: notes on errors, the dump of a waiting rank, guard mode, random delays.

Start with error_notes.py.
May use: params, comm, failure, device.
Must not: change what the engine does. delays.py alone changes when it happens, never what.
"""
