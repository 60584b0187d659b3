"""Refuses a pickle of a wrapped module, a copy of its hooks without it, and a forward on the meta device."""

from typing import NoReturn

from torch.utils.hooks import RemovableHandle

from fsdp.device.streams import META, default_device
from fsdp.errors import NoMemoryYet, ShardingError
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine


class RefuseCopy:
    """Base class of the objects of a unit that its module refers to. Pickling the module reaches one, and it refuses."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(f"unit {self._unit.name!r}: its hooks cannot be copied without its module; copy.deepcopy the model.")

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a module holds the engine of its process: save what "
            "fsdp.full_state_dict(model) returns on rank 0 (every rank calls it), or model.state_dict() by DDP's names."
        )


def refuse_on_meta(engine: Engine) -> list[RemovableHandle]:
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
