"""Loading a checkpoint, a folder in the format of torch's Distributed Checkpoint, on any number of ranks.

Rule: a load checks all that it will read, on all ranks, before it changes anything. save.py writes the folders.
"""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint import saved_grads
from fsdp.checkpoint.manifest import NAME, Manifest, read_manifest
from fsdp.checkpoint.own_values import refuse_lost_versions, seen_by
from fsdp.checkpoint.plain_values import unpack
from fsdp.checkpoint.progress_bar import Progress, ProgressOption
from fsdp.checkpoint.save import EMA_PART, RANDOM, RANK_MARK, Pathlike, layout_entry, refuse_kind
from fsdp.comm.agreement import agree_on_refusals
from fsdp.errors import ShardingError
from fsdp.file_errors import file_errors
from fsdp.random_states import restore_random_states
from fsdp.runtime.registry import collective_call
from fsdp.shards.cut import Shape
from fsdp.shards.refusals import check_fit
from fsdp.state_dict.ema import EMA
from fsdp.state_dict.fqns import IncompatibleKeys, check_names, extra_states
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.optim_state import OptimizerView

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import StoredCheckpoint


class Loaded(dict[str, Any]):
    """What `load` returns: the `extra` of the checkpoint, and the names that `strict=False` left out."""

    def __init__(self, extra: Mapping[str, object], keys: IncompatibleKeys) -> None:
        super().__init__(extra)
        self.missing_keys = keys.missing_keys
        """Names of the model that the checkpoint does not have. Their values stayed."""
        self.unexpected_keys = keys.unexpected_keys
        """Names of the checkpoint that the model does not have."""

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[dict[str, Any]]]:
        """Copied and pickled as a class that `torch.load` accepts."""
        return OrderedDict, (dict(self),)


@torch.no_grad()
@collective_call
def load(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ema: EMA | None = None,
    strict: bool = True,
    rng: bool = True,
    progress: ProgressOption = False,
) -> Loaded:
    """Load what `save` wrote, on any number of ranks, however the model is wrapped; return `extra`.

    Each rank reads the shards that it holds. On as many ranks as saved the checkpoint, buffers, extra state of modules and
    `extra` are this rank's, and `rng` restores this rank's random states. On another number of ranks, they are rank 0's, and
    random states are left alone. `ema` gets the averages that were saved. Gradients that were saved are restored. A folder that
    torch's Distributed Checkpoint wrote from `{"model": ..., "optimizer": ...}` can be loaded too, without checksums. Only plain
    data is unpickled. `progress`: as for `save`. Communicates: every rank must call it alike.

    With `strict=False`, names that only one of the model and the checkpoint has are left out. They are `missing_keys` and
    `unexpected_keys` of the returned dict. The parameters of an optimizer must be those of the checkpoint in any case.

    Raises:
        ShardingError: on every rank; `path` is None, because `latest` found nothing; the checkpoint is unfinished, damaged or of
            another format version; names, shapes or dtypes are not the model's; or `optimizer` or `ema` is given and the
            checkpoint has no state of one. Nothing was loaded.
    """
    from fsdp.checkpoint import dcp  # torch's Distributed Checkpoint takes most of a second to import

    model_view = ModelView(model, "load")
    comm = model_view.world_comm
    optimizer_view = None if optimizer is None else OptimizerView(model_view, optimizer, f"load {path}")
    meter = Progress("load", progress, comm.rank)
    shown = agree_on_refusals(comm, "load", model_view.state_dict)  # hooks of the user's may fail

    @file_errors(f"load: {path} cannot be read", Path(str(path)))
    def prepare() -> tuple[dcp.StoredCheckpoint, dict[str, Any], dcp.ReadPlan, IncompatibleKeys]:
        folder = _folder_at(path)
        manifest = read_manifest(folder) if (folder / NAME).exists() or not (folder / dcp.METADATA).exists() else None
        _refuse_damage(folder, manifest, {dcp.METADATA: {0}})
        stored = dcp.StoredCheckpoint(folder)
        alike = manifest is None or manifest.world_size == comm.size
        if manifest is not None:
            refuse_lost_versions(f"load {folder}", stored.paths.values(), model_view, manifest.world_size)
            stored = stored.renamed(seen_by(comm.rank if alike else 0, stored.paths))
        targets, keys = _model_targets(folder, stored, model, shown, strict)
        targets.update(_gradient_targets(folder, stored, model_view, {*keys.missing_keys, *keys.unexpected_keys}))
        if optimizer_view is not None:
            targets.update(_optimizer_targets(stored, manifest, optimizer_view))
        refuse_kind("load", "ema", ema, (EMA, NoneType), "an fsdp.EMA")
        if ema is not None:
            ema.check_model(model_view)
            targets.update(_average_targets(folder, stored, ema))
        wanted = {f"extra.{comm.rank if alike else 0}"}
        if rng and alike and manifest is not None:
            wanted.add(f"{RANDOM}.{comm.rank}")
        targets.update({key: None for key in stored.paths if key in wanted})
        values = dcp.ReadPlan(stored, {key: value for key, value in targets.items() if value is None})
        tensors = dcp.ReadPlan(stored, {key: value for key, value in targets.items() if value is not None})
        meter.check()
        meter.begin((1 if manifest is None else 2) * (values.nbytes + tensors.nbytes))
        for reading in (values, tensors):
            _refuse_damage(folder, manifest, reading.ranges, meter.add)
        found = values.read(meter.add)
        if optimizer_view is not None:
            optimizer_view.named({"state": {}, **stored.nested(found)["optimizer"]})
        return stored, found, tensors, keys

    with meter:
        stored, values, tensors, keys = agree_on_refusals(comm, "load", prepare)
        loaded = agree_on_refusals(comm, "load", lambda: tensors.read(meter.add))
        found = stored.nested({**values, **loaded})
        model_view.set_state(found["model"], shown, strict)
        if optimizer_view is not None:
            given = found["optimizer"]
            # as the optimizer keeps it: local tensors, under its own keys
            state = {
                name: {key.split(RANK_MARK)[0]: getattr(value, "local", value) for key, value in kept.items()}
                for name, kept in given.get("state", {}).items()
            }
            named = optimizer_view.named({"state": state, "param_groups": given["param_groups"]})
            optimizer_view.install(state, named["param_groups"])
        if ema is not None:
            ema.load_state_dict(found[EMA_PART])
        if saved_grads.PART in found:
            saved_grads.restore_gradients(model_view, found[saved_grads.PART])
        for packed in found.get(RANDOM, {}).values():
            restore_random_states(unpack(packed), model_view.units[0].device)
        return Loaded(next((unpack(packed) for packed in found.get("extra", {}).values()), {}), keys)


