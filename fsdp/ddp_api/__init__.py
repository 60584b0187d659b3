"""What fsdp.compat.ddp and fsdp.compat.apex export: DistributedDataParallel of torch and of Apex, written over this engine.

Start with wrapper.py, torch's class. Both classes share their module by fully_shard with NO_SHARD, so every rank keeps the model.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Import Apex.
"""
