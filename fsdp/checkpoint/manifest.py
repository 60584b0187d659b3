"""The manifest of a finished checkpoint: its contents and checksums. Standard library only.

Rule 1: the manifest is written last, so a folder without one is foreign or unfinished.
Rule 2: nothing in the manifest is executed, and its checksums cover every byte of every other file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from fsdp.errors import ShardingError

NAME: Final = "manifest.json"
VERSION: Final = 1


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`."""

    world_size: int
    saved_at: int
    """Nanoseconds since 1970, by the clock of rank 0."""
    tensors: dict[str, dict[str, Any]]
    """`shape` and `dtype` of each tensor, by key."""
    layout: dict[str, list[int]]
    """How each sharded parameter is cut: its start in the flat buffer, and the length and the number of the buffer's shards."""
    files: dict[str, dict[str, Any]]
    """`bytes` and `items` of each file, by name. An item is [offset, length, crc32]."""
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, and sync it to disk."""
        body = asdict(self)
        with open(folder / NAME, "w", encoding="utf-8") as file:
            json.dump({"crc32": _crc_of(body), **body}, file)
            file.flush()
            os.fsync(file.fileno())

    def damage(
        self, folder: Path, ranges: Mapping[str, set[int]] | None = None, on_progress: Callable[[int], None] = lambda count: None
    ) -> Iterator[str]:
        """Yield one sentence for each missing or changed file or item. Reads files, one item at a time.

        `ranges`: check only these files, and in each only the items at these offsets. `on_progress`: called with the bytes of
        each item that was read.
        """
        for name, file in self.files.items():
            if ranges is not None and name not in ranges:
                continue
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing"
            elif (there := path.stat().st_size) != file["bytes"]:
                yield f"{name} has {there:,} bytes, of {file['bytes']:,} that were written"
            else:
                items = [item for item in file["items"] if ranges is None or item[0] in ranges[name]]
                yield from _damaged(path, items, on_progress)

    def missing_or_cut(self, folder: Path) -> str | None:
        """A sentence about the first file that is missing or has another size; None if there is none. Reads no file."""
        return next((damage for name in self.files for damage in self.damage(folder, {name: set()})), None)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        ShardingError: there is none, or it is damaged, or of a format that this version does not know.
    """
    path = folder / NAME
    if not path.is_file():
        what = "an unfinished or foreign checkpoint" if folder.is_dir() else "a file" if folder.exists() else "not there"
        raise ShardingError(f"{folder} has no {NAME}: it is {what}. fsdp.latest(folder) finds the newest finished one.")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        crc = body.pop("crc32")
        version = body["version"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ShardingError(f"{path} is damaged ({type(error).__name__}); take an older checkpoint.") from None
    if version != VERSION:
        raise ShardingError(f"{path} is of format version {version}; this version of fsdp reads version {VERSION}.")
    if crc != _crc_of(body):
        raise ShardingError(f"{path} is damaged (its checksum differs); take an older checkpoint.")
    return Manifest(**body)


def record(
    path: Path, items: list[tuple[int, int]], on_progress: Callable[[int], None] = lambda count: None, at_once: bool = True
) -> dict[str, Any]:
    """Compute the manifest's entry of the file `path` with these items, each (offset, length), and sync the file to disk.

    With `at_once`, checksums are computed during the sync, and cost nearly nothing. That needs a new thread, which cannot be
    started while the interpreter ends. `on_progress`: called with the bytes of each item that was read.
    """

    def check(file: Any) -> Iterator[list[int]]:
        for offset, length in sorted(items):
            yield [offset, length, _crc_at(file, offset, length)]
            on_progress(length)

    with open(path, "rb") as file:
        if at_once:
            with ThreadPoolExecutor(1) as disk:
                synced = disk.submit(os.fsync, file.fileno())
                checked = list(check(file))
                synced.result()
        else:
            os.fsync(file.fileno())
            checked = list(check(file))
        return {"bytes": path.stat().st_size, "items": checked}


def _damaged(path: Path, items: list[list[int]], on_progress: Callable[[int], None]) -> Iterator[str]:
    with open(path, "rb") as file:
        for offset, length, crc in items:
            found = _crc_at(file, offset, length)
            on_progress(length)
            if found != crc:
                yield f"{path.name} is damaged between bytes {offset:,} and {offset + length:,} (its checksum differs)"


def _crc_at(file: Any, offset: int, length: int) -> int:
    """The checksum of `length` bytes; -1 if the file ends before."""
    file.seek(offset)
    crc = 0
    while length > 0:
        block = file.read(min(length, 1 << 22))
        if not block:
            return -1
        crc, length = crc32(block, crc), length - len(block)
    return crc


def _crc_of(body: dict[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True).encode())
