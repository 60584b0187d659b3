"""What ranks write into the store of their group for those that wait for them, and the errors that these raise."""

from typing import Final, NamedTuple

from fsdp.errors import PeerFailed

_GONE: Final = ("has ended", "does not answer", "has not come back")
"""How the reasons begin that a rank gives for one that cannot speak for itself."""
_ABSENT: Final = "has not called"
"""How the reason begins that a rank gives for one that has not made a call within the time-out, and may still come."""
RESTART: Final = "Start the job again from a checkpoint."


class Exit(NamedTuple):
    """What a process writes when it ends by itself."""

    launched: dict[str, int]
    """Its launches on a device, by communicator."""
    failure: str
    """The exception that ended it. Empty if there was none."""


class Abandonment(NamedTuple):
    """What a rank writes when it abandons a step."""

    rank: int
    """The rank that is the reason, as the user counts it."""
    unit: str | None
    reason: str
    writer: int
    """The rank that wrote this, in the group."""
    launched: dict[str, int]
    """The launches of that one on a device, by communicator."""

    @property
    def is_lost(self) -> bool:
        """Whether `rank` cannot speak for itself."""
        return self.reason.startswith(_GONE)


def abandoned_by(
    rank: int, unit: str | None, reason: str, remedy: str = " This step is over here too; start it again on all ranks, or end."
) -> PeerFailed:
    if reason.startswith(_GONE):  # another rank has found that
        return PeerFailed(f"rank {rank} {reason}. {RESTART}", rank, unit, reason)
    if reason.startswith(_ABSENT):
        return PeerFailed(f"rank {rank} {reason}.{remedy}", rank, unit, reason)
    where = "" if unit is None else f", in unit {unit!r},"
    return PeerFailed(f"rank {rank} has abandoned the step{where} with {reason}.{remedy}", rank, unit, reason)
