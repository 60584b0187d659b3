"""What fsdp.compat.fully_shard exports: FSDP2's function, class and handle, written over this engine.

Start with wrap.py, the function. module.py has the methods that a wrapped module gets; each maps to a capability of the engine.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Import torch's FSDP2, but for its configuration objects and its names.
"""
