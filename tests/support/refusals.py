"""What ranks that refuse something say."""

from collections.abc import Callable

import pytest

import fsdp


def refusals(size: int, fn: Callable[[int], object], error: type[Exception] = fsdp.ShardingError) -> list[str]:
    """The texts of the errors that `fn` raises on the ranks. It must raise one on each, and none waits for another."""

    def listen(rank: int) -> str:
        with pytest.raises(error) as caught:
            fn(rank)
        return str(caught.value)

    return fsdp.simulate(size, listen)


def refused_everywhere(size: int, fn: Callable[[int], object], text: str, error: type[Exception] = fsdp.ShardingError) -> None:
    """Check that `fn` raises an error with this text on every rank."""
    for message in refusals(size, fn, error):
        assert text in message


def told(size: int, fn: Callable[[int], object]) -> list[str]:
    """For each rank the class and the first line of the error that `fn` raises there; nothing where it raises none."""

    def listen(rank: int) -> str:
        try:
            fn(rank)
        except (fsdp.ShardingError, fsdp.WorldError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""

    return fsdp.simulate(size, listen)
