"""Checks that every rank refuses something."""

from collections.abc import Callable

import pytest

import fsdp


def refused_everywhere(size: int, fn: Callable[[int], object], text: str, error: type[Exception] = fsdp.ShardingError) -> None:
    """Check that `fn` raises an error with this text on every rank, and that none waits for another."""

    def listen(rank: int) -> str:
        with pytest.raises(error) as caught:
            fn(rank)
        return str(caught.value)

    for message in fsdp.simulate(size, listen):
        assert text in message
