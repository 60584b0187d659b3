"""Device memory and streams.

Start with streams.py, whose note says which stream waits for which. storage.py allocates and frees.
May use: errors. Only here torch.cuda is named and `resize_` called.
Must not: know a unit or a communicator.
"""
