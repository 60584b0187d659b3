"""The invariants of the units of one root, stated without the tables.

Rule 1: the monitor sees what happens to units (a call, a gradient) and what the engine does (actions, effects).
Rule 2: it never reads a table, because it checks the tables.

P2  A unit that computes has current unsharded parameters in memory, and its modules use them. No memory is freed during an
    all-gather, and no unit is gathered twice.
P3  Gradients of a backward that synchronises are reduced exactly once, before the commit.
P4  A backward has one final callback. After it every unit is IDLE and sharded, and nothing is in flight.
P5  A failed pass leaves no gradients and no full parameters. Gradients accumulated under `no_sync` by earlier backwards survive.
"""

from collections.abc import Callable
from enum import Enum, auto
from operator import attrgetter
from typing import Final

from state_machine.residency import Effect
from state_machine.vocabulary import Action, Event

NOWHERE, UNSHARDING_NOW, IN_MEMORY = 0, 1, 2
"""Where the copy of a unit's parameters is."""
NONE, REDUCING, REDUCED = 0, 1, 2
"""The reduction of a unit's gradients: none, in flight, or finished and not committed."""

SAME, HIDDEN, SHOWN = 0, 1, 2
"""Whether the weights have changed since the gather: no, yes without a trace on this rank, yes with changed version counters."""

Seen = tuple[int, bool, int, bool, bool, int, bool, bool, bool]
_SEEN: Final[Callable[["Facts"], Seen]] = attrgetter(
    *("copy", "shown", "stale", "open", "arrived", "reduction", "accumulated", "full_params", "doubt")
)


class Violation(AssertionError):
    """An invariant was violated, or a legal move was refused."""


class Sync(Enum):
    """The kind of the backward that runs."""

    NO_BACKWARD = auto()
    SYNC = auto()
    NO_SYNC = auto()
    """A backward under `no_sync`."""
    AUTOGRAD_GRAD = auto()
    """`torch.autograd.grad`. It synchronises from the first accumulated gradient on, if there is one."""


class Facts:
    """What the monitor knows about one unit."""

    __slots__ = ("accumulated", "arrived", "copy", "doubt", "full_params", "open", "reduction", "shown", "stale")

    def __init__(self) -> None:
        self.restore((NOWHERE, False, SAME, False, False, NONE, False, False, False))

    def freeze(self) -> Seen:
        """Return all facts, hashable."""
        return _SEEN(self)

    def restore(self, seen: Seen) -> None:
        """Restore the facts of `freeze`."""
        (
            self.copy,
            self.shown,
            self.stale,  # whether the shards changed since the copy was gathered
            self.open,  # a backward has entered the unit and its gradients are not complete
            self.arrived,  # a gradient was accumulated and is not reduced
            self.reduction,
            self.accumulated,  # gradients accumulated by earlier backwards under `no_sync`
            self.full_params,
            self.doubt,  # the shards may have changed on some rank since the gather
        ) = seen


EXPECTED: Final = {
    # the only events that may cause an action, in any state
    Action.HOOK_OUTPUTS: (Event.POST_FORWARD, Event.POST_RECOMPUTE),
    Action.COMMIT: (Event.FINAL_CALLBACK,),
    Action.FLUSH_GRADS: (Event.FINAL_CALLBACK,),
    Action.REDUCE_GRADS: (Event.POST_BACKWARD,),
    Action.ACCUMULATE_UNSHARDED: (Event.FINAL_CALLBACK_NO_SYNC,),
    Action.DROP_GRADS: (Event.BACKWARD_FAILED, Event.STEP_ABANDONED),
    Action.WRITE_BACK: (Event.UNSUMMON_WRITEBACK,),
    Action.GATHER_FULL: (Event.SUMMON,),
}