def latest(folder: Pathlike, verify: bool = False) -> Path | None:
    """Return the newest finished checkpoint in `folder`, or None. Does not communicate.

    A damaged checkpoint is skipped with a warning. Names and sizes of files are checked; with `verify`, every byte. `load` checks
    all that it reads in any case. None also if there is no `folder` yet.

    Raises:
        ShardingError: `folder` is a file or a checkpoint, or cannot be read. Training would start anew, without a word.
    """
    refuse_kind("latest", "folder", folder, (str, os.PathLike), "the name of a folder")
    folder = Path(folder)
    found: list[tuple[int, Path]] = []
    for path in _visible_folders(folder):
        try:
            with file_errors(str(path), path):
                if not (path / NAME).exists():
                    continue
                manifest = read_manifest(path)
                lacking = next(manifest.damage(path), None) if verify else manifest.missing_or_cut(path)
        except ShardingError as damage:
            warnings.warn(f"skipped: {damage}")
            continue
        if lacking:
            warnings.warn(f"skipped: {path}: {lacking}")
        else:
            found.append((manifest.saved_at, path))
    return max(found)[1] if found else None


# helpers ----------------------------------------------------------------------------------


def _folder_at(path: Pathlike | None) -> Path:
    if path is None:
        raise ShardingError(
            "load: the path is None, as fsdp.latest returns where no checkpoint is finished. A first start has nothing to load: "
            "`if (path := fsdp.latest(folder)) is not None: fsdp.load(path, model, optimizer)`."
        )
    refuse_kind("load", "path", path, (str, os.PathLike), "the name of a folder")
    return Path(path)


def _visible_folders(folder: Path) -> list[Path]:
    """What is in `folder`, the folder of a run, without hidden names; nothing if it is missing."""
    with file_errors(f"latest: {folder} cannot be read", folder):
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except FileNotFoundError:
            return []
    if NAME in names:
        raise ShardingError(f"latest: {folder} is a checkpoint itself; load it, or give the folder around it.")
    return [folder / name for name in names]


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


def _model_targets(
    folder: Path, stored: "StoredCheckpoint", model: nn.Module, shown: Mapping[str, Any], strict: bool
) -> tuple[dict[str, Any], IncompatibleKeys]:
    """The memory to read into, by key: tensors of the state dict `shown`, and new memory for extra state; None for other values.

    Also the names that are left out.
    """
    prefix, operation = "model.", f"load {folder}"
    there = {key.removeprefix(prefix): key for key in stored.paths if key.startswith(prefix)}
    extra = extra_states(model)
    # if extra state is a dict, each of its values has a key of its own
    nested = {name: [key for key in there if key == name or key.startswith(f"{name}.")] for name in extra}
    plain = {name: key for name, key in there.items() if not any(name in keys for keys in nested.values())}
    # the format keeps nothing of an empty dict
    expected = [name for name, module in extra.items() if nested[name] or not _is_empty_dict(module.get_extra_state())]
    names = [*(name for name in shown if name not in extra), *expected]
    keys = check_names(operation, names, {**plain, **{name: kept for name, kept in nested.items() if kept}}, strict)
    targets = {there[name]: shown[name] if isinstance(shown[name], Tensor) else None for name in names if name in plain}
    for key, value in targets.items():
        if value is not None:
            _check_stored(operation, key.removeprefix(prefix), stored.tensor(key), tuple(value.shape), value.dtype)
    return {**targets, **{there[key]: stored.empty(there[key]) for kept in nested.values() for key in kept}}, keys


