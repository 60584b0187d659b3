"""Saving a checkpoint: all ranks plan it, each rank writes its part, and the folder is complete or absent.

Rule 1: a visible folder is finished. A save writes in a hidden folder beside it, which one rename makes visible.
Rule 2: a background thread writes copies only, and uses a communicator of its own.
"""

import os
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fsdp.checkpoint import own_values, saved_grads
from fsdp.checkpoint.atomic_folder import begin, hide, not_written, publish, remove_leftovers, removed_on_failure
from fsdp.checkpoint.background import Saving, finished, run_in_background, wait_for_last
from fsdp.checkpoint.manifest import NAME, Manifest, read_manifest
from fsdp.checkpoint.plain_values import pack, storable
from fsdp.checkpoint.progress_bar import Progress, ProgressOption
from fsdp.comm.agreement import agree_and_share, agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.comm.open_communicators import background_comm
from fsdp.errors import ShardingError, name_ranks
from fsdp.file_errors import reason_of
from fsdp.random_states import random_states
from fsdp.runtime.registry import collective_call
from fsdp.shards.state_placement import State, StatePlacement
from fsdp.state_dict.ema import EMA
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.optim_state import OptimizerView
from fsdp.state_dict.param_shard import ParamShard

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import WritePlan

RANK_MARK: Final = "@"
"""Stands between a key of an optimizer's state and a rank, if the tensor is a statistic over that rank's shard."""
EMA_PART: Final = "ema"
"""The part of a checkpoint with the averages of the weights."""
RANDOM: Final = "random"
"""The part of a checkpoint with the random states of each rank."""
Pathlike = str | os.PathLike[str]


@torch.no_grad()
@collective_call
def save(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    ema: EMA | None = None,
    keep_last: int | None = None,
    rng: bool = True,
    accumulated: bool = False,
    async_: bool = False,
    progress: ProgressOption = False,
) -> Saving:
    """Save `model`, the state of `optimizer`, and `extra` as the folder `path`, which appears when it is complete.

    Each rank writes its own shards. Buffers, and all else that is not sharded, are rank 0's, and each rank writes its own besides
    where they differ. `ema`, an average of the model's weights, is saved with them. `extra` may differ between ranks: step,
    position in the data, state of a scaler. `rng` saves the random states of each rank as well (Python's, numpy's if it is
    imported, torch's, the model's device's). `accumulated` saves gradients as well, for a save between the backwards of one step.
    With `keep_last`, the folder around `path` belongs to this run: afterwards it holds the newest `keep_last` checkpoints, and no
    unfinished ones. Communicates: every rank must call it alike, with a path that is the same folder for all. Memory: one file,
    of 1 GiB or one tensor.

    With `async_`, the call returns when this rank has copied its part to the host. The copies need as many bytes as the part,
    until they are written. The checkpoint has the values at the time of the call, also if training continues. A thread with a
    process group of its own writes them. `wait()` of the result returns the path, or raises. A failure is warned of when it
    happens; if `wait()` is not called, the next `save` raises it. The next save, and an interpreter that ends, wait for a save
    that is running. Call `wait()` before `destroy_process_group()`. In `fsdp.simulate` there is no thread: everything is written
    in the call, and `wait()` raises failures.

    `progress`: True for a bar of rank 0's bytes (package tqdm), or a function of this rank's (done_bytes, total_bytes), which
    the writing thread calls. Every byte counts twice: it is written, and read for its checksum.

    Raises:
        ShardingError: on every rank; `path` exists or is not one folder for all ranks; some rank could not write; `extra`, extra
            state of a module or an option of the optimizer holds more than plain data (tensors, numbers, strings, lists, dicts),
            or a sparse tensor; the optimizer has state that belongs to no parameter; an argument is given on some ranks only;
            gradients are kept under `no_sync`; or a forward, a backward or a summon is going on. Nothing appears.
    """
    model_view = ModelView(model, "save")
    world_comm = model_view.world_comm
    meter = Progress("save", progress, world_comm.rank)

    def prepare() -> dict[str, bytes]:
        wait_for_last(world_comm)
        refuse_kind("save", "path", path, (str, os.PathLike), "the name of a folder")
        refuse_kind("save", "ema", ema, (EMA, NoneType), "an fsdp.EMA")
        if keep_last is not None and (isinstance(keep_last, bool) or not hasattr(keep_last, "__index__") or keep_last < 1):
            raise ShardingError(f"save: keep_last is {keep_last!r}; give the number of checkpoints to keep, at least 1.")
        model_view.refuse_sparse()
        saved_grads.refuse_each_ranks_own(model_view, accumulated)
        try:
            extras = dict(extra or {})
        except (TypeError, ValueError):
            raise ShardingError(f"save: extra is {extra!r}; give a dict.") from None
        packed = {"extra": pack("save: extra", extras)}
        if rng:
            packed[RANDOM] = pack("save: the random states", random_states(model_view.units[0].device))
        if ema is not None:
            ema.check_model(model_view)
        meter.check()
        return packed

    given = {"optimizer": optimizer is not None, "ema": ema is not None, "accumulated": accumulated, "async_": async_}
    packed, by_rank = agree_and_share(world_comm, "save", prepare, lambda packed: given)
    folder = Path(path).absolute() if async_ else Path(path)  # the program may change its folder while the thread writes
    for name in given:
        giving = [rank for rank, one in enumerate(by_rank) if one[name]]
        if 0 < len(giving) < world_comm.size:
            raise ShardingError(f"save: {name} is given on {name_ranks(giving)} alone; give it on every rank, or on none.")
    state: dict[str, Any] = {"model": model_view.state_dict()}
    state.update({part: {str(world_comm.rank): data} for part, data in packed.items()})
    if accumulated:
        state[saved_grads.PART] = saved_grads.gradient_state(model_view)
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(OptimizerView(model_view, optimizer))
    if ema is not None:
        state[EMA_PART] = ema.state_dict()
    state = agree_on_refusals(world_comm, "save", lambda: storable("save", state))
    own_values.set_apart(state, model_view)
    own_comm = background_comm(world_comm) if async_ else world_comm
    plan = plan_checkpoint(folder, state, world_comm)
    write = partial(write_checkpoint, plan, _layout(model_view), keep_last, meter, own_comm)
    if not async_:
        write()
        return finished(folder)
    with removed_on_failure(plan.folder, world_comm):
        agree_on_refusals(world_comm, "save", plan.stage)
    return run_in_background(world_comm, folder, write)


