"""Failures of the file system as sentences: the path, the reason, and the remedy. Standard library only."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fsdp.errors import ShardingError

_ROOM: Final = "make room, or give a path on another disk"
_PERMISSION: Final = "give a path for which this process has the permission"
_FOLDER: Final = "a file stands where a folder is needed, so give another path"
_REMEDIES: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "give a path on another disk",
    errno.EEXIST: _FOLDER,
    errno.ENOTDIR: _FOLDER,
    errno.ENAMETOOLONG: "give a shorter name",
}


@contextmanager
def file_errors(text: str, path: Path, ending: str = "") -> Iterator[None]:
    """Raise a failure of the file system in the block as a sentence that begins with `text`.

    Raises:
        ShardingError: the file system refused something.
    """
    try:
        yield
    except ShardingError:
        raise  # a sentence already
    except Exception as failure:
        reason = reason_of(failure, path)
        if reason is None:
            raise
        raise ShardingError(f"{text}: {reason}.{ending}") from failure


def reason_of(failure: BaseException, path: Path) -> str | None:
    """Why the file system refused something, with the remedy; None if `failure` has another cause.

    Names the file if it is another one than `path`.
    """
    error: BaseException | None = failure
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(found[1])  # of the package safetensors
        if number is not None:
            named = getattr(error, "filename", None)
            where = f" ({named})" if named is not None and os.fspath(named) != str(path) else ""
            remedy = _REMEDIES.get(number)
            return f"{os.strerror(number)}{where}" + (f"; {remedy}" if remedy else "")
        if isinstance(error, OSError):
            return str(error)
        # torch's writer of archives ends in words of its own while the failure of the file system is handled
        error = error.__cause__ or error.__context__
    return None
