"""Where the unsharded parameters of a unit are, as FSDP2's methods ask for it: now, ahead of time, and for how long."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from fsdp.errors import ShardingError
from fsdp.params.gathered_copies import backward_without_a_loss
from fsdp.runtime.registry import UnitRef, refuse_unless_resting, unit_ref_of
from state_machine import Event, Request, ReshardPolicy, State


class UnshardHandle:
    """What `unshard(async_op=True)` returns. The next forward of the unit waits by itself."""

    def __init__(self, ref: UnitRef | None = None) -> None:
        self._ref = ref

    def wait(self) -> None:
        """Wait for the all-gather, and let the module show its unsharded parameters."""
        ref, self._ref = self._ref, None
        if ref is not None and _rests(ref):
            ref.engine.request(ref.index, Request.UNSHARD)


class GradientReductionHandle:
    """What `finalize_backward(async_op=True)` returns."""

    def wait(self) -> None:
        """Do nothing: the gradients are reduced already."""


def reduce_kept(ref: UnitRef) -> None:
    """Reduce the gradients that backwards without synchronisation have kept, unless gradients are not to be reduced.

    Raises:
        ShardingError: a forward or a backward is running.
    """
    refuse_unless_resting("finalize_backward", ref.engine)
    if ref.engine.synchronises and ref.engine.reducer.keeps_gradients:
        backward_without_a_loss(partial(ref.engine.on_event, 0, Event.EXTERNAL_GRAD))


def unshard(ref: UnitRef | None, async_op: bool) -> UnshardHandle | None:
    """Gather a unit, or with `async_op` launch its all-gather and return a handle. Does nothing while the unit computes."""
    if ref is not None and _rests(ref):
        ref.engine.request(ref.index, Request.PREFETCH)
    handle = UnshardHandle(ref)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(ref: UnitRef) -> None:
    """Let the module show its shards and free the unsharded parameters. Does nothing while the unit computes."""
    if _rests(ref):
        ref.engine.request(ref.index, Request.RESHARD)


def _rests(ref: UnitRef) -> bool:
    return ref.engine.root.lifecycles[ref.index].state is State.IDLE


def set_policy(ref: UnitRef, policy: ReshardPolicy | None, method: str) -> None:
    """From now on, free the unsharded parameters of a unit when a policy says; None: when its options say.

    Errors begin with `method`.

    Raises:
        ShardingError: a forward or a backward is running.
    """
    config = ref.unit.config
    wanted = policy or (config.reshard_policy if ref.index else config.root_reshard_policy)
    if ref.engine.root.lifecycles[ref.index].reshard_policy is not wanted:
        refuse_unless_resting(method, ref.engine)
        ref.engine.root.set_reshard_policy(ref.index, wanted)
    ref.unit.set(reshard_policy=policy)


def prefetch(ref: UnitRef, ahead: Sequence[nn.Module], in_backward: bool) -> None:
    """From now on, gather the units `ahead` whenever the unit is gathered in a forward, or in a backward.

    Raises:
        ShardingError: one of them is no unit of the same root.
    """
    found = [unit_ref_of(module) for module in ahead]
    for module, other in zip(ahead, found, strict=True):
        if other is None or other.engine is not ref.engine:
            raise ShardingError(f"prefetch: {type(module).__name__} is no unit of the same root; wrap the root first.")
    path, (in_forwards, in_backwards) = ref.engine.path, ref.unit.settings.ahead
    schedule = path.backward if in_backward else path.forward
    schedule.give(ref.index, [other.index for other in found if other is not None])
    ref.unit.set(ahead=(in_forwards, tuple(ahead)) if in_backward else (tuple(ahead), in_backwards))
