"""Weights in the layout of Hugging Face: safetensors files of a limited size, and an index of them.

Rule 1: no rank holds more than one file. File n is rank n's to write, and each rank reads its own rows only.
Rule 2: what is written is full tensors. torch's Distributed Checkpoint has a writer for this format, which of several boxes of
        a tensor on one rank keeps the last and says nothing (2.13); it is not used.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.checkpoint.atomic_folder import begin, publish
from fsdp.checkpoint.progress import Asked, Progress
from fsdp.comm.agreement import agree_on_refusals
from fsdp.errors import ShardingError
from fsdp.runtime.registry import communicates, everyone_in, resting_units_in
from fsdp.state_dict.fqns import check_names, entries
from fsdp.state_dict.full_state import BUCKET_BYTES
from fsdp.state_dict.param_ranges import Range, gather_range, memory_for, ranges_of
from fsdp.state_dict.param_shard import Piece, check_fit, pieces_in

INDEX: Final = "model.safetensors.index.json"
UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@torch.no_grad()
@communicates
def export_safetensors(model: nn.Module, path: str | Path, max_shard_size: int | str = "5GB", *, progress: Asked = False) -> None:
    """Write parameters and persistent buffers as the folder `path`, which appears when it is complete.

    Tied parameters are written once, under their first name, as `transformers` does. A file has at most `max_shard_size` bytes
    of tensors ("5GB", "500MB", or a number), or one tensor. `progress`: True for a bar on rank 0 (package tqdm), or a function
    of (done_bytes, total_bytes). Communicates: every rank must call it alike.

    Memory: one file on the rank that writes it, and on every rank one range of 32 MiB or one parameter.

    Raises:
        ShardingError: on every rank; the package `safetensors` is missing, `max_shard_size` is no size, there is something at
            `path`, or a rank could not write.
    """
    folder, limit = Path(path), size_in_bytes(max_shard_size)
    require_safetensors("export_safetensors")
    units = resting_units_in(model, "export_safetensors")
    collectives = everyone_in(model, "export_safetensors")
    pieces = pieces_in(model)
    names = _first_names(model)
    plain = [(name, tensor) for name, tensor in entries(model) if id(tensor) not in pieces and names[id(tensor)] == name]
    ranges = [(unit, one) for unit in units for one in ranges_of(unit, BUCKET_BYTES)]
    planned = [(name, tensor.nbytes) for name, tensor in plain]
    planned += [(names[id(piece.parameter)], _bytes(piece)) for _, one in ranges for piece in one.pieces]
    files = plan_files(planned, limit)
    shown: list[Progress] = []

    def prepare() -> str:
        shown.append(Progress("export_safetensors", progress, collectives.rank))
        return begin("export_safetensors", folder) if collectives.rank == 0 else ""

    working = folder.parent / agree_on_refusals(collectives, prepare)[0]
    try:
        shown[0].begin(sum(size for _, size in planned))
        writer = _Writer(working, files, collectives.rank, collectives.size, shown[0])
        for label, tensor in plain:
            writer.take(label, tensor)
        memory = memory_for([one for _, one in ranges])
        for unit, one in ranges:
            _take_range(one, gather_range(one, unit.collectives, unit.name, memory), names, writer)
        agree_on_refusals(collectives, lambda: _finish(writer, working, files) if collectives.rank == 0 else writer.finish())
        agree_on_refusals(collectives, lambda: publish("export_safetensors", working, folder) if collectives.rank == 0 else None)
        shown[0].end()
    except BaseException:
        shown[0].end(finished=False)
        if collectives.rank == 0:
            shutil.rmtree(working, ignore_errors=True)
        raise


@torch.no_grad()
@communicates
def load_safetensors(model: nn.Module, path: str | Path, *, progress: Asked = False) -> None:
    """Load parameters and buffers from a safetensors file or a folder of them; each rank reads its own rows only.

    Of tied parameters, one name is enough. `progress`: True for a bar on rank 0 (package tqdm), or a function of this rank's
    (done_bytes, total_bytes). Communicates: every rank must call it alike.

    Raises:
        ShardingError: on every rank; the package `safetensors` or a file is missing, or names, shapes or dtypes are not the
            model's. Nothing was loaded.
    """
    require_safetensors("load_safetensors")
    resting_units_in(model, "load_safetensors")
    collectives = everyone_in(model, "load_safetensors")
    pieces, asker = pieces_in(model), f"load_safetensors {path}"
    with ExitStack() as stack:
        targets: list[tuple[Tensor, Any]] = []
        shown: list[Progress] = []

        def prepare() -> None:
            shown.append(Progress("load_safetensors", progress, collectives.rank))
            slices = dict(slices_in(Path(path), asker, stack))
            of: dict[int, str] = {}
            for name, tensor in entries(model):
                if name in slices:
                    of.setdefault(id(tensor), name)
            wanted = [name for name, tensor in entries(model) if name in slices or id(tensor) not in of]
            check_names(asker, wanted, slices)
            for name, tensor in {id(tensor): (of[id(tensor)], tensor) for _, tensor in entries(model)}.values():
                shape = pieces[id(tensor)].shape if id(tensor) in pieces else tuple(tensor.shape)
                there = slices[name]
                check_fit(
                    asker,
                    name,
                    torch.empty(there.get_shape(), dtype=dtype_of(there.get_dtype()), device="meta"),
                    shape,
                    tensor.dtype,
                )
                targets.append((tensor, there))

        agree_on_refusals(collectives, prepare)
        shown[0].begin(sum(tensor.nbytes for tensor, _ in targets))
        for tensor, there in targets:
            piece = pieces.get(id(tensor))
            tensor.copy_(_read(there, piece, tensor))
            shown[0].add(tensor.nbytes)
        shown[0].end()


class _Writer:
    """The files of one rank: each is written as soon as all of its tensors have come."""

    def __init__(self, working: Path, files: list[list[tuple[str, int]]], rank: int, size: int, progress: Progress) -> None:
        self._progress = progress
        self._working = working
        self._names = [file_name(number, len(files)) for number in range(len(files))]
        self._mine = {name: number for number, there in enumerate(files) if number % size == rank for name, _ in there}
        self._left = {number: len(there) for number, there in enumerate(files)}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._failure: OSError | None = None

    def take(self, name: str, tensor: Tensor) -> None:
        """A tensor in full, of which a copy is kept if it is this rank's to write."""
        self._progress.add(tensor.nbytes)
        number = self._mine.get(name)
        if number is None:
            return
        self._held.setdefault(number, {})[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._left[number] -= 1
        if not self._left[number]:
            self._write(number)

    def _write(self, number: int) -> None:
        from safetensors.torch import save_file

        try:
            save_file(self._held.pop(number), self._working / self._names[number], metadata={"format": "pt"})
        except Exception as error:  # the others are in a gather: they hear of it at the end
            self._failure = OSError(str(error))

    def finish(self) -> None:
        """Raises:
        OSError: a file could not be written.
        """
        if self._failure is not None:
            raise self._failure


def file_name(number: int, count: int) -> str:
    """Of file `number`, from 0."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _finish(writer: _Writer, working: Path, files: list[list[tuple[str, int]]]) -> None:
    writer.finish()
    write_index(working, files)


def write_index(working: Path, files: list[list[tuple[str, int]]]) -> None:
    """Which tensor is in which file, where there are several."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(size for there in files for _, size in there)},
            "weight_map": {name: file_name(number, len(files)) for number, there in enumerate(files) for name, _ in there},
        }
        (working / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plan_files(tensors: list[tuple[str, int]], limit: int) -> list[list[tuple[str, int]]]:
    """Which tensors, with their bytes, go to which file: as they come, up to `limit` bytes."""
    files: list[list[tuple[str, int]]] = [[]]
    for name, size in tensors:
        if files[-1] and sum(there for _, there in files[-1]) + size > limit:
            files.append([])
        files[-1].append((name, size))
    return files


def _take_range(one: Range, buffer: Tensor, names: dict[int, str], writer: _Writer) -> None:
    for piece in one.pieces:
        writer.take(names[id(piece.parameter)], one.view(buffer, piece))


def _first_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, tensor in entries(model):
        names.setdefault(id(tensor), name)
    return names


def _bytes(piece: Piece) -> int:
    return prod(piece.shape) * piece.parameter.element_size()


def slices_in(path: Path, asker: str, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Every tensor in the file or the files of a folder, by name, unread."""
    for file in files_in(path, asker):
        opened = stack.enter_context(opened_file(file, asker))
        for key in opened.keys():  # noqa: SIM118  # not a mapping
            yield key, opened.get_slice(key)


def files_in(path: Path, asker: str) -> list[Path]:
    """The file, or the files of a folder.

    Raises:
        ShardingError: one is missing.
    """
    if path.is_dir():
        index = path / INDEX
        names = (
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else {file_name(0, 1)}
        )
    else:
        names, path = {path.name}, path.parent
    for name in sorted(names):
        if not (path / name).is_file():
            raise ShardingError(f"{asker}: {name} is missing.")
    return [path / name for name in sorted(names)]


def opened_file(file: Path, asker: str) -> Any:
    """One file, mapped until it is closed.

    Raises:
        ShardingError: it is damaged.
    """
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # the package has an exception of its own, and raises others
        raise ShardingError(f"{asker}: {file.name} is damaged: {error}.") from error


def _read(there: Any, piece: Piece | None, tensor: Tensor) -> Tensor:
    """This rank's part of a parameter: no rows are read but those it has elements of."""
    if piece is None or not piece.shape:
        full: Tensor = there[...]
        return full if tensor.numel() else full.reshape(-1)[:0]
    part, row = piece.part, max(prod(piece.shape[1:]), 1)
    low, high = part.first // row, -(-(part.first + part.numel) // row)
    rows: Tensor = there[low:high].reshape(-1)
    return rows[part.first - low * row : part.first - low * row + part.numel].view(part.shape)


def dtype_of(name: str) -> torch.dtype:
    """Of a name that safetensors gives to it."""
    from safetensors.torch import _TYPES

    types: dict[str, Any] = dict(_TYPES)
    found: torch.dtype = types[name]
    return found


def size_in_bytes(size: int | str) -> int:
    """A number, or text such as "5GB", as bytes.

    Raises:
        ShardingError: it is neither.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)\s*", size, re.IGNORECASE) if isinstance(size, str) else None
    number = int(float(found[1]) * UNITS[found[2].upper()]) if found else size
    if not isinstance(number, int) or number <= 0:
        raise ShardingError(f"export_safetensors: max_shard_size is {size!r}; give bytes, or text such as '5GB'.")
    return number


def require_safetensors(asker: str) -> None:
    """Raises:
    ShardingError: the package is not installed.
    """
    if find_spec("safetensors") is None:
        raise ShardingError(f"{asker} needs the package safetensors: pip install 'fsdp[safetensors]'.")
