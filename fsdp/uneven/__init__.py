"""Lets the ranks of a root go different ways (`uneven_paths`): they gather in one common order, some of them passively.

Start with uneven_engine.py; the protocol is `state_machine/paths.py`.
May use: runtime, shards, params, comm, device, debug, errors. Only this package reads the common path.
Must not: choose a collective by what this rank alone knows.
"""
