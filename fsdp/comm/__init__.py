"""Collectives among ranks: one interface, implemented over torch.distributed and in a simulated world.

Start with process_group.py; context.py makes the communicators of a model; simulated.py runs all ranks in one process.
May use: failure, config, errors. Only here torch.distributed is imported.
Must not: use a unit or a parameter.
"""
