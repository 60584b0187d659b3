"""Puts one engine over the units of a root, and takes it off again."""

from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from fsdp.building.conversions import Converter
from fsdp.building.copies import ATTRIBUTES, Copier
from fsdp.building.other_engines import accept_other_engines, refuse_other_engines
from fsdp.comm.context import CommContext
from fsdp.debug.delays import delayed
from fsdp.debug.dump_on_signal import remember
from fsdp.device.storage import MemoryTracker
from fsdp.device.streams import META, default_device, make_streams
from fsdp.errors import NoMemoryYet
from fsdp.params.module_tree import ModuleTree
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.forward_hooks import hook_units
from fsdp.runtime.launch_gathers import Gathers
from fsdp.runtime.passes import Passes
from fsdp.runtime.path_policy import PathPolicy
from fsdp.runtime.prefetch import PrefetchSchedule
from fsdp.runtime.registry import UnitRef
from fsdp.runtime.steps import check_steps
from fsdp.runtime.uneven.common_path import CommonPath
from fsdp.shards.optimizer_state import cuts
from fsdp.shards.optimizer_steps import hook_optimizers
from fsdp.state_dict.state_dict_hooks import StateHooks


def attach(
    units: Sequence[Unit], descendants: Sequence[frozenset[int]], comms: CommContext, borrowed: Sequence[str] = ()
) -> Engine:
    """Put one engine over `units`, outermost first, and set the hooks of all of them.

    `descendants`: for each unit, the numbers of the units inside it. `borrowed`: what the root uses of units that are not inside
    it, each as the end of a sentence.
    """
    hook_optimizers()
    cuts.count += 1
    device = next((unit.device for unit in units if unit.flats), torch.device("cpu"))
    offloads = any(unit.copies_shards for unit in units)
    streams = delayed(make_streams(device, len(comms.lanes), offloads), comms.world_comm.rank, device)
    tracker = MemoryTracker()
    inner = dict.fromkeys(flat.comms for unit in units for flat in unit.flats if not flat.comms.same_ranks_as(comms))
    comms = comms._replace(inner=tuple(inner))
    comms.join_groups()
    for unit in units:
        unit.join(comms, streams, tracker, device, torch.device("cpu") if offloads else device)
    engine = Engine(units, descendants, comms, streams, tracker)
    hooks = hook_units(_make_passes(engine))
    check_steps(engine)
    remember(engine.snapshot)
    refusals = _refuse_on_meta(engine)
    for index, unit in enumerate(units):
        state_hooks = StateHooks(engine, index)
        ref = UnitRef(engine, hooks, state_hooks.handles if index else [*state_hooks.handles, *refusals], index)
        copier = Copier(engine, index, attach)
        for module in unit.modules:
            module.__dict__[UnitRef.ATTRIBUTE] = ref
            module.__dict__[Copier.ATTRIBUTE] = copier
            if unit.replaces_params:
                module.__dict__[Converter.ATTRIBUTE] = Converter(module)
            refuse_other_engines(module)
    for unit in units[1:]:
        unit.module.__dict__.pop(ModuleTree.ATTRIBUTE, None)
    ModuleTree(units[0].modules, borrowed)
    return engine


def _make_passes(engine: Engine) -> Passes:
    units, config = engine.units, engine.units[0].config
    cap = config.coalesce_bytes if engine.comms.reduce_comm.size > 1 else 0
    path: PathPolicy
    if config.uneven_paths:
        path = CommonPath(engine)
    else:
        names, sizes = [unit.name for unit in units], [sum(unit.gather_sizes) for unit in units]
        forward, backward = (
            PrefetchSchedule(config.prefetch, f"{kind} of {names[0]!r}", names, sizes, cap) for kind in ("forward", "backward")
        )
        path = PathPolicy(forward, backward)
        numbers = {id(module): number for number, unit in enumerate(units) for module in unit.modules}
        for number, unit in enumerate(units):
            for schedule, ahead in zip((forward, backward), unit.settings.ahead, strict=True):
                schedule.give(number, [numbers[id(module)] for module in ahead if id(module) in numbers])
    return Passes(engine, path, Gathers(units, engine.streams, cap, engine.stats))


def _refuse_on_meta(engine: Engine) -> list[RemovableHandle]:
    """Let the forwards of all units raise, if some are on the meta device. A rehearsal computes there."""
    without_memory = [unit for unit in engine.units if any(flat.device == META for flat in unit.flats)]
    if not without_memory or default_device(engine.comms.world_comm.supports_device) == META:
        return []
    root = engine.units[0]
    wanted = {id(p) for flat in without_memory[0].flats if flat.device == META for p in flat.sharded_params}

    def refuse(*_: object) -> None:
        without_memory[0].check_modules()
        raise NoMemoryYet(
            "FSDP parameters should be materialized from meta device before training, but the following were still on meta "
            f"device: {[name for name, one in root.module.named_parameters() if id(one) in wanted]}. Call "
            "to_empty(device=...) on the wrapped model and give the parameters values, or call load_state_dict."
        )

    modules = [module for unit in engine.units for module in unit.modules]
    return [module.register_forward_pre_hook(refuse, prepend=True) for module in modules]


def detach(refs: Iterable[UnitRef]) -> None:
    """Take the engines off units. A step that is going on is abandoned. The units keep their shards and have no hooks."""
    refs = tuple(refs)
    for ref in {id(ref.engine): ref for ref in refs}.values():
        ref.engine.reset_step()
        for hooks in ref.hooks:
            hooks.remove()
    for ref in refs:
        for handle in ref.state_dict_handles:
            handle.remove()


def forget(ref: UnitRef) -> None:
    """Remove the attributes by which modules are a unit."""
    for module in ref.unit.modules:
        accept_other_engines(module)
        for name in ATTRIBUTES:
            module.__dict__.pop(name, None)
