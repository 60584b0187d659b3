"""torch's Distributed Checkpoint, driven over our channels: so it works in a simulated world too, without a process group.

Rule 1: formats, plans and files are torch's own classes; what is here hands their plans around.
Rule 2: nothing that was read is unpickled but by allow-list: metadata by the one below, values by torch's `weights_only`.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp.checkpoint.manifest import record
from fsdp.comm.agreement import agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError

METADATA: Final = ".metadata"
FILE_BYTES: Final = 1 << 30
"""Of one file."""
_HERE: Final = "torch.distributed.checkpoint."
_ALLOWED: Final = {
    (_HERE + "metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (_HERE + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")
    ),
}


class StoredCheckpoint:
    """A finished checkpoint, or any folder that Distributed Checkpoint wrote, with its metadata read."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        ShardingError: there is no metadata, or it is damaged or asks for something that metadata never asks for.
        """
        self.folder = folder
        self.metadata = read_metadata(folder)

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """What is stored under `key`, if it is a tensor."""
        found = self.metadata.state_dict_metadata[key]
        return found if isinstance(found, TensorStorageMetadata) else None

    def info(self, item: ReadItem) -> _StorageInfo:
        """Where one item is."""
        found: _StorageInfo = self.metadata.storage_data[item.storage_index]
        return found

    def empty(self, key: str) -> Tensor | None:
        """Memory on the CPU for all of what is stored under `key`; None if it is no tensor."""
        found = self.tensor(key)
        return None if found is None else torch.empty(found.size, dtype=found.properties.dtype)

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Where each key was in the nested state dict."""
        known: dict[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        return {key: known.get(key, (key,)) for key in self.metadata.state_dict_metadata}

    def plan(self, targets: dict[str, Any]) -> "ReadPlan":
        """How to read the keys of `targets` into their values: tensors in place, anything else (None) by a new one."""
        return ReadPlan(self, targets)

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Values by key, nested as they were saved."""
        found: dict[str, Any] = unflatten_state_dict(flat, self.paths)
        return found


class ReadPlan:
    """What one rank is about to read."""

    def __init__(self, stored: StoredCheckpoint, targets: dict[str, Any]) -> None:
        self._stored = stored
        self._targets = targets
        self._planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(targets, stored.metadata, is_coordinator=False)
        self._plan: LoadPlan = self._planner.create_local_plan()

    @property
    def ranges(self) -> dict[str, set[int]]:
        """Which files, and at which offsets."""
        found: dict[str, set[int]] = {}
        for item in self._plan.items:
            info = self._stored.info(item)
            found.setdefault(info.relative_path, set()).add(info.offset)
        return found

    @property
    def nbytes(self) -> int:
        """What is stored there; twice, what is read twice."""
        return sum(self._stored.info(item).length for item in self._plan.items)

    def read(self, on_progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
        """Read it; the targets, filled. `on_progress`: hears of the bytes of every item that was read.

        Raises:
            ShardingError: a file is missing or cut, or a value is a pickle of something that is no plain data.
        """
        stored = self._stored  # not self: no cycle may keep what was read alive
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
    """torch's, but for how it reads what is no tensor, and that it tells how far it is."""

    on_progress: Callable[[ReadItem], None] = staticmethod(lambda item: None)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        self.on_progress(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.on_progress(read_item)


class LazyTensor:
    """A tensor that is read when it is written, and not before: what a conversion hands on."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read = read

    @property
    def nbytes(self) -> int:
        """When it is read."""
        return prod(self.shape) * self.dtype.itemsize

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        offsets, sizes = torch.Size([0] * len(self.shape)), torch.Size(self.shape)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=self.dtype), sizes)
        return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]


class _SavePlanner(DefaultSavePlanner):
    """torch's, but for where values come from: copies that were set aside, and what is read only now."""

    def __init__(self) -> None:
        super().__init__()
        self.aside: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        self.on_progress: Callable[[int], None] = lambda count: None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.on_progress(size_of(write_item))
        if write_item.index in self.aside:
            return self.aside.pop(write_item.index)  # nobody needs it again
        value = self.state_dict[write_item.index.fqn]
        return value.read() if isinstance(value, LazyTensor) else super().resolve_data(write_item)


class WritePlan:
    """What one rank is about to write of a nested state dict, as all ranks have agreed."""

    def __init__(self, folder: Path, state: Mapping[str, Any], comm: Communicator, file_bytes: int = FILE_BYTES) -> None:
        """Plan it, in files of at most `file_bytes`, or one tensor. The folder must exist. Communicates.

        Raises:
            Exception: on every rank, if any rank cannot (ShardingError, with the rank, where it is another).
        """
        # each file goes down to the disk when it is recorded
        self._planner, self._writer = _SavePlanner(), FileSystemWriter(folder, sync_files=False)
        self._folder = folder
        self._staged = False
        self._file_bytes = file_bytes

        def plan() -> SavePlan:
            self._planner.set_up_planner(dict(state), self._writer.storage_meta(), is_coordinator=comm.rank == 0)
            self._writer.set_up_storage_writer(comm.rank == 0)
            return self._writer.prepare_local_plan(self._planner.create_local_plan())

        # every rank computes the same global plan, which saves handing it out
        central, self._metadata = self._planner.create_global_plan(agree_on_refusals(comm, plan))
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(central)[comm.rank])

    @property
    def nbytes(self) -> int:
        """Of the tensors this rank writes."""
        return sum(map(size_of, self._plan.items))

    def stage(self) -> None:
        """Copy what this rank will write, and that alone, to the host: what is saved may change from now on."""
        self._planner.aside = {item.index: _copy(self._planner.resolve_data(item)) for item in self._plan.items}
        self._planner.state_dict = {}
        self._writer.per_thread_copy_ahead = 0  # or torch's writer, on a thread, would wait for a stream of the first device
        self._staged = True

    def write(self, comm: Communicator, on_progress: Callable[[int], None]) -> dict[str, Any]:
        """Write it, and on rank 0 the metadata; return what the manifest says of all files.

        Memory: torch's writer holds every tensor of a file, or a copy of it, until the file is complete.
        `on_progress` hears of the bytes of what is about to be written, and of what was read again for its checksum.
        Communicates.

        Raises:
            Exception: as above.
        """
        self._planner.on_progress = on_progress

        def put() -> tuple[list[WriteResult], dict[str, Any]]:
            # the option is everybody's, and in the background others may be saving
            with nullcontext() if self._staged else _without_checksums_in_archives():
                results = [one for plan in self._files() for one in self._writer.write_data(plan, self._planner).wait()]
            share = self.nbytes / max(sum(one.size_in_bytes for one in results), 1)  # torch wraps every tensor in an archive
            return results, _records(self._folder, results, lambda count: on_progress(int(count * share)), not self._staged)

        def finish() -> dict[str, Any]:
            if comm.rank != 0:
                return {}
            self._writer.finish(self._metadata, [results for results, _ in answers])
            path = self._folder / METADATA
            return {METADATA: record(path, [(0, path.stat().st_size)], at_once=not self._staged)}

        try:
            answers = agree_on_refusals(comm, put)
        finally:
            self._planner.aside = {}
        files = {name: one for _, records in answers for name, one in records.items()}
        return {**files, **agree_on_refusals(comm, finish)[0]}

    def _files(self) -> Iterator[SavePlan]:
        """The plan of each file of this rank."""
        plans: list[list[WriteItem]] = [[]]
        held = 0
        for item in self._plan.items:
            held += size_of(item)
            if plans[-1] and held > self._file_bytes:
                plans.append([])
                held = size_of(item)
            plans[-1].append(item)
        for number, items in enumerate(plans):
            prefix: str = self._plan.storage_data.prefix
            yield replace(self._plan, items=items, storage_data=_StoragePrefix(f"{prefix}{number}_" if number else prefix))


def size_of(item: WriteItem) -> int:
    """The bytes of a tensor that is to be written; 0 of what is no tensor."""
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _copy(value: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    if isinstance(value, io.BytesIO):
        return value  # a pickle that was made just now
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a folder that Distributed Checkpoint wrote, by allow-list.

    Raises:
        ShardingError: it is missing, damaged, or asks for a class that metadata does not consist of.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError:
        raise ShardingError(f"{folder} has no {METADATA}: no finished checkpoint.") from None
    except ShardingError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ShardingError(f"{path} is damaged: {error!r}.") from error
    if not isinstance(metadata, Metadata):
        raise ShardingError(f"{path} is damaged: it holds a {type(metadata).__name__}.")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _ALLOWED:
            raise ShardingError(f"the metadata asks for {module}.{name}, which no metadata needs: it is damaged, or an attack.")
        return super().find_class(module, name)


@contextmanager
def _without_checksums_in_archives() -> Iterator[None]:
    """torch puts one into the archive it makes of each tensor, and never looks at it; the manifest has one of the same bytes."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _records(folder: Path, results: list[WriteResult], on_progress: Callable[[int], None], at_once: bool) -> dict[str, Any]:
    items: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info: _StorageInfo = result.storage_data
        items.setdefault(info.relative_path, []).append((info.offset, info.length))
    return {name: record(folder / name, there, on_progress, at_once) for name, there in items.items()}
