"""A place between two steps where all ranks come together."""

from torch import nn

from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call, engines_in, refuse_unless_resting
from fsdp.runtime.uneven.uneven_engine import UnevenEngine


@collective_call
def meet(model: nn.Module) -> None:
    """Take part in what other ranks gather, until every rank has called this. Communicates.

    Ranks of a model with `uneven_paths=True` may do different things between two backwards: evaluate on some ranks only, or
    generate to different lengths. A rank that comes to the end of its next backward waits there for the others. Where no
    backward follows, before a save, a collective of your own or the end of the program, call this on every rank.

    Raises:
        ShardingError: `model` contains no unit or is only a part of a root; it was made without `uneven_paths=True`; or a forward
            or backward runs; or weights were changed between two gathers of a step, and ranks took different paths or changed
            them at different places.
        WorldError: other ranks are at the end of a backward.
        PeerFailed: a rank has ended, or has abandoned the step.
    """
    for engine in engines_in(model, "meet"):
        refuse_unless_resting("meet", engine)
        if not isinstance(engine, UnevenEngine):
            raise ShardingError("meet: ranks of this model take the same path, so they need not meet; pass uneven_paths=True.")
        engine.meet()
