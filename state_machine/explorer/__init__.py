"""Checks the tables: visits every reachable joint state of small trees of units and checks the invariants in each.

Start with model.py, which lists what autograd and a user may do. Nothing that runs in training imports this package.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn the collector off. It would look at every state that a search keeps, again and again: half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