def refuse_kind(function_name: str, name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    """Raise ShardingError unless the argument `name` is of one of `kinds`."""
    if not isinstance(value, kinds):
        raise ShardingError(f"{function_name}: {name} is {value!r}; give {wanted}.")


def plan_checkpoint(folder: Path, state: dict[str, Any], comm: Communicator, file_bytes: int | None = None) -> "WritePlan":
    """Plan to write `state`, this rank's part of a nested state dict, in a hidden folder. Refuses what `begin` refuses.

    Communicates.
    """
    from fsdp.checkpoint import dcp

    working = begin("save", folder, comm)
    with removed_on_failure(working, comm):
        return dcp.WritePlan(working, folder, state, comm, file_bytes or dcp.FILE_BYTES)


def write_checkpoint(
    plan: "WritePlan", layout: dict[str, list[int]], keep_last: int | None, progress: Progress, comm: Communicator
) -> None:
    """Write this rank's part. The folder appears when all ranks have written theirs, or never. Communicates."""
    with removed_on_failure(plan.folder, comm), progress:
        progress.begin(2 * plan.nbytes)
        files = plan.write(comm, progress.add)
        agree_on_refusals(comm, "save", lambda: _publish(plan, layout, keep_last, comm.size, files) if comm.rank == 0 else None)


def _publish(
    plan: "WritePlan", layout: dict[str, list[int]], keep_last: int | None, world_size: int, files: dict[str, Any]
) -> None:
    """Write the manifest, make the checkpoint visible, and remove old checkpoints as `keep_last` says."""
    from fsdp.checkpoint import dcp

    stored = dcp.StoredCheckpoint(plan.folder)
    tensors = {
        key: {"shape": list(found.size), "dtype": str(found.properties.dtype).removeprefix("torch.")}
        for key in stored.paths
        if (found := stored.tensor(key)) is not None
    }
    with not_written("save", plan.final):
        Manifest(world_size, time.time_ns(), tensors, layout, files).write(plan.folder)
        publish("save", plan.folder, plan.final)
    if keep_last is not None:
        _prune(plan.final.parent, keep_last)


def _layout(model_view: ModelView) -> dict[str, list[int]]:
    sharded = ((name, model_view.param_shards.get(id(tensor))) for name, tensor in model_view.entries)
    return {name: layout_entry(param_shard) for name, param_shard in sharded if param_shard is not None}


def layout_entry(param_shard: ParamShard) -> list[int]:
    """The entry of a parameter in `Manifest.layout`."""
    layout = param_shard.flat.layout
    return [*layout.place(param_shard.number), layout.num_shards]


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints in `folder`, and unfinished ones."""
    by_age = []
    for path in folder.glob(f"[!.]*/{NAME}"):
        try:
            manifest = read_manifest(path.parent)
        except ShardingError:
            continue  # a damaged checkpoint is left for the user to examine
        if not manifest.missing_or_cut(path.parent):
            by_age.append((manifest.saved_at, path.parent))
    for _, path in sorted(by_age)[:-keep]:
        try:
            hide(path)
        except OSError as error:
            warnings.warn(f"save: the old checkpoint {path} could not be removed: {reason_of(error, path)}")
    remove_leftovers(folder)


def _optimizer_state(optimizer_view: OptimizerView) -> dict[str, Any]:
    """This rank's part of an optimizer's state, nested by parameter name. Communicates."""
    places, rank, local = optimizer_view.placed(), optimizer_view.comm.rank, optimizer_view.local()
    state: State = {}
    for name, kept in places.items():
        found: dict[str, Any] = {}
        for key, one in kept.items():
            if not isinstance(one, StatePlacement):
                found[key] = one
            elif optimizer_view.holds(name):
                value = one.value(f"optimizer.state.{name}.{key}", local[name][key].detach(), rank)
                found[f"{key}{RANK_MARK}{rank}" if one.is_per_rank else key] = value
        if found:
            state[name] = found
    return {"state": state, "param_groups": optimizer_view.options()}
