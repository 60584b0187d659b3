"""Failed, stopped and disagreeing ranks: how the other ranks find out, and which errors they raise.

Start with peers.py; desync.py compares the collectives that ranks wait for; watchdog.py frees waits on a device.
May use: errors. Works with stores, threads and processes.
Must not: touch a tensor of training.
"""
