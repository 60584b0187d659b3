"""Describing, checking and converting checkpoints without a model, a GPU or other ranks.

Rule: a conversion holds one tensor at a time, or one file of up to `max_shard_size` if the output has several files. (A file of
torch.save is mapped, so the operating system decides how much of it is in memory. One in torch's old format is read whole.)
"""

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_leaves, tree_map

from fsdp.checkpoint.atomic_folder import removed_on_failure, writing
from fsdp.checkpoint.hf_safetensors import Writer, dtype_of, files_in, opened_file, plan_files, require_safetensors
from fsdp.checkpoint.manifest import NAME, read_manifest
from fsdp.checkpoint.plain_values import pack, storable, unpack
from fsdp.checkpoint.progress_bar import Progress
from fsdp.checkpoint.save import RANDOM, plan_checkpoint, write_checkpoint
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError, require_package
from fsdp.shards.cut import Chunk
from fsdp.shards.sharded_value import write_items

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import StoredCheckpoint

ALONE: Final = Communicator()
PACKED: Final = ("extra", RANDOM)
"""The parts with one packed value for each rank."""


class LazyTensor:
    """A tensor that a conversion reads only when it writes it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read

    @property
    def nbytes(self) -> int:
        """The size of the tensor in memory, once it is read."""
        return prod(self.shape) * self.dtype.itemsize

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        return write_items(fqn, [Chunk((0,) * len(self.shape), self.shape, 0)], torch.Size(self.shape), self.dtype)


def describe(path: Path, tensors: bool = False) -> Iterator[str]:
    """Yield lines that describe a checkpoint; with `tensors`, one line for each tensor as well.

    Raises:
        ShardingError: `path` is no checkpoint, or its metadata cannot be read.
    """
    from fsdp.checkpoint import dcp

    if (path / NAME).exists():
        manifest = read_manifest(path)
        when = datetime.fromtimestamp(manifest.saved_at / 1e9, UTC)
        yield f"format {manifest.version}, saved by {manifest.world_size} ranks on {when:%Y-%m-%d %H:%M:%S} UTC"
        yield f"{len(manifest.files)} files, {sum(file['bytes'] for file in manifest.files.values()) / 1e6:,.1f} MB"
    stored = dcp.StoredCheckpoint(path)
    if not (path / NAME).exists():
        yield "written by torch's Distributed Checkpoint: no manifest, no checksums"
    parts: dict[str, list[Any]] = {}
    for key, keys in stored.paths.items():
        if (found := stored.tensor(key)) is not None:
            parts.setdefault(str(keys[0]), []).append((key, found))
    for part, metas in parts.items():
        size = sum(prod(meta.size) * meta.properties.dtype.itemsize for _, meta in metas)
        yield f"{part}: {len(metas)} tensors, {sum(prod(meta.size) for _, meta in metas):,} elements, {size / 1e6:,.1f} MB"
        if tensors:
            yield from (f"  {key} {tuple(meta.size)} {meta.properties.dtype} in {len(meta.chunks)} chunks" for key, meta in metas)
    for part in PACKED:
        if ranks := sum(keys[0] == part for keys in stored.paths.values()):
            yield f"{part}: of {ranks} {'rank' if ranks == 1 else 'ranks'}"


def damage_in(path: Path) -> list[str]:
    """One sentence for each missing or changed file or item. Reads every byte. Empty if there is no manifest."""
    return list(read_manifest(path).damage(path)) if (path / NAME).exists() else []


def convert(path: Path, out: Path, to: str, max_shard_size: int) -> None:
    """Convert `path` (a checkpoint, a file of torch.save, safetensors) to the form `to`, as `out`.

    "safetensors" holds the model only, "torch" and "dcp" hold all parts.

    Raises:
        ShardingError: `path` cannot be read, or `out` exists.
    """
    if damage := damage_in(path):
        raise ShardingError(f"convert: {path} is damaged: {'; '.join(damage[:3])}.")
    if out.exists():
        raise ShardingError(f"convert: {out} exists already; give another name, or remove it first.")
    source = _open(path)
    if to == "safetensors":
        _to_safetensors(_weights_in(_in_parts(source, path), path), out, max_shard_size)
    elif to == "torch":
        _to_torch(_each_rank(source, unpack), out)
    else:
        if any(isinstance(name, int) for name in source.get("optimizer", {}).get("state", {})):
            raise ShardingError(
                f"convert: the optimizer state in {path} is by number, and only its optimizer knows the names; load it with "
                "fsdp.load_full_optim_state_dict, then fsdp.save."
            )
        state = storable("convert", _each_rank(source, partial(pack, "convert: the values of a rank")))
        plan = plan_checkpoint(out, state, ALONE, max_shard_size)
        write_checkpoint(plan, {}, None, Progress("convert", False, 0), ALONE)


def _each_rank(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """`state` with `change` applied to each rank's packed values."""
    parts: dict[str, Any] = {
        part: {str(rank): change(value) for rank, value in state[part].items()} for part in PACKED if part in state
    }
    return {**state, **parts}


