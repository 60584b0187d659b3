"""Refuses a pickle of a wrapped module, and a copy of its hooks without it."""

from typing import NoReturn

from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class RefuseCopy:
    """Base class of the objects of a unit that its module refers to. Pickling the module reaches one, and it refuses."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"unit {self._unit.name!r}: its hooks cannot be copied without its module; copy.deepcopy the model.")

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a rank holds only its shard: save "
            "fsdp.full_state_dict(model) instead."
        )
