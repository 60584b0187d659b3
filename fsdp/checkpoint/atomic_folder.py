"""Folders that are complete or absent.

Rule: files are written in a hidden folder beside the final one, and one rename makes them visible.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp.comm.agreement import agree_and_gather, agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.file_errors import file_errors

INCOMPLETE = ".incomplete-"
"""Part of the name of every hidden folder: its writer is still running, or was killed."""


@contextmanager
def writing(function_name: str, folder: Path, comm: Communicator) -> Iterator[Path]:
    """Yield a hidden folder for the files of all ranks; it becomes `folder` at the end, and is removed if the block raises.

    Communicates at both ends.

    Raises:
        ShardingError: on every rank; `folder` exists, or nothing can be written beside it.
    """
    working = begin(function_name, folder, comm)
    with removed_on_failure(working, comm):
        yield working

        @not_written(function_name, folder)
        def finish() -> None:
            if comm.rank == 0:
                publish(function_name, working, folder)

        agree_on_refusals(comm, function_name, finish)


def begin(function_name: str, folder: Path, comm: Communicator) -> Path:
    """Let rank 0 make the hidden folder from which `folder` is to be published. Communicates.

    Raises:
        ShardingError: on every rank; `folder` exists, is another one on some rank, or nothing can be written beside it.
    """
    names = agree_and_gather(comm, function_name, lambda: _make_hidden(function_name, folder) if comm.rank == 0 else "")
    working = folder.parent / names[0]
    with removed_on_failure(working, comm):
        agree_on_refusals(comm, function_name, lambda: _refuse_another(function_name, folder, working))
    return working


@contextmanager
def not_written(function_name: str, folder: Path) -> Iterator[None]:
    """Raise a failure of the file system in the block, which writes the files of `folder`, as a sentence: a ShardingError."""
    with file_errors(f"{function_name}: {folder} could not be written", folder, " Nothing appeared there."):
        yield


def publish(function_name: str, working: Path, folder: Path) -> None:
    """Rename the finished folder `working` to `folder`, unless another job has made that meanwhile. Sync both names to disk."""
    sync(working)
    try:
        working.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise ShardingError(
            f"{function_name}: {folder} has come into being meanwhile ({error.strerror}); one job at a time writes there."
        ) from error
    sync(folder.parent)


@contextmanager
def removed_on_failure(working: Path, comm: Communicator) -> Iterator[None]:
    """Let rank 0 remove the hidden file or folder `working` if the block raises on it."""
    try:
        yield
    except BaseException:
        if comm.rank == 0 and working.is_dir():
            shutil.rmtree(working, ignore_errors=True)
        elif comm.rank == 0:
            working.unlink(missing_ok=True)
        raise


def hide(folder: Path) -> None:
    """Rename a folder to a hidden one, so that a crash during its removal leaves no damaged folder under the old name."""
    folder.rename(folder.with_name(_hidden_name(folder)))


def remove_leftovers(folder: Path) -> None:
    """Remove the hidden folders in `folder`."""
    for path in folder.glob(f".*{INCOMPLETE}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Sync the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_hidden(function_name: str, folder: Path) -> str:
    name = _hidden_name(folder)
    with file_errors(f"{function_name}: cannot write in {folder.parent}", folder.parent):
        if folder.exists():
            raise ShardingError(
                f"{function_name}: {folder} exists already; give each one a name of its own (its step), or remove it first."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / name).mkdir()
    return name


def _refuse_another(function_name: str, folder: Path, working: Path) -> None:
    """Check that the hidden folder `working`, which rank 0 has made for its own `folder`, is there and is for this one."""
    with file_errors(f"{function_name}: cannot write in {folder.parent}", folder.parent):
        is_new = not folder.parent.exists()
        folder.parent.mkdir(parents=True, exist_ok=True)  # this asks a network's server, where a look may find an old answer
        if not working.is_dir() or working.name[:-8] != _hidden_name(folder)[:-8]:  # the last 8 characters are random
            with suppress(OSError):  # others may have written there
                folder.parent.rmdir() if is_new else None
            raise ShardingError(
                f"{function_name}: {folder} is another folder on this rank than on rank 0; give a path that all ranks share."
            )


def _hidden_name(folder: Path) -> str:
    return f".{folder.name}{INCOMPLETE}{uuid.uuid4().hex[:8]}"
