"""Detects ranks that failed, ended or disagree, and notifies the other ranks.

Start with peers.py; desync.py compares what ranks wait for; watchdog.py ends waits on a device.
May use: errors. It works with stores, threads and processes.
Must not: read or write a tensor of training.
"""
