"""Hugging Face Accelerate, and what stands on it (Trainer, TRL), with this engine in the place of torch's FSDP.

Rule: PATCHES is all that is changed in Accelerate and peft. Whatever else the FSDP plugin does, it does with names of the doors.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from fsdp import compat
from fsdp.building.torch_policies import UNKNOWN, refuse_unknown_fields
from fsdp.compat.doors import Replacement
from fsdp.compat.fsdp1.sharding import instances_in
from fsdp.errors import ShardingError
from fsdp.state_dict.fqns import plain_fqn
from fsdp.state_dict.model_view import giving_shards

try:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
except ImportError as missing:
    raise ImportError("fsdp.integrations.accelerate needs the package accelerate: pip install 'fsdp[accelerate]'.") from missing

__all__ = ["DOORS", "PATCHES", "Patch", "install", "uninstall"]

DOORS: Final = ("torch_fsdp", "fully_shard")
"""What `fsdp.compat.install` puts in: for version 1 of Accelerate's FSDP plugin, and for version 2."""
PLUGIN_FIELDS: Final = (
    *("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch", "mixed_precision_policy"),
    *("auto_wrap_policy", "cpu_offload", "ignored_modules", "state_dict_type", "state_dict_config", "optim_state_dict_config"),
    *("limit_all_gathers", "use_orig_params", "param_init_fn", "sync_module_states", "forward_prefetch"),
    *("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"),
    *("transformer_cls_names_to_wrap", "min_num_params"),
)
"""The fields of Accelerate's FSDP plugin. What it makes of them, it does with the names of the doors."""
Method = Callable[..., Any]


class Patch(NamedTuple):
    """A method or function of Accelerate that is replaced by one which calls it."""

    place: str
    """The module, and the class in it if there is one."""
    name: str
    replace: Callable[[Method], Method]
    """From Accelerate's to ours. Its docstring says what happens without the patch."""


def _shard_on_cpus(theirs: Method) -> Method:
    """On CPU processes the plugin is ignored without a word, and the model trains with DistributedDataParallel."""

    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        _put_in_patches()
        if fsdp_plugin is not None:
            _check_door(fsdp_plugin.fsdp_version)
            _check_fields(fsdp_plugin)
        theirs(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=fsdp_plugin)
        # later instances of the class copy the type from there
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return __init__


def _check_door(version: int) -> None:
    """Raises:
    ShardingError: there is no such version, or its door is not installed, so that torch's own engine would train.
    """
    if version not in (1, 2):
        raise ShardingError(f"fsdp_version={version!r}: {UNKNOWN} Known are 1 and 2.")
    door, found = DOORS[version - 1], compat.installed()
    if door not in found:
        raise ShardingError(
            f'the FSDP plugin with fsdp_version={version} needs the door "{door}"; installed are {", ".join(found) or "none"}: '
            f'call fsdp.integrations.accelerate.install("{door}") before the Accelerator is made, or give another fsdp_version.'
        )


def _check_fields(plugin: Any) -> None:
    """Raises:
    ShardingError: the plugin asks for something in a field that a later version of Accelerate has.
    """
    # the plugin writes False for None
    left_out = (one.name for one in fields(plugin) if one.default is None and getattr(plugin, one.name) is False)
    refuse_unknown_fields(plugin, {*PLUGIN_FIELDS, *left_out})


def _initialise_on_cpus(theirs: Method) -> Method:
    """With sync_module_states it raises on a machine without accelerators."""

    @functools.wraps(theirs)
    def __post_init__(self: Any) -> None:
        try:
            theirs(self)
        except RuntimeError:
            if torch.accelerator.is_available() or not self.sync_module_states:
                raise
            vars(self)["param_init_fn"] = lambda module: module.to_empty(device="cpu", recurse=False)

    return __post_init__


