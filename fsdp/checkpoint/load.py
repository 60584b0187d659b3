"""Checkpoints: folders in torch's Distributed Checkpoint format, complete or not there, read by any number of ranks.

Rule: a load checks everything it is going to read, on all ranks, before it changes anything. How they are written: save.py.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint import saved_grads
from fsdp.checkpoint.manifest import NAME, Manifest, read_manifest
from fsdp.checkpoint.progress import Asked, Progress
from fsdp.checkpoint.rng import restore_random_states
from fsdp.checkpoint.save import EACH, RANDOM, Pathlike, cut_of, unpack
from fsdp.comm.agreement import agree_on_refusals
from fsdp.errors import ShardingError
from fsdp.runtime.registry import everyone_in, resting_units_in
from fsdp.state_dict.fqns import check_names, entries, extra_states
from fsdp.state_dict.optim_placement import Kind, Spread, spread_from_full
from fsdp.state_dict.optim_state import Holding
from fsdp.state_dict.param_shard import check_fit, pieces_in

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import Stored


@torch.no_grad()
def load(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rng: bool = True,
    progress: Asked = False,
) -> dict[str, Any]:
    """Load what `save` wrote, on any number of ranks, however the model is wrapped; return `extra`.

    Each rank reads what it holds. On as many ranks as saved it, `extra` is what this rank gave, and with `rng` this rank draws
    on where it then was; on another number, `extra` is what rank 0 gave, and random states are left alone. Gradients that were
    saved come back. A folder that torch's Distributed Checkpoint wrote from `{"model": ..., "optimizer": ...}` can be loaded
    too, without checksums. Nothing is ever unpickled but plain data. `progress`: as for `save`. Communicates: every rank must
    call it alike.

    Raises:
        ShardingError: on every rank; the checkpoint is unfinished, damaged or of another format version, or names, shapes or
            dtypes are not the model's, or it holds no optimizer state and one is asked for. Nothing was loaded.
    """
    from fsdp.checkpoint import dcp  # torch's Distributed Checkpoint takes most of a second to import

    folder = Path(path)
    units = resting_units_in(model, "load")
    collectives = everyone_in(model, "load")
    holding = None if optimizer is None else Holding(model, optimizer, f"load {folder}")

    def prepare() -> tuple[dcp.Stored, dict[str, Any], dcp.Reading]:
        manifest = read_manifest(folder) if (folder / NAME).exists() or not (folder / dcp.METADATA).exists() else None
        _refuse_damage(folder, manifest, {dcp.METADATA: {0}})
        stored = dcp.Stored(folder)
        targets = {**_model_targets(folder, stored, model), **_gradient_targets(folder, stored, model)}
        if holding is not None:
            targets.update(_optimizer_targets(stored, manifest, holding))
        alike = manifest is None or manifest.world_size == collectives.size
        wanted = {f"extra.{collectives.rank if alike else 0}"}
        if rng and alike and manifest is not None:
            wanted.add(f"{RANDOM}.{collectives.rank}")
        targets.update({key: None for key in stored.paths if key in wanted})
        values = stored.plan({key: value for key, value in targets.items() if value is None})
        tensors = stored.plan({key: value for key, value in targets.items() if value is not None})
        shown.append(Progress("load", progress, collectives.rank))
        shown[0].begin((1 if manifest is None else 2) * (values.nbytes + tensors.nbytes))
        for reading in (values, tensors):
            _refuse_damage(folder, manifest, reading.ranges, shown[0].add)
        found = values.read(shown[0].add)
        if holding is not None:
            holding.named({"state": {}, **stored.nested(found)["optimizer"]})
        return stored, found, tensors

    shown: list[Progress] = []
    prepared: list[tuple[dcp.Stored, dict[str, Any], dcp.Reading]] = []
    loaded: dict[str, Any] = {}
    try:
        agree_on_refusals(collectives, lambda: prepared.append(prepare()))
        stored, values, tensors = prepared[0]
        agree_on_refusals(collectives, lambda: loaded.update(tensors.read(shown[0].add)))
    except BaseException:
        for one in shown:
            one.end(finished=False)
        raise
    found = stored.nested({**values, **loaded})
    for name, module in extra_states(model).items():
        module.set_extra_state(found["model"][name])
    if holding is not None:
        given = found["optimizer"]
        state = {name: _own(kept) for name, kept in given.get("state", {}).items()}
        holding.install(state, holding.named({"state": state, "param_groups": given["param_groups"]})["param_groups"])
    if saved_grads.PART in found:
        saved_grads.take_gradients(model, found[saved_grads.PART])
    for packed in found.get(RANDOM, {}).values():
        restore_random_states(unpack(packed), units[0].device)
    shown[0].end()
    return next((unpack(packed) for packed in found.get("extra", {}).values()), {})


def latest(folder: Pathlike, verify: bool = False) -> Path | None:
    """The newest finished checkpoint in `folder`, or None. One that is damaged is skipped with a warning. Does not communicate.

    Looks at names and sizes of files; with `verify`, at every byte. `load` checks what it reads in any case.
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
    folder: Path, manifest: Manifest | None, ranges: Mapping[str, set[int]], told: Callable[[int], None] = lambda count: None
) -> None:
    damage = [] if manifest is None else list(manifest.damage(folder, ranges, told))
    if damage:
        raise ShardingError(
            f"checkpoint {folder} is damaged: {'; '.join(damage[:3])}. fsdp.latest finds the newest complete one."
        )


