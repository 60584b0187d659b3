"""Checkpoints: folders in torch's Distributed Checkpoint format, complete or not there, read by any number of ranks.

Rule 1: what has its name is finished. A save works in a hidden folder beside it, which one rename makes visible.
Rule 2: a load checks everything it is going to read, on all ranks, before it changes anything.
"""

import io
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.agreement import agree_on_refusals
from fsdp.atomic import begin, hide, publish, remove_leftovers
from fsdp.collectives import Collectives
from fsdp.errors import ShardingError
from fsdp.manifest import NAME, Manifest, read_manifest
from fsdp.names import check_names, entries, extra_states
from fsdp.optimizer_state import Holding
from fsdp.piece import Piece, check_fit, pieces_in
from fsdp.sharded import everyone_in, resting_units_in
from fsdp.spread import Kind, Spread, spread_from_full

if TYPE_CHECKING:
    from fsdp.dcp import Stored

EACH = "@"
"""Between a key of an optimizer's state and the rank whose own it is."""
Pathlike = str | os.PathLike[str]


@torch.no_grad()
def save(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> None:
    """Save `model`, the state of `optimizer`, and `extra` as the folder `path`, which appears when it is complete.

    Each rank writes its own parts. `extra` is each rank's own: step, random states, position in the data. With `keep_last`, the
    folder that `path` is in belongs to this run: afterwards it holds its newest `keep_last` checkpoints, and no unfinished
    ones. Communicates: every rank must call it alike, with a path that is the same folder for all.

    Raises:
        ShardingError: on every rank; there is something at `path` already, some rank could not write, `extra` holds more than
            plain data (tensors, numbers, strings, lists, dicts), or a forward, a backward or a summon is going on. Nothing
            appears.
    """
    folder = Path(path)
    resting_units_in(model, "save")
    collectives = everyone_in(model, "save")
    packed = b""

    def prepare() -> None:
        nonlocal packed
        if keep_last is not None and keep_last < 1:
            raise ShardingError(f"save: keep_last is {keep_last}; give the number of checkpoints to keep, at least 1.")
        packed = pack(dict(extra or {}))

    agree_on_refusals(collectives, prepare)
    state: dict[str, Any] = {"model": dict(model.state_dict()), "extra": {str(collectives.rank): packed}}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(Holding(model, optimizer, "save"))
    write_checkpoint(folder, state, _layout(model), collectives, keep_last)


def write_checkpoint(
    folder: Path, state: dict[str, Any], layout: dict[str, list[int]], collectives: Collectives, keep_last: int | None = None
) -> None:
    """Write this rank's part of a nested state dict as the folder `folder`, which appears when it is complete. Communicates.

    Raises:
        ShardingError: on every rank; there is something there already, or some rank could not write. Nothing appears.
    """
    from fsdp import dcp

    name = agree_on_refusals(collectives, lambda: begin("save", folder) if collectives.rank == 0 else "")[0]
    working = folder.parent / name
    try:
        files = dcp.write(working, state, collectives)
        manifest = Manifest(collectives.size, time.time_ns(), {}, layout, files)
        agree_on_refusals(collectives, lambda: _finish(manifest, working, folder, keep_last) if collectives.rank == 0 else None)
    except BaseException as failure:
        if collectives.rank == 0:
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(failure, OSError):
            raise ShardingError(f"save: {folder} could not be written: {failure}. Nothing appeared there.") from failure
        raise


@torch.no_grad()
def load(path: Pathlike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Load what `save` wrote, on any number of ranks, however the model is wrapped; return `extra`.

    Each rank reads what it holds. On as many ranks as saved it, `extra` is what this rank gave; on another number, what
    rank 0 gave. A folder that torch's Distributed Checkpoint wrote from `{"model": ..., "optimizer": ...}` can be loaded too,
    without checksums. Nothing is ever unpickled but plain data. Communicates: every rank must call it alike.

    Raises:
        ShardingError: on every rank; the checkpoint is unfinished, damaged or of another format version, or names, shapes or
            dtypes are not the model's, or it holds no optimizer state and one is asked for. Nothing was loaded.
    """
    from fsdp import dcp  # torch's Distributed Checkpoint takes most of a second to import

    folder = Path(path)
    resting_units_in(model, "load")
    collectives = everyone_in(model, "load")
    holding = None if optimizer is None else Holding(model, optimizer, f"load {folder}")

    def prepare() -> tuple[dcp.Stored, dict[str, Any], dcp.Reading]:
        manifest = read_manifest(folder) if (folder / NAME).exists() or not (folder / dcp.METADATA).exists() else None
        _refuse_damage(folder, manifest, {dcp.METADATA: {0}})
        stored = dcp.Stored(folder)
        targets = _model_targets(folder, stored, model)
        if holding is not None:
            targets.update(_optimizer_targets(stored, manifest, holding))
        rank = collectives.rank if manifest is None or manifest.world_size == collectives.size else 0
        targets.update({key: None for key in stored.paths if key == f"extra.{rank}"})
        values = stored.plan({key: value for key, value in targets.items() if value is None})
        tensors = stored.plan({key: value for key, value in targets.items() if value is not None})
        for reading in (values, tensors):
            _refuse_damage(folder, manifest, reading.ranges)
        found = values.read()
        if holding is not None:
            holding.named({"state": {}, **stored.nested(found)["optimizer"]})
        return stored, found, tensors

    prepared: list[tuple[dcp.Stored, dict[str, Any], dcp.Reading]] = []
    agree_on_refusals(collectives, lambda: prepared.append(prepare()))
    stored, values, tensors = prepared[0]
    loaded: dict[str, Any] = {}
    agree_on_refusals(collectives, lambda: loaded.update(tensors.read()))
    found = stored.nested({**values, **loaded})
    for name, module in extra_states(model).items():
        module.set_extra_state(found["model"][name])
    if holding is not None:
        given = found["optimizer"]
        state = {name: _own(kept) for name, kept in given.get("state", {}).items()}
        holding.install(state, holding.named({"state": state, "param_groups": given["param_groups"]})["param_groups"])
    packed = list(found.get("extra", {}).values())
    return unpack(packed[0]) if packed else {}


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


# save -------------------------------------------------------------------------------------


def _finish(manifest: Manifest, working: Path, folder: Path, keep_last: int | None) -> None:
    """Write the manifest, make the checkpoint visible, and remove those that are not to be kept."""
    from fsdp import dcp

    stored = dcp.Stored(working)
    tensors = {
        key: {"shape": list(one.size), "dtype": str(one.properties.dtype).removeprefix("torch.")}
        for key in stored.paths
        if (one := stored.tensor(key)) is not None
    }
    replace(manifest, tensors=tensors).write(working)
    publish("save", working, folder)
    if keep_last is not None:
        _prune(folder.parent, keep_last)


def _layout(model: nn.Module) -> dict[str, list[int]]:
    pieces = pieces_in(model)
    found = {}
    for name, tensor in entries(model):
        if piece := pieces.get(id(tensor)):
            found[name] = _cut(piece)
    return found


def _prune(folder: Path, keep: int) -> None:
    finished = []
    for path in folder.glob(f"[!.]*/{NAME}"):
        try:
            finished.append((read_manifest(path.parent).saved_at, path.parent))
        except ShardingError:
            continue  # damaged ones are left for someone to look at
    for _, path in sorted(finished)[:-keep]:
        hide(path)
    remove_leftovers(folder)


def _optimizer_state(holding: Holding) -> dict[str, Any]:
    """This rank's part of the state of an optimizer, nested by parameter name. Communicates."""
    spreads, state = holding.spreads()
    local = holding.local()
    for (name, key), spread in spreads.items():
        if not holding.holds(name):
            continue
        kept = state.setdefault(name, {})
        tensor = local[name][key].detach()
        if spread.kind is Kind.EACH:
            kept[f"{key}{EACH}{holding.rank}"] = tensor
        elif spread.kind is Kind.WHOLE:
            kept[key] = tensor
        else:
            kept[key] = spread.value(f"optimizer.state.{name}.{key}", tensor, holding.rank)
    return {"state": state, "param_groups": holding.options()}


def pack(extra: dict[str, Any]) -> bytes:
    """One rank's `extra`, as it is stored.

    Raises:
        ShardingError: it holds more than plain data.
    """
    stream = io.BytesIO()
    torch.save(extra, stream)
    try:
        unpack(stream.getvalue())
    except Exception as error:
        raise ShardingError(
            f"save: extra holds something that only unpickling would bring back ({error}); give tensors, numbers, strings, lists "
            "and dicts."
        ) from None
    return stream.getvalue()


def unpack(packed: bytes) -> dict[str, Any]:
    """The reverse."""
    extra: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=True)
    return extra


# load -------------------------------------------------------------------------------------


def _refuse_damage(folder: Path, manifest: Manifest | None, ranges: Mapping[str, set[int]]) -> None:
    damage = [] if manifest is None else list(manifest.damage(folder, ranges))
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
    if manifest is None or manifest.layout.get(name) != _cut(holding.pieces[name]):
        raise ShardingError(
            f"{asker}: {what.split(EACH)[0]!r} of parameter {name!r} is a statistic over each rank's own part, saved by "
            f"{'unknown' if manifest is None else manifest.world_size} ranks; load it on as many, wrapped alike, or load without "
            "the optimizer and start it anew."
        )


def _cut(piece: Piece) -> list[int]:
    layout = piece.flat.layout
    return [layout.slots[piece.number].start, layout.chunk, layout.world_size]


def _own(kept: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state as the optimizer keeps it: local tensors, under its own keys."""
    return {key.split(EACH)[0]: getattr(value, "local", value) for key, value in kept.items()}


def _own_rank(what: str) -> int:
    return int(what.rpartition(EACH)[2])
