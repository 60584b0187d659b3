"""What autograd and a user may legally do to a small tree of units.

What may happen is stated by permission, and where in doubt more is permitted than torch can do, so that what holds
here holds there. The world (harness.py) does it. The permissions:

* The graphs that exist are one set, `live`: the units some graph can still reach. A forward adds to it, a backward
  reaches any of it in any order and may leave it as it is (`retain_graph`, a second graph), and the user may drop it.
  So any number of forwards, then any number of backwards, in any order, with any output unused.
* A unit is called from inside its parent, any number of times, in any order, and ends as it likes: with a graph, with
  nothing that requires grad (evaluation, a detached output, the first forward under reentrant checkpointing), or by an
  exception, which the parent may catch.
* In a backward, an output is reached before a gradient arrives or never (late entry), gradients become complete or
  never do, a replay may come at any time, and a unit may be entered again after it was done (several checkpoints).
* A replay blocks autograd's thread, so nothing but replays and prefetch can come between its begin and its end, and
  both leave the lifecycle where the begin put it: it is one move, with its end or (stopped early) without.
* A gradient from a use of a parameter outside its unit may come in any backward, also when no graph reaches the unit.
* A frozen unit has no gradients; its inputs' gradients (BACKWARD_LEFT) come also when its own output is unused.
* An optimizer step makes every copy stale, and autograd refuses the graphs from before it: both in one move, at rest.
* Prefetch may want any unit that is not lent, at any moment, with a bound on the gathers in flight.
* An exception in a backward inside a forward may pass through some of the forwards before the engine hears of it.

Left out: an optimizer step inside a forward (the units around it go on computing with what they gathered), a forward
that catches a failure of ours and goes on (refused at its end), and a frozen unit left by one call while a backward is
inside another call of it (autograd runs one device's nodes latest first, so calls do not overlap).
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from state_machine.explorer.invariants import IN_FLIGHT, NONE, NOWHERE, Bystander, Sync
from state_machine.table import Strategy
from state_machine.vocabulary import Event


class Branch(NamedTuple):
    """One unit of a tree."""

    name: str
    parent: int
    """Its place among the units; the outermost is its own parent."""
    strategy: Strategy = Strategy.FREE_AFTER_FORWARD
    frozen: bool = False


class Scope(NamedTuple):
    """What the user does in one exploration. Nothing is bounded but what is said here."""

    nested: bool = True
    """Backwards also inside a forward."""
    no_sync: bool = True
    """Backwards also under `no_sync`."""
    lending: bool = True
    """Full parameters are lent at rest."""
    again: bool = True
    """A unit that was done may be entered again in the same backward."""
    prefetch: int = 1
    """The most gathers that prefetch has in flight."""
    breakage: bool = False
    """Every single effect that can fail (see harness.py) may fail half-way, at any moment."""


class Tree(NamedTuple):
    """Units, outermost first, and what is done to them."""

    name: str
    units: tuple[Branch, ...]
    scope: Scope


class What(Enum):
    """The kinds of moves."""

    FORWARD = auto()
    BACKWARD = auto()
    REPLAY = auto()
    CLOSE = auto()
    WANT = auto()
    OPTIMIZER_STEP = auto()
    GRAPHS_DROPPED = auto()
    LOAN = auto()
    ABANDON = auto()
    REFUSED = auto()


class Move(NamedTuple):
    """One thing autograd, the user or prefetch does."""

    what: What
    unit: int = 0
    event: Event = Event.STEP_ABANDONED
    sync: Sync = Sync.NO_BACKWARD
    depth: int = 0
    """How many forwards the exception has passed through."""


FORWARD_MOVES: Final = (Event.FORWARD_ENDS, Event.INFERENCE_ENDS, Event.FORWARD_FAILS)
CLOSING: Final = {Sync.SYNCHRONISING: Event.BACKWARD_ENDS, Sync.KEEPING: Event.BACKWARD_ENDS_UNSYNCED}
COMPLETE: Final = {Sync.SYNCHRONISING: Event.GRADIENTS_READY, Sync.KEEPING: Event.GRADIENTS_KEPT}


class Model:
    """Says what may come next, from what the bystander saw and what the user holds."""

    def __init__(self, tree: Tree) -> None:
        self.units = tree.units
        self.scope = tree.scope
        order = range(len(tree.units))
        self.children = tuple(tuple(u for u in order if tree.units[u].parent == p and u != p) for p in order)

    def moves(self, seen: Bystander, live: int, owed: Sequence[bool]) -> Iterator[Move]:
        """Every move that is legal now, and some that must be refused."""
        if seen.sync is Sync.NO_BACKWARD:
            yield from self._forward_moves(seen)
            if not seen.path:
                yield from self._moves_at_rest(seen, live, owed)
            if not seen.path or self.scope.nested:
                yield from self._backward_moves(seen, live, Sync.SYNCHRONISING)
                if self.scope.no_sync:
                    yield from self._backward_moves(seen, live, Sync.KEEPING)
        else:
            yield from self._backward_moves(seen, live, seen.sync)
            yield Move(What.CLOSE, event=CLOSING[seen.sync])
            for depth in range(len(seen.path) + 1):
                yield Move(What.CLOSE, event=Event.BACKWARD_FAILS, depth=depth)
        gathers = sum(facts.copy == IN_FLIGHT for facts in seen.facts)
        for unit, facts in enumerate(seen.facts):
            if not facts.lent and (facts.copy != NOWHERE or gathers < self.scope.prefetch):
                yield Move(What.WANT, unit)
            if facts.lent or seen.computes(unit):
                yield Move(What.REFUSED, unit, Event.SUMMONED)
        yield Move(What.ABANDON)

    def _forward_moves(self, seen: Bystander) -> Iterator[Move]:
        if not seen.path:
            yield Move(What.FORWARD, 0, Event.FORWARD_BEGINS)
            return
        top = seen.path[-1]
        for child in self.children[top]:
            yield Move(What.FORWARD, child, Event.FORWARD_BEGINS)
        if not seen.facts[top].lent:
            yield Move(What.REFUSED, top, Event.FORWARD_BEGINS)
        for event in FORWARD_MOVES:
            refused = event is Event.FORWARD_ENDS and seen.facts[top].lent
            yield Move(What.REFUSED if refused else What.FORWARD, top, event)

    def _moves_at_rest(self, seen: Bystander, live: int, owed: Sequence[bool]) -> Iterator[Move]:
        if live:
            yield Move(What.GRAPHS_DROPPED)
        if live or any(facts.copy != NOWHERE for facts in seen.facts):
            yield Move(What.OPTIMIZER_STEP)
        for unit, facts in enumerate(seen.facts):
            if facts.lent or owed[unit]:
                yield Move(What.LOAN, unit, Event.RETURNED)
                yield Move(What.LOAN, unit, Event.DISCARDED)
            elif self.scope.lending:
                yield Move(What.LOAN, unit, Event.SUMMONED)

    def _backward_moves(self, seen: Bystander, live: int, sync: Sync) -> Iterator[Move]:
        for unit, facts in enumerate(seen.facts):
            if not facts.arrived and not self.units[unit].frozen:
                outside = Event.GRADIENT_FROM_OUTSIDE
                yield Move(What.REFUSED, unit, outside) if facts.lent else Move(What.BACKWARD, unit, outside, sync)
            if not live >> unit & 1:
                continue
            frozen = self.units[unit].frozen
            if facts.lent:
                yield Move(What.REFUSED, unit, Event.BACKWARD_REACHES)
            elif self.scope.again or facts.open or facts.reduction == NONE:
                yield Move(What.BACKWARD, unit, Event.BACKWARD_REACHES, sync)
                yield Move(What.BACKWARD, unit, Event.REPLAY_BEGINS, sync)
                yield Move(What.REPLAY, unit, Event.REPLAY_BEGINS, sync)
                if not facts.arrived and not frozen:
                    yield Move(What.BACKWARD, unit, Event.GRADIENT_ARRIVES, sync)
            if frozen and seen.queued:
                yield Move(What.BACKWARD, unit, Event.BACKWARD_LEFT, sync)
            if facts.arrived or (self.scope.again and facts.reduction != NONE):
                yield Move(What.BACKWARD, unit, COMPLETE[sync], sync)
