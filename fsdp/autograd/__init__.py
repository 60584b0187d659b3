"""Questions to torch's autograd and to Python's stack: which backward runs, which function calls, what a node leads to.

Start with visits.py. Only this package uses the functions of autograd's engine in torch._C and walks frames of the stack.
May use: no other package.
Must not: use a unit, a rank or an event.
"""
