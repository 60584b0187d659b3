"""Which units have changed their weights after the first gather of a step. See rule 6 of `state_machine.paths`.

A change is seen by the version counters of this rank's shards. Fused optimizers do not move them, so their steps are counted.
What is written through `.data` is not seen.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp.params.unit import Unit
from fsdp.params.versions import all_now


class WeightChanges:
    """The changes of the weights of one root on this rank, in one step at a time."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)
        self._versions = [unit.versions for unit in units]
        self._before: list[int] | None = None
        """The version counter of each unit at the first gather of this step; None before it."""
        self._fused: set[int] = set()
        """The units that fused optimizers have stepped since then."""
        handle = register_optimizer_step_post_hook(_hook_of(weakref.WeakMethod(self._on_step)))
        weakref.finalize(self, handle.remove)

    def begin_gather(self) -> None:
        """A gather is about to be launched."""
        if self._before is None:
            self._before = all_now(self._versions)

    def units(self) -> Sequence[int]:
        """The units whose weights have changed since the first gather of this step."""
        if self._before is None:
            return ()
        now = all_now(self._versions)
        if now == self._before and not self._fused:
            return ()
        moved = (index for index, (old, new) in enumerate(zip(self._before, now, strict=True)) if old != new)
        return sorted({*self._fused, *moved})

    def end_step(self) -> None:
        """The step is over, or abandoned."""
        self._before = None
        self._fused.clear()

    def _on_step(self, optimizer: Optimizer) -> None:
        if self._before is None:
            return
        stepped = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
        if stepped:
            self._fused.update(
                index for index, unit in enumerate(self._units) if any(id(p) in stepped for p in unit.sharded_params)
            )


def _hook_of(method: "weakref.WeakMethod[Callable[[Optimizer], None]]") -> Callable[[Optimizer, Any, Any], None]:
    """A hook after the step of every optimizer, which keeps no model."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        on_step = method()
        if on_step is not None:
            on_step(optimizer)

    return hook
