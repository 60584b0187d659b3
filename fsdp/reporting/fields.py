"""The fields that a trace file must have: a file that another program has changed gets a sentence, not a traceback."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

from fsdp.errors import ShardingError

_NUMBER: Final = (int, float)
_INFO: Final = {
    "rank": int,
    "world_size": int,
    "host": str,
    "began_at": _NUMBER,
    "unit_bytes": list,
    "options": dict,
}
_OPTIONS: Final = {"prefetch": int, "reshard": str, "ranks": str, "device": str}
_EVENT: Final = {"ph": str, "pid": int, "tid": int, "name": str}
_TIMED: Final = {"ts": _NUMBER, "args": dict}
_SLICE: Final = {"dur": _NUMBER}
_ARGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "step": {"step": int, "abandoned": bool},
    "compute": {"unit": str, "kind": str},
    "engine": {"unit": str, "phase": str},
    "collective": {"unit": str, "collective": str, "comm": str, "ranks": int, "number": int, "received": int},
}
"""By category of an event, the arguments that it must have."""
_TOGETHER: Final = (("wait_began", "waited"), ("end_after", "end_before"))
"""Arguments of collectives that are numbers, each with the other one of its pair or not at all."""


def check_infos(infos: Any) -> None:
    """Check what a file says of its ranks.

    Raises:
        ShardingError: a field is missing, or is of another kind.
    """
    if not isinstance(infos, list):
        raise ShardingError("'ranks' is no list")
    for info in infos:
        _check("the part 'fsdp'", info, _INFO)
        _check("the part 'options'", info["options"], _OPTIONS)
        if not 0 <= info["rank"] < info["world_size"]:
            raise ShardingError(f"the part 'fsdp' is of rank {info['rank']} of {info['world_size']}")
        if not all(_is(size, int) for size in info["unit_bytes"]):
            raise ShardingError("the part 'fsdp' has something else than numbers in 'unit_bytes'")


def check_events(events: Sequence[Any]) -> None:
    """Check the events of a file.

    Raises:
        ShardingError: a field of one is missing, or is of another kind.
    """
    for place, event in enumerate(events):
        where = f"event {place}"
        _check(where, event, _EVENT)
        if event["ph"] == "M":
            continue
        _check(where, event, _TIMED if event["ph"] != "X" else {**_TIMED, **_SLICE})
        args, category = event["args"], event.get("cat")
        _check(f"{where}, args", args, _ARGS.get(str(category), {}))
        if category == "step" and args.get("backward_began", "") is not None:
            _check(f"{where}, args", args, {"backward_began": _NUMBER})
        elif category == "memory":
            _check(f"{where}, args", args, dict.fromkeys(args, int))
        elif category == "collective":
            pairs = [pair for pair in _TOGETHER if args.keys() & {*pair}]
            _check(f"{where}, args", args, {name: _NUMBER for pair in pairs for name in pair})


def _check(where: str, found: Any, fields: Mapping[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ShardingError(f"{where} is no object")
    for name, kind in fields.items():
        if name not in found:
            raise ShardingError(f"{where} has no field {name!r}")
        if not _is(found[name], kind):
            raise ShardingError(f"{where} has {found[name]!r} in its field {name!r}")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, kind) and not (isinstance(value, float) and not isfinite(value))
