"""Full states that tests compare and load, and what tests are repeated with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import CASES, Case, make_net, weights_of
from tests.support.ranks import refused_everywhere

STATEFUL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Door = Callable[..., nn.Module]
DOORS = pytest.mark.parametrize("door", [fsdp.fully_shard, fsdp.FullyShardedDataParallel], ids=["in place", "wrapper"])


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Names, order, dtypes, shapes and every bit."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(found[name], tensor), name


def assert_state(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    assert_same_state(fsdp.full_state_dict(model, rank0_only=False), wanted)


@contextmanager
def refused_whole(model: nn.Module, text: str = "") -> Iterator[pytest.ExceptionInfo[fsdp.ShardingError]]:
    """What is inside is refused, and has loaded nothing."""
    before = weights_of(model)
    with pytest.raises(fsdp.ShardingError, match=text) as refusal:
        yield refusal
    assert_same_state(weights_of(model), before)


def refused_unchanged(options: dict[str, Any], text: str) -> None:
    """Options that are refused with this text on two ranks, while the module stays as it is."""

    def fn(rank: int) -> None:
        net = make_net()
        before = weights_of(net)
        try:
            fsdp.fully_shard(net, **options)
        finally:
            assert_same_state(weights_of(net), before)

    refused_everywhere(2, fn, text)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Names and order, and values after some steps."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def assert_like_plain(model: nn.Module, plain: nn.Module) -> None:
    assert_near(fsdp.full_state_dict(model, rank0_only=False), plain.state_dict())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The full weights, and the state of the optimizer, by name, on every rank."""
    state = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    kept = {f"{name}: {key}": torch.as_tensor(value) for name, one in state.items() for key, value in one.items()}
    return {**fsdp.full_state_dict(model, rank0_only=False), **kept}


def shifted(case: Case) -> dict[str, Tensor]:
    """A state dict of the plain module that differs from a fresh one everywhere."""
    return {name: tensor + 1 for name, tensor in case.model().state_dict().items()}
