"""What torch's autograd and Python's stack can be asked: which backward runs, which function calls, what a node leads to.

Start with node_hooks.py. Only here torch._C's functions of the engine are called and frames are walked.
May use: errors.
Must not: know a unit, a rank or an event.
"""
