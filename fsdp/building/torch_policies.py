"""FSDP1's and FSDP2's own objects as options here: wrapping, mixed precision, offload. Imports nothing of them."""

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Protocol

from torch import nn

from fsdp.config import MixedPrecisionPolicy, OffloadPolicy
from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit

Choice = Callable[[str, nn.Module], bool]
Fsdp1Policy = Callable[[nn.Module, bool, int], bool]
"""FSDP1's policies: (module, recurse, nonwrapped_numel) -> whether to look into the module, or whether to wrap it."""


class CustomPolicy(Protocol):
    """FSDP1's policies that are objects: `ModuleWrapPolicy`, and `CustomPolicy` with options for each module."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, object]
    ) -> dict[nn.Module, dict[str, object]]: ...


COMMON: Final = ("param_dtype", "reduce_dtype", "cast_forward_inputs")
OF_FSDP2: Final = (*COMMON, "output_dtype", "param_dtype_override_fn")
"""The fields of FSDP2's `MixedPrecisionPolicy`."""
OF_FSDP1: Final = (*COMMON, "buffer_dtype", "keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore")
"""The fields of FSDP1's `MixedPrecision`."""
UNKNOWN: Final = "this version of fsdp does not know it, and would go on without it; leave it out."
OFFLOADS: Final = ("pin_memory", "offload_params")
"""The fields of FSDP2's and FSDP1's policies for offload."""


# wrapping policies ------------------------------------------------------------------------


def fsdp1_choice(policy: Fsdp1Policy, root: nn.Module, ignored: Collection[int]) -> Choice:
    """Ask an FSDP1 policy as FSDP1 does: children first, then whether what is left of the module is worth a unit."""
    chosen: set[int] = set()
    left_alone = {id(p) for module in root.modules() if id(module) in ignored for p in module.parameters()}

    def numel(module: nn.Module) -> int:
        free = [p for p in module.parameters() if id(p) not in left_alone and owning_unit(p) is None]
        return sum(p.numel() for p in free)

    def visit(module: nn.Module) -> int:
        """Choose among the modules below. Returns the number of elements that units own then."""
        total = numel(module)
        if not policy(module=module, recurse=True, nonwrapped_numel=total):  # type: ignore[call-arg]  # as FSDP1 calls it
            return 0
        taken = sum(visit(child) for child in module.children() if id(child) not in ignored)
        if module is root or not policy(module=module, recurse=False, nonwrapped_numel=total - taken):  # type: ignore[call-arg]
            return taken
        chosen.add(id(module))
        return total

    visit(root)
    return lambda name, module: id(module) in chosen


def custom_choice(policy: CustomPolicy, root: nn.Module, ignored: Collection[int]) -> dict[int, Any]:
    """Ask an FSDP1 `CustomPolicy`: the modules that it chooses, by id, each with a mesh of its own or None.

    Raises:
        ShardingError: it gives a module another option.
    """
    found = policy._run_policy(root, {module for module in root.modules() if id(module) in ignored}, {})
    for module, options in found.items():
        if options.keys() - {"mesh"}:
            raise ShardingError(
                f"auto_wrap_policy gives a {type(module).__name__} the options {options}; units of one call have the same but "
                "for mesh. Wrap that module first, by fsdp.fully_shard with its own options."
            )
    return {id(module): options.get("mesh") for module, options in found.items()}


# mixed precision --------------------------------------------------------------------------


