"""The choices for a job side by side: a table, the recommendation, and what would have to change."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from fsdp.commands.planning.choices import Choice
from fsdp.commands.rehearsal.hardware import Cluster
from fsdp.commands.rehearsal.memory import ACTIVATIONS, BUCKETS, OPTIMIZER, UNSHARDED
from fsdp.commands.rehearsal.rehearse import ALONE, DATA, REPEATED, TENSOR, Rehearsal
from fsdp.commands.reporting.formats import size, table

HEADER: Final = ("choice", "fits", "peak", "engine", "activations", "optimizer", "collectives", "received", "step", "exposed")


@dataclass(frozen=True)
class Candidate:
    """A choice, and what it needs."""

    choice: Choice
    rehearsal: Rehearsal | None
    """None if the engine refuses the choice."""
    refusal: str
    """Why it is refused; empty otherwise."""

    @property
    def found(self) -> Rehearsal:
        """What it needs: it is not refused."""
        assert self.rehearsal is not None
        return self.rehearsal


@dataclass(frozen=True)
class Fewest:
    """The smallest number of ranks that fits."""

    ranks: int | None
    """None: even the largest number does not fit."""
    most: int
    """The largest number that was looked at."""
    title: str
    """The choice that needs the least memory of a rank."""
    peak: int
    """Bytes of a rank with this number of ranks, or with the largest one."""


@dataclass(frozen=True)
class Plan:
    """The choices for a job, the fastest that fits first, then those that do not fit, smallest first, then refused ones."""

    candidates: tuple[Candidate, ...]
    memory: int
    """Bytes of a rank's device that may be used."""
    world_size: int
    cluster: Cluster
    parameters: int
    """Elements of all parameters."""
    reserve: int = 0
    """Bytes of these that stay free."""
    assumed: tuple[str, ...] = ()
    """What the numbers assume, a sentence each."""
    fewest: Fewest | None = None
    """None if nobody asked for it."""

    def fits(self, candidate: Candidate) -> bool:
        """Whether the peak of a choice is within the memory, but for the reserve."""
        return candidate.rehearsal is not None and candidate.rehearsal.peak <= self.usable

    @property
    def shown(self) -> list[Candidate]:
        """The choices that are not refused."""
        return [one for one in self.candidates if one.rehearsal is not None]

    @property
    def usable(self) -> int:
        """Bytes that a choice may need."""
        return self.memory - self.reserve

    @property
    def best(self) -> Candidate | None:
        """The fastest choice that fits; None if none does."""
        return next((one for one in self.candidates if self.fits(one)), None)

    def __str__(self) -> str:
        """The table, the recommendation, and what would have to change."""
        return "\n".join(lines_of(self))

    def to_json(self) -> str:
        """Everything as JSON: bytes and seconds."""
        return json.dumps(
            {
                "world_size": self.world_size,
                "per_host": self.cluster.per_host,
                "device": self.cluster.device.name,
                "memory": self.memory,
                "reserve": self.reserve,
                "assumed": [*self.assumed],
                "parameters": self.parameters,
                "recommended": None if self.best is None else self.best.choice.title,
                "fewest_ranks": None if self.fewest is None else asdict(self.fewest),
                "candidates": [*map(self._as_dict, self.candidates)],
            }
        )

    def _as_dict(self, one: Candidate) -> dict[str, Any]:
        choice, found = one.choice, one.rehearsal
        named = {
            "title": choice.title,
            "strategy": choice.strategy,
            "mesh": choice.mesh,
            **choice.dimensions._asdict(),
            "units": choice.units,
            "unit_names": choice.unit_names,
            "checkpointing": choice.checkpointing,
            "offload": choice.offload,
        }
        if found is None:
            return {**named, "refused": one.refusal}
        return {
            **named,
            "fits": self.fits(one),
            "peak": found.peak,
            "held": dict(found.held),
            "engine_peak": found.engine_peak,
            "saved": found.saved,
            "attention": dict(found.attention),
            "collectives": len(found.collectives),
            "received": found.received,
            "padding": found.padding,
            "unit_count": found.units,
            "seconds": found.seconds,
            "computing": found.computing,
            "exposed": dict(found.exposed),
            "stages": [{"peak": stage.peak, "seconds": stage.seconds} for stage in found.stages],
            "host_peak": found.host_peak,
            "host_held": dict(found.host_held),
        }


def lines_of(plan: Plan) -> Iterator[str]:
    """The whole plan."""
    device = plan.cluster.device
    yield (
        f"{plan.parameters:,} parameters on {plan.world_size} ranks, {plan.cluster.per_host} on a host; {device.name}, "
        f"{size(plan.memory)} for each rank"
    )
    yield from plan.assumed
    yield ""
    yield from table(HEADER, [row(plan, one) for one in plan.shown])
    for one in plan.candidates:
        if one.rehearsal is None:
            yield f"{one.choice.title}: refused: {one.refusal}"
    yield ""
    yield from advice(plan)
    yield ""
    yield "The peak is what is held at once; activations are what a forward leaves for its backward. Bytes of the engine and"
    yield "collectives are exact. Activations are counted from the operators of the model; workspaces of kernels are not seen."
    yield f"Seconds are estimated from: {device.source};"
    yield f"inside a host: {device.link.source}; between hosts: {plan.cluster.between.source}."


