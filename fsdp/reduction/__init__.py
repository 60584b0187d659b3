"""Gradients: from `.grad` of unsharded parameters to reduced gradients in `.grad` of sharded parameters.

Start with reducer.py, then bucket.py and in_flight.py.
May use: params (flat buffers), comm (communicators), device (streams, storage), config.
Must not: register a hook, read an event of the lifecycle, or read the state of a unit.
"""
