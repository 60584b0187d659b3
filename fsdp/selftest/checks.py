"""The checks of `python -m fsdp selftest`. Each runs on every rank, and raises if something is wrong.

Rule 1: the plain model trains on the batches of all ranks on one device, and the sharded model must have its weights.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fsdp

STEPS: Final = 4
WIDTH: Final = 64
WITHIN: Final = 2e-5
"""How far a weight may be off, in units of the largest value of its tensor: some roundings of fp32."""
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


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 8)).to(device)


def _batch(rank: int, step: int, device: torch.device) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _plain(place: Place) -> State:
    """The weights of a plain model that trains on the batches of all ranks."""
    model = _model(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(place.size):
            (_loss(model(_batch(rank, step, place.device))) / place.size).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _sharded(place: Place, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fsdp.fully_shard(_model(place.device), auto_wrap_policy={Block}, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        _loss(model(_batch(place.rank, step, place.device))).backward()  # type: ignore[no-untyped-call]
        fsdp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    full: Any = fsdp.full_state_dict(model, rank0_only=False)
    return {name: value.cpu() for name, value in full.items()}


def _trained(place: Place, **options: Any) -> dict[str, Tensor]:
    model, optimizer = _sharded(place, **options)
    _train(place, model, optimizer)
    return _weights(model)


def _distance(found: State, wanted: State) -> float:
    """The largest difference of a weight, in units of the largest value of its tensor."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"the parameters have other names: {sorted(found.keys() ^ wanted.keys())}")
    off = [(found[name].cpu() - one.cpu()).abs().max() / one.cpu().abs().max() for name, one in wanted.items()]
    return float(torch.stack(off).max())  # NaN if any is


def _require_close(found: State, wanted: State, within: float) -> str:
    off = _distance(found, wanted)
    if not off <= within:
        raise AssertionError(f"a weight is off by {off:.2g} of the largest one; {within:.0e} is allowed")
    return f"off by {off:.1e}"


def _require_equal(found: State, wanted: State) -> str:
    different = [name for name, one in wanted.items() if not torch.equal(found[name], one)]
    if different:
        raise AssertionError(f"the bits of {different[0]!r} differ, and of {len(different) - 1} more parameters")
    return "equal bits"


def _strategy(name: str) -> Callable[[Place], str]:
    def check(place: Place) -> str:
        options: dict[str, Any] = {"sharding_strategy": name}
        if name == "HYBRID_SHARD":
            replicas = 2 if place.size % 2 == 0 else 1
            options["mesh"] = (replicas, place.size // replicas)
        return _require_close(_trained(place, **options), _plain(place), WITHIN)

    return check


def _mixed_precision(place: Place) -> str:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _require_close(_trained(place, mp_policy=policy), _plain(place), 5e-2)


def _deterministic(place: Place) -> str:
    options = {"reduction": fsdp.ReductionPolicy(deterministic=True)}
    return _require_equal(_trained(place, **options), _trained(place, **options))


@contextmanager
def _delays(seed: int) -> Any:
    before = os.environ.get("FSDP_DELAYS")
    os.environ["FSDP_DELAYS"] = str(seed)
    try:
        yield
    finally:
        os.environ.pop("FSDP_DELAYS")
        if before is not None:
            os.environ["FSDP_DELAYS"] = before


def _delayed(place: Place) -> str:
    """Streams are stalled at random on CUDA; elsewhere the host sleeps."""
    options = {"reduction": fsdp.ReductionPolicy(deterministic=True), "prefetch": 2}
    wanted = _trained(place, **options)
    for seed in (1, 2):
        with _delays(seed):
            said = _require_equal(_trained(place, **options), wanted)
    return f"{said} under two seeds"


def _accumulation(place: Place) -> str:
    """Gradients of two backwards under `no_sync` and one that synchronises."""
    options = {"reduction": fsdp.ReductionPolicy(deterministic=True)}
    model, optimizer = _sharded(place, **options)
    other = _model(place.device)
    for step in range(3):
        if step < 2:
            with fsdp.no_sync(model):
                _loss(model(_batch(place.rank, step, place.device))).backward()  # type: ignore[no-untyped-call]
        else:
            _loss(model(_batch(place.rank, step, place.device))).backward()  # type: ignore[no-untyped-call]
        for rank in range(place.size):
            (_loss(other(_batch(rank, step, place.device))) / place.size).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).step()
    return _require_close(_weights(model), other.state_dict(), WITHIN)


def _memory(place: Place) -> str:
    """Between steps a rank holds its shards, and the allocator of the device as much after later steps as after the first."""
    model, optimizer = _sharded(place, reshard_after_forward=True)
    after_wrapping = fsdp.memory_bytes(model)
    _train(place, model, optimizer, range(2))
    first = torch.accelerator.memory_allocated() if place.on_device else 0
    _train(place, model, optimizer, range(2, 6))
    last = torch.accelerator.memory_allocated() if place.on_device else 0
    held = fsdp.memory_bytes(model)
    if held != after_wrapping:
        raise AssertionError(f"{held} bytes are held between steps, and {after_wrapping} were after wrapping")
    if last > first:
        raise AssertionError(f"the device holds {last - first} bytes more after six steps than after two")
    return f"{held:,} bytes between steps" + (f", the device holds {last:,}" if place.on_device else "")


def _checkpoint(place: Place) -> str:
    """A checkpoint in the middle of training, loaded into a new model: the bits of training that went on."""
    options = {"reduction": fsdp.ReductionPolicy(deterministic=True)}
    folder = place.folder / "checkpoint"
    model, optimizer = _sharded(place, **options)
    _train(place, model, optimizer, range(2))
    fsdp.save(folder, model, optimizer)
    _train(place, model, optimizer, range(2, STEPS))
    again, its_optimizer = _sharded(place, **options)
    fsdp.load(folder, again, its_optimizer)
    _train(place, again, its_optimizer, range(2, STEPS))
    return _require_equal(_weights(again), _weights(model))


def _host_waits(place: Place) -> str | None:
    """The host waits for the device nowhere in a step. Only CUDA can be asked."""
    module: Any = torch.get_device_module(place.device)
    if not hasattr(module, "set_sync_debug_mode"):
        return None
    model, optimizer = _sharded(place)
    _train(place, model, optimizer, range(2))
    x = _batch(place.rank, 3, place.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            _loss(model(x)).backward()  # type: ignore[no-untyped-call]
            fsdp.clip_grad_norm_(model, 0.5)
        finally:
            module.set_sync_debug_mode("default")
    waits = [str(one.message) for one in said if "synchronizing" in str(one.message)]
    if waits:
        raise AssertionError(f"the host waits {len(waits)} times in a step: {waits[0]}")
    return "none in forward, backward and clipping"


CHECKS: Final[dict[str, Callable[[Place], str | None]]] = {
    **{
        f"trains as without shards: {name}": _strategy(name)
        for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "HYBRID_SHARD")
    },
    "bf16 with fp32 reductions": _mixed_precision,
    "accumulation under no_sync": _accumulation,
    "the same bits twice": _deterministic,
    "the same bits under random delays": _delayed,
    "memory between steps": _memory,
    "a checkpoint goes on": _checkpoint,
    "host waits in a step": _host_waits,
}
"""Each check by its name in the report. It returns what it found; None: it cannot be made on this device."""
