"""Checkpoints: folders on disk that any number of ranks can load.

Start with save.py and load.py. manifest.py describes the content of a folder; atomic_folder.py makes it appear all at once.
May use: state_dict, runtime (registry), reduction (gradients of no_sync), shards, comm, file_errors, random_states, errors.
Must not: start a forward or a backward. Only dcp.py and shards/sharded_value.py import torch.distributed.checkpoint.
"""
