"""The names in a plain module's state dict, and checks of a given state dict against them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys

from fsdp.errors import ShardingError, StateMismatch
from fsdp.shards.refusals import check_fit
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict.param_shard import ParamShard, param_shards_in

IncompatibleKeys = _IncompatibleKeys
"""The names that a load with `strict=False` left out, as torch's `load_state_dict` returns them."""
TRANSPARENT = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"})
"""Attributes in which wrappers keep a module, and which are left out of the names of its parameters."""
EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch stores the result of a module's `get_extra_state`."""


def entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of the plain module's state dict, in its order. A tied tensor occurs once for each name."""
    for prefix, module in _plain_modules(model):
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is not None:
                yield prefix + name, tensor


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each tensor in `entries`, by its id."""
    return {id(tensor): name for name, tensor in reversed([*entries(model)])}


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with a `get_extra_state` of their own, by the name of that state in the plain module's state dict."""
    return {
        prefix + EXTRA_STATE: module
        for prefix, module in _plain_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def check_names(operation: str, wanted: list[str], given: Mapping[str, object], strict: bool = True) -> IncompatibleKeys:
    """Check that `given` has the names `wanted` and no others; return the differences. Errors begin with `operation`.

    Raises:
        StateMismatch: with `strict`, names are missing or unexpected.
    """
    known = set(wanted)
    missing = [name for name in wanted if name not in given]
    unexpected = sorted(name for name in given if name not in known)
    if strict and (missing or unexpected):
        raise StateMismatch(
            # torch's words are in it, which a user's code may look for
            f"{operation}: Missing key(s): {missing or 'none'}. Unexpected key(s): {unexpected or 'none'}. "
            "Give the state dict of the same plain module, or strict=False to leave these names out."
        )
    return IncompatibleKeys(missing, unexpected)


def with_counts(model: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`given` with the batches that each BatchNorm of the model has counted, where it is from before torch kept the count.

    torch's own `load_state_dict` puts them there for a state dict without a version too.
    """
    versions = getattr(given, "_metadata", None) or {}
    counts = {
        f"{prefix}num_batches_tracked": module.num_batches_tracked
        for prefix, module in _plain_modules(model)
        if isinstance(module, _NormBase) and (versions.get(prefix[:-1], {}).get("version") or 0) < 2
    }
    return {**{name: count for name, count in counts.items() if count is not None}, **given}


def given_by(operation: str, rank: int, state_dict: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The state dict that `rank` gives; None if it leaves that to rank 0, which must give one. Functions return {} on others."""
    if state_dict:
        return state_dict
    if rank == 0:
        raise ShardingError(
            f"{operation}: rank 0 gives {'None' if state_dict is None else 'an empty state dict'}; it must give the full one. "
            "Other ranks may give None, or the {} that they got."
        )
    return None


def check_values(operation: str, model: nn.Module, given: Mapping[str, object]) -> None:
    """Raise ShardingError if a value in `given` cannot be loaded under its name in `model`. Errors begin with `operation`."""
    param_shards = param_shards_in(model)
    for name, tensor in entries(model):
        if name in given:
            part_for(operation, name, given[name], param_shards.get(id(tensor)), tensor)


def part_for(operation: str, name: str, given: object, param_shard: ParamShard | None, target: Tensor) -> Tensor:
    """What of `given` belongs into `target`, a tensor like the shard or an ordinary one. Refused if it does not fit."""
    if param_shard is not None:
        return param_shard.placement.part_of_given(operation, name, given, target)
    if isinstance(given, ShardedValue):
        raise ShardingError(
            f"{operation}: {name!r} is a part, and the model has an ordinary tensor there, such as one of a module that "
            "was put in after wrapping: give the full value, as in fsdp.full_state_dict(model)."
        )
    return check_fit(operation, name, given, tuple(target.shape), target.dtype)


def plain_fqn(path: str) -> str:
    """A name without the attributes in which wrappers keep a module."""
    return ".".join(part for part in path.split(".") if part and part not in TRANSPARENT)


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, with the prefix of the names of its tensors."""
    for path, module in model.named_modules(remove_duplicate=False):
        plain_path = plain_fqn(path)
        yield f"{plain_path}." if plain_path else "", module
