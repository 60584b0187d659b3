"""Another dtype or device for units that exist, as `model.half()` asks for after wrapping; or another mixed precision.

Nothing is communicated. Flat buffers are made anew, and cut each parameter as before, so the state of an optimizer still fits.
A smaller dtype then has shards that are no multiples of 16 bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.building.attach import attach, detach
from fsdp.building.conversions import Conversion
from fsdp.building.dissolve import refuse_losses
from fsdp.config import Config, MixedPrecisionPolicy
from fsdp.errors import ShardingError
from fsdp.params.buffer_plan import compute_dtype
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.module_tree import ModuleTree
from fsdp.params.placement import place_again
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import refuse_traced, refuse_unless_resting, unit_ref_of
from fsdp.shards.shard_tensor import plain


def changed_flats(unit: Unit, fn: Conversion) -> list[FlatBuffer]:
    """The flat buffers of a unit whose shards get another dtype or device by `fn`."""
    probes = [(flat, flat.shard.new_empty(0)) for flat in unit.flats]
    return [flat for flat, probe in probes if (made := fn(probe)).dtype is not probe.dtype or made.device != probe.device]


def changes(unit: Unit, fn: Conversion) -> bool:
    """Whether `fn` gives shards of a unit another dtype or device."""
    return bool(changed_flats(unit, fn))


class Part(NamedTuple):
    """Parameters of one flat buffer that are converted alike, and have a flat buffer of their own afterwards."""

    flat: FlatBuffer
    numbers: Sequence[int]
    """The numbers of the parameters."""
    fn: Conversion

    def values(self) -> list[Tensor]:
        """The converted shards, one for each parameter."""
        return [self.fn(self.flat.shard_view(number)) for number in self.numbers]

    def made(self, dtype: torch.dtype, config: Config) -> FlatBuffer:
        """The flat buffer of the part, with shards of `dtype`."""
        flat, infos = self.flat, [self.flat.param_infos[number] for number in self.numbers]
        computes = compute_dtype(infos[0], dtype, config)
        itemsize = min(dtype.itemsize, computes.itemsize)
        placements = place_again(flat.placements, flat.sharded_params, self.numbers, dtype, itemsize)
        return FlatBuffer(infos, placements, flat.comms, computes, config.offload)


@torch.no_grad()
def convert(engine: Engine, fn: Conversion, units: Collection[int], chosen: Collection[int] | None = None) -> Engine:
    """Convert the parameters and gradients of some units of a root by `fn`; return the engine that drives the root from now on.

    `units`: the numbers of the units. `chosen`: the ids of parameters; the others stay as they are. None means all. Parameters of
    one flat buffer can be chosen apart if its shards are DTensors: every rank has the same rows of them in another buffer.
    Parameter objects, hooks of the user, and the options of the root stay.

    Memory: the shards of these units twice.

    Raises:
        ShardingError: a forward, a backward or a summon is going on; gradients are kept under `no_sync`; the root is inside
            `fsdp.join`, or uses parameters of others; or `fn` moves shards that `offload_policy` keeps in host memory. Nothing
            was changed.
    """
    _refuse(engine, units, "to", fn)
    parts = {index: [part for flat in engine.units[index].flats for part in _parts_of(flat, fn, chosen)] for index in units}
    configs = {index: engine.units[index].config for index in units}
    return _remade(engine, parts, configs)


def _parts_of(flat: FlatBuffer, fn: Conversion, chosen: Collection[int] | None) -> list[Part]:
    """A flat buffer as it is converted: whole, or the chosen parameters and the others apart."""
    numbers = [i for i, parameter in enumerate(flat.sharded_params) if chosen is None or id(parameter) in chosen]
    others = [i for i in range(len(flat.sharded_params)) if i not in numbers]
    return [part for part in (Part(flat, numbers, fn), Part(flat, others, _unchanged)) if part.numbers]


@torch.no_grad()
def change_precision(engine: Engine, policies: Mapping[int, MixedPrecisionPolicy], function_name: str) -> Engine:
    """Let some units of a root compute in other dtypes; return the engine that drives the root from now on.

    `policies`: the policy of each unit, by its number. The shards keep their dtype. Errors begin with `function_name`.

    Raises:
        ShardingError: see `convert`.
    """
    _refuse(engine, policies, function_name)
    parts = {index: [Part(flat, range(len(flat.parts)), _unchanged) for flat in engine.units[index].flats] for index in policies}
    configs = {index: replace(engine.units[index].config, mp_policy=policy) for index, policy in policies.items()}
    return _remade(engine, parts, configs)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _remade(engine: Engine, parts: Mapping[int, list[Part]], configs: Mapping[int, Config]) -> Engine:
    """An engine over units of which some are made anew, with new options. `parts`: how each of these is converted."""
    values = {index: [part.values() for part in of_unit] for index, of_unit in parts.items()}
    refs = [ref for unit in engine.units if (ref := unit_ref_of(unit.module)) is not None]
    detach(refs)
    made = [
        _convert(unit, parts[index], values[index], configs[index]) if index in parts else unit
        for index, unit in enumerate(engine.units)
    ]
    new = attach(made, engine.descendants, engine.comms)
    _take_over(new, engine)
    return new


def _refuse(engine: Engine, units: Collection[int], function_name: str, fn: Conversion = _unchanged) -> None:
    engine.clean_up_dead_forward()
    refuse_unless_resting(function_name, engine)
    refuse_traced(function_name, engine)
    refuse_losses(engine, function_name)
    ModuleTree.of(engine.units[0].module).check(engine.units)
    for index in units:
        unit = engine.units[index]
        if any(flat.home.copies and fn(flat.shard.new_empty(0)).device != flat.shard.device for flat in unit.flats):
            raise ShardingError(
                f"{function_name}: the shards of unit {unit.name!r} are in host memory by offload_policy and stay there, while "
                f"{unit.flats[0].device} computes; change the dtype alone, or move the module before wrapping it."
            )
        unit.check_shards()


def _convert(unit: Unit, parts: list[Part], values: list[list[Tensor]], config: Config) -> Unit:
    grads = [[_converted_grad(part.flat.sharded_params[number].grad, part.fn) for number in part.numbers] for part in parts]
    stepped = unit.versions.changed_since_made
    for part, converted in zip(parts, values, strict=True):
        flat = part.flat
        device = flat.device if flat.home.copies else converted[0].device
        for number in part.numbers:
            # a stand-in of the full shape with the memory of one element, which the new buffer cuts
            stand_in = converted[0].new_empty((), device=device).expand(flat.layout.slots[number].shape)
            placement = flat.placements[number]
            placement.make_full(flat.param_infos[number], flat.unsharded_params[number], placement.shown(stand_in), None)
    unit.dissolve()
    flats = [part.made(converted[0].dtype, config) for part, converted in zip(parts, values, strict=True)]
    for flat, converted, of_flat in zip(flats, values, grads, strict=True):
        for number, (value, grad) in enumerate(zip(converted, of_flat, strict=True)):
            flat.shard_view(number).copy_(value)
            if grad is not None:
                flat.sharded_params[number].grad = flat.placements[number].as_shard(grad)
    new = Unit(unit.modules, unit.name, flats, config, unit.comms, unit.settings)
    if stepped:
        new.versions.repeat(1)  # an optimizer may have state that is cut like the shards
    return new


def _converted_grad(grad: Tensor | None, fn: Conversion) -> Tensor | None:
    return None if grad is None else fn(grad if grad.is_sparse else plain(grad))


def _take_over(new: Engine, old: Engine) -> None:
    """Give an engine what was set on the one before it."""
    new.synchronises = old.synchronises
    if (hook := old.reducer.reductions.hook) is not None:
        new.reducer.set_hook(hook)
