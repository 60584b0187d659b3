"""From torch's hooks to events, from events to the tables of `state_machine`, from their answers to actions.

Start with engine.py, then hooks.py. Only here hooks are registered on modules and parameters, and only here the lifecycle moves.
May use: debug, reduction, params, comm, device, autograd, config.
Must not: decide in Python what a table can decide.
"""
