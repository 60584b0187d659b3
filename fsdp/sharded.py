"""How a module knows the engine that drives it."""

from typing import ClassVar

from torch import nn

from fsdp.engine import Engine
from fsdp.errors import ShardingError
from fsdp.hooks import Hooks


class Sharded:
    """What a unit's module carries: its engine, and which unit it is."""

    ATTRIBUTE: ClassVar = "_fsdp_sharded"

    __slots__ = ("engine", "hooks", "index")

    def __init__(self, engine: Engine, hooks: Hooks, index: int) -> None:
        self.engine = engine
        self.hooks = hooks
        self.index = index


def sharded_of(module: nn.Module) -> Sharded | None:
    """What `module` carries if it is a unit."""
    found: Sharded | None = module.__dict__.get(Sharded.ATTRIBUTE)
    return found


def engines_in(model: nn.Module, asker: str) -> tuple[Engine, ...]:
    """The engines of the roots in `model`, in the order of the modules.

    Raises:
        ShardingError: there is none, or `model` is only a part of a root.
    """
    engines: dict[Engine, bool] = {}
    for module in model.modules():
        sharded = sharded_of(module)
        if sharded is not None:
            engines[sharded.engine] = engines.get(sharded.engine, False) or sharded.index == 0
    if not engines:
        raise ShardingError(
            f"{asker}: {type(model).__name__} contains no unit; wrap it with FullyShardedDataParallel or fully_shard first."
        )
    for engine, complete in engines.items():
        if not complete:
            raise ShardingError(
                f"{asker}: {type(model).__name__} is a part of root {engine.units[0].name!r}; call it on the root."
            )
    return tuple(engines)
