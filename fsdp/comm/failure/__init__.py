"""Failed, stopped and disagreeing ranks: how the other ranks find out, and which errors they raise.

Start with peer_monitor.py; desync.py compares the collectives that ranks wait for; job_waits.py what ranks
of different groups wait for; watchdog.py ends waits on a device; unreachable_hosts.py finds hosts that do not answer.
May use: errors, log. It works with stores, threads, sockets and processes.
Must not: read or write a tensor of training.
"""
