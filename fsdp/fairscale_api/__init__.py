"""What fsdp.compat.fairscale exports: fairscale's classes and functions, written over this engine.

Start with wrapper.py, the wrapper class. It gives the engine flat parameters (flat_params.py), one unit for each instance.
May use: every package below.
Must not: decide what a unit does; that is the engine's. Import fairscale.
"""
