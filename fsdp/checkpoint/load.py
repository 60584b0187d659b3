"""Loading a checkpoint, a folder in the format of torch's Distributed Checkpoint, on any number of ranks.

Rule: a load checks all that it will read, on all ranks, before it changes anything. save.py writes the folders.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint import saved_grads
from fsdp.checkpoint.manifest import NAME, Manifest, read_manifest
from fsdp.checkpoint.progress import Progress, ProgressOption
from fsdp.checkpoint.rng import restore_random_states
from fsdp.checkpoint.save import RANDOM, RANK_MARK, Pathlike, layout_entry, unpack
from fsdp.comm.agreement import agree_on_refusals
from fsdp.errors import ShardingError
from fsdp.state_dict.fqns import check_names, extra_states
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.optim_placement import PlacementKind, StatePlacement, placement_from_full
from fsdp.state_dict.optim_state import OptimizerView
from fsdp.state_dict.param_shard import check_fit

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import StoredCheckpoint


@torch.no_grad()
def load(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rng: bool = True,
    progress: ProgressOption = False,
) -> dict[str, Any]:
    """Load what `save` wrote, on any number of ranks, however the model is wrapped; return `extra`.

    Each rank reads the shards that it holds. On as many ranks as saved the checkpoint, `extra` is this rank's, and `rng` restores
    this rank's random states. On another number of ranks, `extra` is rank 0's, and random states are left alone. Gradients that
    were saved are restored. A folder that torch's Distributed Checkpoint wrote from `{"model": ..., "optimizer": ...}` can be
    loaded too, without checksums. Only plain data is unpickled. `progress`: as for `save`. Communicates: every rank must call it
    alike.

    Raises:
        ShardingError: on every rank; the checkpoint is unfinished, damaged or of another format version, or names, shapes or
            dtypes are not the model's, or `optimizer` is given and the checkpoint has no optimizer state. Nothing was loaded.
    """
    from fsdp.checkpoint import dcp  # torch's Distributed Checkpoint takes most of a second to import

    folder = Path(path)
    model_view = ModelView(model, "load")
    comm = model_view.world_comm
    optimizer_view = None if optimizer is None else OptimizerView(model_view, optimizer, f"load {folder}")
    meter = Progress("load", progress, comm.rank)

    def prepare() -> tuple[dcp.StoredCheckpoint, dict[str, Any], dcp.ReadPlan]:
        manifest = read_manifest(folder) if (folder / NAME).exists() or not (folder / dcp.METADATA).exists() else None
        _refuse_damage(folder, manifest, {dcp.METADATA: {0}})
        stored = dcp.StoredCheckpoint(folder)
        targets = {**_model_targets(folder, stored, model_view), **_gradient_targets(folder, stored, model_view)}
        if optimizer_view is not None:
            targets.update(_optimizer_targets(stored, manifest, optimizer_view))
        alike = manifest is None or manifest.world_size == comm.size
        wanted = {f"extra.{comm.rank if alike else 0}"}
        if rng and alike and manifest is not None:
            wanted.add(f"{RANDOM}.{comm.rank}")
        targets.update({key: None for key in stored.paths if key in wanted})
        values = stored.plan({key: value for key, value in targets.items() if value is None})
        tensors = stored.plan({key: value for key, value in targets.items() if value is not None})
        meter.check()
        meter.begin((1 if manifest is None else 2) * (values.nbytes + tensors.nbytes))
        for reading in (values, tensors):
            _refuse_damage(folder, manifest, reading.ranges, meter.add)
        found = values.read(meter.add)
        if optimizer_view is not None:
            optimizer_view.named({"state": {}, **stored.nested(found)["optimizer"]})
        return stored, found, tensors

    try:
        stored, values, tensors = agree_on_refusals(comm, prepare)
        loaded = agree_on_refusals(comm, lambda: tensors.read(meter.add))
    except BaseException:
        meter.end(finished=False)
        raise
    found = stored.nested({**values, **loaded})
    for name, module in extra_states(model).items():
        module.set_extra_state(found["model"][name])
    if optimizer_view is not None:
        given = found["optimizer"]
        state = {name: _local_state(kept) for name, kept in given.get("state", {}).items()}
        named = optimizer_view.named({"state": state, "param_groups": given["param_groups"]})
        optimizer_view.install(state, named["param_groups"])
    if saved_grads.PART in found:
        saved_grads.restore_gradients(model_view, found[saved_grads.PART])
    for packed in found.get(RANDOM, {}).values():
        restore_random_states(unpack(packed), model_view.units[0].device)
    meter.end()
    return next((unpack(packed) for packed in found.get("extra", {}).values()), {})


def latest(folder: Pathlike, verify: bool = False) -> Path | None:
    """Return the newest finished checkpoint in `folder`, or None. Does not communicate.

    A damaged checkpoint is skipped with a warning. Names and sizes of files are checked; with `verify`, every byte. `load` checks
    all that it reads in any case.
    """
    found: list[tuple[int, Path]] = []
    for path in sorted(Path(folder).glob(f"[!.]*/{NAME}")):
        try:
            manifest = read_manifest(path.parent)
        except ShardingError as damage:
            warnings.warn(f"skipped: {damage}")
            continue
        if lacking := next(manifest.damage(path.parent), None) if verify else manifest.missing_or_cut(path.parent):
            warnings.warn(f"skipped: {path.parent}: {lacking}")
        else:
            found.append((manifest.saved_at, path.parent))
    return max(found)[1] if found else None


# helpers ----------------------------------------------------------------------------------


def _refuse_damage(
    folder: Path,
    manifest: Manifest | None,
    ranges: Mapping[str, set[int]],
    on_progress: Callable[[int], None] = lambda count: None,
) -> None:
    damage = [] if manifest is None else list(manifest.damage(folder, ranges, on_progress))
    if damage:
        raise ShardingError(
            f"checkpoint {folder} is damaged: {'; '.join(damage[:3])}. fsdp.latest finds the newest complete one."
        )


def _model_targets(folder: Path, stored: "StoredCheckpoint", model_view: ModelView) -> dict[str, Any]:
    """The memory to read into, by key: the model's own tensors, and new memory for extra state; None for other values."""
    prefix, operation = "model.", f"load {folder}"
    there = {key.removeprefix(prefix): key for key in stored.paths if key.startswith(prefix)}
    extra = extra_states(model_view.model)
    # if extra state is a dict, each of its values has a key of its own
    nested = {name: [key for key in there if key == name or key.startswith(f"{name}.")] for name in extra}
    plain = {name: key for name, key in there.items() if not any(name in keys for keys in nested.values())}
    check_names(operation, [name for name, _ in model_view.entries], plain)
    param_shards = model_view.param_shards
    for name, tensor in model_view.entries:
        found = stored.tensor(there[name])
        if found is None:
            raise ShardingError(f"{operation}: {name!r} is no tensor there.")
        shape = param_shards[id(tensor)].shape if id(tensor) in param_shards else tuple(tensor.shape)
        check_fit(operation, name, torch.empty(found.size, dtype=found.properties.dtype, device="meta"), shape, tensor.dtype)
    values = model_view.model.state_dict()
    targets = {there[name]: values[name] for name, _ in model_view.entries}
    return {**targets, **{there[key]: stored.empty(there[key]) for keys in nested.values() for key in keys}}


