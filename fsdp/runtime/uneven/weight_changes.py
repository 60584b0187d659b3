"""Which units have changed their weights after the first gather of a step. See rule 6 of `state_machine.paths`.

A change is seen by the version counters of this rank's shards. Fused optimizers do not move them, so their steps are counted.
What is written through `.data` is not seen. Where in a step weights have changed is asked between two passes, and at its end.
"""

import weakref
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp.autograd.dynamo import uncompiled
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.params.versions import Versions


class WeightChanges:
    """The changes of the weights of one root on this rank, in one step at a time."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)
        self._versions = [unit.versions for unit in units]
        self._seen: list[int] | None = None
        """The version counter of each unit when it was looked at last in this step; None before the first gather."""
        self._fused = [0] * len(units)
        """How often fused optimizers have stepped each unit."""
        handle = register_optimizer_step_post_hook(uncompiled(_hook_of(weakref.WeakMethod(self._on_step))))
        weakref.finalize(self, handle.remove)

    @property
    def held(self) -> Sequence[int]:
        """The units of which this rank holds elements that an optimizer may change."""
        return [index for index, unit in enumerate(self._units) if any(map(_holds_some, unit.flats))]

    def begin_gather(self) -> None:
        """A gather is about to be launched."""
        if self._seen is None:
            self._seen = self._now()

    def take(self) -> Sequence[int]:
        """The units whose weights have changed since this was asked last, or since the first gather of this step."""
        if self._seen is None:
            return ()
        before, self._seen = self._seen, self._now()
        return [index for index, (old, new) in enumerate(zip(before, self._seen, strict=True)) if old != new]

    def end_step(self) -> None:
        """The step is over, or abandoned."""
        self._seen = None

    def _now(self) -> list[int]:
        return list(map(add, map(Versions.now, self._versions), self._fused))

    def _on_step(self, optimizer: Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
        if stepped:
            for index, unit in enumerate(self._units):
                self._fused[index] += any(id(p) in stepped for p in unit.sharded_params)


def _holds_some(flat: FlatBuffer) -> bool:
    return any(p.requires_grad and part.numel for p, part in zip(flat.sharded_params, flat.parts, strict=True))


def _hook_of(method: "weakref.WeakMethod[Callable[[Optimizer], None]]") -> Callable[[Optimizer, Any, Any], None]:
    """A hook after the step of every optimizer, which keeps no model."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        on_step = method()
        if on_step is not None:
            on_step(optimizer)

    return hook
