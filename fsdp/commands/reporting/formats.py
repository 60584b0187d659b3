"""Times, sizes and tables as text, and files of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp.file_errors import file_errors


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns, the first one to the left and the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()


def milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, least in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count:.0f} B"


def write_text(command: str, path: Path, text: str) -> None:
    """Write a file, for this command.

    Raises:
        ShardingError: the file system refuses the file.
    """
    with file_errors(f"{command}: {path}", path):
        path.write_text(text, encoding="utf-8")
