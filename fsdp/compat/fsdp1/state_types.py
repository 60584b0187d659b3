"""Which of FSDP1's formats the state dicts of a model have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from fsdp.building.torch_policies import refuse_unknown_fields
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.compat.fsdp1.torch_names import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.compat.shared.newer_peers import refuse_unknown_member

CONFIGS: Final[dict[StateDictType, tuple[type[Any], type[Any]]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
"""The classes of configurations that belong to each format."""
CONFIG_NAMES: Final = ("state_dict_config", "optim_state_dict_config")
FIELDS: Final = ("offload_to_cpu", "rank0_only", "_use_dtensor")
"""The fields of all configurations."""


def settings_of(module: nn.Module) -> Any:
    """The format of all instances in `module`; None if there is none.

    Raises:
        AssertionError: the instances have different formats.
    """
    found = [one._settings for one in instances_in(module)]
    for settings in found[1:]:
        if settings != found[0]:
            raise AssertionError(
                f"the instances have different formats, {found[0]} and {settings}; set one for all, on the outermost module."
            )
    if not found:
        return None
    for one in instances_in(module):
        if one._device_mesh is not None:
            for config in (found[0].state_dict_config, found[0].optim_state_dict_config):
                if hasattr(config, "_use_dtensor"):
                    config._use_dtensor = True
    return found[0]


def set_settings(module: nn.Module, kind: StateDictType, config: Any, optim_config: Any) -> StateDictSettings:
    """Set the format of all instances in `module`; return the format before.

    Raises:
        RuntimeError: a configuration belongs to another format.
        AssertionError: the instances have different formats now.
    """
    given = []
    refuse_unknown_member(kind, [one.name for one in CONFIGS])
    for name, wanted, one in zip(CONFIG_NAMES, CONFIGS[kind], (config, optim_config), strict=True):
        if one is not None and type(one) is not wanted:
            raise RuntimeError(f"Expected {name} of type {wanted.__name__} for {kind.name} but got {type(one).__name__}.")
        refuse_unknown_fields(one, FIELDS)
        given.append(wanted() if one is None else one)
    instances = instances_in(module)
    kinds = {one._settings.state_dict_type for one in instances}
    if len(kinds) > 1:
        raise AssertionError(f"the instances have different formats, {sorted(one.name for one in kinds)}; set one for all first.")
    before = instances[0]._settings if instances else StateDictSettings(None, None, None)  # type: ignore[arg-type]
    for one in instances:
        one.set_settings(StateDictSettings(kind, *given))
    return before


@contextmanager
def settings_inside(module: nn.Module, kind: StateDictType, config: Any, optim_config: Any) -> Iterator[None]:
    """Set the format of all instances in `module`, inside."""
    before = {one: one._settings for one in instances_in(module)}
    set_settings(module, kind, config, optim_config)
    try:
        yield
    finally:
        for one, settings in before.items():
            one.set_settings(settings)
