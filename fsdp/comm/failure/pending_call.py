"""The calls that the ranks of a group wait for, as plain data, and how errors and the dump name them."""

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from fsdp.errors import FEWER_BATCHES, NO_SYNC, UNEVEN_PATHS, name_ranks

RESTART_CALL: Final = "forward before the backward of its last one"
"""A call that is not a collective: see desync.py, the note on steps that fail where no hook fires."""
RESTARTED: Final = f"a {RESTART_CALL}, which failed outside the model or was left out there"
"""Why the others abandon the step of a rank that makes it."""
OPENS: Final = "fully_shard"
"""The call that is no collective: a rank is about to connect to the others."""
OBJECTS: Final = "gather_objects"
BETWEEN_STEPS: Final = (OPENS, OBJECTS)
"""The kinds of calls that a rank makes between steps."""
FOR_EVALUATION: Final = "buffers for an evaluation"
"""The label of a broadcast of buffers before a forward without a graph."""
_CAUSES: Final = (
    (re.compile(rf"{OBJECTS}\('([a-z_]+)'\)$"), "Every rank must call {}."),
    (re.compile(r"all_(?:gather|reduce)\('([^']+ of [^']+)'"), "Every rank must ask for the {}."),
    (re.compile(rf"broadcast\('{FOR_EVALUATION}'"), "Every rank must begin an evaluation, or call model.module there."),
    (re.compile(r"broadcast\('(?!buffers')[^' ]*'"), "Every rank must read or load the full state."),
)
"""Calls that no unit makes in a step, and what helps where some ranks alone make one."""
Signature = tuple[str, str, int]
"""A call: the collective, the label and the bytes."""


class PendingCall(NamedTuple):
    """The call that one rank waits for."""

    comm: str
    """The name of the communicator."""
    number: int
    """The position of the call on that communicator."""
    call: str
    key: str
    """The key under which ranks that are about to make the call are counted. Empty if this rank has launched it."""
    launched: dict[str, int]
    """The number of calls this rank has made on each communicator."""
    agreed: str = ""
    """The call that all ranks have made in this place so far, if they were here before."""
    on_device: bool = False
    """True if this is the last call launched on a device. The host may not be waiting for it."""
    where: str = ""
    """The call in words, such as "all_gather of blocks.3" or "save"."""
    evaluated: int = 0
    """The number of gathers on this communicator that this rank has launched in forwards without gradients."""
    among: Sequence[int] = ()
    """The ranks that make the call, as the user counts them: those at both ends of a message. Empty: all of the group."""

    def launched_on(self, comm: str) -> int:
        """The number of calls this rank has made on a communicator, which it may not have opened yet."""
        return self.launched.get(comm, 0)

    def has_made(self, other: "PendingCall") -> bool:
        """Whether this rank has made the call that another one waits for, or is about to."""
        return self.launched_on(other.comm) >= other.number or bool(self.key and self.key == other.key)

    @property
    def is_restart(self) -> bool:
        """See desync.py, the note on steps that fail where no hook fires."""
        return self.call.startswith(RESTART_CALL)


class Wait(NamedTuple):
    """A call for which this rank has waited long."""

    begin: float
    pending: PendingCall
    rank: int
    absent: tuple[int, ...]
    """The ranks that have not made the call, as far as this rank knows."""

    @property
    def seconds(self) -> float:
        """For how long it has waited."""
        return time.monotonic() - self.begin

    def describe(self) -> str:
        whom = f" for {name_ranks(self.absent)}" if self.absent else ""
        return f"rank {self.rank} has waited {self.seconds:.0f} s in {self.pending.where}{whom}"


class History:
    """The last calls of a communicator, and the call that all ranks have made after them."""

    __slots__ = ("agreed", "recent", "then")

    def __init__(self, recent: tuple[Signature, ...]) -> None:
        self.recent = recent
        self.agreed: Signature | None = None
        """The call that is predicted."""
        self.then: History
        """The history after `agreed`."""


