"""How a player's model is wrapped: natively under each strategy, and through each door."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import nn

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.compat import ddp, fairscale, fully_shard, torch_fsdp
from tests.acts.players import Block, Net, Player

Wrap = Callable[[Net], tuple[nn.Module, Callable[[bool], None]]]


def plain_player(door: str, size: int) -> Player:
    """What the players of a door are compared with."""
    net = _net(door)
    return _player(door, net, net, tuple(range(size)), lambda synchronises: None, lambda norm: _net(door, norm), plain=True)


def player(door: str, rank: int) -> Player:
    """On one rank of a simulated world."""
    net = _net(door)
    model, synchronise = DOORS[door](net)
    return _player(door, model, net, (rank,), synchronise, lambda norm: DOORS[door](_net(door, norm))[0])


def kind_of(door: str) -> str:
    """A door whose plain player is the same."""
    alike = [
        other for other in DOORS if WITHOUT.get(other) == WITHOUT.get(door) and (other in REPLICATED) == (door in REPLICATED)
    ]
    return alike[0]


def _player(door: str, *things: Any, plain: bool = False) -> Player:
    return partial(Player, *things)(plain=plain, without=WITHOUT.get(door, ()), replicated=door in REPLICATED)


def _net(door: str, max_norm: float | None = None) -> Net:
    """fairscale's names accept float32 alone, and no frozen parameter beside others."""
    return Net(False, max_norm) if door == "fairscale" else Net(True, max_norm).double()


class _Context:
    """A context manager that is entered and left by hand."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._stack = make, ExitStack()

    def __call__(self, synchronises: bool) -> None:
        self._stack.close()
        if not synchronises:
            self._stack.enter_context(self._make())


def _native(net: Net, **options: Any) -> tuple[nn.Module, Callable[[bool], None]]:
    if options["sharding_strategy"] == "HYBRID_SHARD":
        here = current_rank()
        assert here is not None
        replicas = 2 if here.size % 2 == 0 else 1
        options["mesh"] = (replicas, here.size // replicas)
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, **options)
    return model, _Context(partial(fsdp.no_sync, model))


def _torch_fsdp(net: Net) -> tuple[nn.Module, Callable[[bool], None]]:
    policy = torch_fsdp.ModuleWrapPolicy({Block})
    model = torch_fsdp.FullyShardedDataParallel(net, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    return model, _Context(model.no_sync)


def _fully_shard(net: Net) -> tuple[nn.Module, Callable[[bool], None]]:
    for block in net.blocks:
        fully_shard.fully_shard(block)
    model: Any = fully_shard.fully_shard(net)
    return model, model.set_requires_gradient_sync


def _ddp(net: Net) -> tuple[nn.Module, Callable[[bool], None]]:
    model = ddp.DistributedDataParallel(net)
    return model, _Context(model.no_sync)


def _fairscale(net: Net) -> tuple[nn.Module, Callable[[bool], None]]:
    wrap = partial(fairscale.FullyShardedDataParallel, flatten_parameters=False)
    for number, block in enumerate(net.blocks):
        net.blocks[number] = wrap(block)
    model = wrap(net)
    return model, _Context(model.no_sync)


STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "HYBRID_SHARD", "NO_SHARD")
DOORS: Final[dict[str, Wrap]] = {
    **{strategy: partial(_native, sharding_strategy=strategy) for strategy in STRATEGIES},
    "torch_fsdp": _torch_fsdp,
    "fully_shard": _fully_shard,
    "ddp": _ddp,
    "fairscale": _fairscale,
}
_OF_PARTS: Final = (
    "read p.shape",
    "read the size of p",
    "read p.data.shape",
    "read p.grad.shape",
    "read the shapes of the optimizer's state",
    "read the value of a weight",
    "read the value of a gradient",
    "read a gradient of the root",
    "read the norm of every gradient",
    "read which parameters have a gradient",
    "make state by the shape of p",
    "look a row up with max_norm",
)
WITHOUT: Final[dict[str, tuple[str, ...]]] = {
    "torch_fsdp": _OF_PARTS,
    "fairscale": (*_OF_PARTS, "load the kept state dict with assign=True"),
}
"""What users of these two doors see of a parameter is a part, as with the engines of these names. fairscale knows no `assign`."""
REPLICATED: Final = ("NO_SHARD", "HYBRID_SHARD", "ddp")
"""Each of two ranks has all elements."""