def row(plan: Plan, one: Candidate) -> tuple[str, ...]:
    """The cells of one choice."""
    found = one.found
    return (
        one.choice.title,
        "yes" if plan.fits(one) else "no",
        size(found.peak),
        size(found.engine_peak),
        size(found.saved),
        size(found.held.get("optimizer state", 0)),
        str(len(found.collectives)),
        size(found.received),
        f"{1e3 * found.seconds:.1f} ms",
        f"{sum(found.exposed.values()) / found.seconds:.0%}",
    )


def advice(plan: Plan) -> Iterator[str]:
    """The recommendation, the distance to the second, what would have to change for others, and the smallest number of ranks."""
    yield from _recommendation(plan)
    fewest = plan.fewest
    if fewest is not None and fewest.ranks is None:
        yield f"Up to {fewest.most} ranks nothing fits: {fewest.title} needs {size(fewest.peak)} of each of {fewest.most} ranks."
    elif fewest is not None:
        yield f"The smallest number of ranks that fits is {fewest.ranks}: {fewest.title}, {size(fewest.peak)} of each rank."


def _recommendation(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is None:
        yield from _nothing_fits(plan)
        return
    yield f"Recommended: {best.choice.title}: {1e3 * best.found.seconds:.1f} ms a step, estimated."
    if best.choice.unit_names:
        count = len(best.choice.unit_names)
        yield f"Its {count} inner units are chosen by name: give `fully_shard` the options in `plan.best.choice.options`."
    if best.choice.dimensions != ALONE:
        yield from _mesh_of(plan, best)
    yield from _price_of_recomputing(plan, best)
    if best.found.host_held:
        kinds = ", ".join(f"{kind} {size(held)}" for kind, held in best.found.host_held.items())
        yield f"Each rank needs {size(best.found.host_peak)} of host memory: {kinds}."
    fitting = [one for one in plan.candidates if plan.fits(one)]
    if len(fitting) > 1:
        excess = fitting[1].found.seconds / best.found.seconds - 1
        yield f"Second: {fitting[1].choice.title}, {f'{excess:.1%} slower' if excess >= 0.0005 else 'as fast'}."
    faster = [one for one in plan.shown if not plan.fits(one) and one.found.seconds < best.found.seconds]
    for one in sorted(faster, key=lambda one: one.found.peak)[:1]:
        gain = 1 - one.found.seconds / best.found.seconds
        yield f"{one.choice.title} would be {gain:.1%} faster, and needs {size(one.found.peak - plan.usable)} more memory."


def _mesh_of(plan: Plan, one: Candidate) -> Iterator[str]:
    """The mesh of a choice with several dimensions, what is sharded over which of them, and the stages of a pipeline."""
    choice = one.choice
    stages = choice.dimensions.pp
    sizes = choice.dimensions.sizes(plan.world_size // stages, choice.mesh)
    names = ", ".join(f'"{name}"' for name in sizes if name != TENSOR)
    every = {"pp": stages, **sizes} if stages > 1 else sizes
    yield f"Its mesh: init_device_mesh(device, {(*every.values(),)}, mesh_dim_names={(*every,)}), for parallelize(model, mesh)."
    of_experts = f'experts are sharded over mesh["{REPEATED}"], and ' if choice.dimensions.ep > 1 else ""
    flat = f'._flatten("{DATA}")' if of_experts else ""
    part = f"{'each stage' if stages > 1 else 'the model'}{'' if of_experts else ' is sharded'}"
    yield f"Then {of_experts}{part} over mesh[{names}]{flat}."
    for number, stage in enumerate(one.found.stages):
        yield f"Stage {number}: {size(stage.peak)} of each rank, {1e3 * stage.seconds:.1f} ms without the bubble."


def _price_of_recomputing(plan: Plan, best: Candidate) -> Iterator[str]:
    """What checkpointing costs beside the same choice without it."""
    plain = {**asdict(best.choice), "checkpointing": False}
    for one in plan.shown:
        if best.choice.checkpointing and asdict(one.choice) == plain:
            more = best.found.computing / one.found.computing - 1
            yield f"Checkpointing computes {more:.0%} more. Only waiting for collectives hides it."


def _nothing_fits(plan: Plan) -> Iterator[str]:
    smallest = plan.shown[0]
    found = smallest.found
    yield f"Nothing fits. The smallest is {smallest.choice.title}: it needs {size(found.peak - plan.usable)} more."
    kind, held = max(found.held.items(), key=lambda item: item[1])
    remedies = {
        ACTIVATIONS: "a smaller micro-batch or a shorter sequence, or checkpointing of smaller modules",
        "optimizer state": "more ranks, an offload policy, or an optimizer with less state",
        OPTIMIZER: "more ranks, or an optimizer that steps a few parameters at a time (foreach=False)",
        "shards": "more ranks, an offload policy, or a dtype of less bytes",
        UNSHARDED: "smaller units",
        BUCKETS: "smaller units, or a smaller bucket_cap_mb",
    }
    yield f"Most of it are {kind}, {size(held)}: what helps is {remedies.get(kind, 'more ranks')}."
