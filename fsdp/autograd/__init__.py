"""Questions to torch's autograd and to Python's stack: which backward runs, which function calls, what a node leads to.

Start with node_hooks.py. Only here frames of the stack are walked.
May use: no other package.
Must not: know a unit, a rank or an event.
"""
