"""Checkpoints without a model, a GPU or other ranks: what is in one, and the same in another form.

Rule: a conversion holds one tensor at a time, or one file of the output where that has several: `max_shard_size`. (What it
reads from a file of torch.save is mapped, and the system's to keep or to drop.)
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fsdp.checkpoint.atomic_folder import begin, publish
from fsdp.checkpoint.hf_safetensors import (
    dtype_of,
    file_name,
    files_in,
    opened_file,
    plan_files,
    require_safetensors,
    write_index,
)
from fsdp.checkpoint.manifest import NAME, read_manifest
from fsdp.checkpoint.progress import Progress
from fsdp.checkpoint.save import RANDOM, CheckpointWriter, pack, unpack
from fsdp.comm.communicator import SingleRankCommunicator
from fsdp.errors import ShardingError

if TYPE_CHECKING:
    from fsdp.checkpoint.dcp import LazyTensor, StoredCheckpoint

PACKED: Final = ("extra", RANDOM)
"""Parts that hold each rank's own, packed."""


def describe(path: Path, tensors: bool = False) -> Iterator[str]:
    """What a checkpoint holds, a line at a time; with `tensors`, each of them.

    Raises:
        ShardingError: it is no checkpoint, or its metadata cannot be read.
    """
    from fsdp.checkpoint import dcp

    if (path / NAME).exists():
        manifest = read_manifest(path)
        when = datetime.fromtimestamp(manifest.saved_at / 1e9, UTC)
        yield f"format {manifest.version}, saved by {manifest.world_size} ranks on {when:%Y-%m-%d %H:%M:%S} UTC"
        yield f"{len(manifest.files)} files, {manifest.total_bytes / 1e6:,.1f} MB"
    stored = dcp.StoredCheckpoint(path)
    if not (path / NAME).exists():
        yield "written by torch's Distributed Checkpoint: no manifest, no checksums"
    parts: dict[str, list[Any]] = {}
    for key, where in stored.paths.items():
        if (found := stored.tensor(key)) is not None:
            parts.setdefault(str(where[0]), []).append((key, found))
    for part, there in parts.items():
        size = sum(prod(one.size) * one.properties.dtype.itemsize for _, one in there)
        yield f"{part}: {len(there)} tensors, {sum(prod(one.size) for _, one in there):,} elements, {size / 1e6:,.1f} MB"
        if tensors:
            yield from (f"  {key} {tuple(one.size)} {one.properties.dtype} in {len(one.chunks)} boxes" for key, one in there)
    for part in PACKED:
        if ranks := sum(where[0] == part for where in stored.paths.values()):
            yield f"{part}: of {ranks} {'rank' if ranks == 1 else 'ranks'}"


def damage_in(path: Path) -> list[str]:
    """What is not as it was written, every byte read; nothing where there is no manifest to tell."""
    return list(read_manifest(path).damage(path)) if (path / NAME).exists() else []


def convert(path: Path, out: Path, to: str, max_shard_size: int) -> None:
    """Write what is at `path` (a checkpoint, a file of torch.save, safetensors) as `out`, in the form `to`.

    "safetensors" holds the model, "torch" and "dcp" everything there is.

    Raises:
        ShardingError: it cannot be read, or something is at `out` already.
    """
    if damage := (damage_in(path) if path.is_dir() else []):
        raise ShardingError(f"convert: {path} is damaged: {'; '.join(damage[:3])}.")
    if out.exists():
        raise ShardingError(f"convert: {out} exists already; give another name, or remove it first.")
    source = _open(path)
    if to == "safetensors":
        _to_safetensors(source, out, max_shard_size)
    elif to == "torch":
        _to_torch(_each_rank(source, unpack), out)
    else:
        if any(isinstance(name, int) for name in source.get("optimizer", {}).get("state", {})):
            raise ShardingError(
                f"convert: the optimizer state in {path} is by number, and only its optimizer knows the names; load it with "
                "fsdp.load_full_optim_state_dict, then fsdp.save."
            )
        alone = SingleRankCommunicator()
        CheckpointWriter(out, _each_rank(source, pack), {}, alone, None, Progress("convert", False, 0), max_shard_size).finish(
            alone
        )


