"""A backward of a rank that has nothing to learn from in this step."""

from torch import nn

from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call, engines_in, refuse_unless_resting
from fsdp.runtime.uneven.uneven_engine import UnevenEngine


@collective_call
def empty_backward(model: nn.Module) -> None:
    """Take part in the backward of the other ranks without a batch. Communicates.

    Call it in place of forward and backward on a rank that has nothing to learn from in this step. Its gradients count as zeros,
    as those of any rank that does not use a parameter. Under `fsdp.no_sync` no rank communicates, and it does nothing.

    Raises:
        ShardingError: `model` contains no unit or is only a part of a root; it was made without `uneven_paths=True`; or a forward
            or backward runs.
        WorldError: other ranks have called `fsdp.meet`.
        PeerFailed: a rank has ended, or has abandoned the step.
    """
    for engine in engines_in(model, "empty_backward"):
        refuse_unless_resting("empty_backward", engine)
        if not isinstance(engine, UnevenEngine):
            raise ShardingError(
                "empty_backward: all ranks of this model compute the same, so none can leave a backward out; pass "
                "uneven_paths=True, or train inside fsdp.join."
            )
        if engine.synchronises:
            engine.empty_backward()
