"""The drop-in modules, and where the library that each stands for has the same names."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple

WHAT_IT_HAS: Final = ("*",)
"""Stands for every name of the door that the place has."""


class Door(NamedTuple):
    """A drop-in module, and the modules of the library in which its names are replaced."""

    module: str
    """The drop-in module. Its `__all__` are the names."""
    places: Mapping[str, tuple[str, ...]]
    """By module of the library: the names that are replaced there."""
    aliases: Mapping[tuple[str, str], str] = MappingProxyType({})
    """Other names of the same things: (module of the library, its attribute) -> our name."""
    keeps: tuple[str, ...] = ()
    """Modules of the library that keep its own names, also if nobody has imported them yet: they reach into its engine."""


_STATE_DICT: Final = "torch.distributed.checkpoint.state_dict"
_FAIRSCALE_WRAP: Final = ("auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap")
_FAIRSCALE_FSDP: Final = (
    "FullyShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
)
_FAIRSCALE_CHECKPOINT: Final = ("checkpoint_wrapper", "is_checkpointing", "is_recomputing")
_FAIRSCALE_RECOMPUTE: Final = ("disable_checkpointing", "enable_checkpointing", "enable_recomputing")

DOORS: Final[dict[str, Door]] = {
    "torch_fsdp": Door(
        "fsdp.compat.torch_fsdp",
        {
            "torch.distributed.fsdp": WHAT_IT_HAS,
            "torch.distributed.fsdp.api": WHAT_IT_HAS,
            "torch.distributed.fsdp.fully_sharded_data_parallel": WHAT_IT_HAS,
            "torch.distributed.fsdp.sharded_grad_scaler": WHAT_IT_HAS,
            "torch.distributed.fsdp.wrap": WHAT_IT_HAS,
            # get_state_dict and its like ask whether a module is FSDP1's
            _STATE_DICT: (),
        },
        MappingProxyType(
            {
                (_STATE_DICT, "FSDP"): "FullyShardedDataParallel",
                (_STATE_DICT, "_get_module_fsdp_state_if_fully_sharded_module"): "instance_of",
            }
        ),
    ),
    "fully_shard": Door(
        "fsdp.compat.fully_shard",
        {
            "torch.distributed.fsdp": WHAT_IT_HAS,
            "torch.distributed._composable.fsdp": WHAT_IT_HAS,
            "torch.distributed._composable.fsdp.fully_shard": WHAT_IT_HAS,
            "torch.distributed.pipelining": ("PipelineStage",),
            "torch.distributed.pipelining.stage": ("PipelineStage",),
        },
        # for a module of torch's FSDP2 it reduces gradients by itself; for ours our stage does
        keeps=("torch.distributed.pipelining",),
    ),
    "ddp": Door("fsdp.compat.ddp", {"torch.nn.parallel": WHAT_IT_HAS, "torch.nn.parallel.distributed": WHAT_IT_HAS}),
    "apex": Door(
        "fsdp.compat.apex",
        {"apex.parallel": ("DistributedDataParallel",), "apex.parallel.distributed": ("DistributedDataParallel",)},
    ),
    "fairscale": Door(
        "fsdp.compat.fairscale",
        {
            "fairscale.nn": ("FlattenParamsWrapper", "FullyShardedDataParallel", "checkpoint_wrapper", *_FAIRSCALE_WRAP),
            "fairscale.nn.data_parallel": _FAIRSCALE_FSDP,
            "fairscale.nn.data_parallel.fully_sharded_data_parallel": (*_FAIRSCALE_FSDP, "cast_floats_to_right_precision"),
            "fairscale.nn.data_parallel.fsdp_optim_utils": ("is_singleton_tensor",),
            "fairscale.nn.wrap": _FAIRSCALE_WRAP,
            "fairscale.nn.wrap.auto_wrap": ("ConfigAutoWrap", *_FAIRSCALE_WRAP),
            "fairscale.nn.checkpoint": _FAIRSCALE_CHECKPOINT,
            "fairscale.nn.checkpoint.checkpoint_activations": (*_FAIRSCALE_CHECKPOINT, *_FAIRSCALE_RECOMPUTE),
            "fairscale.nn.checkpoint.checkpoint_utils": ("patch_batchnorm",),
            "fairscale.nn.misc": ("FlattenParamsWrapper", "checkpoint_wrapper"),
            "fairscale.nn.misc.flatten_params_wrapper": ("FlatParameter", "FlattenParamsWrapper"),
            "fairscale.internal.parallel": ("ProcessGroupName", "chunk_and_pad", "get_process_group_cached"),
            "fairscale.optim.grad_scaler": ("GradScaler", "ShardedGradScaler"),
        },
    ),
}


class Replacement(NamedTuple):
    """One attribute of a library that is replaced."""

    place: str
    name: str
    ours: Any
    theirs: Any
    """What the library has there. `ours`, if the library is absent."""


def is_absent(place: str) -> bool:
    """Whether the whole library of `place` is not there, so that modules with our names may stand in for it."""
    package = place.partition(".")[0]
    return package not in sys.modules and importlib.util.find_spec(package) is None


def replacements(door: Door) -> list[Replacement]:
    """The attributes that the door replaces, in the order of its places. Imports the door, and the places that there are."""
    ours = importlib.import_module(door.module)
    for place in door.keeps:
        _module(place)
    found = []
    for place, listed in door.places.items():
        names = ours.__all__ if listed == WHAT_IT_HAS else listed
        if is_absent(place):
            found += [Replacement(place, name, getattr(ours, name), getattr(ours, name)) for name in names]
        elif (module := _module(place)) is not None:
            aliases = {name: alias for (where, name), alias in door.aliases.items() if where == place}
            pairs = {name: getattr(ours, our_name) for name, our_name in ({name: name for name in names} | aliases).items()}
            theirs = {name: vars(module)[name] for name in pairs if callable(vars(module).get(name))}
            found += [Replacement(place, name, pairs[name], theirs[name]) for name in theirs if theirs[name] is not pairs[name]]
    return found


def _module(place: str) -> ModuleType | None:
    """The module of the library; None if this version of the library has none of that name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        return None