class InvariantMonitor:
    """Watches the units of one root, and raises Violation as soon as an invariant is violated."""

    __slots__ = ("always", "committing", "evaluates", "facts", "keeps", "may_step", "names", "path", "queued", "sync")

    def __init__(self, names: tuple[str, ...], keeps: tuple[bool, ...], always: tuple[bool, ...]) -> None:
        self.names = names
        self.keeps = keeps
        """The units that may be in memory and not compute."""
        self.always = always
        """The units that may be in memory after the backward too."""
        self.facts = tuple(Facts() for _ in names)
        self.path: tuple[int, ...] = ()
        """The units whose forward runs, outermost first."""
        self.sync = Sync.NO_BACKWARD
        self.may_step = False
        """Whether a backward inside the current forward is over, so that an optimizer may step before the forward ends."""
        self.evaluates = False
        """Whether the current forward records no graph."""
        self.queued = False
        """Whether the final callback of this backward is queued."""
        self.committing: list[int] = []
        """The units that have committed since the backward ended."""

    def require(self, condition: bool, unit: int, what: str) -> None:
        """Raise Violation unless `condition`."""
        if not condition:
            raise Violation(f"{self.names[unit]}: {what}")

    def effect(self, unit: int, effect: Effect) -> None:
        """Record an effect on the memory of a unit."""
        facts = self.facts[unit]
        match effect:
            case Effect.ALL_GATHER:
                self.require(facts.copy == NOWHERE, unit, "gathered what was in memory or in flight already")
                facts.copy = UNSHARDING_NOW
                facts.stale = SAME
                facts.doubt = self.may_step
            case Effect.WAIT_ALL_GATHER:
                if facts.copy == UNSHARDING_NOW:
                    facts.copy = IN_MEMORY
            case Effect.USE_UNSHARDED:
                self.require(facts.copy == IN_MEMORY, unit, "used parameters that are not in memory")
                facts.shown = True
            case Effect.USE_SHARDED:
                facts.shown = False
            case Effect.FREE_UNSHARDED:
                self.require(facts.copy != UNSHARDING_NOW, unit, "freed memory during an all-gather")
                self.require(not facts.shown, unit, "freed memory that the modules still use")
                facts.copy = NOWHERE
                facts.stale = SAME
                facts.doubt = False

    def action(self, unit: int, action: Action, event: Event) -> None:
        """Record an action that the engine has executed for `event`."""
        facts = self.facts[unit]
        self.require(event in EXPECTED.get(action, (event,)), unit, f"{action.name} for {event.name}")
        self.require(
            not self.committing or action in (Action.COMMIT, Action.ACCUMULATE_UNSHARDED),
            unit,
            f"{action.name}, which can fail, after a COMMIT",
        )
        match action:
            case Action.JOIN_BACKWARD:
                self.require(not self.queued, unit, "a second callback in one backward")
                self.queued = True
            case Action.REDUCE_GRADS:
                self.require(facts.arrived, unit, "reduced a gradient twice, or none")
                facts.arrived = False
                facts.reduction = REDUCING
            case Action.FLUSH_GRADS:
                if facts.arrived or (facts.accumulated and facts.reduction == NONE):
                    facts.arrived = False
                    facts.reduction = REDUCING
            case Action.COMMIT:
                self.require(unit not in self.committing, unit, "committed twice")
                self.require(not facts.arrived, unit, "committed before a gradient that arrived was reduced")
                self.require(not facts.accumulated or facts.reduction != NONE, unit, "committed without the gradients of no_sync")
                facts.reduction = NONE
                facts.accumulated = False
                self.committing.append(unit)
            case Action.ACCUMULATE_UNSHARDED:
                self.committing.append(unit)
                facts.accumulated = facts.accumulated or facts.arrived
                facts.arrived = False
            case Action.WAIT_REDUCTIONS:
                self.effect(unit, Effect.WAIT_ALL_GATHER)
                facts.reduction = REDUCED if facts.reduction == REDUCING else facts.reduction
            case Action.DROP_GRADS:
                self.require(facts.reduction != REDUCING, unit, "dropped gradients under a reduction in flight")
                facts.arrived = False
                facts.reduction = NONE
            case Action.GATHER_FULL:
                self.require(facts.copy == NOWHERE, unit, "gathered full parameters beside an unsharded copy")
                facts.full_params = True
            case Action.WRITE_BACK:
                self.require(facts.full_params, unit, "wrote back parameters that were not summoned")
            case Action.FREE_FULL:
                facts.full_params = False

    def after_event(self, unit: int, event: Event, actions: tuple[Action, ...]) -> None:
        """Check that the actions for an event include those that it requires."""
        facts = self.facts[unit]
        self.require(
            self.queued or self.sync is Sync.NO_BACKWARD, unit, "a backward has entered a unit and no callback is queued"
        )
        if event is Event.POST_FORWARD or event is Event.POST_RECOMPUTE:
            self.require(Action.HOOK_OUTPUTS in actions, unit, "its outputs have no hooks")
        elif event is Event.POST_BACKWARD:
            self.require(not facts.arrived, unit, "its gradients are complete and not reduced")
        elif event is Event.SUMMON:
            self.require(facts.full_params, unit, "summoned, but it has no full parameters")
        elif event is Event.UNSUMMON_WRITEBACK or event is Event.UNSUMMON_DISCARD:
            self.require(not facts.full_params, unit, "unsummoned, but it still has full parameters")

    def computes(self, unit: int) -> bool:
        """Whether its forward, a recompute of it, or its backward runs now."""
        return self.facts[unit].open or unit in self.path

    def check(self) -> None:
        """Check P2 at any moment: a unit is unsharded if and only if it computes."""
        for unit, facts in enumerate(self.facts):
            if facts.full_params:
                self.require(facts.copy == NOWHERE, unit, "summoned, and gathered beside the full parameters")
            elif facts.open or unit in self.path:
                self.require(facts.copy == IN_MEMORY, unit, "computes and its parameters are not in memory")
                self.require(facts.shown, unit, "computes and its modules use the shards")
            else:
                self.require(not facts.shown, unit, "its modules use unsharded parameters and nothing computes")
                self.require(facts.copy != IN_MEMORY or self.keeps[unit], unit, "holds memory and nothing computes")

    def begin_pass(self, evaluates: bool) -> None:
        """Begin a forward of the root: the weights may have changed before it."""
        self.evaluates = evaluates
        for unit, facts in enumerate(self.facts):
            facts.doubt = facts.doubt or evaluates or not self.always[unit]

    def backward_inside(self) -> None:
        """End a backward inside a forward. One that failed may follow one that accumulated gradients."""
        self.may_step = True
        for unit, facts in enumerate(self.facts):
            # the copies of other reshard policies are checked by version counters
            facts.doubt = facts.doubt or self.always[unit]

    def check_used(self, unit: int) -> None:
        """Check P2 when a forward or a backward has entered a unit."""
        facts = self.facts[unit]
        self.require(facts.full_params or facts.stale == SAME, unit, "computes with a stale copy")

    def gathers(self, unit: int, checks: bool, waits: bool, sums: bool) -> None:
        """Check what the engine does before an all-gather."""
        self.require(checks or self.sync is not Sync.NO_BACKWARD, unit, "gathered shards that were not checked")
        self.require(
            waits or not self.may_step or self.sync is not Sync.NO_BACKWARD,
            unit,
            "gathered shards that may be written at the same time",
        )
        self.require(sums or not self.always[unit], unit, "gathered without checksums for the later comparison")

    def drop(self, unit: int) -> None:
        """Check that a copy which the engine drops may be stale."""
        facts = self.facts[unit]
        needed = facts.copy == NOWHERE or facts.stale != SAME or facts.doubt
        self.require(needed, unit, "dropped a copy that is not stale")

    def check_pass_ended(self, failed: bool) -> None:
        """Check the units when the forward of the root is over."""
        self.may_step = False
        self.evaluates = False
        for unit, facts in enumerate(self.facts):
            self.require(facts.copy != UNSHARDING_NOW, unit, "the pass is over and a gather is in flight")
            self.require(facts.open or not failed or facts.copy == NOWHERE, unit, "the pass has failed and it is not sharded")

    def check_closed(self, accumulated: tuple[bool, ...], event: Event) -> None:
        """Check P3, P4 and P5 when a backward has ended."""
        for unit, facts in enumerate(self.facts):
            self.require(facts.reduction == NONE, unit, "a reduction outlives its backward")
            self.require(not facts.arrived, unit, "a gradient outlives its backward, neither reduced nor accumulated nor dropped")
            if unit not in self.path and (event is Event.BACKWARD_FAILED or not self.always[unit]):
                self.require(facts.copy == NOWHERE, unit, "the backward is over and it is not sharded")
            self.require(facts.copy != UNSHARDING_NOW, unit, "the backward is over and a gather is in flight")
            if event is Event.FINAL_CALLBACK:
                self.require(unit in self.committing, unit, "never committed")
                self.require(not facts.accumulated, unit, "gradients of no_sync were not reduced")
            elif accumulated[unit]:
                self.require(facts.accumulated, unit, "gradients of earlier backwards are lost")
            elif event is Event.BACKWARD_FAILED:
                self.require(not facts.accumulated, unit, "a failed backward has accumulated its gradients")
        self.committing.clear()
        self.queued = False

    def check_abandoned(self, accumulated: tuple[bool, ...]) -> None:
        """Check P5 when a step was abandoned."""
        self.committing.clear()
        self.queued = False
        self.may_step = False
        self.evaluates = False
        for unit, facts in enumerate(self.facts):
            self.require(facts.copy == NOWHERE and not facts.shown, unit, "abandoned and not sharded")
            self.require(not facts.full_params, unit, "abandoned and still summoned")
            self.require(facts.reduction == NONE and not facts.arrived, unit, "abandoned and its gradients remain")
            self.require(facts.accumulated or not accumulated[unit], unit, "gradients of earlier backwards are lost")
