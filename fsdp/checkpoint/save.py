"""How a checkpoint comes to be: planned by all ranks, written by each, complete or not there.

Rule 1: what has its name is finished. A save works in a hidden folder beside it, which one rename makes visible.
Rule 2: what is left to a thread has been copied, and uses a channel of its own.
"""

import io
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fsdp.checkpoint import saved_grads
from fsdp.checkpoint.atomic_folder import begin, hide, publish, remove_leftovers
from fsdp.checkpoint.background import Saving, finished, go_on, settle
from fsdp.checkpoint.manifest import NAME, Manifest, read_manifest
from fsdp.checkpoint.progress import Asked, Progress
from fsdp.checkpoint.rng import random_states
from fsdp.comm.agreement import agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.comm.connect import background_comm
from fsdp.errors import ShardingError
from fsdp.runtime.registry import resting_units_in, world_comm_in
from fsdp.state_dict.fqns import entries
from fsdp.state_dict.optim_placement import PlacementKind
from fsdp.state_dict.optim_state import OptimizerView
from fsdp.state_dict.param_shard import ParamShard, param_shards_in

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import WritePlan

EACH: Final = "@"
"""Between a key of an optimizer's state and the rank whose own it is."""
RANDOM: Final = "random"
"""The part of a checkpoint that holds each rank's random states."""
Pathlike = str | os.PathLike[str]


@torch.no_grad()
def save(
    path: Pathlike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    rng: bool = True,
    accumulated: bool = False,
    async_: bool = False,
    progress: Asked = False,
) -> Saving:
    """Save `model`, the state of `optimizer`, and `extra` as the folder `path`, which appears when it is complete.

    Each rank writes its own parts. `extra` is each rank's own: step, position in the data, state of a scaler. With `rng`, the
    random states of each rank are saved as well (Python's, numpy's if it is imported, torch's, of the model's device). With
    `accumulated`, so are gradients: for a save between the backwards of one step. With `keep_last`, the folder that `path` is in
    belongs to this run: afterwards it holds its newest `keep_last` checkpoints, and no unfinished ones. Communicates: every
    rank must call it alike, with a path that is the same folder for all. Memory: one file, of 1 GiB or one tensor.

    With `async_`, it returns when everything that this rank will write is copied to the host (as many bytes, until they are
    written); what is saved is what was there at the call, however training goes on. The rest happens on a thread and a process
    group of its own. What it returns is done then or later; `wait()` returns the path or raises. A failure is warned of when it
    happens, and raised by the next `save` if nobody has waited. A save that is under way is waited for by the next one, and by
    an interpreter that ends; call `wait()` before `destroy_process_group()`. In `fsdp.simulate` nothing goes on in the
    background: all is done at the call, and failures come from `wait()`.

    `progress`: True for a bar of rank 0's bytes (package tqdm), or a function of this rank's (done_bytes, total_bytes), called
    on the thread that writes. Every byte counts twice: it is written, and read for its checksum.

    Raises:
        ShardingError: on every rank; there is something at `path` already, some rank could not write, `extra` holds more than
            plain data (tensors, numbers, strings, lists, dicts), gradients are kept under `no_sync`, or a forward, a backward
            or a summon is going on. Nothing appears.
    """
    folder = Path(path)
    units = resting_units_in(model, "save")
    world_comm = world_comm_in(model, "save")
    packed: dict[str, bytes] = {}
    shown: list[Progress] = []

    def prepare() -> list[str]:
        settle(world_comm)
        if keep_last is not None and keep_last < 1:
            raise ShardingError(f"save: keep_last is {keep_last}; give the number of checkpoints to keep, at least 1.")
        saved_grads.refuse_kept_gradients(model)
        packed["extra"] = pack(dict(extra or {}))
        if rng:
            packed[RANDOM] = pack(random_states(units[0].device))
        shown.append(Progress("save", progress, world_comm.rank))
        return saved_grads.names_of_gradients(model) if accumulated else []

    named = agree_on_refusals(world_comm, prepare)
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    state.update({part: {str(world_comm.rank): one} for part, one in packed.items()})
    if accumulated:
        state[saved_grads.PART] = saved_grads.gradient_state(model, named, world_comm)
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(OptimizerView(model, optimizer, "save"))
    beside = background_comm(world_comm) if async_ else world_comm
    draft = CheckpointWriter(folder, state, _layout(model), world_comm, keep_last, shown[0])
    if not async_:
        draft.finish(world_comm)
        return finished(folder)
    draft.stage(world_comm)
    return go_on(world_comm, folder, lambda: draft.finish(beside))


