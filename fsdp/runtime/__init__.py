"""Turns torch's hooks into events, asks the tables of `state_machine`, and carries out the actions they return.

Start with passes.py, the stages of a step. Only here forward and gradient hooks are registered, and a lifecycle changes.
May use: debug, reduction, params, shards, comm, device, autograd, config, errors, log.
Must not: decide in Python what a table can decide.
"""
