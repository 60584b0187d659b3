"""Collectives among ranks: one interface, implemented over torch.distributed and in a simulated world.

Start with communicator.py; context.py says which ranks share which communicator; simulated.py runs all ranks in one process.
May use: comm.failure, autograd (frames), config, random_states, errors, log. Only process_group.py, routed_group.py and
open_communicators.py import torch.distributed.
Must not: use a unit or a parameter.
"""