def _each_rank(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same, with what each rank packed changed into another form."""
    parts: dict[str, Any] = {
        part: {str(rank): change(one) for rank, one in state[part].items()} for part in PACKED if part in state
    }
    return {**state, **parts}


def _open(path: Path) -> dict[str, Any]:
    """All there is as one nested dict, in which tensors are unread, or mapped."""
    from fsdp.checkpoint import dcp

    if (path / dcp.METADATA).exists():
        stored = dcp.StoredCheckpoint(path)
        tensors = {key: _stored(stored, key, found) for key in stored.paths if (found := stored.tensor(key)) is not None}
        values = stored.plan({key: None for key in stored.paths if key not in tensors}).read()
        return stored.nested({key: tensors[key] if key in tensors else values[key] for key in stored.paths})
    if path.is_dir() or path.suffix == ".safetensors":
        require_safetensors("convert")
        return {"model": dict(tensor for file in files_in(path, "convert") for tensor in _unread_in(file))}
    try:
        state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # anything at all may be in a file
        raise ShardingError(
            f"convert: {path} is no checkpoint, and no file of torch.save with plain data: {type(error).__name__}."
        ) from error
    return dict(state) if "model" in state and isinstance(state["model"], Mapping) else {"model": state}


def _stored(stored: "StoredCheckpoint", key: str, found: Any) -> "LazyTensor":
    from fsdp.checkpoint import dcp

    return dcp.LazyTensor(tuple(found.size), found.properties.dtype, lambda: stored.plan({key: stored.empty(key)}).read()[key])


def _unread_in(file: Path) -> Iterator[tuple[str, "LazyTensor"]]:
    from fsdp.checkpoint import dcp

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with opened_file(file, "convert") as there:  # what is mapped goes when it is closed
                found: Tensor = there.get_tensor(name)
                return found

        return read

    with opened_file(file, "convert") as opened:
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            there = opened.get_slice(name)
            yield name, dcp.LazyTensor(tuple(there.get_shape()), dtype_of(there.get_dtype()), reader(name))


def _read(value: Any) -> Any:
    """A tensor, in memory or mapped there."""
    return value if isinstance(value, Tensor) else value.read()


def _to_torch(state: dict[str, Any], out: Path) -> None:
    """A file of torch.save. torch writes it with holes for the tensors, and says where they are; they follow one by one.

    The archive therefore has no checksums of them. torch never looks at these.
    """
    with FakeTensorMode():
        outline = tree_map(lambda value: torch.empty(value.shape, dtype=value.dtype) if _is_tensor(value) else value, state)
    working = out.with_name(f".{out.name}.incomplete")
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(outline, working)
        with FakeTensorMode():
            holes = torch.load(working, weights_only=True)
        with open(working, "r+b") as file:
            for value, hole in zip(tree_leaves(state), tree_leaves(holes), strict=True):
                if _is_tensor(value):
                    file.seek(hole.untyped_storage()._checkpoint_offset)
                    file.write(_read(value).detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        working.rename(out)
    except BaseException:
        working.unlink(missing_ok=True)
        raise


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape")


def _to_safetensors(source: dict[str, Any], out: Path, limit: int) -> None:
    require_safetensors("convert")
    from safetensors.torch import save_file

    tensors = {name: value for name, value in source["model"].items() if _is_tensor(value)}
    files = plan_files([(name, value.nbytes) for name, value in tensors.items()], limit)
    working = out.parent / begin("convert", out)
    try:
        for number, there in enumerate(files):
            held = {name: _read(tensors[name]).contiguous().clone() for name, _ in there}
            save_file(held, working / file_name(number, len(files)), metadata={"format": "pt"})
            del held
        write_index(working, files)
        publish("convert", working, out)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
