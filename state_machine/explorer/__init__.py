"""Proves the tables: enumerates every reachable joint state of small trees of units and checks the invariants.

Start with model.py, which says what autograd and a user may do. Nothing that runs in training imports this package.
"""
