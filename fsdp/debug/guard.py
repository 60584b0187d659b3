"""Guard mode: what no hook sees is named where it would crash, or be lost without a word. It costs time, and finds mistakes.

[Note: what the guard watches]
Autograd may be led to the parameters of a unit by a tensor that left its forward unseen (a closure). Their memory is given back
then, and reading it ends the process. Under guard every tensor that is saved for the backward inside a unit's forward is looked
at, and a parameter is looked at again when autograd asks for it. Edits of whole parameters through `.data`, which leave no
version behind, are found by comparing the whole parameters with a copy when the forward ends: all of them, so that every rank
comes to the same answer.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit


class Guard:
    """Watches one call of one unit. Memory: the whole parameters once more, until it ends."""

    __slots__ = ("_before", "_edits", "_hooks", "_unit")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._before = [flat.whole.view(torch.uint8).clone() for flat in unit.flats]
        self._edits = [flat.count_edits() for flat in unit.flats]
        self._hooks: saved_tensors_hooks | None = None
        # torch asks the innermost hooks only: those of a checkpoint (which reads parameters anew when it replays), or of the user
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is None or isinstance(getattr(outer[0], "__self__", None), Guard):
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def end(self) -> None:
        """The call is over: look at nothing more that is saved. Idempotent."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def refuse_hidden_edits(self) -> None:
        """Compare the whole parameters with what they were.

        Raises:
            ShardingError: one was changed, and its version does not say so.
        """
        for flat, before, edits in zip(self._unit.flats, self._before, self._edits, strict=True):
            after, size = flat.whole.view(torch.uint8), flat.whole.element_size()
            if flat.is_shared or torch.equal(after, before):
                continue  # what is the shard itself is not lost
            for place, slot, then, now in zip(flat.places, flat.layout.slots, edits, flat.count_edits(), strict=True):
                mine = slice(slot.start * size, slot.end * size)
                if then == now and not torch.equal(after[mine], before[mine]):
                    raise ShardingError(
                        f"parameter {place.names[0]!r} was changed through .data in the forward of unit {self._unit.name!r}, "
                        "which nobody can see, so that the change would be lost: change the parameter itself, under "
                        "torch.no_grad()."
                    )

    def _pack(self, tensor: Tensor) -> Any:
        own = tensor.layout is torch.strided and storage_key(tensor) in self._unit.keys
        # detached: a node that saves what it returns would be kept by it for good; versions are counted together
        return _Saved(tensor.detach(), None if tensor.is_inference() else tensor._version, own)

    def _unpack(self, saved: "_Saved") -> Tensor:
        # torch itself compares versions only of what no hook has packed
        if saved.version is not None and saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that the backward needs, saved in the forward of unit "
                f"{self._unit.name!r}, has been changed by an in-place operation: it is at version {saved.tensor._version}, and "
                f"was saved at version {saved.version}."
            )
        if saved.own and saved.tensor.numel() and not saved.tensor.untyped_storage().size():
            raise ShardingError(
                f"a backward has come to unit {self._unit.name!r} by a way that no hook has seen, when its parameters are "
                "sharded: through a tensor that left the forward other than by returning it, as an attribute, or through a "
                "forward hook (a closure, a global). Return that tensor from the forward as well."
            )
        return saved.tensor


class _Saved(NamedTuple):
    """A tensor that autograd keeps for the backward."""

    tensor: Tensor
    version: int | None
    own: bool
    """It shares the memory of the unit's parameters."""
