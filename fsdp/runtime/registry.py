"""How a module knows the engine that drives it."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp.comm.process_group import Communicator
from fsdp.debug.error_notes import add_note
from fsdp.errors import ShardingError, WorldError
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.hooks import EngineHooks
from state_machine import Event, State

F = TypeVar("F", bound=Callable[..., Any])


class UnitRef:
    """What a unit's module carries: its engine, and which unit it is."""

    ATTRIBUTE: ClassVar = "_fsdp_sharded"

    __slots__ = ("engine", "hooks", "index", "state_dict_handles")

    def __init__(self, engine: Engine, hooks: EngineHooks, state_dict_handles: Sequence[RemovableHandle], index: int) -> None:
        self.engine = engine
        self.hooks = hooks
        self.state_dict_handles = tuple(state_dict_handles)
        self.index = index

    @property
    def unit(self) -> Unit:
        """The unit itself."""
        return self.engine.units[self.index]

    def on_event(self, event: Event) -> None:
        """Tell the engine of an event of this unit."""
        self.engine.on_event(self.index, event)


def unit_ref_of(module: nn.Module) -> UnitRef | None:
    """What `module` carries if it is a unit."""
    found: UnitRef | None = module.__dict__.get(UnitRef.ATTRIBUTE)
    return found


def collective_call(function: F) -> F:
    """For what all ranks call between two steps: if they do not, the error has the story, as inside a step."""

    @wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except WorldError as error:
            model = args[0] if args else kwargs["model"]
            add_note(error, units_in(model, function.__name__)[0].engine.snapshot, 0)
            raise

    return cast(F, told)


def units_in(model: nn.Module, caller: str) -> list[UnitRef]:
    """What the units in `model` carry, in the order of the modules; a forward that died unnoticed is cleaned up first.

    Raises:
        ShardingError: there is none.
    """
    found = [sharded for module in model.modules() if (sharded := unit_ref_of(module)) is not None]
    if not found:
        raise ShardingError(
            f"{caller}: {type(model).__name__} contains no unit; wrap it with FullyShardedDataParallel or fully_shard first."
        )
    for engine in {sharded.engine: None for sharded in found}:
        engine.clean_up_dead_forward()
    return found


def engines_in(model: nn.Module, caller: str) -> tuple[Engine, ...]:
    """The engines of the roots in `model`, in the order of the modules.

    Raises:
        ShardingError: there is none, or `model` is only a part of a root.
    """
    complete: dict[Engine, bool] = {}
    for sharded in units_in(model, caller):
        complete[sharded.engine] = complete.get(sharded.engine, False) or sharded.index == 0
    for engine, unsharded in complete.items():
        if not unsharded:
            raise refusal(
                f"{caller}: {type(model).__name__} is a part of root {engine.units[0].name!r}; call it on the root.", engine
            )
    return tuple(complete)


def refusal(text: str, engine: Engine) -> ShardingError:
    """What somebody asked for cannot be done as things stand, which the note tells: first the first unit that is not at rest."""
    busy = (index for index, lifecycle in enumerate(engine.root.lifecycles) if lifecycle.state is not State.IDLE)
    error = ShardingError(text)
    add_note(error, engine.snapshot, next(busy, 0))
    return error


def refuse_unless_resting(caller: str, engine: Engine) -> None:
    """Raises:
    ShardingError: a forward, a backward or a summon is going on.
    """
    if not engine.root.at_rest:
        raise refusal(f"{caller}: call it outside any forward, backward and summon_full_params.", engine)


def resting_units_in(model: nn.Module, caller: str) -> list[Unit]:
    """The units in `model`, in the order of the modules, none of them in use, and what was done to their shards taken over.

    Raises:
        ShardingError: there is none; or a forward, a backward or a summon is going on; or a shard was replaced by what does
            not fit.
    """
    found = units_in(model, caller)
    for engine in {sharded.engine: None for sharded in found}:
        refuse_unless_resting(caller, engine)
    for sharded in found:
        try:
            sharded.unit.check_shards()
        except ShardingError as error:
            add_note(error, sharded.engine.snapshot, sharded.index)
            raise
    return [sharded.unit for sharded in found]


def world_comm_in(model: nn.Module, caller: str) -> Communicator:
    """The channel to all ranks `model` is wrapped over: those that share its shards, and those that hold the same ones.

    Raises:
        ShardingError: there is no unit.
    """
    return units_in(model, caller)[0].engine.comms.world_comm
