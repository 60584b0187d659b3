"""A test that every rank of a simulated world runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import fsdp

Test = Callable[..., None]


def on_ranks(size: int | str) -> Callable[[Test], Test]:
    """Run a test on each of `size` simulated ranks, or as many as its argument of that name says.

    Its argument `rank` is the number of the rank; the others come from pytest.
    """

    def of(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            ranks = given[size] if isinstance(size, str) else size
            fsdp.simulate(ranks, lambda rank: test(*args, rank=rank, **given))

        others = [one for one in signature.parameters.values() if one.name != "rank"]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return of
