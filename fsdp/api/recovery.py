"""Recovery after a step that some rank has abandoned."""

import sys

from torch import nn

from fsdp.runtime.registry import engines_in


def agree_abandoned(model: nn.Module) -> None:
    """Wait for all ranks after a failed step and make them ready for the next step. Communicates.

    Call it on every rank after catching what the step raised: its own error on the rank that failed, `PeerFailed` on the others.
    Without this call the next forward does the same. With it, the ranks meet at a place you choose, and an error that prevents
    the next step is raised there.

    Raises:
        PeerFailed: a rank has ended, or has not called this within FSDP_RETURN_SECONDS (60 by default).
        WorldError: some ranks have completed the backward that others abandoned, so their parameters may be one step apart.
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    for engine in engines_in(model, "agree_abandoned"):
        # notify the ranks that know of no failure yet
        engine.notify_peers(engine.units[0].name, sys.exc_info()[1])
        engine.comms.reconnect()
