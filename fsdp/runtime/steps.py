"""Refuses steps of optimizers whose gradients are not there yet, or are not reduced, and parameters that no step can reach."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp.autograd.dynamo import uncompiled
from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import unit_ref_of

_engines: Final[WeakSet[Engine]] = WeakSet()
"""All engines of the process. Simulated ranks have one each."""
_looked_through: Final[WeakKeyDictionary[Optimizer, int]] = WeakKeyDictionary()
"""The number of parameters of each optimizer when they were last looked through."""


def check_steps(engine: Engine) -> None:
    """From now on, look at each step of an optimizer that has parameters of this engine."""
    _hook_optimizers()
    _engines.add(engine)


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(uncompiled(_look_at_step))


def _look_at_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Refuse a step, or let it be refused after its closure, which may have the backward that reduces. Returns new arguments."""
    name = f"{type(optimizer).__name__}.step"
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    if _looked_through.get(optimizer) != count:
        for parameter in _parameters_of(optimizer):
            _refuse_unsharded(name, parameter)
        _looked_through[optimizer] = count
    if not any([engine.has_unreduced_grads for engine in _engines]):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    _refuse_unreduced(name, optimizer, kept=not callable(closure))
    if not callable(closure):
        return None

    def checked() -> Any:
        loss = closure()
        _refuse_unreduced(name, optimizer)
        return loss

    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _refuse_unreduced(name: str, optimizer: Optimizer, kept: bool = True) -> None:
    """Raise ShardingError if a gradient is not reduced yet inside a backward; or, with `kept`, is kept under `no_sync`."""
    for engine in [engine for engine in _engines if engine.has_unreduced_grads]:
        # engines of other models and of other simulated ranks may keep gradients too
        of_engine = {id(info.parameter) for unit in engine.units for info in unit.param_infos}
        unreduced = engine.unreduced_params() if any([id(p) in of_engine for p in _parameters_of(optimizer)]) else {}
        found = next((unreduced[id(p)] for p in _parameters_of(optimizer) if id(p) in unreduced), None)
        if found is not None and engine.is_before_commits:
            raise ShardingError(
                f"{name}: inside a backward the gradient of {found!r} is not reduced yet; step after the backward, or in "
                "p.register_post_accumulate_grad_hook."
            )
        if found is not None and kept:
            raise ShardingError(
                f"{name}: the gradient of {found!r} is kept under no_sync and not reduced, so each rank has another one; step "
                "after a backward that synchronises."
            )


def engines_of(optimizer: Optimizer) -> tuple[list[Engine], list[nn.Parameter]]:
    """The engines that have parameters of an optimizer, in the order of these, and the parameters that no engine has."""
    left = {id(parameter): (number, parameter) for number, parameter in enumerate(_parameters_of(optimizer))}
    found: dict[int, Engine] = {}
    refs = [unit_ref_of(module) for engine in _engines for module in engine.units[0].modules]
    # an engine of before, whose units are those of a root around them by now, may not be collected yet
    for engine in dict.fromkeys(ref.engine for ref in refs if ref is not None):
        own = [
            left.pop(key)[0] for key in [id(info.parameter) for unit in engine.units for info in unit.param_infos] if key in left
        ]
        if own:
            found[min(own)] = engine
    return [found[first] for first in sorted(found)], [parameter for _, parameter in left.values()]


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_unsharded(name: str, parameter: nn.Parameter) -> None:
    unit = owning_unit(parameter)
    if isinstance(unit, Unit) and unit.unsharded_of(parameter) is parameter:
        raise ShardingError(
            f"{name}: the optimizer was given a parameter of unit {unit.name!r} inside its forward, or before `reshard()`, where "
            "the module shows an unsharded parameter that exists only there; add parameters between forwards, after `reshard()`."
        )
    if name == "Muon.step" and isinstance(unit, Unit) and unit.config.plain_shards and unit.flats[0].num_shards > 1:
        raise ShardingError(
            f"{name}: a parameter of unit {unit.name!r} is this rank's rows, an ordinary tensor, and this optimizer needs the "
            "full matrix. Use an optimizer that computes each element of a parameter by itself, such as torch.optim.AdamW."
        )
