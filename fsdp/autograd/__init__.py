"""What torch's autograd and Python's stack can tell: which backward runs, which function calls, what a node leads to.

Start with node_hooks.py. Only this package uses the functions of autograd's engine in torch._C and walks frames.
May use: errors.
Must not: use a unit, a rank or an event.
"""
