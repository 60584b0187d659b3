"""What the checks of `python -m fsdp selftest` share: a small model with and without shards, batches, comparisons of weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fsdp

STEPS: Final = 4
WIDTH: Final = 64
WITHIN: Final = 2e-5
"""How far a weight may be off, in units of the largest value of its tensor: some roundings of fp32."""
DETERMINISTIC: Final[dict[str, Any]] = {"reduction": fsdp.ReductionPolicy(deterministic=True)}
"""Options with which equal batches give equal bits."""
State = Mapping[str, Any]
"""Full weights by name."""


class Place(NamedTuple):
    """Where a check runs."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    """A folder that all ranks see."""

    @property
    def on_device(self) -> bool:
        """Whether the rank computes on an accelerator."""
        return self.device.type != "cpu"


class Block(nn.Module):
    """A unit: a norm, two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Layers(nn.Sequential):
    """The model: a layer, the blocks, and a layer."""

    def forward(self, x: Tensor, call: "Call | None" = None) -> Tensor:
        """Call each layer, or let `call` do that: it gets the number of the layer, the layer, and its input."""
        for number, layer in enumerate(self):
            x = layer(x) if call is None else call(number, layer, x)
        return x


Call = Callable[[int, nn.Module, Tensor], Tensor]


def make_model(device: torch.device) -> Layers:
    torch.manual_seed(0)
    return Layers(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 8)).to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def plain_weights(place: Place) -> State:
    """The weights of a plain model that trains on the batches of all ranks."""
    model = make_model(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(place.size):
            (loss_of(model(batch(rank, step, place.device))) / place.size).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def sharded_model(place: Place, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fsdp.fully_shard(make_model(place.device), auto_wrap_policy={Block}, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), call: Call | None = None
) -> None:
    for step in steps:
        loss_of(model(batch(place.rank, step, place.device), call)).backward()  # type: ignore[no-untyped-call]
        fsdp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    full: Any = fsdp.full_state_dict(model, rank0_only=False)
    return {name: value.cpu() for name, value in full.items()}


def trained_weights(place: Place, **options: Any) -> dict[str, Tensor]:
    model, optimizer = sharded_model(place, **options)
    train(place, model, optimizer)
    return weights_of(model)


def _distance(found: State, wanted: State) -> float:
    """The largest difference of a weight, in units of the largest value of its tensor."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"the parameters have other names: {sorted(found.keys() ^ wanted.keys())}")
    off = [(found[name].cpu() - one.cpu()).abs().max() / one.cpu().abs().max() for name, one in wanted.items()]
    return float(torch.stack(off).max())  # NaN if any is


def require_close(found: State, wanted: State, within: float) -> str:
    off = _distance(found, wanted)
    if not off <= within:
        raise AssertionError(f"a weight is off by {off:.2g} of the largest one; {within:.0e} is allowed")
    return f"off by {off:.1e}"


def require_equal(found: State, wanted: State) -> str:
    different = [name for name, one in wanted.items() if not torch.equal(found[name], one)]
    if different:
        raise AssertionError(f"the bits of {different[0]!r} differ, and of {len(different) - 1} more parameters")
    return "equal bits"
