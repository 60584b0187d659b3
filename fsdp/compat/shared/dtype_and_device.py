"""Another dtype or device for units that exist, as `model.half()` asks for after wrapping; or another mixed precision.

Nothing is communicated. Each flat buffer is made anew with the layout that it had, so that the state of an optimizer still fits.
A smaller dtype then has shards that are no multiples of 16 bytes.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fsdp.building.attach import attach, detach
from fsdp.building.dissolve import refuse_losses
from fsdp.config import Config, MixedPrecisionPolicy
from fsdp.errors import ShardingError
from fsdp.params.buffer_plan import compute_dtype
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.module_tree import ModuleTree
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import refuse_unless_resting, unit_ref_of
from fsdp.shards.shard_tensor import plain

Conversion = Callable[[Tensor], Tensor]


def changed_flats(unit: Unit, fn: Conversion) -> list[FlatBuffer]:
    """The flat buffers of a unit whose shards get another dtype or device by `fn`."""
    probes = [(flat, flat.shard.new_empty(0)) for flat in unit.flats]
    return [flat for flat, probe in probes if (made := fn(probe)).dtype is not probe.dtype or made.device != probe.device]


def changes(unit: Unit, fn: Conversion) -> bool:
    """Whether `fn` gives shards of a unit another dtype or device."""
    return bool(changed_flats(unit, fn))


@torch.no_grad()
def convert(engine: Engine, fn: Conversion, units: Collection[int], chosen: Collection[FlatBuffer] | None = None) -> Engine:
    """Convert the parameters and gradients of some units of a root by `fn`; return the engine that drives the root from now on.

    `units`: the numbers of the units. `chosen`: flat buffers of these units; the others stay as they are. None means all.
    Parameter objects, hooks of the user, and the options of the root stay.

    Memory: the shards of these units twice.

    Raises:
        ShardingError: a forward, a backward or a summon is going on; gradients are kept under `no_sync`; the root is inside
            `fsdp.join`, or uses parameters of others; or `fn` moves shards that `offload_policy` keeps in host memory. Nothing
            was changed.
    """
    _refuse(engine, units, "to", fn)
    fns = {
        index: [fn if chosen is None or flat in chosen else _unchanged for flat in engine.units[index].flats] for index in units
    }
    configs = {index: engine.units[index].config for index in units}
    return _remade(engine, fns, configs)


@torch.no_grad()
def change_precision(engine: Engine, policies: Mapping[int, MixedPrecisionPolicy], function_name: str) -> Engine:
    """Let some units of a root compute in other dtypes; return the engine that drives the root from now on.

    `policies`: the policy of each unit, by its number. The shards keep their dtype. Errors begin with `function_name`.

    Raises:
        ShardingError: see `convert`.
    """
    _refuse(engine, policies, function_name)
    fns: dict[int, list[Conversion]] = {index: [_unchanged] * len(engine.units[index].flats) for index in policies}
    configs = {index: replace(engine.units[index].config, mp_policy=policy) for index, policy in policies.items()}
    return _remade(engine, fns, configs)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _remade(engine: Engine, fns: Mapping[int, list[Conversion]], configs: Mapping[int, Config]) -> Engine:
    """An engine over units of which some are made anew, with new options. `fns`: how each of their flat buffers is converted."""
    shards = {
        index: [fn(flat.shard) for fn, flat in zip(of_unit, engine.units[index].flats, strict=True)]
        for index, of_unit in fns.items()
    }
    refs = [ref for unit in engine.units if (ref := unit_ref_of(unit.module)) is not None]
    detach(refs)
    made = [
        _convert(unit, fns[index], shards[index], configs[index]) if index in shards else unit
        for index, unit in enumerate(engine.units)
    ]
    new = attach(made, engine.descendants, engine.comms)
    _take_over(new, engine)
    return new


def _refuse(engine: Engine, units: Collection[int], function_name: str, fn: Conversion = lambda tensor: tensor) -> None:
    engine.clean_up_dead_forward()
    refuse_unless_resting(function_name, engine)
    refuse_losses(engine, function_name)
    root = engine.units[0]
    ModuleTree.of(root.module).refuse_borrowing(root.name)
    for index in units:
        unit = engine.units[index]
        if any(flat.is_offloaded and fn(flat.shard.new_empty(0)).device != flat.shard.device for flat in unit.flats):
            raise ShardingError(
                f"{function_name}: the shards of unit {unit.name!r} are in host memory by offload_policy and stay there, while "
                f"{unit.flats[0].device} computes; change the dtype alone, or move the module before wrapping it."
            )
        unit.check_shards()


def _convert(unit: Unit, fns: list[Conversion], shards: list[Tensor], config: Config) -> Unit:
    grads = [
        [_converted_grad(parameter.grad, fn) for parameter in flat.sharded_params]
        for flat, fn in zip(unit.flats, fns, strict=True)
    ]
    stepped = unit.versions.changed_since_made
    for flat, shard in zip(unit.flats, shards, strict=True):
        for number, slot in enumerate(flat.layout.slots):
            # a stand-in of the full shape with the memory of one element, which the new buffer cuts
            stand_in = shard.new_empty((), device=flat.device if flat.is_offloaded else None).expand(slot.shape)
            if flat.dtensor_layouts is None:
                flat.restore_param(number, stand_in, None)
            else:
                flat.replace_dtensor(number, flat.dtensor_layouts[number].shown(stand_in))
    unit.dissolve()
    flats = [
        FlatBuffer(
            flat.param_infos,
            compute_dtype(flat.param_infos[0], shard.dtype, config),
            unit.comm,
            flat.is_replicated,
            config.aligned,
            config.plain_shards,
            former=flat,
            offload=config.offload,
        )
        for flat, shard in zip(unit.flats, shards, strict=True)
    ]
    for flat, shard, of_flat in zip(flats, shards, grads, strict=True):
        flat.shard.copy_(shard)
        for number, grad in enumerate(of_flat):
            if grad is not None:
                flat.sharded_params[number].grad = flat.as_shown(number, grad)
    new = Unit(unit.modules, unit.name, flats, config, unit.comm)
    if stepped:
        new.versions.repeat(1)  # an optimizer may have state that is cut like the shards
    return new


def _converted_grad(grad: Tensor | None, fn: Conversion) -> Tensor | None:
    return None if grad is None else fn(grad if grad.is_sparse else plain(grad))


def _take_over(new: Engine, old: Engine) -> None:
    """Give an engine what was set on the one before it."""
    new.set_synchronises(old.synchronises)
    if (factors := old.reducer.divide_factors) is not None:
        new.reducer.set_divide_factors(*factors)
    if (hook := old.reducer.hook) is not None:
        new.reducer.set_hook(hook)
    for index, lifecycle in enumerate(old.root.lifecycles):
        if new.root.lifecycles[index].reshard_policy is not lifecycle.reshard_policy:
            new.root.set_reshard_policy(index, lifecycle.reshard_policy)