def _model_targets(folder: Path, stored: "Stored", model: nn.Module) -> dict[str, Any]:
    """The model's own tensors by key, and None for what is no tensor."""
    prefix, asker = "model.", f"load {folder}"
    there = {key.removeprefix(prefix): key for key in stored.paths if key.startswith(prefix)}
    extra = extra_states(model)
    # of extra state that is a dict, each value has a key of its own
    nested = {name: [key for key in there if key == name or key.startswith(f"{name}.")] for name in extra}
    plain = {name: key for name, key in there.items() if not any(name in keys for keys in nested.values())}
    check_names(asker, [name for name, _ in entries(model)], plain)
    pieces = pieces_in(model)
    for name, tensor in entries(model):
        found = stored.tensor(there[name])
        if found is None:
            raise ShardingError(f"{asker}: {name!r} is no tensor there.")
        shape = pieces[id(tensor)].shape if id(tensor) in pieces else tuple(tensor.shape)
        check_fit(asker, name, torch.empty(found.size, dtype=found.properties.dtype, device="meta"), shape, tensor.dtype)
    values = model.state_dict()
    targets = {there[name]: values[name] for name, _ in entries(model)}
    return {**targets, **{there[key]: stored.empty(there[key]) for keys in nested.values() for key in keys}}


def _gradient_targets(folder: Path, stored: "Stored", model: nn.Module) -> dict[str, Tensor]:
    """New memory for this rank's parts of the gradients that were saved."""
    prefix, pieces, targets = f"{saved_grads.PART}.", pieces_in(model), {}
    named = dict(entries(model))
    for key in stored.paths:
        if key.startswith(prefix) and (found := stored.tensor(key)) is not None:
            name = key.removeprefix(prefix)
            piece = pieces.get(id(named.get(name)))
            targets[key] = saved_grads.target_of_gradient(f"load {folder}", name, piece, tuple(found.size))
    return targets


def _optimizer_targets(stored: "Stored", manifest: Manifest | None, holding: Holding) -> dict[str, Any]:
    """New memory for this rank's part of the optimizer's state, by key, and None for what is no tensor."""
    asker = holding.asker
    paths = {key: path for key, path in stored.paths.items() if path[0] == "optimizer"}
    if not paths:
        raise ShardingError(f"{asker}: it holds no optimizer state; leave the optimizer out.")
    targets: dict[str, Any] = {key: None for key, path in paths.items() if path[1] == "param_groups"}
    for key, path in paths.items():
        if path[1] != "state":
            continue
        name, what = str(path[2]), str(path[3])
        if name not in holding.parameters:
            raise ShardingError(f"{asker}: it has state of parameter {name!r}, which the optimizer does not step.")
        found = stored.tensor(key)
        if not holding.holds(name):
            continue
        device = holding.parameters[name].device
        if found is None or not found.size:
            targets[key] = stored.empty(key)
        elif EACH in what:
            if _own_rank(what) == holding.rank:
                _check_layout(asker, name, what, manifest, holding)
                targets[key] = torch.empty(found.size, dtype=found.properties.dtype, device=device)
        else:
            spread = spread_from_full(
                f"{asker}: {what!r} of parameter {name!r}", holding.pieces.get(name), tuple(found.size), found.properties.dtype
            )
            targets[key] = _target(spread, key, holding, device)
    return targets


def _target(spread: Spread, key: str, holding: Holding, device: torch.device) -> Tensor:
    local = torch.empty(spread.local_shape(holding.rank), dtype=spread.dtype, device=device)
    return local if spread.kind is Kind.WHOLE else spread.value(key, local, holding.rank)


def _check_layout(asker: str, name: str, what: str, manifest: Manifest | None, holding: Holding) -> None:
    if manifest is None or manifest.layout.get(name) != cut_of(holding.pieces[name]):
        raise ShardingError(
            f"{asker}: {what.split(EACH)[0]!r} of parameter {name!r} is a statistic over each rank's own part, saved by "
            f"{'unknown' if manifest is None else manifest.world_size} ranks; load it on as many, wrapped alike, or load without "
            "the optimizer and start it anew."
        )


def _own(kept: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state as the optimizer keeps it: local tensors, under its own keys."""
    return {key.split(EACH)[0]: getattr(value, "local", value) for key, value in kept.items()}


def _own_rank(what: str) -> int:
    return int(what.rpartition(EACH)[2])
