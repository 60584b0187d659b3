"""Checkpoints without a model, a GPU or other ranks: what is in one, and the same in another form.

Rule: a conversion holds what it reads tensor by tensor, up to one file of the output; only a single file of torch.save is written
from memory, because torch writes it at once.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp.atomic import begin, publish
from fsdp.checkpoint import pack, unpack, write_checkpoint
from fsdp.collectives import Collectives
from fsdp.errors import ShardingError
from fsdp.hugging_face import file_name, plan_files, require_safetensors, slices_in, write_index
from fsdp.manifest import NAME, read_manifest
from fsdp.simulated import current_rank, simulate

if TYPE_CHECKING:
    from fsdp.dcp import Stored


def describe(path: Path, tensors: bool = False) -> Iterator[str]:
    """What a checkpoint holds, a line at a time; with `tensors`, each of them.

    Raises:
        ShardingError: it is no checkpoint, or its metadata cannot be read.
    """
    from fsdp import dcp

    if (path / NAME).exists():
        manifest = read_manifest(path)
        when = datetime.fromtimestamp(manifest.saved_at / 1e9, UTC)
        yield f"format {manifest.version}, saved by {manifest.world_size} ranks on {when:%Y-%m-%d %H:%M:%S} UTC"
        yield f"{len(manifest.files)} files, {manifest.total_bytes / 1e6:,.1f} MB"
    stored = dcp.Stored(path)
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
    with ExitStack() as stack:
        source = _open(path, stack)
        if to == "safetensors":
            _to_safetensors(source, out, max_shard_size)
        elif to == "torch":
            working = out.with_name(f".{out.name}.incomplete")
            state = source.everything()
            torch.save({**state, **{"extra": {rank: unpack(one) for rank, one in state.get("extra", {}).items()}}}, working)
            working.rename(out)
        else:
            state = source.everything()
            if any(isinstance(name, int) for name in state.get("optimizer", {}).get("state", {})):
                raise ShardingError(
                    f"convert: the optimizer state in {path} is by number, and only its optimizer knows the names; load it with "
                    "fsdp.load_full_optim_state_dict, then fsdp.save."
                )
            state["extra"] = {str(rank): pack(one) for rank, one in state.get("extra", {}).items()}
            simulate(1, lambda rank: write_checkpoint(out, state, {}, alone()))


def alone() -> Collectives:
    """A channel of the simulated world of one."""
    rank = current_rank()
    assert rank is not None, "inside simulate"
    return rank.channel("offline")


class _Source:
    """A model's tensors by name, each read when it is asked for, and all there is as one nested dict."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Of what is in memory, or mapped there: {"model": {...}, ...}."""
        self._state = state

    def outline(self) -> list[tuple[str, int]]:
        """The tensors of the model: names and bytes."""
        return [(name, value.nbytes) for name, value in self._state["model"].items() if isinstance(value, Tensor)]

    def tensor(self, name: str) -> Tensor:
        """One of them."""
        found: Tensor = self._state["model"][name]
        return found

    def everything(self) -> dict[str, Any]:
        """All there is."""
        return dict(self._state)


class _StoredSource(_Source):
    """A folder of Distributed Checkpoint."""

    def __init__(self, stored: "Stored") -> None:
        super().__init__({})
        self._stored = stored
        self._keys = {str(where[1]): key for key, where in stored.paths.items() if where[0] == "model" and len(where) == 2}

    def outline(self) -> list[tuple[str, int]]:
        found = ((name, self._stored.tensor(key)) for name, key in self._keys.items())
        return [(name, prod(one.size) * one.properties.dtype.itemsize) for name, one in found if one is not None]

    def tensor(self, name: str) -> Tensor:
        key = self._keys[name]
        found: Tensor = self._stored.plan({key: self._stored.empty(key)}).read()[key]
        return found

    def everything(self) -> dict[str, Any]:
        state = self._stored.nested(self._stored.plan({key: self._stored.empty(key) for key in self._stored.paths}).read())
        return state


def _open(path: Path, stack: ExitStack) -> _Source:
    from fsdp import dcp

    if (path / dcp.METADATA).exists():
        return _StoredSource(dcp.Stored(path))
    if path.is_dir() or path.suffix == ".safetensors":
        require_safetensors("convert")
        return _Source({"model": {name: there[...] for name, there in slices_in(path, "convert", stack)}})
    try:
        state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # anything at all may be in a file
        raise ShardingError(
            f"convert: {path} is no checkpoint, and no file of torch.save with plain data: {type(error).__name__}."
        ) from error
    return _Source(state if "model" in state and isinstance(state["model"], Mapping) else {"model": state})


def _to_safetensors(source: _Source, out: Path, limit: int) -> None:
    require_safetensors("convert")
    from safetensors.torch import save_file

    files = plan_files(source.outline(), limit)
    working = out.parent / begin("convert", out)
    try:
        for number, there in enumerate(files):
            tensors = {name: source.tensor(name).contiguous().clone() for name, _ in there}
            save_file(tensors, working / file_name(number, len(files)), metadata={"format": "pt"})
        write_index(working, files)
        publish("convert", working, out)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