def text_of(call: Signature) -> str:
    kind, label, size = call
    return f"{kind}({label!r}, {size} bytes)" if size else f"{kind}({label!r})"


def where_of(kind: str, label: str) -> str:
    if kind in BETWEEN_STEPS:
        return label
    return kind if kind == RESTART_CALL else f"{kind} of {label}"


def remedies_for(calls: Iterable[str], alone: Sequence[int] = ()) -> list[str]:
    """What may help ranks that wait in different calls, the likely cause first. `alone`: the ranks that have evaluated alone."""
    calls = list(calls)
    if alone:
        cause = (
            f"Only {name_ranks(alone)} made a forward without gradients (an evaluation) before: make it on every rank, or pass"
        )
        return [f"{cause} uneven_paths=True.", "With it, call fsdp.meet(model) on every rank before calls between steps."]
    causes = {
        call: text.format(*map(_full_name, one.groups()))
        for call in calls
        for pattern, text in _CAUSES
        if (one := pattern.match(call))
    }
    others = [call for call in calls if call not in causes]
    if causes and others:
        return [*sorted({*causes.values()}), FEWER_BATCHES]
    # the collectives of units
    reduces, gathers = (any(call.startswith(kind) for call in others) for kind in ("reduce_scatter(", "all_gather("))
    # some ranks may have left the training loop: the calls are of several kinds
    left = len({call.partition("(")[0] for call in calls}) > 1
    return [NO_SYNC] * (reduces and left) + [UNEVEN_PATHS] * (reduces or gathers) + [FEWER_BATCHES] * left


def _full_name(name: str) -> str:
    """The name by which a program calls a function of this package; others as they are."""
    return {one: f"fsdp.{one}" for one in sys.modules["fsdp"].__all__}.get(name, name)


def names_a_unit(label: str) -> bool:
    """Whether the label of a gather is the name of a unit, and not what the gather gives, such as "sum of 0.weight"."""
    return " of " not in label


def evaluated_alone(counts: Mapping[int, int]) -> list[int]:
    """The ranks that have made forwards without gradients which others have not made; empty if all have made as many.

    `counts`: the number of gathers in such forwards, by rank.
    """
    return [rank for rank, count in counts.items() if count > min(counts.values())]


def steps_apart(completed: Mapping[int, int]) -> str | None:
    """The error if a rank has completed a backward that another one has abandoned. `completed`: backwards, by rank."""
    ahead, behind = (choose(completed, key=completed.__getitem__) for choose in (max, min))
    if completed[ahead] == completed[behind]:
        return None
    return (
        f"rank {ahead} has completed a backward that rank {behind} has abandoned, so their parameters may be a step apart: "
        "load a checkpoint, on all ranks."
    )


def is_deadlock(found: dict[int, PendingCall], size: int) -> bool:
    """Whether every rank waits for a call that some rank has not made."""
    return len(found) == size and all(absent_ranks(pending, found) and not pending.on_device for pending in found.values())


def absent_ranks(pending: PendingCall, found: dict[int, PendingCall]) -> list[int]:
    """The ranks in `found` that are to make the call `pending`, and have neither made it nor are about to."""
    return [rank for rank in pending.among or found if rank in found and not found[rank].has_made(pending)]


def describe_deadlock(found: dict[int, PendingCall], ranks: Sequence[int]) -> str:
    """The error where nobody can go on. `ranks`: as the user counts them."""
    parts = [
        f"Rank {ranks[rank]} waits for {one.call}, operation {one.number} of communicator {one.comm.rpartition('/')[2]!r}, which "
        f"{name_ranks([ranks[other] for other in absent_ranks(one, found)])} did not call."
        for rank, one in found.items()
    ]
    return " ".join(["Deadlock: nobody can go on.", *parts, *remedies_for([one.call for one in found.values()])])
