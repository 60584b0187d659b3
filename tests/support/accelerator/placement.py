"""Which kernels and allocations of a training step the streams of the engine are given, and which they must be given.

Other waits keep the order of most of this work. So a lost stream context changes no number: it costs the overlap. Counting
notices it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

import fsdp
from fsdp.runtime.registry import engines_in
from tests.device.test_races import HALF, STRATEGIES, batch, net
from tests.support.accelerator.device import NAME, Scheduler, counted
from tests.support.accelerator.world import run
from tests.support.models import loss_of, promised

Placed = Mapping[str, Counter[str]]
"""By stream, what it was given: kernels by name, and allocations."""
UNITS: Final = 3
"""Of the model: the root and two blocks. Each has one buffer of parameters and one bucket."""
TWICE: Final = 2 * UNITS - 1
"""The gathers of a step where units are resharded after their forward. All but the root are gathered again."""
OFFLOAD: Final = {"offload_policy": fsdp.OffloadPolicy()}
BF16: Final = {"mp_policy": HALF}
SHARED: Final = {"reduction": fsdp.ReductionPolicy(coalesce_cap_mb=1.0)}
"""All units share their collectives."""


def gathers(times: int, joint: int = 0) -> Placed:
    """Each allocates the unsharded parameters and copies this rank's shard to its place.

    `joint`: how many collectives all of them share. Each puts the shards together, and every unit copies its part out.
    """
    return {"gather": Counter(allocation=times + joint, copy_=2 * times if joint else times, cat=joint)}


def uploads(times: int, converted: int = 0) -> Placed:
    """The same from host memory. A shard that is converted is first copied to the device as it is."""
    return {"upload": Counter(allocation=times + converted, copy_=times + converted)}


def reductions(scattered: int = 0, divided: int = 0, converted: int = 0, moved: int = 0, hooked: int = 0) -> Placed:
    """How many reductions fill a tensor of their own, divide their sum, convert it, and copy it to the host.

    `hooked`: how many are those of `double`, which computes one tensor. The engine copies it, and fills the padding with zeros,
    which only the root's bucket has (74 elements for two ranks).
    """
    kernels = {"div": divided, "copy_": converted + moved + hooked, "mul": hooked, "zero_": int(hooked > 0)}
    return {"reduce": Counter(allocation=scattered + converted + hooked, **kernels)}


CASES: Final[dict[str, tuple[str, dict[str, Any], Placed]]] = {
    "FULL_SHARD": ("FULL_SHARD", {}, {**gathers(TWICE), **reductions(UNITS, UNITS)}),
    "FULL_SHARD, bf16": ("FULL_SHARD", BF16, {**gathers(TWICE), **reductions(UNITS, UNITS, UNITS)}),
    "FULL_SHARD, offloaded": ("FULL_SHARD", OFFLOAD, {**uploads(TWICE), **reductions(UNITS, UNITS, moved=UNITS)}),
    "FULL_SHARD, offloaded, bf16": (
        "FULL_SHARD",
        {**OFFLOAD, **BF16},
        {**uploads(TWICE, TWICE), **reductions(UNITS, UNITS, UNITS, UNITS)},
    ),
    "FULL_SHARD, hooked": ("FULL_SHARD", {"hooked": True}, {**gathers(TWICE), **reductions(UNITS, hooked=UNITS)}),
    # one gather for the forward, one for the backward, and one reduction
    "FULL_SHARD, shared": ("FULL_SHARD", SHARED, {**gathers(TWICE, 2), **reductions(1, 1)}),
    "SHARD_GRAD_OP": ("SHARD_GRAD_OP", {}, {**gathers(UNITS), **reductions(UNITS, UNITS)}),
    "HYBRID_SHARD, bf16": ("HYBRID_SHARD", BF16, {**gathers(TWICE), **reductions(UNITS, UNITS, UNITS)}),
    # gradients are divided before one all-reduce for all units, in the memory that becomes `.grad`
    "NO_SHARD, bf16": ("NO_SHARD", BF16, {**gathers(UNITS), **reductions(converted=1)}),
    "NO_SHARD, offloaded": ("NO_SHARD", OFFLOAD, {**uploads(UNITS), **reductions(moved=1)}),
    "one rank, bf16": ("one rank", BF16, {**gathers(TWICE), **reductions(converted=UNITS)}),
}
"""By name: strategy, options, and what a step gives to the streams of the engine."""


def placed(name: str) -> list[Placed]:
    """What each rank of a case gives to the streams of the engine in a step. The first two learn the order of the units."""
    strategy, more, _ = CASES[name]
    size, options = STRATEGIES[strategy]
    return run(size, lambda rank: _third_step(rank, **options, **more), Scheduler.EAGER)


def misplaced(name: str) -> str | None:
    """What a case gives to other streams than it must; None if there is nothing."""
    wanted = CASES[name][-1]
    return next((f"{name}: {found} instead of {wanted}" for found in placed(name) if found != wanted), None)


def _third_step(rank: int, hooked: bool = False, **options: Any) -> Placed:
    with torch.device(NAME, rank):
        model = net(**options)
        if hooked:
            fsdp.register_comm_hook(model, None, double)
        before: dict[int, Counter[str]] = {}
        for step in range(3):
            before = counted(rank)
            loss_of(model(batch(step))).backward()
    (engine,) = engines_in(model, "placed")
    streams: Any = engine.units[0]._streams
    names = {streams._gather.stream_id: "gather", streams._reduce[0].stream_id: "reduce"}
    if streams._upload is not None:
        names[streams._upload.stream_id] = "upload"
    compute = torch.get_device_module(NAME).current_stream(rank).stream_id
    found = {stream: counts - before.get(stream, Counter()) for stream, counts in counted(rank).items() if stream != compute}
    return {names.get(stream, f"stream {stream}"): counts for stream, counts in found.items() if counts}


def double(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
    """A comm hook that communicates nothing."""
    return promised(bucket.buffer()[: bucket.buffer().numel() // 2] * 2.0)
