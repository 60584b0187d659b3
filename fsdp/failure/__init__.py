"""Failed, stopped and disagreeing ranks: how the others find out and what they are told.

Start with peers.py; desync.py compares what ranks wait for; watchdog.py frees waits on a device.
May use: errors. Works with stores, threads and processes.
Must not: touch a tensor of training.
"""
