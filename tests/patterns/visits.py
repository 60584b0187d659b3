"""The invariants of `Visit`, checked after each of its methods while a program runs.

A table of its states would have some 45 rows (not entered, entered, left, entered again; each with or without a gradient, a
second graph, an open recompute), and would say less than these lines.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from fsdp.autograd.visits import Visit

METHODS = ("reset", "add_grad", "take_grads", "add_lost_act", "add_path", "reach", "reach_again", "leave")


def check(visit: Visit, after: str) -> None:
    """Raise AssertionError if an invariant does not hold."""
    recorded = (visit.entered, visit.has_grad, visit._open_calls, visit.lost_act, visit.tasks, visit.endpoint_handles)
    assert visit in visit._visited or not any(recorded), f"{after}: recorded, and not among the visits: {recorded}"
    assert visit.entered or not (visit._open_calls or visit._via_second_graph), f"{after}: open without being entered"
    ahead = [path for path in visit.living_paths() if path._backward == visit.backward and path._nodes_left]
    # a path whose graph is freed meanwhile is not followed any more
    assert visit._open_calls >= len(ahead), f"{after}: {visit._open_calls} open calls, and {len(ahead)} with nodes ahead"


@contextmanager
def checked() -> Iterator[None]:
    """Check every visit of every unit after each call of a method."""
    with ExitStack() as patches:
        for name in METHODS:
            patches.enter_context(patch.object(Visit, name, _checking(name, getattr(Visit, name))))
        yield


def _checking(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Visit, *args: Any) -> Any:
        result = method(self, *args)
        check(self, name)
        return result

    return call
