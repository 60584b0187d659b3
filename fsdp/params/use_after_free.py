"""Refuses reads of an unsharded parameter that a user kept after its memory was released.

[Note: what is kept of an unsharded parameter]
`kept = self.weight` in a forward keeps a tensor whose memory is released afterwards. On the CPU torch does not notice:
reading the tensor ends the process, and copying it gives arbitrary values. A subclass of nn.Parameter would see
every use, but each use would cost more, and torch.compile would treat the parameter differently. So only the methods that
people use to look at values are covered. They are stored on the parameter object, which Python searches before the class,
and check for memory first; nothing else becomes slower. Not covered: functions and operators (`torch.sum(kept)`,
`kept + 1`), `kept.data`, and views made in the forward (`kept = self.weight.t()`).
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.shown_params import owning_unit
from fsdp.shards.dtensors import here_of, local_of

READERS: Final = (
    *("abs", "clone", "cpu", "cuda", "detach", "double", "float", "item", "max", "mean", "min", "norm", "numpy"),
    # printing a tensor reshapes it
    *("reshape", "std", "sum", "to", "tolist"),
    *("__deepcopy__", "__reduce_ex__"),
)
"""Methods that read all values of a tensor."""


LOCAL_READERS: Final = READERS[: READERS.index("__deepcopy__")]
"""Those of this rank's part of a DTensor, which are called when the DTensor is printed."""
DTENSOR_READERS: Final = (*LOCAL_READERS, "full_tensor", "redistribute", "to_local")


def refuse_freed_reads(unsharded: nn.Parameter) -> None:
    """Make the methods in READERS raise when `unsharded` has no memory."""
    local = local_of(unsharded)
    if local is None:
        _refuse(unsharded, READERS, unsharded)
    else:
        _refuse(unsharded, DTENSOR_READERS, unsharded)
        _refuse(local, LOCAL_READERS, unsharded)


def _refuse(read: Tensor, names: Sequence[str], unsharded: nn.Parameter) -> None:
    given, owned = weakref.ref(read), weakref.ref(unsharded)
    kind = nn.Parameter if names is READERS else type(read)
    read.__dict__.update({name: partial(_read, given, owned, kind, name) for name in names})


def _read(
    given: "weakref.ref[Tensor]", owned: "weakref.ref[nn.Parameter]", kind: type[Tensor], name: str, *args: Any, **kwargs: Any
) -> Any:
    unsharded = given()
    if torch.compiler.is_compiling():  # it does not know methods of nn.Parameter
        return getattr(Tensor if kind is nn.Parameter else kind, name)(unsharded, *args, **kwargs)
    if unsharded is not None and unsharded.numel() and not here_of(unsharded).untyped_storage().size():
        parameter = owned()
        owner = None if parameter is None else owning_unit(parameter)
        unit = "a unit that no longer exists" if owner is None else f"unit {owner.name!r}"
        raise ShardingError(
            f"{name}: this unsharded parameter of {unit}, of shape {tuple(unsharded.shape)}, was kept from inside a forward, "
            "and its memory was released when that ended: keep a copy (`weight.clone()`) there, or give the parameter "
            "that the module shows to fsdp.full_tensor."
        )
    if unsharded is not None and name == "__reduce_ex__":
        # pickle a plain parameter, without these methods
        plain = nn.Parameter(unsharded.data, unsharded.requires_grad)
        plain.__dict__.update({key: value for key, value in unsharded.__dict__.items() if key not in READERS})
        return plain.__reduce_ex__(*args, **kwargs)  # type: ignore[no-untyped-call]
    return getattr(kind, name)(unsharded, *args, **kwargs)
