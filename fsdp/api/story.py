"""Where every unit is, and how it got there, to be read by people."""

from torch import nn

from fsdp.debug.error_notes import lines_of
from fsdp.runtime.registry import engines_in


def story(model: nn.Module) -> str:
    """What the engine is doing with `model` on this rank: for a look at a run that hangs or surprises. Does not communicate.

    For each root: the bytes it holds by kind, the last collectives of each channel, oldest first, and a line for each unit
    with its state, where its whole parameters are, and its last events, oldest first.

    Raises:
        ShardingError: there is no unit in `model`, or it is only a part of a root.
    """
    return "\n".join(line for engine in engines_in(model, "story") for line in lines_of(engine))
