"""Random training programs on the pretend accelerator, beside the same ones on the host. See tools/soak.py."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fsdp
from tests.support.accelerator.device import NAME, Scheduler
from tests.support.accelerator.world import run
from tests.support.against_plain import compare_with_plain
from tests.support.programs import Program, Seen
from tests.support.runs import ShardedRun
from tests.support.trees import TreeSpec


def check(tree: TreeSpec, program: Program, world_size: int, order: int) -> None:
    """Run a program on both, and compare the bits of what each statement left. The order of the ranks chooses the scheduler.

    Autograd's thread for a device makes the nodes of second graphs and counts them apart, also with plain torch. Which of two
    nodes adds to a sum first depends on what each thread has done before. So bits that differ must be those of the host when
    autograd uses one thread, and the numbers must be those of plain torch within rounding.
    """
    wanted = fsdp.simulate(world_size, lambda rank: ShardedRun(tree, rank).run(program), order)
    scheduler = Scheduler(order % len(Scheduler))

    def on_device(rank: int, threads: bool) -> list[Seen]:
        with torch.device(NAME, rank), torch.autograd.set_multithreading_enabled(threads):
            return [_on_host(seen) for seen in ShardedRun(tree, rank).run(program)]

    found = run(world_size, partial(on_device, threads=True), scheduler, order)
    if _difference(found, wanted):
        compare_with_plain(tree, program, found)
        found = run(world_size, partial(on_device, threads=False), scheduler, order)
    different = _difference(found, wanted)
    assert not different, f"{scheduler.name}, {different}"


def _difference(found: list[list[Seen]], wanted: list[list[Seen]]) -> str:
    """The first statement that left something else on a rank, and what it left; empty if there is none."""
    for rank, (here, there) in enumerate(zip(found, wanted, strict=True)):
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            if different := _difference_of(one, other):
                return f"rank {rank}, statement {number - 1}: {different}"
    return ""


def _on_host(seen: Seen) -> Seen:
    seen.value = [value.cpu() for value in seen.value]
    seen.gradients = {name: None if one is None else one.cpu() for name, one in seen.gradients.items()}
    seen.weights = {name: one.cpu() for name, one in seen.weights.items()}
    return seen


def _difference_of(one: Seen, other: Seen) -> str:
    """What two runs saw differently after a statement."""
    if (one.raised, one.came) != (other.raised, other.came):
        return "an error, or the calls of hooks"
    for what in ("value", "gradients", "weights"):
        for name, value, wanted in _pairs(getattr(one, what), getattr(other, what)):
            if not _are_equal(value, wanted):
                return f"{what} {name}: {value} instead of {wanted}"
    return ""


def _pairs(one: Any, other: Any) -> list[tuple[str, Tensor | None, Tensor | None]]:
    if isinstance(one, list):
        one, other = (dict(zip(map(str, range(len(values))), values, strict=True)) for values in (one, other))
    assert one.keys() == other.keys()
    return [(name, value, other[name]) for name, value in one.items()]


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and torch.equal(one, other)
