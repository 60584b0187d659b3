"""Checks that all ranks are about to wrap the same model in the same way."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from fsdp.building.choose_units import Planned, buffers_of
from fsdp.comm.agreement import agree_and_share
from fsdp.comm.communicator import Communicator
from fsdp.config import Config
from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit

Prepared = tuple[Config, list[Planned]]


def agree(comm: Communicator, prepare: Callable[[], Prepared]) -> Prepared:
    """Call `prepare` on every rank and compare the results. If one rank refuses, every rank raises. Communicates.

    Raises:
        ShardingError: `prepare` failed on some rank, or the ranks differ. The text names the first difference and its rank.
    """
    prepared, digests = agree_and_share(comm, "fully_shard", prepare, _digest, " could not wrap its module")
    if len(set(digests)) > 1:
        raise ShardingError(_first_difference(comm.gather_objects(_describe(*prepared), "fully_shard")))
    return prepared


def _digest(prepared: Prepared) -> str:
    return sha256("\n".join(_describe(*prepared)).encode()).hexdigest()


def _describe(config: Config, plan: Sequence[Planned]) -> list[str]:
    lines = [f"{option.name}={getattr(config, option.name)}" for option in fields(config)]
    if config.sync_module_states:
        lines += [f"buffer {name!r} {tuple(b.shape)} {b.dtype}" for name, b in buffers_of(plan[0])]
    for one in plan:
        lines.append(f"unit {one.name!r}")
        for info in one.param_infos:
            p: Any = info.parameter
            names, owner = " = ".join(info.names), owning_unit(p)
            shape = tuple(owner.unsharded_of(p).shape if isinstance(owner, Unit) else p.shape)
            cut = f" cut along dimension {info.shard_dim}" if info.shard_dim else ""
            cut += "" if info.mesh is None else f" over a mesh of {info.mesh.size()} ranks"
            kept = " which computes in it" if info.keeps_dtype else ""
            lines.append(f"parameter {names!r} {shape} {p.dtype}{kept}" + ("" if p.requires_grad else " frozen") + cut)
    return lines


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    rank, mine, theirs = next(
        (rank, mine, theirs)
        for rank, lines in enumerate(described)
        for mine, theirs in zip_longest(described[0], lines, fillvalue="nothing")
        if mine != theirs
    )
    return (
        f"the model is built differently on different ranks: rank 0 has {mine}, but rank {rank} has {theirs}. Build it from the "
        "same code and options on every rank."
    )
