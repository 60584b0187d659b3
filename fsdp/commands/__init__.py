"""What `python -m fsdp` offers: plans of jobs, reports of traces and of jobs that hang, checks of a machine, checkpoints.

Start with main.py, which has the commands; planning, rehearsal, reporting and selftest do what they ask for.
May use: every package below.
Must not: be needed to train.
"""
