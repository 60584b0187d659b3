"""Tensors that know that they are shards: the sharded parameters, their gradients, and the state that an optimizer makes of them.

Start with shard_tensor.py, then operators.py. State dicts hold the values of sharded_value.py.
May use: comm (communicators), autograd (frames), errors.
Must not: know a flat buffer or a unit.
"""