def _check_stored(operation: str, name: str, found: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Check that the stored tensor `found` can be loaded into one of `shape` and `dtype`; None if the value is no tensor."""
    if found is None:
        raise ShardingError(f"{operation}: {name!r} is no tensor there.")
    check_fit(operation, name, torch.empty(found.size, dtype=found.properties.dtype, device="meta"), shape, dtype)


def _is_empty_dict(value: object) -> bool:
    return isinstance(value, dict) and not value


def _gradient_targets(
    folder: Path, stored: "StoredCheckpoint", model_view: ModelView, left_out: Collection[str]
) -> dict[str, Tensor]:
    """New memory for this rank's shards of the saved gradients, by key."""
    prefix, targets = f"{saved_grads.PART}.", {}
    named = dict(model_view.entries)
    for key in stored.paths:
        if key.startswith(prefix) and (found := stored.tensor(key)) is not None:
            name = key.removeprefix(prefix)
            param_shard = model_view.param_shards.get(id(named.get(name)))
            if name not in left_out:
                targets[key] = saved_grads.target_of_gradient(f"load {folder}", name, param_shard, tuple(found.size))
    return targets


def _average_targets(folder: Path, stored: "StoredCheckpoint", ema: EMA) -> dict[str, Any]:
    """The averages to read into, by key, and the number of updates, which is no tensor."""
    operation, prefix, counter = f"load {folder}", f"{EMA_PART}.averages.", f"{EMA_PART}.updates"
    if counter not in stored.paths:
        raise ShardingError(f"{operation}: it holds no averages of weights; leave ema out.")
    averages = ema.averages()
    check_names(operation, [prefix + name for name in averages], {key: 0 for key in stored.paths if key.startswith(prefix)})
    for name, average in averages.items():
        _check_stored(operation, prefix + name, stored.tensor(prefix + name), tuple(average.shape), average.dtype)
    return {counter: None, **{prefix + name: average for name, average in averages.items()}}


def _optimizer_targets(stored: "StoredCheckpoint", manifest: Manifest | None, optimizer_view: OptimizerView) -> dict[str, Any]:
    """New memory for this rank's part of the optimizer's state, by key; None for a value that is no tensor."""
    operation = optimizer_view.operation
    paths = {key: path for key, path in stored.paths.items() if path[0] == "optimizer"}
    if not paths:
        raise ShardingError(f"{operation}: it holds no optimizer state; leave the optimizer out.")
    if not any(path[1] == "param_groups" for path in paths.values()):
        raise ShardingError(
            f"{operation}: its optimizer state is flattened; load it with torch's dcp.load and set_optimizer_state_dict."
        )
    targets: dict[str, Any] = {key: stored.empty(key) for key, path in paths.items() if path[1] == "param_groups"}
    for key, path in paths.items():
        if path[1] != "state" or len(path) == 3:
            continue  # three parts: this rank had no state of a parameter of which rank 0 had some
        name, what = str(path[2]), str(path[3])
        if name not in optimizer_view.parameters:
            raise ShardingError(
                f"{operation}: it has state of parameter {name!r}, which the optimizer does not step; load without the "
                "optimizer and start it anew."
            )
        found = stored.tensor(key)
        if not optimizer_view.holds(name):
            continue
        device = optimizer_view.parameters[name].device
        if found is None or not found.size:
            targets[key] = stored.empty(key)
        elif RANK_MARK in what:
            if int(what.rpartition(RANK_MARK)[2]) == optimizer_view.comm.rank:
                _check_layout(operation, name, what, manifest, optimizer_view)
                targets[key] = torch.empty(found.size, dtype=found.properties.dtype, device=device)
        else:
            placement = optimizer_view.place_full(name, what, tuple(found.size), found.properties.dtype)
            targets[key] = placement.empty(key, optimizer_view.comm.rank, device)
    return targets


def _check_layout(operation: str, name: str, what: str, manifest: Manifest | None, optimizer_view: OptimizerView) -> None:
    """Refuse a statistic over one rank's shard unless the parameter is cut as it was at the save."""
    if manifest is None or manifest.layout.get(name) != layout_entry(optimizer_view.param_shards[name]):
        raise ShardingError(
            f"{operation}: {what.split(RANK_MARK)[0]!r} of parameter {name!r} is a statistic over each rank's own part, saved by "
            f"{'unknown' if manifest is None else manifest.world_size} ranks; load it on as many, wrapped alike, or load without "
            "the optimizer and start it anew."
        )
