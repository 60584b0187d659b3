"""Refuses a copy or a pickle of a wrapped module."""

from typing import NoReturn

from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class RefuseCopy:
    """Base class of the object that the hooks of a unit refer to. Copying or pickling the module reaches it, and it refuses."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"unit {self._unit.name!r} cannot be copied: copy the module before wrapping it, then wrap the copy.")

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a rank holds only its shard: save "
            "fsdp.full_state_dict(model) instead."
        )
