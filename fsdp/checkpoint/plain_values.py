"""Values besides tensors, as a checkpoint keeps them: a load returns what was saved, or the save refuses it.

Rule: a checkpoint holds plain data, which torch reads with `weights_only`. Scalars of numpy become numbers, and mappings of all
classes dicts.
"""

import io
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError

MARK: Final = b"fsdp packed value\n"
"""Begins the bytes that stand for a dict which Distributed Checkpoint would change: it makes keys text, and drops empty dicts."""
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


def storable(operation: str, value: Any, *path: str | int) -> Any:
    """The value at `path` of a nested state dict, with bytes for each dict that Distributed Checkpoint would change.

    Empty parts stay, such as the state of an optimizer that has none.

    Raises:
        ShardingError: a value is no plain data, or a sparse tensor. The error begins with `operation` and names it.
    """
    value = _number(value)
    where = f"{operation}: {'.'.join(map(str, path))}"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        raise ShardingError(f"{where} is a tensor of layout {value.layout}, which a checkpoint cannot hold; keep its dense form.")
    if type(value) in _PLAIN or isinstance(value, Tensor) or hasattr(value, "__create_write_items__"):
        return value
    is_part = len(path) < 2 or (len(path) == 2 and path[0] != "model")
    if isinstance(value, Mapping) and (value or is_part) and all(type(key) is str for key in value):
        return {key: storable(operation, inner, *path, key) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(storable(operation, inner, *path, place) for place, inner in enumerate(value))
    packed = pack(where, value, "cpu")
    return MARK + packed if isinstance(value, Mapping) else value


def restored(value: Any) -> Any:
    """The reverse of `storable`, for one value that was read. Tensors are on the host."""
    if type(value) in (list, tuple):
        return type(value)(map(restored, value))
    return unpack(value[len(MARK) :], "cpu") if isinstance(value, bytes) and value.startswith(MARK) else value


def pack(where: str, value: Any, device: str | None = None) -> bytes:
    """A value of plain data as bytes, with its tensors on `device` or where they are. If not, an error begins with `where`."""
    stream = io.BytesIO()
    try:
        torch.save(_plain(value, device), stream)
        unpack(stream.getvalue())
    except Exception as error:  # what a foreign class raises when it is pickled
        found = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's text has many lines, and escapes for a terminal
        what = found[1] if found else str(error).partition("\n")[0]
        raise ShardingError(
            f"{where} holds something that only unpickling would bring back ({what}); give tensors, numbers, strings, lists and "
            "dicts."
        ) from None
    return stream.getvalue()


def unpack(packed: bytes, device: str | None = None) -> Any:
    """The reverse of `pack`. Tensors are on `device`, or where they were."""
    return torch.load(io.BytesIO(packed), map_location=device, weights_only=True)


def _plain(value: Any, device: str | None) -> Any:
    """A value whose mappings are dicts, and whose tensors are on `device` and have storages of their own."""
    if isinstance(value, Mapping):
        return {_number(key): _plain(inner, device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner, device) for inner in value)
    if not isinstance(value, Tensor) or value.is_meta:
        return _number(value)
    alone = value.detach().to(device).clone()
    return nn.Parameter(alone, value.requires_grad) if isinstance(value, nn.Parameter) else alone


def _number(value: Any) -> Any:
    """A number for a scalar of numpy; any other value as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
