"""A whole parameter that was kept beyond its memory: looking at it is refused by name, as far as Python can be asked.

[Note: what is kept of a whole parameter]
`kept = self.weight` in a forward keeps a tensor whose memory is given back afterwards. torch does not notice on the CPU:
reading it ends the process, and copying it brings what lies there by chance. A subclass of nn.Parameter would see every use, at
a cost for every use; and torch.compile treats it as another thing. So only the methods by which people look at a value
are covered: they are found on the parameter itself before its class, and look for memory first. Nothing else pays for them. What
does not come by: functions and operators (`torch.sum(kept)`, `kept + 1`), `kept.data`, and views made in the forward
(`kept = self.weight.t()`).
"""

import weakref
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.module_params import owner_of

LOOKS: Final = (
    *("abs", "clone", "cpu", "cuda", "detach", "double", "float", "item", "max", "mean", "min", "norm", "numpy"),
    # printing flattens what it prints
    *("reshape", "std", "sum", "to", "tolist"),
    *("__deepcopy__", "__reduce_ex__"),
)
"""Methods that read a whole value."""


def check_looks(whole: nn.Parameter) -> None:
    """From now on, looking at `whole` while it has no memory is refused."""
    reference = weakref.ref(whole)
    whole.__dict__.update({name: partial(_look, reference, name) for name in LOOKS})


def _look(reference: "weakref.ref[nn.Parameter]", name: str, *args: Any, **kwargs: Any) -> Any:
    whole = reference()
    if torch.compiler.is_compiling():
        return getattr(Tensor, name)(whole, *args, **kwargs)
    if whole is not None and whole.numel() and not whole.untyped_storage().size():
        owner = owner_of(whole)
        unit = "a unit that is no more" if owner is None else f"unit {owner.name!r}"
        raise ShardingError(
            f"{name}: this whole parameter of {unit}, of shape {tuple(whole.shape)}, was kept from inside a forward, "
            "and its memory was given back when that ended: keep a copy (`weight.clone()`) there, or give the parameter "
            "that the module shows to fsdp.full_tensor."
        )
    if whole is not None and name == "__reduce_ex__":
        # what is saved is a parameter like any other
        plain = nn.Parameter(whole.data, whole.requires_grad)
        plain.__dict__.update({key: value for key, value in whole.__dict__.items() if key not in LOOKS})
        return plain.__reduce_ex__(*args, **kwargs)  # type: ignore[no-untyped-call]
    return getattr(nn.Parameter, name)(whole, *args, **kwargs)