class CheckpointWriter:
    """A checkpoint that all ranks have planned: a hidden folder, and what this rank is to write there."""

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any],
        layout: dict[str, list[int]],
        comm: Communicator,
        keep_last: int | None,
        progress: Progress,
        file_bytes: int | None = None,
    ) -> None:
        """Of this rank's part of a nested state dict. Communicates.

        Raises:
            ShardingError: on every rank; there is something there already, or nothing can be written there.
        """
        from fsdp.checkpoint import dcp

        self._folder = folder
        self._layout = layout
        self._keep_last = keep_last
        self._progress = progress
        name = agree_on_refusals(comm, lambda: begin("save", folder) if comm.rank == 0 else "")[0]
        self._working = folder.parent / name
        with self._or_nothing(comm):
            self._writing: WritePlan = dcp.WritePlan(self._working, state, comm, file_bytes or dcp.FILE_BYTES)

    def stage(self, comm: Communicator) -> None:
        """Copy what is to be written. Communicates."""
        with self._or_nothing(comm):
            agree_on_refusals(comm, self._writing.stage)

    def finish(self, comm: Communicator) -> None:
        """Write this rank's part; the folder appears when all have. Communicates.

        Raises:
            ShardingError: on every rank, if some rank could not write. Nothing appears.
        """
        with self._or_nothing(comm):
            self._progress.begin(2 * self._writing.nbytes)
            files = self._writing.write(comm, self._progress.add)
            manifest = Manifest(comm.size, time.time_ns(), {}, self._layout, files)
            agree_on_refusals(comm, lambda: self._appear(manifest) if comm.rank == 0 else None)
            self._progress.end()

    def _appear(self, manifest: Manifest) -> None:
        """Write the manifest, make the checkpoint visible, and remove those that are not to be kept."""
        from fsdp.checkpoint import dcp

        stored = dcp.StoredCheckpoint(self._working)
        tensors = {
            key: {"shape": list(one.size), "dtype": str(one.properties.dtype).removeprefix("torch.")}
            for key in stored.paths
            if (one := stored.tensor(key)) is not None
        }
        replace(manifest, tensors=tensors).write(self._working)
        publish("save", self._working, self._folder)
        if self._keep_last is not None:
            _prune(self._folder.parent, self._keep_last)

    @contextmanager
    def _or_nothing(self, comm: Communicator) -> Iterator[None]:
        """Leave nothing behind on failure."""
        try:
            yield
        except BaseException as failure:
            self._progress.end(finished=False)
            if comm.rank == 0:
                shutil.rmtree(self._working, ignore_errors=True)
            if isinstance(failure, OSError):
                raise ShardingError(f"save: {self._folder} could not be written: {failure}. Nothing appeared there.") from failure
            raise


def _layout(model: nn.Module) -> dict[str, list[int]]:
    param_shards = param_shards_in(model)
    found = {}
    for name, tensor in entries(model):
        if param_shard := param_shards.get(id(tensor)):
            found[name] = cut_of(param_shard)
    return found


def cut_of(param_shard: ParamShard) -> list[int]:
    """What the manifest says of how a parameter is cut."""
    layout = param_shard.flat.layout
    return [layout.slots[param_shard.number].start, layout.shard_numel, layout.num_shards]


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


def _optimizer_state(view: OptimizerView) -> dict[str, Any]:
    """This rank's part of the state of an optimizer, nested by parameter name. Communicates."""
    placements, state = view.placements()
    local = view.local()
    for (name, key), placement in placements.items():
        if not view.holds(name):
            continue
        kept = state.setdefault(name, {})
        tensor = local[name][key].detach()
        if placement.kind is PlacementKind.PER_RANK:
            kept[f"{key}{EACH}{view.rank}"] = tensor
        elif placement.kind is PlacementKind.UNSHARDED:
            kept[key] = tensor
        else:
            kept[key] = placement.value(f"optimizer.state.{name}.{key}", tensor, view.rank)
    return {"state": state, "param_groups": view.options()}


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
