"""Failed, stopped and disagreeing ranks: how the other ranks find out, and which errors they raise.

Start with peer_monitor.py; desync.py compares the collectives that ranks wait for; joint_groups.py does what concerns several
groups; watchdog.py ends waits on a device; unreachable_hosts.py finds hosts that do not answer.
May use: errors, log. It works with stores, threads, sockets and processes.
Must not: read or write a tensor of training.
"""
