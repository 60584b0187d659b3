"""Between phases of a program: moves a sharded model and its optimizers to host memory and back.

Start with host_memory.py.
May use: build, runtime, shards, params, device, errors.
Must not: communicate, or change a value.
"""
