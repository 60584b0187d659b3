"""Guard mode raises an error for mistakes that no hook sees, which would end the process or lose a change silently.

[Note: what guard mode checks]
A tensor can leave a unit's forward on an unwatched path, such as a closure. A backward through it reads the parameters of the
unit after their memory was released, which ends the process. Guard mode checks every tensor that is saved for the backward
inside a unit's forward, and checks it again when autograd unpacks it. In-place updates of unsharded parameters through `.data`
do not increase a version counter. Guard mode finds them by comparing the unsharded parameters with a copy when the forward ends.
It compares all of them, so that every rank gets the same answer.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class Guard:
    """Guard mode for one forward call of one unit.

    Memory: a second copy of the unsharded parameters, until the call ends.
    """

    __slots__ = ("_before", "_hooks", "_unit", "_update_counts")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._before = [flat.unsharded.view(torch.uint8).clone() for flat in unit.flats]
        self._update_counts = [flat.count_inplace_updates() for flat in unit.flats]
        self._hooks = ExitStack()
        # torch calls the innermost hooks only. Those of the user stay, and those of a checkpoint: it reads parameters again
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None or isinstance(getattr(outer[0], "__self__", None), Guard):
            self._hooks.enter_context(saved_tensors_hooks(self._pack, self._unpack))

    def end(self) -> None:
        """Stop checking saved tensors, because the call is over. Idempotent."""
        self._hooks.close()

    def refuse_hidden_updates(self) -> None:
        """Compare the unsharded parameters with the copy.

        Raises:
            ShardingError: a parameter was changed and its version counter was not.
        """
        for flat, before, inplace_updates in zip(self._unit.flats, self._before, self._update_counts, strict=True):
            after, size = flat.unsharded.view(torch.uint8), flat.unsharded.element_size()
            if flat.is_shared or torch.equal(after, before):
                continue  # a change of the shard's own memory is not lost
            for place, slot, then, now in zip(
                flat.param_infos, flat.layout.slots, inplace_updates, flat.count_inplace_updates(), strict=True
            ):
                mine = slice(slot.start * size, slot.end * size)
                if then == now and not torch.equal(after[mine], before[mine]):
                    raise ShardingError(
                        f"parameter {place.names[0]!r} was changed through .data in the forward of unit {self._unit.name!r}, "
                        "which no version counter shows, so the change would be lost: change the parameter itself, under "
                        "torch.no_grad()."
                    )

    def _pack(self, tensor: Tensor) -> Any:
        own = tensor.layout is torch.strided and storage_key(tensor) in self._unit.keys
        # detached, because a node that saves its own output would keep itself alive; both share a version counter
        return _Saved(tensor.detach(), None if tensor.is_inference() else tensor._version, own)

    def _unpack(self, saved: "_Saved") -> Tensor:
        # torch compares versions only of tensors that no hook has packed
        if saved.version is not None and saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that the backward needs, saved in the forward of unit "
                f"{self._unit.name!r}, has been changed by an in-place operation: it is at version {saved.tensor._version}, and "
                f"was saved at version {saved.version}."
            )
        if saved.own and saved.tensor.numel() and not saved.tensor.untyped_storage().size():
            raise ShardingError(
                f"a backward has reached unit {self._unit.name!r} by a path that no hook sees, while its parameters are "
                "sharded: through a tensor that left the forward other than by returning it, as an attribute, or through a "
                "forward hook (a closure, a global). Return that tensor from the forward as well."
            )
        return saved.tensor


class _Saved(NamedTuple):
    """A tensor that is saved for the backward."""

    tensor: Tensor
    version: int | None
    own: bool
    """Whether it shares the memory of the unit's parameters."""
