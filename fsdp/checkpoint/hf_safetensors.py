"""Weights in the layout of Hugging Face: safetensors files of a limited size, and an index of them.

Rule 1: no rank holds more than one file. The ranks write the files in turn, and each rank reads only its own rows.
Rule 2: files hold full tensors. torch's Distributed Checkpoint has a writer for this format, but if a rank has several chunks
        of a tensor, it keeps only the last one, without an error (2.13). It is not used.
"""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fsdp.checkpoint.atomic_folder import not_written, writing
from fsdp.checkpoint.progress_bar import Progress, ProgressOption
from fsdp.comm.agreement import agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import copy_from
from fsdp.errors import ShardingError, require_package
from fsdp.file_errors import file_errors
from fsdp.runtime.registry import collective_call
from fsdp.shards.refusals import check_fit
from fsdp.state_dict.fqns import IncompatibleKeys, check_names
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_ranges import full_params
from fsdp.state_dict.param_shard import ParamShard, full_value, load_value, param_shards_of

INDEX: Final = "model.safetensors.index.json"
MULTIPLES: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Stored = TypeVar("Stored")


@torch.no_grad()
@collective_call
def export_safetensors(
    model: nn.Module, path: str | Path, max_shard_size: int | str = "5GB", *, progress: ProgressOption = False
) -> None:
    """Write parameters and persistent buffers as the folder `path`, which appears when it is complete. Buffers are rank 0's.

    A tied parameter is written once, under its first name, as `transformers` does. A file has at most `max_shard_size` bytes
    of tensors ("5GB", "500MB", or a number), or one tensor. `progress`: True for a bar on rank 0 (package tqdm), or a function
    of (done_bytes, total_bytes). Communicates: every rank must call it alike.

    Memory: one file on the rank that writes it, and on every rank one range of 32 MiB or one parameter.

    Raises:
        ShardingError: on every rank; the package `safetensors` is missing, `max_shard_size` is no size, `path` exists, or a
            rank could not write.
    """
    folder, limit = Path(path), size_in_bytes(max_shard_size)
    require_safetensors("export_safetensors")
    model_view = ModelView(model, "export_safetensors")
    comm, names, param_shards = model_view.world_comm, model_view.fqns, model_view.param_shards
    agree_on_refusals(comm, "export_safetensors", model_view.refuse_sparse)
    unsharded = [
        (name, tensor) for name, tensor in model_view.entries if id(tensor) not in param_shards and names[id(tensor)] == name
    ]
    planned = [(name, tensor.nbytes) for name, tensor in unsharded]
    sharded = (shard for unit in model_view.units for shard in param_shards_of(unit))
    planned += [(names[id(shard.parameter)], prod(shard.shape) * shard.parameter.element_size()) for shard in sharded]
    files = plan_files(planned, itemgetter(1), limit)
    meter = Progress("export_safetensors", progress, comm.rank)
    agree_on_refusals(comm, "export_safetensors", meter.check)
    with meter, writing("export_safetensors", folder, comm) as working:
        meter.begin(sum(size for _, size in planned))
        writer = Writer(working, files, comm, meter)
        for name, tensor in unsharded:
            full = full_value(tensor)
            writer.take(name, full if writer.writers[name] == 0 else copy_from(0, full, comm, name))
        for param_shard, full in full_params(model_view.units):
            writer.take(names[id(param_shard.parameter)], full)
        agree_on_refusals(comm, "export_safetensors", not_written("export_safetensors", folder)(writer.finish))


@torch.no_grad()
@collective_call
def load_safetensors(
    model: nn.Module, path: str | Path, *, strict: bool = True, progress: ProgressOption = False
) -> IncompatibleKeys:
    """Load parameters and buffers from a safetensors file or a folder of them; each rank reads its own rows only.

    For a tied parameter, one name is enough. With `strict=False`, names that only one of the model and the files has are left
    out and returned, as `missing_keys` and `unexpected_keys`. `progress`: True for a bar on rank 0 (package tqdm), or a function
    of this rank's (done_bytes, total_bytes). Communicates: every rank must call it alike.

    Raises:
        ShardingError: on every rank; the package `safetensors` or a file is missing, or names, shapes or dtypes are not the
            model's. Nothing was loaded.
    """
    require_safetensors("load_safetensors")
    model_view = ModelView(model, "load_safetensors")
    comm, param_shards = model_view.world_comm, model_view.param_shards
    with ExitStack() as stack, Progress("load_safetensors", progress, comm.rank) as meter:

        @file_errors(f"load_safetensors: {path} cannot be read", Path(path))
        def prepare() -> tuple[list[tuple[Tensor, Any]], IncompatibleKeys]:
            meter.check()
            return _targets(model_view, Path(path), stack, strict)

        targets, keys = agree_on_refusals(comm, "load_safetensors", prepare)
        meter.begin(sum(tensor.nbytes for tensor, _ in targets))
        for tensor, stored in targets:
            param_shard = param_shards.get(id(tensor))
            if param_shard is None:
                load_value(tensor, stored[...])
            elif param_shard.placement.is_row_range and param_shard.shape:
                param_shard.overwrite(_read(stored, param_shard))
            else:
                param_shard.overwrite(param_shard.cut(stored[...]))
            meter.add(tensor.nbytes)
        return keys


