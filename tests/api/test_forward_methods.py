"""fsdp.register_forward_method: which methods it refuses. What it accepts is trained in tests/patterns."""

from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import is_at_rest
from tests.support.ranks import on_ranks


class GoesOn(nn.Linear):
    """Methods that are not over when they have returned."""

    def generator(self, x: Tensor) -> Iterator[Tensor]:
        yield self(x)

    async def coroutine(self, x: Tensor) -> Tensor:
        return self(x)

    async def both(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self(x)


REFUSED_METHODS = {
    "generator": "goes on after it has returned",
    "coroutine": "goes on after it has returned",
    "both": "goes on after it has returned",
    "forward": "is a forward already",
    "__call__": "is a forward already",
}


@pytest.mark.parametrize("name", REFUSED_METHODS)
@on_ranks(2)
def test_a_method_that_cannot_be_run_as_a_forward_is_refused(rank: int, name: str) -> None:
    """A generator met shards; `forward`, registered, was heard twice."""
    model = fsdp.fully_shard(GoesOn(4, 4))
    with pytest.raises(fsdp.ShardingError, match=f"'{name}' {REFUSED_METHODS[name]}"):
        fsdp.register_forward_method(model, name)
    model(torch.ones(1, 4)).sum().backward()
    assert is_at_rest(model)