def _load_into_new_optimizers(theirs: Method) -> Method:
    """With version 1 and SHARDED_STATE_DICT a new optimizer keeps its empty state, and training goes on with another."""

    @functools.wraps(theirs)
    def load_fsdp_optimizer(fsdp_plugin: Any, accelerator: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        if fsdp_plugin.fsdp_version == 1 and fsdp_plugin.state_dict_type.name == "SHARDED_STATE_DICT":
            _init_optim_state(getattr(optimizer, "optimizer", optimizer))  # does nothing if it has state
        return theirs(fsdp_plugin, accelerator, optimizer, *args, **kwargs)

    return load_fsdp_optimizer


def _find_adapters(theirs: Method) -> Method:
    """With version 1 no adapter is saved or loaded, without a word: peft looks for names that have the wrappers' inside."""

    @functools.wraps(theirs)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not instances_in(model):
            return theirs(model, *args, **kwargs)

        def plainly(method: str) -> Callable[..., Any]:
            def named(*args: Any, **kwargs: Any) -> Any:
                found = getattr(type(model), method)(model, *args, **kwargs)
                return ((plain_fqn(name), one) for name, one in found)

            return named

        shown = {name: plainly(name) for name in ("named_modules", "named_parameters")}
        if theirs.__name__ == "set_peft_model_state_dict":
            # it looks at names and shapes; the state dict itself would be gathered
            shown["state_dict"] = lambda: dict(shown["named_parameters"]())
        model.__dict__.update(shown)
        # rank 0 saves alone: it has the state dict, and asks modules that are saved whole for theirs, of which it needs the names
        has_values = theirs.__name__ == "get_peft_model_state_dict" and (args or kwargs.get("state_dict") is not None)
        try:
            with giving_shards(model) if has_values else nullcontext():
                return theirs(model, *args, **kwargs)
        finally:
            for name in shown:
                del model.__dict__[name]

    return call


PATCHES: Final = (
    Patch("accelerate.state.AcceleratorState", "__init__", _shard_on_cpus),
    Patch("accelerate.utils.dataclasses.FullyShardedDataParallelPlugin", "__post_init__", _initialise_on_cpus),
    Patch("accelerate.utils.fsdp_utils", "load_fsdp_optimizer", _load_into_new_optimizers),
    Patch("peft.utils.save_and_load", "get_peft_model_state_dict", _find_adapters),
    Patch("peft.utils.save_and_load", "set_peft_model_state_dict", _find_adapters),
)
"""What `install` changes in Accelerate, and in peft where it is imported, and why."""


_replaced: Final[list[Replacement]] = []
"""The functions of Accelerate in whose place a patch stands."""


class Installed:
    """What `install` returns: a context at whose end everything is put back."""

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *failure: object) -> None:
        if _replaced:
            uninstall()


def install(*doors: str) -> Installed:
    """Let Accelerate's FSDP plugin train with this engine, on CPU processes as well.

    Call it before the Accelerator or the Trainer is made. It puts the names of `doors` (all of DOORS if none is given) in torch's
    place with `fsdp.compat.install`, and PATCHES into Accelerate. A second call changes nothing.
    """
    compat.install(*(doors or DOORS))
    _put_in_patches()
    return Installed()


def _put_in_patches() -> None:
    """Put in the patches that are not in. Those of a library that nobody has imported wait until an Accelerator is made."""
    for patch in PATCHES:
        if patch.place.partition(".")[0] not in sys.modules:
            continue
        if not any((one.place, one.name) == (patch.place, patch.name) for one in _replaced):
            theirs = vars(_owner(patch.place))[patch.name]
            _replaced.append(Replacement(patch.place, patch.name, patch.replace(theirs), theirs))
            _bind(patch.place, patch.name, theirs, _replaced[-1].ours)


def uninstall() -> None:
    """Put everything back, in torch, in Accelerate and in peft."""
    while _replaced:
        one = _replaced.pop()
        _bind(one.place, one.name, one.ours, one.theirs)
    compat.uninstall()


def _owner(place: str) -> Any:
    """The module or the class of that name."""
    try:
        return import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(import_module(module), name)


def _bind(place: str, name: str, before: Method, after: Method) -> None:
    """Replace `before` in its place; if that is a module, also in all modules that imported it."""
    owner = _owner(place)
    setattr(owner, name, after)
    if isinstance(owner, ModuleType):
        for module in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
            for key in [key for key, value in list(vars(module).items()) if value is before and module.__name__ != __name__]:
                setattr(module, key, after)
