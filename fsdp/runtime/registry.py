"""From a module to the unit it is, and to the engine that drives it."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar, Final, TypeVar, cast

from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp.debug.error_notes import add_note
from fsdp.errors import PeerFailed, ShardingError, WorldError
from fsdp.params.module_tree import ModuleTree
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.forward_hooks import ForwardHooks
from state_machine import Request, State

KEEPS_ENGINE: Final = "_fsdp_keeps_engine"
"""The attribute of a class of modules that cannot do without their engine. It says what to do instead of `fsdp.unwrap`."""
WHILE_PUT_AWAY: Final = ("offload", "onload", "memory_bytes", "story", "stats", "agree_abandoned")
"""The functions that may be called on a model between `fsdp.offload` and `fsdp.onload`."""
F = TypeVar("F", bound=Callable[..., Any])


class UnitRef:
    """The attribute by which a module is a unit: the engine, and the number of the unit in it."""

    ATTRIBUTE: ClassVar = "_fsdp_sharded"

    __slots__ = ("engine", "hooks", "index", "state_dict_handles")

    def __init__(
        self, engine: Engine, hooks: Sequence[ForwardHooks], state_dict_handles: Sequence[RemovableHandle], index: int
    ) -> None:
        self.engine = engine
        self.hooks = hooks
        """Those of all units of the engine."""
        self.state_dict_handles = tuple(state_dict_handles)
        self.index = index

    @property
    def unit(self) -> Unit:
        return self.engine.units[self.index]


def unit_ref_of(module: nn.Module) -> UnitRef | None:
    """The unit of `module`; None if it is no unit."""
    found: UnitRef | None = module.__dict__.get(UnitRef.ATTRIBUTE)
    return found


def collective_call(function: F) -> F:
    """Decorate a function that all ranks call between two steps: a WorldError in it gets the story, as inside a step.

    If no rank can go on, the ranks of all groups of the model get to know, of which some may wait for this rank alone.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except WorldError as error:
            model = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Module))  # or the first of a list
            engine = units_in(model, function.__name__)[0].engine
            add_note(error, engine.snapshot, 0)
            if not isinstance(error, PeerFailed):
                engine.comms.abandon(engine.units[0].name, error)
            raise

    return cast(F, wrapper)


def units_in(model: nn.Module, function_name: str) -> list[UnitRef]:
    """The units in `model`, in the order of the modules. First, a pass that has failed is cleaned up.

    Raises:
        ShardingError: there is none, or `model` is no module; or a module uses a parameter of a unit that is not in `model`.
    """
    if not isinstance(model, nn.Module):
        raise ShardingError(f"{function_name} takes a wrapped model, not an object of class {type(model).__name__}.")
    refs = list(dict.fromkeys(ref for module in model.modules() if (ref := unit_ref_of(module)) is not None))
    if not refs:
        raise ShardingError(
            f"{function_name}: {type(model).__name__} contains no unit; wrap it with FullyShardedDataParallel or fully_shard "
            "first."
        )
    for engine in {ref.engine: None for ref in refs}:
        engine.units[0].refuse_forked()
        if engine.units[0].is_put_away and function_name not in WHILE_PUT_AWAY:
            raise ShardingError(
                f"{function_name}: the model is in host memory since fsdp.offload; call fsdp.onload(model) first."
            )
        engine.pending_backward.await_end()
        engine.clean_up_dead_forward()
        refuse_borrowing(engine)
    return refs


def refuse_borrowing(engine: Engine) -> None:
    """Raise ShardingError if a module of the root uses a parameter of a unit that is not inside it."""
    root = engine.units[0]
    ModuleTree.of(root.module).refuse_borrowing(root.name)


def resting_units_in(model: nn.Module, function_name: str) -> list[UnitRef]:
    """The units in `model`, in the order of the modules. All are at rest, and changes of their shards are taken over.

    Raises:
        ShardingError: there is none; or a forward, a backward or a summon is going on; or a shard was replaced by a tensor
            that does not fit.
    """
    refs = units_in(model, function_name)
    for engine in {ref.engine: None for ref in refs}:
        refuse_unless_resting(function_name, engine)
    for ref in refs:
        try:
            ref.unit.check_shards()
        except ShardingError as error:
            add_note(error, ref.engine.snapshot, ref.index)
            raise
    return refs


def engines_in(model: nn.Module, function_name: str) -> tuple[Engine, ...]:
    """The engines of the roots in `model`, in the order of the modules.

    Raises:
        ShardingError: there is none, or `model` is only a part of a root.
    """
    return engines_of(units_in(model, function_name), model, function_name)


def engines_of(refs: Sequence[UnitRef], model: nn.Module, function_name: str) -> tuple[Engine, ...]:
    """The engines of `refs`, all units in `model`. Raise ShardingError if `model` is only a part of a root."""
    has_root: dict[Engine, bool] = {}
    for ref in refs:
        has_root[ref.engine] = has_root.get(ref.engine, False) or ref.index == 0
    for engine, complete in has_root.items():
        if not complete:
            raise refusal(
                f"{function_name}: {type(model).__name__} is a part of root {engine.units[0].name!r}; call it on the root.",
                engine,
            )
    return tuple(has_root)


def refusal(text: str, engine: Engine) -> ShardingError:
    """An error for a call that is not possible now. Its note begins with the first unit that is not at rest."""
    busy = (index for index, lifecycle in enumerate(engine.root.lifecycles) if lifecycle.state is not State.IDLE)
    error = ShardingError(text)
    add_note(error, engine.snapshot, next(busy, 0))
    return error


def reshard(engine: Engine) -> None:
    """Free the unsharded parameters of all units of an engine at rest, also cached ones. The next use gathers them again."""
    for index in range(len(engine.units)):
        engine.request(index, Request.RESHARD)


def refuse_unless_resting(function_name: str, engine: Engine) -> None:
    """Raise ShardingError while a forward, a backward or a summon is going on."""
    engine.pending_backward.await_end()
    engine.refuse_in_grad_hook(function_name)
    if not engine.root.at_rest:
        engine.refuse_two_threads()
        raise refusal(f"{function_name}: call it outside any forward, backward and summon_full_params.", engine)


def refuse_traced(function_name: str, engine: Engine) -> None:
    """Raise ShardingError inside `fsdp.trace`, which would record nothing of the engine that comes in the place of this one."""
    if engine.phases.add_record is not None:
        raise refusal(f"{function_name}: unit {engine.units[0].name!r} is traced; call it outside fsdp.trace.", engine)
