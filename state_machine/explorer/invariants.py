"""An independent statement of the promises: what may never be seen, whatever the tables say.

Rule 1: the bystander sees what happens to units (a call, a gradient) and what the engine does (actions, effects).
Rule 2: it never reads a table. If it did, it would believe the very thing it is there to doubt.

P2  what computes is in memory, shown and not stale; no memory is given back under a gather; none is gathered twice.
P3  what arrived in a synchronising backward is reduced exactly once, before the commit.
P4  one callback per backward; after it every unit is IDLE and sharded, and nothing is in flight.
P5  a failed pass leaves no gradient and no loan; what earlier backwards accumulated under `no_sync` survives.
"""

from enum import Enum, auto
from typing import Final

from state_machine.residency import Effect
from state_machine.vocabulary import Action, Event

NOWHERE, IN_FLIGHT, IN_MEMORY = 0, 1, 2
"""Where the copy of a unit's parameters is."""
NONE, REDUCING, REDUCED = 0, 1, 2
"""Where the reduction of a unit's gradients is: none, in flight, awaited and not committed."""

SAME, HIDDEN, SHOWN = 0, 1, 2
"""Whether the weights have changed since the copy was gathered: no, without a trace on this rank, in its version counters."""

Seen = tuple[int, bool, int, bool, bool, int, bool, bool, bool]


class Violation(AssertionError):
    """A promise was broken, or a legal move was refused."""


class Sync(Enum):
    """Which backward runs."""

    NO_BACKWARD = auto()
    SYNC = auto()
    NO_SYNC = auto()
    """Under `no_sync`."""
    AUTOGRAD_GRAD = auto()
    """`torch.autograd.grad`: it synchronises from the first gradient on, if one comes."""


class Facts:
    """What the bystander knows of one unit."""

    __slots__ = ("accumulated", "arrived", "copy", "doubt", "full_params", "open", "reduction", "shown", "stale")

    def __init__(self) -> None:
        self.restore((NOWHERE, False, SAME, False, False, NONE, False, False, False))

    def freeze(self) -> Seen:
        """Everything, hashable."""
        return (
            self.copy,
            self.shown,
            self.stale,
            self.open,
            self.arrived,
            self.reduction,
            self.accumulated,
            self.full_params,
            self.doubt,
        )

    def restore(self, seen: Seen) -> None:
        """Undo `freeze`."""
        (
            self.copy,
            self.shown,
            self.stale,  # whether the shards changed since the copy was gathered
            self.open,  # a backward has reached it and its gradients are not complete
            self.arrived,  # a gradient came and is not reduced
            self.reduction,
            self.accumulated,  # gradients kept whole by earlier backwards under `no_sync`
            self.full_params,
            self.doubt,  # since the gather something has happened after which the shards may have changed on some rank
        ) = seen


