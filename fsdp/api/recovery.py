"""Going on together after a step that some rank has abandoned."""

import sys

from torch import nn

from fsdp.runtime.registry import engines_in


def agree_abandoned(model: nn.Module) -> None:
    """After an error in a step, here or on another rank: meet all ranks, and be ready for the next step. Communicates.

    Every rank must call it, having caught what the step raised: the rank that failed its own error, the others `PeerFailed`.
    Without it, the next forward does the same; with it, the ranks meet where you say, and what keeps them from going on is raised
    here.

    Raises:
        PeerFailed: a rank is gone, or has not come within FSDP_RETURN_SECONDS (60 by default).
        WorldError: some ranks have completed the backward that others abandoned, so their parameters may be a step apart.
        ShardingError: there is no unit in `model`, or it is only a part of a root.
    """
    for engine in engines_in(model, "agree_abandoned"):
        # those who heard of no failure yet are told by this
        engine.tell_peers(engine.units[0].name, sys.exc_info()[1])
        engine.channels.connect_anew()
