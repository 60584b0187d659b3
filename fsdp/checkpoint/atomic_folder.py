"""Folders that are complete or not there. Standard library only.

Rule: work goes on in a hidden folder beside the one that is wanted, and one rename makes it visible.
"""

import os
import shutil
import uuid
from pathlib import Path

from fsdp.errors import ShardingError

INCOMPLETE = ".incomplete-"
"""In the name of a folder that somebody is at work in, or was when it was killed."""


def begin(asker: str, folder: Path) -> str:
    """Make a folder to work in, beside `folder`; its name.

    Raises:
        ShardingError: there is something at `folder`, or nothing can be written there.
    """
    if folder.exists():
        raise ShardingError(f"{asker}: {folder} exists already; give each one a name of its own (its step), or remove it first.")
    name = f".{folder.name}{INCOMPLETE}{uuid.uuid4().hex[:8]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / name).mkdir()
    except OSError as error:
        raise ShardingError(f"{asker}: cannot write in {folder.parent}: {error.strerror}.") from error
    return name


def publish(asker: str, working: Path, folder: Path) -> None:
    """Give the finished folder `working` its name, down to the disk.

    Raises:
        ShardingError: somebody else has made `folder` meanwhile.
    """
    sync(working)
    try:
        working.rename(folder)
    except OSError as error:
        raise ShardingError(
            f"{asker}: {folder} has come into being meanwhile ({error.strerror}); one job at a time writes there."
        ) from error
    sync(folder.parent)


def hide(folder: Path) -> None:
    """Take a folder out of sight, so that a crash while it is removed leaves no half of it under its name."""
    folder.rename(folder.with_name(f".{folder.name}{INCOMPLETE}{uuid.uuid4().hex[:8]}"))


def remove_leftovers(folder: Path) -> None:
    """Remove what is hidden in `folder`."""
    for path in folder.glob(f".*{INCOMPLETE}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Names in `folder`, down to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
