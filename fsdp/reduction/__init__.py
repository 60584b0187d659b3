"""Reduces gradients: from `.grad` of unsharded parameters to `.grad` of sharded parameters.

Start with reducer.py, then bucket.py and in_flight.py.
May use: params (flat buffers), shards, comm (communicators), device (streams, storage), config, errors, log.
Must not: register a hook, or read the state or an event of a unit.
"""