def _gradient_targets(folder: Path, stored: "StoredCheckpoint", model_view: ModelView) -> dict[str, Tensor]:
    """New memory for this rank's shards of the saved gradients, by key."""
    prefix, targets = f"{saved_grads.PART}.", {}
    named = dict(model_view.entries)
    for key in stored.paths:
        if key.startswith(prefix) and (found := stored.tensor(key)) is not None:
            name = key.removeprefix(prefix)
            param_shard = model_view.param_shards.get(id(named.get(name)))
            targets[key] = saved_grads.target_of_gradient(f"load {folder}", name, param_shard, tuple(found.size))
    return targets


def _optimizer_targets(stored: "StoredCheckpoint", manifest: Manifest | None, optimizer_view: OptimizerView) -> dict[str, Any]:
    """New memory for this rank's part of the optimizer's state, by key; None for a value that is no tensor."""
    operation = optimizer_view.operation
    paths = {key: path for key, path in stored.paths.items() if path[0] == "optimizer"}
    if not paths:
        raise ShardingError(f"{operation}: it holds no optimizer state; leave the optimizer out.")
    targets: dict[str, Any] = {key: None for key, path in paths.items() if path[1] == "param_groups"}
    for key, path in paths.items():
        if path[1] != "state":
            continue
        name, what = str(path[2]), str(path[3])
        if name not in optimizer_view.parameters:
            raise ShardingError(f"{operation}: it has state of parameter {name!r}, which the optimizer does not step.")
        found = stored.tensor(key)
        if not optimizer_view.holds(name):
            continue
        device = optimizer_view.parameters[name].device
        if found is None or not found.size:
            targets[key] = stored.empty(key)
        elif RANK_MARK in what:
            if int(what.rpartition(RANK_MARK)[2]) == optimizer_view.rank:
                _check_layout(operation, name, what, manifest, optimizer_view)
                targets[key] = torch.empty(found.size, dtype=found.properties.dtype, device=device)
        else:
            placement = placement_from_full(
                f"{operation}: {what!r} of parameter {name!r}",
                optimizer_view.param_shards.get(name),
                tuple(found.size),
                found.properties.dtype,
            )
            targets[key] = _target(placement, key, optimizer_view.rank, device)
    return targets


def _target(placement: StatePlacement, key: str, rank: int, device: torch.device) -> Tensor:
    local = torch.empty(placement.local_shape(rank), dtype=placement.dtype, device=device)
    return local if placement.kind is PlacementKind.UNSHARDED else placement.value(key, local, rank)


def _check_layout(operation: str, name: str, what: str, manifest: Manifest | None, optimizer_view: OptimizerView) -> None:
    """Refuse a statistic over one rank's shard unless the parameter is cut as it was at the save."""
    if manifest is None or manifest.layout.get(name) != layout_entry(optimizer_view.param_shards[name]):
        raise ShardingError(
            f"{operation}: {what.split(RANK_MARK)[0]!r} of parameter {name!r} is a statistic over each rank's own part, saved by "
            f"{'unknown' if manifest is None else manifest.world_size} ranks; load it on as many, wrapped alike, or load without "
            "the optimizer and start it anew."
        )


def _local_state(kept: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state as the optimizer keeps it: local tensors, under its own keys."""
    return {key.split(RANK_MARK)[0]: getattr(value, "local", value) for key, value in kept.items()}
