"""Refuses a copy or a pickle of a wrapped module."""

from typing import NoReturn

from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class Uncopied:
    """What the hooks of a unit refer to. A copy or a pickle of the module comes here, and is refused."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"unit {self._unit.name!r} cannot be copied: copy the module before wrapping it, then wrap the copy.")

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a rank holds only its shard: save "
            "fsdp.full_state_dict(model) instead."
        )
