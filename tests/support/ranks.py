"""A test that every rank of a simulated world runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import fsdp

Test = Callable[..., None]


def on_ranks(size: int) -> Callable[[Test], Test]:
    """Run a test on each of `size` simulated ranks. It takes the rank first, and then what pytest gives it."""

    def of(test: Test) -> Test:
        _, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**given: Any) -> None:
            fsdp.simulate(size, lambda rank: test(rank, **given))

        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return of
