"""Checkpoints: folders on disk that any number of ranks can load.

Start with save.py and load.py. manifest.py describes what a folder holds; atomic_folder.py makes it appear all at once.
May use: state_dict, runtime/registry.py, comm.
Must not: start a forward or a backward. Here and in state_dict/sharded_value.py alone torch.distributed.checkpoint is imported.
"""
