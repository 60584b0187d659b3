"""Device memory and streams.

Start with streams.py, whose note says which stream waits for which. storage.py allocates and releases memory.
May use: errors. Only here torch.cuda is used and `resize_` called.
Must not: use a unit or a communicator.
"""
