"""torch's Distributed Checkpoint over communicators of this project, so that it works in a simulated world too.

Rule 1: formats, plans and files are torch's own classes. This file only passes their plans between ranks.
Rule 2: everything is unpickled by allow-list: metadata by the one below, values by torch's `weights_only`.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from fsdp.checkpoint.atomic_folder import not_written
from fsdp.checkpoint.hf_safetensors import plan_files
from fsdp.checkpoint.manifest import record
from fsdp.checkpoint.plain_values import restored
from fsdp.comm.agreement import agree_and_gather
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError

METADATA: Final = ".metadata"
FILE_BYTES: Final = 1 << 30
"""The limit for the tensors of one file."""
_DCP: Final = "torch.distributed.checkpoint."
_METADATA: Final = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_ALLOWED: Final = {
    *((_DCP + "metadata", name) for name in _METADATA),
    *((_DCP + "filesystem", "_StorageInfo"), ("torch", "Size")),
    *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *product(("pathlib", "pathlib._local"), ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
}
"""The classes and functions that a folder's metadata may name, each with its module."""


class StoredCheckpoint:
    """A finished checkpoint, or any folder that Distributed Checkpoint wrote, with its metadata in memory."""

    def __init__(self, folder: Path) -> None:
        """Unpickle the metadata of a folder that Distributed Checkpoint wrote, by allow-list.

        Raises:
            ShardingError: it is missing or damaged, or would unpickle a class that is not in the allow-list.
        """
        self.folder = folder
        path = folder / METADATA
        try:
            with open(path, "rb") as file:
                self.metadata: Metadata = _Unpickler(file).load()
        except (FileNotFoundError, NotADirectoryError):
            raise ShardingError(f"{folder} has no {METADATA}: no finished checkpoint.") from None
        except ShardingError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise ShardingError(f"{path} is damaged: {error!r}.") from error
        if not isinstance(self.metadata, Metadata):
            raise ShardingError(f"{path} is damaged: it holds a {type(self.metadata).__name__}.")

    def renamed(self, keys: Mapping[str, tuple[str, tuple[str | int, ...]]]) -> "StoredCheckpoint":
        """The same checkpoint with these keys alone, each under another name and path in the nested state dict."""
        found, metadata = copy(self), self.metadata
        names = {key: name for key, (name, _) in keys.items()}
        found.metadata = replace(
            metadata,
            state_dict_metadata={name: metadata.state_dict_metadata[key] for key, name in names.items()},
            planner_data=dict(keys.values()),
            storage_data={
                index if index.fqn == names[index.fqn] else replace(index, fqn=names[index.fqn]): info
                for index, info in metadata.storage_data.items()
                if index.fqn in names
            },
        )
        return found

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """The metadata of the tensor under `key`; None if the value there is no tensor."""
        found = self.metadata.state_dict_metadata[key]
        return found if isinstance(found, TensorStorageMetadata) else None

    def info(self, item: ReadItem) -> _StorageInfo:
        """The file, offset and length of one item."""
        found: _StorageInfo = self.metadata.storage_data[item.storage_index]
        return found

    def empty(self, key: str) -> Tensor | None:
        """Memory on the CPU for the full tensor under `key`; None if the value there is no tensor."""
        found = self.tensor(key)
        return None if found is None else torch.empty(found.size, dtype=found.properties.dtype)

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """The path of each key in the nested state dict."""
        known: dict[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        return {key: known.get(key, (key,)) for key in self.metadata.state_dict_metadata}

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Nest values by key as they were nested when they were saved."""
        found: dict[str, Any] = unflatten_state_dict(flat, self.paths)
        return found


class ReadPlan:
    """The items that one rank will read."""

    def __init__(self, stored: StoredCheckpoint, targets: dict[str, Any]) -> None:
        """Plan to read the keys of `targets`: a tensor is filled in place, None is replaced by the value."""
        self._stored = stored
        self._targets = targets
        self._planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(targets, stored.metadata, is_coordinator=False)
        self._plan: LoadPlan = self._planner.create_local_plan()

    @property
    def ranges(self) -> dict[str, set[int]]:
        """The offsets of the items in each file, by its name."""
        found: dict[str, set[int]] = {}
        for item in self._plan.items:
            info = self._stored.info(item)
            found.setdefault(info.relative_path, set()).add(info.offset)
        return found

    @property
    def nbytes(self) -> int:
        """The stored size of the items. An item that is read twice counts twice."""
        return sum(self._stored.info(item).length for item in self._plan.items)

    def read(self, on_progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
        """Read the items; return the targets with their values. `on_progress`: called with the bytes of each item.

        Raises:
            ShardingError: a file is missing or too short, or a value is a pickle of more than plain data.
        """
        stored = self._stored  # the lambda must not refer to self: such a cycle would keep the values alive
        self._planner.on_progress = lambda item: on_progress(stored.info(item).length)
        reader = FileSystemReader(self._stored.folder)
        reader.set_up_storage_reader(self._stored.metadata, is_coordinator=False)
        try:
            reader.read_data(self._plan, self._planner).wait()
        except pickle.UnpicklingError as error:
            raise ShardingError(
                f"checkpoint {self._stored.folder} holds a pickle of something that is no plain data, and it was not read."
            ) from error
        except (OSError, RuntimeError, EOFError, AssertionError) as error:
            raise ShardingError(f"checkpoint {self._stored.folder} cannot be read: {error}") from error
        return self._targets


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner, with `weights_only` for values that are no tensors, and with reports of progress."""

    on_progress: Callable[[ReadItem], None] = staticmethod(lambda item: None)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = restored(torch.load(value, map_location="cpu", weights_only=True))
        self.on_progress(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.on_progress(read_item)


class _SavePlanner(DefaultSavePlanner):
    """torch's planner, which also takes values from staged copies and reads what a conversion reads late."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        self.on_progress: Callable[[int], None] = lambda count: None

    def stage(self, items: Sequence[WriteItem]) -> None:
        """Copy the values of `items` to the host, and forget the state dict."""
        self.staged = {item.index: _copy(self.resolve_data(item)) for item in items}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.on_progress(size_of(write_item))
        if write_item.index in self.staged:
            return self.staged.pop(write_item.index)  # each item is written once
        value = self.state_dict[write_item.index.fqn]
        return value.read() if hasattr(value, "read") else super().resolve_data(write_item)


class WritePlan:
    """The items of a nested state dict that one rank will write, as all ranks have agreed."""

    def __init__(
        self, folder: Path, final: Path, state: Mapping[str, Any], comm: Communicator, file_bytes: int = FILE_BYTES
    ) -> None:
        """Plan to write `state` in files of at most `file_bytes`, or of one tensor. Communicates.

        `folder` must exist. Errors name `final`, which the folder is to become. A failure on one rank is raised on every rank.
        """
        # `record` syncs each file to disk
        self._planner, self._writer = _SavePlanner(), FileSystemWriter(folder, sync_files=False)
        self.folder = folder
        self.final = final
        self._staged = False
        self._file_bytes = file_bytes

        def plan() -> SavePlan:
            self._planner.set_up_planner(dict(state), self._writer.storage_meta(), is_coordinator=comm.rank == 0)
            self._writer.set_up_storage_writer(comm.rank == 0)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        # every rank computes the global plan itself, so that no rank has to send it
        global_plan, self._metadata = self._planner.create_global_plan(agree_and_gather(comm, "save", plan))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(global_plan)[comm.rank])

    @property
    def nbytes(self) -> int:
        """The size of the tensors that this rank writes."""
        return sum(map(size_of, self._plan.items))

    def stage(self) -> None:
        """Copy the tensors that this rank will write to the host. The originals may change afterwards."""
        self._planner.stage(self._plan.items)
        self._writer.per_thread_copy_ahead = 0  # or torch's writer, on a thread, would wait for a stream of the first device
        self._staged = True

    def write(self, comm: Communicator, on_progress: Callable[[int], None]) -> dict[str, Any]:
        """Write this rank's items, and on rank 0 the metadata; return the manifest's entries of all files. Communicates.

        Memory: torch's writer holds every tensor of a file, or a copy of it, until the file is complete.
        `on_progress`: called with the bytes of each item before it is written, and again after its checksum was computed.
        A failure on one rank is raised on every rank.
        """
        self._planner.on_progress = on_progress

        @not_written("save", self.final)
        def put() -> tuple[list[WriteResult], dict[str, Any]]:
            # without the checksum in each tensor's archive: torch never reads it, and the manifest has one of the same bytes.
            # The option is global, and other threads may be saving while this one writes in the background
            with nullcontext() if self._staged else config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                results = [result for plan in self._files() for result in self._writer.write_data(plan, self._planner).wait()]
            # torch wraps every tensor in an archive, so more bytes are written than tensors have
            share = self.nbytes / max(sum(result.size_in_bytes for result in results), 1)
            return results, _records(self.folder, results, lambda count: on_progress(int(count * share)), not self._staged)

        @not_written("save", self.final)
        def finish() -> dict[str, Any]:
            if comm.rank != 0:
                return {}
            self._writer.finish(self._metadata, [results for results, _ in answers])
            path = self.folder / METADATA
            return {METADATA: record(path, [(0, path.stat().st_size)], at_once=not self._staged)}

        try:
            answers = agree_and_gather(comm, "save", put)
        finally:
            self._planner.staged = {}
        files = {name: entry for _, records in answers for name, entry in records.items()}
        return {**files, **agree_and_gather(comm, "save", finish)[0]}

    def _files(self) -> Iterator[SavePlan]:
        """The plan of each file of this rank."""
        for number, items in enumerate(plan_files(self._plan.items, size_of, self._file_bytes)):
            prefix: str = self._plan.storage_data.prefix
            yield replace(self._plan, items=items, storage_data=_StoragePrefix(f"{prefix}{number}_" if number else prefix))


def size_of(item: WriteItem) -> int:
    """The bytes of the tensor in `item`; 0 if the value is no tensor."""
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _copy(value: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    if isinstance(value, io.BytesIO):
        return value  # a pickle, which is a copy already
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _ALLOWED:
            raise ShardingError(f"the metadata asks for {module}.{name}, which no metadata needs: it is damaged, or an attack.")
        return super().find_class(module, name)


def _records(folder: Path, results: list[WriteResult], on_progress: Callable[[int], None], at_once: bool) -> dict[str, Any]:
    """The manifest's entries of the files in `results`, by name."""
    items: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info: _StorageInfo = result.storage_data
        items.setdefault(info.relative_path, []).append((info.offset, info.length))
    return {name: record(folder / name, placed, on_progress, at_once) for name, placed in items.items()}
