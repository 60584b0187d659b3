"""Checks the tables: visits every reachable joint state of small trees of units and checks the invariants in each.

Start with model.py, which lists what autograd and a user may do. Nothing that runs in training imports this package.
"""
