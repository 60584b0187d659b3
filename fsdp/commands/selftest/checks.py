"""The checks of `python -m fsdp selftest`. Each runs on every rank, and raises if something is wrong.

Rule 1: the plain model trains on the batches of all ranks on one device, and the sharded model must have its weights.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.commands.selftest.failures import on_all_ranks, on_one_rank, out_of_memory
from fsdp.commands.selftest.training import (
    DETERMINISTIC,
    STEPS,
    WITHIN,
    Call,
    Place,
    batch,
    loss_of,
    make_model,
    plain_weights,
    require_close,
    require_equal,
    sharded_model,
    train,
    trained_weights,
    weights_of,
)
from fsdp.debug.delays import DELAYS


def _as_plain(place: Place, within: float = WITHIN, **options: Any) -> str:
    """Training with these options, beside training without shards."""
    return require_close(trained_weights(place, **options), plain_weights(place), within)


def _hybrid(place: Place) -> str:
    replicas = 2 if place.size % 2 == 0 else 1
    return _as_plain(place, sharding_strategy="HYBRID_SHARD", mesh=(replicas, place.size // replicas))


def _offloaded(place: Place) -> str:
    """Shards, gradients and optimizer state in host memory."""
    found = trained_weights(place, offload_policy=fsdp.OffloadPolicy(), **DETERMINISTIC)
    return require_close(found, trained_weights(place, **DETERMINISTIC), WITHIN)


def _activation_checkpointing(place: Place) -> str:
    """Both kinds of checkpoints, with the bits of no checkpoint."""
    wanted, said = trained_weights(place, **DETERMINISTIC), ""
    for use_reentrant in (True, False):

        def call(number: int, layer: nn.Module, x: Tensor, use_reentrant: bool = use_reentrant) -> Tensor:
            result: Tensor = checkpoint(layer, x, use_reentrant=use_reentrant) if number else layer(x)
            return result

        model, optimizer = sharded_model(place, **DETERMINISTIC)
        train(place, model, optimizer, call=call)
        said = require_equal(weights_of(model), wanted)
    return said


def _different_paths(place: Place) -> str:
    """Each rank leaves out another block in each step. A rank without a gradient gives zeros."""
    plain = make_model(place.device)
    model, optimizer = sharded_model(place, uneven_paths=True)
    its_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model(batch(place.rank, step, place.device), _without_one(place.rank, step))).backward()  # type: ignore[no-untyped-call]
        fsdp.meet(model)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(place.size):
            loss = loss_of(plain(batch(rank, step, place.device), _without_one(rank, step)))
            (loss / place.size).backward()  # type: ignore[no-untyped-call]
        its_optimizer.step()
        its_optimizer.zero_grad()
    return require_close(weights_of(model), plain.state_dict(), WITHIN)


def _without_one(rank: int, step: int) -> Call:
    """Calls all layers but one block."""
    left_out = 1 + (rank + step) % 4
    return lambda number, layer, x: x if number == left_out else layer(x)


def _deterministic(place: Place) -> str:
    return require_equal(trained_weights(place, **DETERMINISTIC), trained_weights(place, **DETERMINISTIC))


def _delayed(place: Place) -> str:
    """Streams are stalled at random on CUDA; elsewhere the host sleeps."""
    before, said = os.environ.get(DELAYS), ""  # read first: ranks of one process share it
    options = {**DETERMINISTIC, "prefetch": 2}
    wanted = trained_weights(place, **options)
    try:
        for seed in ("1", "2"):
            os.environ[DELAYS] = seed
            said = require_equal(trained_weights(place, **options), wanted)
    finally:
        os.environ.pop(DELAYS, None)
        if before is not None:
            os.environ[DELAYS] = before
    return f"{said} under two seeds"


def _accumulation(place: Place) -> str:
    """Gradients of two backwards under `no_sync` and one that synchronises."""
    model, optimizer = sharded_model(place, **DETERMINISTIC)
    other = make_model(place.device)
    for step in range(3):
        with fsdp.no_sync(model) if step < 2 else nullcontext():
            loss_of(model(batch(place.rank, step, place.device))).backward()  # type: ignore[no-untyped-call]
        for rank in range(place.size):
            (loss_of(other(batch(rank, step, place.device))) / place.size).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).step()
    return require_close(weights_of(model), other.state_dict(), WITHIN)


def _memory(place: Place) -> str:
    """Between steps a rank holds its shards, and the allocator of the device as much after later steps as after the first."""
    model, optimizer = sharded_model(place, reshard_after_forward=True)
    after_wrapping = fsdp.memory_bytes(model)
    train(place, model, optimizer, range(2))
    first = torch.accelerator.memory_allocated() if place.on_device else 0
    train(place, model, optimizer, range(2, 6))
    last = torch.accelerator.memory_allocated() if place.on_device else 0
    held = fsdp.memory_bytes(model)
    if held != after_wrapping:
        raise AssertionError(f"{held} bytes are held between steps, and {after_wrapping} were after wrapping")
    if last > first:
        raise AssertionError(f"the device holds {last - first} bytes more after six steps than after two")
    return f"{held:,} bytes between steps" + (f", the device holds {last:,}" if place.on_device else "")


def _checkpoint(place: Place) -> str:
    """A checkpoint in the middle of training, loaded into a new model: the bits of training that went on."""
    folder = place.folder / "checkpoint"
    model, optimizer = sharded_model(place, **DETERMINISTIC)
    train(place, model, optimizer, range(2))
    fsdp.save(folder, model, optimizer)
    train(place, model, optimizer, range(2, STEPS))
    again, its_optimizer = sharded_model(place, **DETERMINISTIC)
    fsdp.load(folder, again, its_optimizer)
    train(place, again, its_optimizer, range(2, STEPS))
    return require_equal(weights_of(again), weights_of(model))


def _host_waits(place: Place) -> str | None:
    """The host waits for the device nowhere in a step. Only CUDA can be asked."""
    module: Any = torch.get_device_module(place.device)
    if not hasattr(module, "set_sync_debug_mode"):
        return None
    model, optimizer = sharded_model(place)
    train(place, model, optimizer, range(2))
    x = batch(place.rank, 3, place.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            loss_of(model(x)).backward()  # type: ignore[no-untyped-call]
            fsdp.clip_grad_norm_(model, 0.5)
        finally:
            module.set_sync_debug_mode("default")
    waits = [str(one.message) for one in said if "synchronizing" in str(one.message)]
    if waits:
        raise AssertionError(f"the host waits {len(waits)} times in a step: {waits[0]}")
    return "none in forward, backward and clipping"


CHECKS: Final[dict[str, Callable[[Place], str | None]]] = {
    **{
        f"trains as without shards: {name}": partial(_as_plain, sharding_strategy=name)
        for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_GRADIENTS", "SHARD_OPTIMIZER")
    },
    "trains as without shards: HYBRID_SHARD": _hybrid,
    "bf16 with fp32 reductions": partial(
        _as_plain, within=5e-2, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "accumulation under no_sync": _accumulation,
    "the same bits twice": _deterministic,
    "the same bits under random delays": _delayed,
    "small units share collectives": partial(  # which run on two streams
        _as_plain, reduction=fsdp.ReductionPolicy(coalesce_cap_mb=1, streams=2)
    ),
    "activation checkpointing, both kinds": _activation_checkpointing,
    "ranks go different ways": _different_paths,
    "shards in host memory": _offloaded,
    "memory between steps": _memory,
    "a checkpoint goes on": _checkpoint,
    "host waits in a step": _host_waits,
    "a step that runs out of memory": out_of_memory,
    "a step that fails on all ranks": on_all_ranks,
    "a step that fails on one rank": on_one_rank,
}
"""Each check by its name in the report. It returns what it found; None: it cannot be made on this device.

The failure of one rank comes last: on a device no step can follow it.
"""