EXPECTED: Final = {
    # actions that a fact of the event itself demands or forbids, whatever the state
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
    """Watches the units of one root. Raises Violation the moment a promise is broken."""

    __slots__ = ("always", "committing", "evaluates", "facts", "keeps", "may_step", "names", "path", "queued", "sync")

    def __init__(self, names: tuple[str, ...], keeps: tuple[bool, ...], always: tuple[bool, ...]) -> None:
        self.names = names
        self.keeps = keeps
        """Which units may be in memory and not compute."""
        self.always = always
        """Which may be in memory after the backward too."""
        self.facts = tuple(Facts() for _ in names)
        self.path: tuple[int, ...] = ()
        """The units whose forward runs, outermost first."""
        self.sync = Sync.NO_BACKWARD
        self.may_step = False
        """A backward inside the forward that runs is over, so that an optimizer may step before the forward ends."""
        self.evaluates = False
        """The forward that runs records no graph."""
        self.queued = False
        """The callback of this backward is queued."""
        self.committing: list[int] = []
        """Who committed since the backward closed."""

    def require(self, condition: bool, unit: int, what: str) -> None:
        """Raise Violation unless `condition`."""
        if not condition:
            raise Violation(f"{self.names[unit]}: {what}")

    def effect(self, unit: int, effect: Effect) -> None:
        """Something happened to the memory of a unit."""
        facts = self.facts[unit]
        match effect:
            case Effect.ALL_GATHER:
                self.require(facts.copy == NOWHERE, unit, "gathered what was in memory or in flight already")
                facts.copy = IN_FLIGHT
                facts.stale = SAME
                facts.doubt = self.may_step
            case Effect.WAIT_ALL_GATHER:
                if facts.copy == IN_FLIGHT:
                    facts.copy = IN_MEMORY
            case Effect.USE_UNSHARDED:
                self.require(facts.copy == IN_MEMORY, unit, "showed parameters that are not in memory")
                facts.shown = True
            case Effect.USE_SHARDED:
                facts.shown = False
            case Effect.FREE_UNSHARDED:
                self.require(facts.copy != IN_FLIGHT, unit, "released memory under a gather in flight")
                self.require(not facts.shown, unit, "released memory that the modules still show")
                facts.copy = NOWHERE
                facts.stale = SAME
                facts.doubt = False

    def action(self, unit: int, action: Action, event: Event) -> None:
        """The engine did something other than moving memory, in answer to `event`."""
        facts = self.facts[unit]
        self.require(event in EXPECTED.get(action, (event,)), unit, f"{action.name} in answer to {event.name}")
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
                self.require(not facts.accumulated or facts.reduction != NONE, unit, "committed without what no_sync accumulated")
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
                self.require(facts.copy == NOWHERE, unit, "lent full parameters beside a whole copy")
                facts.full_params = True
            case Action.WRITE_BACK:
                self.require(facts.full_params, unit, "wrote back what was not lent")
            case Action.FREE_FULL:
                facts.full_params = False

    def answered(self, unit: int, event: Event, actions: tuple[Action, ...]) -> None:
        """What must be among the answers to an event, seen from outside."""
        facts = self.facts[unit]
        self.require(self.queued or self.sync is Sync.NO_BACKWARD, unit, "a backward touched a unit and no callback is queued")
        if event is Event.POST_FORWARD or event is Event.POST_RECOMPUTE:
            self.require(Action.HOOK_OUTPUTS in actions, unit, "nobody watches its outputs")
        elif event is Event.POST_BACKWARD:
            self.require(not facts.arrived, unit, "its gradients are complete and not reduced")
        elif event is Event.SUMMON:
            self.require(facts.full_params, unit, "asked for, and not lent")
        elif event is Event.UNSUMMON_WRITEBACK or event is Event.UNSUMMON_DISCARD:
            self.require(not facts.full_params, unit, "given back, and still lent")

    def computes(self, unit: int) -> bool:
        """Does its forward, a replay of it, or its backward run now?"""
        return self.facts[unit].open or unit in self.path

    def check(self) -> None:
        """P2 and P8, at any moment: whole exactly where something computes."""
        for unit, facts in enumerate(self.facts):
            if facts.full_params:
                self.require(facts.copy == NOWHERE, unit, "lent, and gathered beside the loan")
            elif facts.open or unit in self.path:
                self.require(facts.copy == IN_MEMORY, unit, "computes and its parameters are not in memory")
                self.require(facts.shown, unit, "computes and its modules show the shards")
            else:
                self.require(not facts.shown, unit, "shows whole parameters and nothing computes")
                self.require(facts.copy != IN_MEMORY or self.keeps[unit], unit, "holds memory and nothing computes")

    def begin_pass(self, evaluates: bool) -> None:
        """A forward of the root begins: what may have changed before it did."""
        self.evaluates = evaluates
        for unit, facts in enumerate(self.facts):
            facts.doubt = facts.doubt or evaluates or not self.always[unit]

    def backward_inside(self) -> None:
        """A backward inside a forward is over. One that failed may come after one that brought gradients."""
        self.may_step = True
        for unit, facts in enumerate(self.facts):
            # what other strategies hold is compared by version counters
            facts.doubt = facts.doubt or self.always[unit]

    def check_used(self, unit: int) -> None:
        """P2, when a forward or a backward has come to a unit."""
        facts = self.facts[unit]
        self.require(facts.full_params or facts.stale == SAME, unit, "computes with a stale copy")

    def gathers(self, unit: int, checks: bool, waits: bool, sums: bool) -> None:
        """What the engine does before a gather."""
        self.require(checks or self.sync is not Sync.NO_BACKWARD, unit, "gathered shards that were not checked")
        self.require(
            waits or not self.may_step or self.sync is not Sync.NO_BACKWARD, unit, "gathered shards that may be written now"
        )
        self.require(sums or not self.always[unit], unit, "gathered what will be asked for, without checksums")

    def drop(self, unit: int) -> None:
        """The engine gives a copy back, to gather it anew if it is needed."""
        facts = self.facts[unit]
        needed = facts.copy == NOWHERE or facts.stale != SAME or facts.doubt
        self.require(needed, unit, "dropped a copy that nothing has made stale")

    def check_pass_ended(self, failed: bool) -> None:
        """When the forward of the root is over."""
        self.may_step = False
        self.evaluates = False
        for unit, facts in enumerate(self.facts):
            self.require(facts.copy != IN_FLIGHT, unit, "the pass is over and a gather is in flight")
            self.require(facts.open or not failed or facts.copy == NOWHERE, unit, "the pass has failed and it is not sharded")

    def check_closed(self, accumulated: tuple[bool, ...], event: Event) -> None:
        """P3, P4, P5, when a backward has closed."""
        for unit, facts in enumerate(self.facts):
            self.require(facts.reduction == NONE, unit, "a reduction outlives its backward")
            self.require(not facts.arrived, unit, "a gradient outlives its backward, neither reduced nor kept nor dropped")
            if unit not in self.path and (event is Event.BACKWARD_FAILED or not self.always[unit]):
                self.require(facts.copy == NOWHERE, unit, "the backward is over and it is not sharded")
            self.require(facts.copy != IN_FLIGHT, unit, "the backward is over and a gather is in flight")
            if event is Event.FINAL_CALLBACK:
                self.require(unit in self.committing, unit, "never committed")
                self.require(not facts.accumulated, unit, "what no_sync accumulated was not reduced")
            elif accumulated[unit]:
                self.require(facts.accumulated, unit, "what earlier backwards accumulated is lost")
            elif event is Event.BACKWARD_FAILED:
                self.require(not facts.accumulated, unit, "a failed backward accumulated its gradients")
        self.committing.clear()
        self.queued = False

    def check_abandoned(self, accumulated: tuple[bool, ...]) -> None:
        """P5, when a pass was given up: no trace, whatever went on."""
        self.committing.clear()
        self.queued = False
        self.may_step = False
        self.evaluates = False
        for unit, facts in enumerate(self.facts):
            self.require(facts.copy == NOWHERE and not facts.shown, unit, "given up and not sharded")
            self.require(not facts.full_params, unit, "given up and still lent")
            self.require(facts.reduction == NONE and not facts.arrived, unit, "given up and its gradients remain")
            self.require(facts.accumulated or not accumulated[unit], unit, "what earlier backwards accumulated is lost")
