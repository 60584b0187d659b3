"""Parameters and optimizer state by fully qualified name, as this rank's shards or in full.

Start with fqns.py (the names) and param_shard.py (the shard of a parameter that a rank holds).
May use: runtime, params, shards, comm, device (streams, storage), autograd, errors, config.
Must not: write files.
"""
