"""What fsdp.compat.torch_fsdp exports: torch's FSDP1 classes and functions, written over this engine.

Start with wrapper.py, the wrapper class. Each instance is one unit of the engine, over the user's own parameters.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Use torch's FullyShardedDataParallel or its flat parameters.
"""
