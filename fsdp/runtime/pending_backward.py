"""Whether a backward may still come to the last forward of a root, here and on the other ranks."""

from fsdp.comm.context import CommContext
from fsdp.errors import PeerFailed


class PendingBackward:
    """What is known of it between two steps, where no hook hears what fails."""

    __slots__ = ("_comms", "_epoch", "expected", "graphs")

    def __init__(self, comms: CommContext) -> None:
        self._comms = comms
        self._epoch = 0
        """Of the channels, when the last pass began."""
        self.expected = False
        """It made a graph, and no backward has come to it that the other ranks would wait in."""
        self.graphs = 0
        """Of calls of units, that are alive."""

    def graph_is_gone(self, _: object) -> None:
        """Nobody has the graph of one call, or of one inside it, any more."""
        self.graphs -= 1

    def was_abandoned(self) -> bool:
        """Whether another model on these channels has abandoned a step since, of which it may have been a part."""
        epoch, self._epoch = self._epoch, self._comms.epoch()
        abandoned = epoch != self._epoch
        self.expected = self.expected and not abandoned
        return abandoned

    def announce_restart(self, unit: str) -> PeerFailed | None:
        """A forward begins. No backward came to the last one: left out on every rank, or that step failed here where nothing
        hears it, such as in the loss, and the others were told of it by what is returned.

        Raises:
            PeerFailed: they were, and somebody still has a graph of that step here, so that it may go on.
        """
        awaited, self.expected = self.expected, False
        told = self._comms.shard_comm.announce_restart(unit) if awaited else None
        if told is not None and self.graphs:
            raise told
        return told
