"""Device memory and streams.

Start with streams.py, whose note says which stream waits for which. storage.py allocates and releases memory. home.py says where
shards are.
May use: config, errors. Only this package uses torch.cuda and calls `resize_`.
Must not: use a unit or a communicator.
"""
