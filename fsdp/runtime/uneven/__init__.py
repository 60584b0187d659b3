"""Lets the ranks of a root go different ways (`uneven_paths`), or have different numbers of batches (`fsdp.join`).

Start with common_path.py: ranks gather in one common order, some of them passively; the protocol is `state_machine/paths.py`.
Start with join.py for ranks that have no data left.
May use: runtime, reduction, shards, params, comm, device, debug, config, errors, autograd.
Only this package reads the common path.
Must not: choose a collective by what this rank alone knows.
"""
