"""The parameters of one unit: its flat buffers, their layout, and what the unit's modules show.

Start with unit.py, then flat_buffer.py and layout.py.
May use: comm (communicators), device (streams, storage), autograd (frames), config, errors.
Must not: use gradient buckets, events, or another unit.
"""