def _targets(
    model_view: ModelView, path: Path, stack: ExitStack, strict: bool
) -> tuple[list[tuple[Tensor, Any]], IncompatibleKeys]:
    """Each tensor of the model with the unread tensor of the files that belongs there, which fits it; and the names left out."""
    operation = f"load_safetensors {path}"
    slices: dict[str, Any] = {}
    for file in files_in(path, operation):
        opened = stack.enter_context(opened_file(file, operation))
        slices.update({key: opened.get_slice(key) for key in opened.keys()})  # noqa: SIM118  # not a mapping
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model_view.entries:
        if name in slices:
            found.setdefault(id(tensor), (name, tensor))
    wanted = [name for name, tensor in model_view.entries if name in slices or id(tensor) not in found]
    keys = check_names(operation, wanted, slices, strict)
    targets: list[tuple[Tensor, Any]] = []
    for name, tensor in found.values():
        param_shard, stored = model_view.param_shards.get(id(tensor)), slices[name]
        shape = tuple(tensor.shape) if param_shard is None else param_shard.shape
        outline = torch.empty(stored.get_shape(), dtype=dtype_of(stored.get_dtype()), device="meta")
        check_fit(operation, name, outline, shape, tensor.dtype)
        targets.append((tensor, stored))
    return targets, keys


class Writer:
    """The files of one rank. Each is written as soon as all of its tensors were taken."""

    def __init__(self, working: Path, files: list[list[tuple[str, int]]], comm: Communicator, progress: Progress) -> None:
        self._progress = progress
        self._working = working
        self._rank = comm.rank
        self._files = {name: number for number, tensors in enumerate(files) for name, _ in tensors}
        """The number of the file of each tensor."""
        self._names = [file_name(number, len(files)) for number in range(len(files))]
        self._total = sum(size for tensors in files for _, size in tensors)
        self.writers = {name: number % comm.size for name, number in self._files.items()}
        """The rank that writes the file of each tensor."""
        self._missing = {number: len(tensors) for number, tensors in enumerate(files)}
        self._held: dict[int, dict[str, Tensor]] = {}
        self.failure: Exception | None = None
        """What has first kept this rank from writing a file."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a full tensor if this rank writes its file."""
        self._progress.add(tensor.nbytes)
        if self.writers[name] != self._rank:
            return
        number = self._files[name]
        self._held.setdefault(number, {})[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._missing[number] -= 1
        if not self._missing[number]:
            self._write(number)

    def _write(self, number: int) -> None:
        from safetensors.torch import save_file

        try:
            save_file(self._held.pop(number), self._working / self._names[number], metadata={"format": "pt"})
        except Exception as error:  # the other ranks are in a gather, so `finish` raises it
            self.failure = self.failure or error

    def finish(self) -> None:
        """Let rank 0 write the index of the files, if there are several. Raise what has kept this rank from writing a file."""
        if self.failure is not None:
            raise self.failure
        if self._rank == 0 and len(self._names) > 1:
            weights = {name: self._names[number] for name, number in self._files.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": weights}
            (self._working / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def file_name(number: int, count: int) -> str:
    """The name of file `number`, counted from 0, of `count` files."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def plan_files(tensors: Iterable[Stored], size_of: Callable[[Stored], int], limit: int) -> list[list[Stored]]:
    """Distribute tensors over files in the given order, each up to `limit` bytes or one tensor."""
    files: list[list[Stored]] = [[]]
    filled = 0
    for tensor in tensors:
        filled += size_of(tensor)
        if files[-1] and filled > limit:
            files.append([])
            filled = size_of(tensor)
        files[-1].append(tensor)
    return files


def files_in(path: Path, operation: str) -> list[Path]:
    """The file `path`, or the files of the folder `path`. Refused if one is missing, or the index is damaged."""
    if not path.exists():
        raise ShardingError(f"{operation}: there is no such file or folder.")
    if path.is_dir():
        index, names = path / INDEX, {file_name(0, 1)}
        try:
            if index.is_file():
                names = set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ShardingError(f"{operation}: {INDEX} is damaged; get it again, or export the weights again.") from None
    else:
        names, path = {path.name}, path.parent
    for name in sorted(names):
        if not (path / name).is_file():
            raise ShardingError(f"{operation}: {name} is missing.")
    return [path / name for name in sorted(names)]


def opened_file(file: Path, operation: str) -> Any:
    """Open one file, which is mapped until it is closed. Raise ShardingError if it is damaged."""
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # the package has an exception of its own, and raises others
        raise ShardingError(f"{operation}: {file.name} is damaged: {error}.") from error


def _read(stored: Any, param_shard: ParamShard) -> Tensor:
    """This rank's part of a stored tensor. Reads only the rows of which this rank has elements."""
    part, row = param_shard.placement.part, max(prod(param_shard.shape[1:]), 1)
    low, high = part.first // row, -(-(part.first + part.numel) // row)
    rows: Tensor = stored[low:high].reshape(-1)
    return rows[part.first - low * row : part.first - low * row + part.numel].view(part.shape)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that safetensors calls `name`."""
    from safetensors.torch import _TYPES

    types: dict[str, Any] = dict(_TYPES)
    found: torch.dtype = types[name]
    return found


def size_in_bytes(size: int | str, option: str = "export_safetensors: max_shard_size") -> int:
    """The bytes of a number, or of text such as "5GB". If `size` is neither, an error begins with `option`."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]i?B)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    number = int(float(found[1]) * MULTIPLES[found[2].upper()]) if found else size
    if type(number) is not int or number <= 0:
        raise ShardingError(f"{option} is {size!r}; give bytes, or text such as '5GB'.")
    return number


def require_safetensors(function_name: str) -> None:
    """Raise ShardingError if a package is not installed."""
    require_package(function_name, "safetensors")
    require_package(function_name, "numpy")  # safetensors needs it for tensors of torch, and does not ask for it