def precision_of(policy: Any, root: nn.Module, wraps: bool) -> MixedPrecisionPolicy:
    """Convert a policy of FSDP1 or FSDP2, field by field. `wraps`: there is an auto_wrap_policy.

    Raises:
        ShardingError: it is no policy, or a field of it cannot be followed for `root`.
    """
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    is_fsdp2 = all(hasattr(policy, name) for name in (*COMMON, "output_dtype"))
    if not is_fsdp2 and not all(hasattr(policy, name) for name in (*COMMON, "buffer_dtype")):
        raise ShardingError(
            "mp_policy must be a fsdp.MixedPrecisionPolicy (fields param_dtype, reduce_dtype, output_dtype, cast_forward_inputs, "
            f"cast_root_forward_inputs), FSDP2's class of that name, or FSDP1's MixedPrecision, not {policy!r}."
        )
    refuse_unknown_fields(policy, OF_FSDP2 if is_fsdp2 else OF_FSDP1)
    if not is_fsdp2:
        _refuse_what_fsdp1_alone_does(policy, root, wraps)
    return MixedPrecisionPolicy(
        policy.param_dtype,
        policy.reduce_dtype,
        getattr(policy, "output_dtype", None),
        policy.cast_forward_inputs,
        getattr(policy, "cast_root_forward_inputs", False),
        # what None means for `reduce_dtype` changed in the version that brought this field
        policy.reduce_dtype is None and hasattr(policy, "param_dtype_override_fn"),
    )


def _refuse_what_fsdp1_alone_does(policy: Any, root: nn.Module, wraps: bool) -> None:
    if getattr(policy, "keep_low_precision_grads", False):
        raise ShardingError("mp_policy.keep_low_precision_grads=True: `.grad` always has the dtype of the shards; leave it out.")
    dtype = getattr(policy, "buffer_dtype", None)
    for name, buffer in root.named_buffers():
        if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
            raise ShardingError(
                f"mp_policy.buffer_dtype={dtype}: buffers keep their dtype, and {name!r} is {buffer.dtype}; leave it out, or "
                "convert the buffers before wrapping."
            )
    kept = tuple(getattr(policy, "_module_classes_to_ignore", ()))
    for name, module in root.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if wraps and policy.param_dtype is not None and isinstance(module, kept) and any(owning_unit(p) is None for p in own):
            raise ShardingError(
                f"mp_policy: FSDP1's MixedPrecision leaves {name!r}, a {type(module).__name__}, in full precision. Wrap it "
                "first, by fsdp.fully_shard(module) without mp_policy; or give a fsdp.MixedPrecisionPolicy, which includes it."
            )


# offload ----------------------------------------------------------------------------------


def offload_of(policy: object) -> OffloadPolicy | None:
    """Convert a policy of FSDP1 or FSDP2. FSDP2's `OffloadPolicy` and FSDP1's `CPUOffload(offload_params=False)` are None.

    Raises:
        ShardingError: it is no policy.
    """
    if policy is None or isinstance(policy, OffloadPolicy):
        return policy
    refuse_unknown_fields(policy, OFFLOADS)
    if hasattr(policy, "pin_memory"):
        return OffloadPolicy(policy.pin_memory)
    if hasattr(policy, "offload_params"):
        return OffloadPolicy() if policy.offload_params else None
    if type(policy).__name__ == "OffloadPolicy":
        return None
    raise ShardingError(
        f"offload_policy must be a fsdp.OffloadPolicy, FSDP2's CPUOffloadPolicy, or FSDP1's CPUOffload, not {policy!r}."
    )


def refuse_unknown_fields(given: object, known: Collection[str]) -> None:
    """Raise ShardingError if an object of a peer has another value than the default in a field that is none of `known`."""
    kind = type(given)
    own = fields(given) if is_dataclass(given) else ()
    defaults = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in own}
    others = (name for name in getattr(given, "__dict__", ()) if name not in defaults and not name.startswith("_"))
    for name in (*defaults, *others):
        if name not in known and not are_alike(getattr(given, name), defaults.get(name, getattr(kind, name, MISSING))):
            raise ShardingError(f"{kind.__name__}: {name}={getattr(given, name)!r}: {UNKNOWN}")


def are_alike(value: object, default: object) -> bool:
    """Whether a value is the default of an argument or a field, which asks for nothing."""
    return value is default or (type(value) is type(default) and bool(value == default))
