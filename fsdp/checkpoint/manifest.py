"""What a finished checkpoint says of itself. Standard library only.

Rule 1: it is written last, so a folder without one is not a checkpoint of ours, or not a finished one.
Rule 2: nothing in it is executed, and it says of every byte of every file whether it is as it was written.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
    """By key: `shape` and `dtype`."""
    layout: dict[str, list[int]]
    """Of each sharded parameter: where it begins in the flat buffer of its unit, the length of a part of that, how many parts."""
    files: dict[str, dict[str, Any]]
    """By name: `bytes`, and `items`, each [offset, length, crc32]."""
    version: int = field(default=VERSION)

    def write(self, folder: Path) -> None:
        """Write it into `folder`, down to the disk."""
        body = asdict(self)
        with open(folder / NAME, "w", encoding="utf-8") as file:
            json.dump({"crc32": _crc_of(body), **body}, file)
            file.flush()
            os.fsync(file.fileno())

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file["bytes"] for file in self.files.values())

    def damage(
        self, folder: Path, ranges: Mapping[str, set[int]] | None = None, told: Callable[[int], None] = lambda count: None
    ) -> Iterator[str]:
        """One sentence for everything that is not as it was written; files are read, an item at a time.

        `ranges`: of these files only, the items at these offsets only. `told`: hears of every item that was read, its bytes.
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
                yield from _damaged(path, items, told)

    def missing_or_cut(self, folder: Path) -> str | None:
        """The first file that is not there in full, if any; nothing is read."""
        return next((d for name in self.files for d in self.damage(folder, {name: set()})), None)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        ShardingError: there is none, it is damaged, or of a format this version does not know.
    """
    path = folder / NAME
    if not path.is_file():
        what = "an unfinished or foreign checkpoint" if folder.is_dir() else "no folder"
        raise ShardingError(f"{folder} has no {NAME}: it is {what}. fsdp.latest(folder) finds the newest finished one.")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        crc = body.pop("crc32")
        version = body["version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ShardingError(f"{path} is damaged ({type(error).__name__}); take an older checkpoint.") from None
    if version != VERSION:
        raise ShardingError(f"{path} is of format version {version}; this version of fsdp reads version {VERSION}.")
    if crc != _crc_of(body):
        raise ShardingError(f"{path} is damaged (its checksum differs); take an older checkpoint.")
    return Manifest(**body)


def record(
    path: Path, items: list[tuple[int, int]], told: Callable[[int], None] = lambda count: None, at_once: bool = True
) -> dict[str, Any]:
    """What the manifest says of one file with these items, each (offset, length); it is down to the disk afterwards.

    With `at_once`, checksums are computed while the disk works, and so cost nearly nothing. That takes a thread, which
    nobody can start any more when the interpreter ends. `told`: hears of every item that was read, its bytes.
    """

    def check(file: Any) -> Iterator[list[int]]:
        for at, length in sorted(items):
            yield [at, length, _crc_at(file, at, length)]
            told(length)

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


def _damaged(path: Path, items: list[list[int]], told: Callable[[int], None]) -> Iterator[str]:
    with open(path, "rb") as file:
        for at, length, crc in items:
            found = _crc_at(file, at, length)
            told(length)
            if found != crc:
                yield f"{path.name} is damaged between bytes {at:,} and {at + length:,} (its checksum differs)"


def _crc_at(file: Any, at: int, length: int) -> int:
    file.seek(at)
    crc = 0
    while length > 0:
        block = file.read(min(length, 1 << 22))
        if not block:
            return -1
        crc, length = crc32(block, crc), length - len(block)
    return crc


def _crc_of(body: dict[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True).encode())
