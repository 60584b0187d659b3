"""The parameters of one unit: its flat buffers, their layout, and the parameters that its modules show.

Start with unit.py, then flat_buffer.py and layout.py.
May use: shards, comm (communicators), device (streams, storage), autograd (frames), config, errors.
Must not: use a gradient bucket, an event, or another unit.
"""
