"""Counts of operations, the same on every machine: compare them between commits.

Two counters, because they miss different things. `dispatched`: what reaches the Python key of the dispatcher (a subclass such
as DTensor counts once for itself and once for what it does inside). `profiled`: the aten and c10d records of the profiler,
composite operations included.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import no_standard_error
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Counts what is dispatched, on both floors: a subclass's operation, then those it performs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrappers = [kind for kind in types if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__]
        self.operations[f"{func.name()} on {wrappers[0].__name__}" if wrappers else func.name()] += 1
        # to decline is to let the subclass go first, with this mode still listening to what it does
        return NotImplemented if wrappers else func(*args, **(kwargs or {}))


@contextmanager
def dispatched(found: Counter[str]) -> Iterator[None]:
    with Counting() as counting:
        yield
    found.update(counting.operations)


@contextmanager
def profiled(found: Counter[str]) -> Iterator[None]:
    with no_standard_error(), profile(activities=[ProfilerActivity.CPU]) as recording:
        yield
    found.update(event.name for event in recording.events() if event.name.startswith(("aten::", "c10d::", "_c10d")))


COUNTERS = {"dispatched": dispatched, "profiled": profiled}
