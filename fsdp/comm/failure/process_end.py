"""Calls functions when this process ends by itself, whether it is an interpreter of its own or a fork.

`atexit` alone is not enough. Up to Python 3.12, a process that `multiprocessing` has forked leaves it out. Since Python 3.13
it forgets what was registered before the fork.
"""

import atexit
from collections.abc import Callable
from multiprocessing import util


def at_end(function: Callable[[], None]) -> None:
    """Call `function`, perhaps twice, when this process ends, and in each fork of it when that ends. Signals call nothing."""
    atexit.register(function)
    # it runs in the fork after `multiprocessing` has dropped what was registered
    util.register_after_fork(function, _at_end_of_fork)


def _at_end_of_fork(function: Callable[[], None]) -> None:
    util.Finalize(None, function, exitpriority=0)
