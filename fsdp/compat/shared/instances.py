"""What the names of several engines do alike: a wrapper has its module's attributes, state dicts other formats, units factors."""

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsdp.building.conversions import Conversion
from fsdp.building.copies import Memo
from fsdp.compat.shared.dtype_and_device import convert
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import UnitRef, refusal, refuse_unless_resting, unit_ref_of

WRAPPED_NAME: Final = "_fsdp_wrapped_module."
"""What FSDP1 and fairscale put before the names of a wrapped module's state dict."""


def copy_wrapper(wrapper: nn.Module, shared: Collection[object], memo: Memo) -> nn.Module:
    """The copy of a wrapper around a unit, with the same objects `shared`, such as process groups, which cannot be copied."""
    memo.update({id(one): one for one in shared})
    copied = memo[id(wrapper)] = type(wrapper).__new__(type(wrapper))
    copied.__dict__.update(copy.deepcopy(wrapper.__dict__, memo))
    return copied


class Wrapper(nn.Module):
    """Has the attributes and the items of the module in it, where it has none of that name itself."""

    _fsdp_holds: ClassVar = "_fsdp_wrapped_module"
    """The attribute that torch stores the module under."""
    _fsdp_answers: ClassVar = "_fsdp_wrapped_module"
    """The attribute whose value answers for the wrapper."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self._fsdp_holds:
                raise
            return getattr(getattr(self, self._fsdp_answers), name)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, self._fsdp_answers)[key]


def rename(state_dict: dict[str, Any], old: str, new: str) -> None:
    """Replace the beginning `old` of names by `new`; the order stays."""
    if old != new and any(key.startswith(old) for key in state_dict):
        items = [(new + key[len(old) :] if key.startswith(old) else key, value) for key, value in state_dict.items()]
        state_dict.clear()
        state_dict.update(items)


def drop_state_hooks(engine: Engine) -> None:
    """Remove the engine's hooks on state dicts, which have formats of a door."""
    for unit in engine.units:
        ref = unit_ref_of(unit.module)
        for handle in () if ref is None else ref.state_dict_handles:
            handle.remove()


def convert_from(ref: UnitRef, fn: Conversion, is_converted: Callable[[Unit], bool]) -> None:
    """Convert a unit and those inside it, if they are to be. Their state dicts have formats of a door. See `convert`."""
    inside = [ref.index, *sorted(ref.engine.descendants[ref.index])]
    found = [index for index in inside if is_converted(ref.engine.units[index])]
    if found:
        drop_state_hooks(convert(ref.engine, fn, found))


def put_on(device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Move tensors that have memory to a device. The objects stay."""
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def moved(inputs: Any, device: torch.device | None) -> Any:
    """`inputs` with all tensors in it on `device`."""
    return inputs if device is None else tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, inputs)


def divide_by(caller: str, ref: UnitRef, before: float, after: float) -> None:
    """Divide the gradients of a unit by these factors, from the next backward on. Every rank must call this alike.

    It replaces `average` and `predivide_factor` of the `ReductionPolicy`. Errors begin with `caller`.

    Raises:
        ShardingError: a factor is not a positive number, a communication hook reduces the gradients, or a backward is running.
    """
    for factor in (before, after):
        check_factor(caller, factor)
    refuse_unless_resting(caller, ref.engine)
    if ref.engine.reducer.reductions.hook is not None:
        raise refusal(f"{caller}: a communication hook reduces the gradients, and it alone divides them.", ref.engine)
    ref.engine.reducer.set_divide_factors(ref.unit, (before, after))


def check_factor(caller: str, factor: float) -> None:
    """Raise ShardingError unless gradients can be divided by a factor."""
    if not 0 < factor < float("inf"):
        raise ShardingError(f"{caller}: a factor must be a positive number, not {factor!r}.")