def _open(path: Path) -> dict[str, Any]:
    """The content of `path` as one nested dict, in which tensors are lazy or mapped."""
    from fsdp.checkpoint import dcp

    if (path / dcp.METADATA).exists():
        stored = dcp.StoredCheckpoint(path)
        tensors = {key: _lazy(stored, key, found) for key in stored.paths if (found := stored.tensor(key)) is not None}
        values = dcp.ReadPlan(stored, {key: None for key in stored.paths if key not in tensors}).read()
        return stored.nested({key: tensors[key] if key in tensors else values[key] for key in stored.paths})
    if path.is_dir() or path.suffix == ".safetensors":
        require_safetensors("convert")
        return {"model": dict(tensor for file in files_in(path, "convert") for tensor in _lazy_in(file))}
    try:
        state = torch.load(path, mmap=is_zipfile(path), weights_only=True, map_location="cpu")
    except Exception as error:  # a foreign file may raise anything
        raise ShardingError(
            f"convert: {path} is no checkpoint, and no file of torch.save with plain data: {type(error).__name__}."
        ) from error
    return _in_parts(state, path)


def _in_parts(state: object, path: Path) -> dict[str, Any]:
    """What `path` holds, in which weights may lie at the top or under "model", as the parts of a checkpoint."""
    if not isinstance(state, Mapping):
        raise ShardingError(f"convert: {path} holds a {type(state).__name__}; give a file or folder with a dict of weights.")
    return dict(state) if isinstance(state.get("model"), Mapping) else {"model": state}


def _weights_in(source: dict[str, Any], path: Path) -> dict[str, Any]:
    """The weights by name. Extra state of modules is left out."""
    given = {name: value for name, value in source["model"].items() if not str(name).endswith(_EXTRA_STATE_KEY_SUFFIX)}
    tensors = {name: value for name, value in given.items() if _is_tensor(value)}
    nested = [name for name, value in given.items() if isinstance(value, Mapping) and any(map(_is_tensor, tree_leaves(value)))]
    if nested or not tensors:
        what = f"tensors lie under {', '.join(map(repr, nested))}" if nested else "there are no weights"
        raise ShardingError(f"convert: in {path}, {what}; save the dict of weights by itself, or as 'model', and convert that.")
    return tensors


def _lazy(stored: "StoredCheckpoint", key: str, found: Any) -> LazyTensor:
    from fsdp.checkpoint import dcp

    def read() -> Tensor:
        return dcp.ReadPlan(stored, {key: stored.empty(key)}).read()[key]  # type: ignore[no-any-return]

    return LazyTensor(tuple(found.size), found.properties.dtype, read)


def _lazy_in(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of a safetensors file by name."""
    with opened_file(file, "convert") as opened:
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            unread = opened.get_slice(name)
            shape, dtype = tuple(unread.get_shape()), dtype_of(unread.get_dtype())
            yield name, LazyTensor(shape, dtype, partial(_tensor_in, file, name))


def _tensor_in(file: Path, name: str) -> Tensor:
    with opened_file(file, "convert") as opened:  # closing it unmaps the file
        found: Tensor = opened.get_tensor(name)
        return found


def _read(value: Any) -> Any:
    """The values of a tensor or lazy tensor."""
    return value if isinstance(value, Tensor) else value.read()


def _to_torch(state: dict[str, Any], out: Path) -> None:
    """Write a file of torch.save: first with a hole for each tensor, then the tensors, one by one, into the holes.

    torch reports where the holes are. The archive has no checksums of the tensors, which torch never reads.
    """
    require_package("convert to torch", "numpy")
    with FakeTensorMode():
        outline = tree_map(
            lambda one: torch.empty(one.shape, dtype=one.dtype) if _is_tensor(one) else one, state, is_leaf=_is_size
        )
    working = out.with_name(f".{out.name}.incomplete")
    with removed_on_failure(working, ALONE):
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(outline, working)
        with FakeTensorMode():
            holes = torch.load(working, weights_only=True)
        with open(working, "r+b") as file:
            for value, hole in zip(tree_leaves(state, _is_size), tree_leaves(holes, _is_size), strict=True):
                if _is_tensor(value):
                    file.seek(hole.untyped_storage()._checkpoint_offset)
                    file.write(_read(value).detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        working.rename(out)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # torch would take it for a tuple, and make one of it


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape")


def _to_safetensors(tensors: dict[str, Any], out: Path, limit: int) -> None:
    require_safetensors("convert")
    files = plan_files([(name, value.nbytes) for name, value in tensors.items()], itemgetter(1), limit)
    with writing("convert", out, ALONE) as working:
        writer = Writer(working, files, ALONE, Progress("convert", False, 0))
        for name, value in tensors.items():
            writer.take(name, _read(value))
            if writer.failure is not None:
                break
        writer.finish()
