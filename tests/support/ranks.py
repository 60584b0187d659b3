"""A test that every rank of a simulated world runs, and what ranks that refuse something say."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import fsdp

Test = Callable[..., None]


def on_ranks(size: int | str, refuses: str = "") -> Callable[[Test], Test]:
    """Run a test on each of `size` simulated ranks, or as many as its argument of that name says.

    Its argument `rank` is the number of the rank; the others come from pytest. `refuses`: on each rank it must raise a
    ShardingError with this text.
    """

    def of(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            ranks = given[size] if isinstance(size, str) else size
            program = lambda rank: test(*args, rank=rank, **given)  # noqa: E731
            refused_everywhere(ranks, program, refuses) if refuses else fsdp.simulate(ranks, program)

        others = [one for one in signature.parameters.values() if one.name != "rank"]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return of


def refusals(size: int, fn: Callable[[int], object], error: type[Exception] = fsdp.ShardingError) -> list[str]:
    """The texts of the errors that `fn` raises on the ranks. It must raise one on each, and none waits for another."""

    def listen(rank: int) -> str:
        with pytest.raises(error) as caught:
            fn(rank)
        return str(caught.value)

    return fsdp.simulate(size, listen)


def refused_everywhere(
    size: int, fn: Callable[[int], object], text: str, error: type[Exception] = fsdp.ShardingError
) -> list[str]:
    """Check that `fn` raises an error with this text on every rank. Return what it says."""
    messages = refusals(size, fn, error)
    assert all(text in message for message in messages), messages
    return messages


def told(size: int, fn: Callable[[int], object]) -> list[str]:
    """For each rank the class and the first line of the error that `fn` raises there; nothing where it raises none."""

    def listen(rank: int) -> str:
        try:
            fn(rank)
        except (fsdp.ShardingError, fsdp.WorldError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""

    return fsdp.simulate(size, listen)
