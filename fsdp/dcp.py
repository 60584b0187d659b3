"""torch's Distributed Checkpoint, driven over our channels: so it works in a simulated world too, without a process group.

Rule 1: formats, plans and files are torch's own classes; what is here hands their plans around.
Rule 2: nothing that was read is unpickled but by allow-list: metadata by the one below, values by torch's `weights_only`.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp.agreement import agree_on_refusals
from fsdp.collectives import Collectives
from fsdp.errors import ShardingError
from fsdp.manifest import record

METADATA: Final = ".metadata"
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


class Stored:
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

    def empty(self, key: str) -> Tensor | None:
        """Memory on the CPU for all of what is stored under `key`; None if it is no tensor."""
        found = self.tensor(key)
        return None if found is None else torch.empty(found.size, dtype=found.properties.dtype)

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Where each key was in the nested state dict."""
        known: dict[str, tuple[str | int, ...]] = self.metadata.planner_data or {}
        return {key: known.get(key, (key,)) for key in self.metadata.state_dict_metadata}

    def plan(self, targets: dict[str, Any]) -> "Reading":
        """How to read the keys of `targets` into their values: tensors in place, anything else (None) by a new one."""
        return Reading(self, targets)

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Values by key, nested as they were saved."""
        found: dict[str, Any] = unflatten_state_dict(flat, self.paths)
        return found


class Reading:
    """What one rank is about to read."""

    def __init__(self, stored: Stored, targets: dict[str, Any]) -> None:
        self._stored = stored
        self._targets = targets
        self._planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(targets, stored.metadata, is_coordinator=False)
        self._plan: LoadPlan = self._planner.create_local_plan()

    @property
    def ranges(self) -> dict[str, set[int]]:
        """Which files, and at which offsets."""
        found: dict[str, set[int]] = {}
        for item in self._plan.items:
            info: _StorageInfo = self._stored.metadata.storage_data[item.storage_index]
            found.setdefault(info.relative_path, set()).add(info.offset)
        return found

    def read(self) -> dict[str, Any]:
        """Read it; the targets, filled.

        Raises:
            ShardingError: a file is missing or cut, or a value is a pickle of something that is no plain data.
        """
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


class _Planner(DefaultLoadPlanner):
    """torch's, but for how it reads what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def write(folder: Path, state: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Write this rank's part of a nested state dict, and on rank 0 the metadata; return what the manifest says of all files.

    Communicates. The folder must exist.

    Raises:
        Exception: on every rank, if any rank cannot write (ShardingError, with the rank, where it is another).
    """
    # each file goes down to the disk when it is recorded
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder, sync_files=False)

    def plan() -> Any:
        planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=collectives.rank == 0)
        writer.set_up_storage_writer(collectives.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    # every rank computes the same global plan, which saves handing it out
    central, metadata = planner.create_global_plan(agree_on_refusals(collectives, plan))
    mine = planner.finish_plan(writer.prepare_global_plan(central)[collectives.rank])

    def put() -> tuple[list[WriteResult], dict[str, Any]]:
        with _without_checksums_in_archives():
            results = writer.write_data(mine, planner).wait()
        return results, _records(folder, results)

    answers = agree_on_refusals(collectives, put)
    files = {name: one for _, records in answers for name, one in records.items()}

    def finish() -> dict[str, Any]:
        if collectives.rank != 0:
            return {}
        writer.finish(metadata, [results for results, _ in answers])
        path = folder / METADATA
        return {METADATA: record(path, [(0, path.stat().st_size)])}

    return {**files, **agree_on_refusals(collectives, finish)[0]}


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


def _records(folder: Path, results: list[WriteResult]) -> dict[str, Any]:
    items: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        info: _StorageInfo = result.storage_data
        items.setdefault(info.relative_path, []).append((info.offset, info.length))
    return {name: record(folder / name, there) for name, there in items.items()}
