"""What autograd and a user may legally do to a small tree of units.

The model lists permissions. In doubt it permits more than torch can do, so its results hold for torch. The harness (harness.py)
executes the moves. The permissions:

* All graphs together are one set, `live`: the units that some graph can still reach. A forward adds to it. A backward enters any
  of its units in any order and may leave the set unchanged (`retain_graph`, a second graph). The user may drop it. So any number
  of forwards can precede any number of backwards, in any order, with any output unused.
* A parent calls a unit any number of times, in any order. A call ends with a graph, without an output that requires grad
  (evaluation, a detached output, the first forward under reentrant checkpointing), or by an exception, which the parent may
  catch.
* In a backward, an output is entered before a gradient arrives or never (late entry), gradients may stay incomplete, a recompute
  may come at any time, and a unit may be entered again after it was done (several checkpoints).
* A recompute blocks autograd's thread, so only recomputes and prefetch can come between its begin and its end, and neither
  changes the lifecycle. So a recompute is one move, with its end or (stopped early) without.
* A gradient from a use of a parameter outside its unit may arrive in any backward, even if no graph reaches the unit.
* A frozen unit has no gradients. The gradients of its inputs (INPUT_GRADS_DONE) come even if its own output is unused.
* An optimizer step makes every copy stale, and autograd refuses earlier graphs: both are one move. A step happens at rest, or in
  a forward inside which a backward has run. It may leave the shards of this rank, and so their version counters, unchanged.
  Inside a forward, units whose reshard policy is not NEVER only react to changed counters.
* A forward of the root records a graph, or is an evaluation.
* Prefetch may gather any unit that is not summoned, at any moment, with a bound on the all-gathers in flight.
* A backward may fail unnoticed. Then the next event is a forward outside any other, at rest.
* `torch.autograd.grad` accumulates no gradient in a parameter, unless a backward inside it does. It never begins with one.
* An exception in a backward inside a forward may leave some of the forwards before the engine notices it.

Left out: a backward through a call during which an optimizer has stepped (the version counters refuse it), a forward that
catches an error of fsdp and continues (refused at its end), and a frozen unit that one call leaves while a backward is inside
another call of it (autograd runs the nodes of one device latest first, so calls do not overlap).
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from state_machine.explorer.invariants import NONE, NOWHERE, UNSHARDING_NOW, InvariantMonitor, Sync
from state_machine.table import ReshardPolicy
from state_machine.vocabulary import Event


class Branch(NamedTuple):
    """One unit of a tree."""

    name: str
    parent: int
    """The index of its parent. The outermost unit is its own parent."""
    reshard_policy: ReshardPolicy = ReshardPolicy.AFTER_FORWARD
    frozen: bool = False


class Scope(NamedTuple):
    """The limits of one exploration. Nothing else is bounded."""

    nested: bool = True
    """Backwards also inside a forward."""
    no_sync: bool = True
    """Backwards also under `no_sync`."""
    summoning: bool = True
    """The user summons full parameters at rest."""
    autograd_grad: bool = False
    """Backwards also by `torch.autograd.grad`."""
    again: bool = True
    """A unit that is done may be entered again in the same backward."""
    stepping: bool = False
    """An optimizer steps inside a forward too, and there are evaluations."""
    prefetch: int = 1
    """The most all-gathers that prefetch has in flight."""
    breakage: bool = False
    """Every effect that can fail (see harness.py) may fail half-way, at any moment."""


class Tree(NamedTuple):
    """Units, outermost first, and the limits of their exploration."""

    name: str
    units: tuple[Branch, ...]
    scope: Scope


class What(Enum):
    """The kinds of moves."""

    FORWARD = auto()
    BACKWARD = auto()
    RECOMPUTE = auto()
    CLOSE = auto()
    PREFETCH = auto()
    OPTIMIZER_STEP = auto()
    GRAPHS_DROPPED = auto()
    SUMMON = auto()
    ABANDON = auto()
    REFUSED = auto()


class Move(NamedTuple):
    """One step of autograd, the user or prefetch."""

    what: What
    unit: int = 0
    event: Event = Event.STEP_ABANDONED
    sync: Sync = Sync.NO_BACKWARD
    depth: int = 0
    """The number of forwards that the exception has left."""
    evaluates: bool = False
    """Whether it is a forward of the root that records no graph."""


FORWARD_MOVES: Final = (Event.POST_FORWARD, Event.POST_FORWARD_NO_GRAD, Event.FORWARD_FAILED)
CLOSING: Final = {
    Sync.SYNC: Event.FINAL_CALLBACK,
    Sync.NO_SYNC: Event.FINAL_CALLBACK_NO_SYNC,
    Sync.AUTOGRAD_GRAD: Event.FINAL_CALLBACK_NO_SYNC,
}
COMPLETE: Final = {
    Sync.SYNC: Event.POST_BACKWARD,
    Sync.NO_SYNC: Event.POST_BACKWARD_NO_SYNC,
    Sync.AUTOGRAD_GRAD: Event.POST_BACKWARD_NO_SYNC,
}


class Model:
    """Yields the next possible moves, from the facts of the monitor and the graphs of the user."""

    def __init__(self, tree: Tree) -> None:
        self.units = tree.units
        self.scope = tree.scope
        order = range(len(tree.units))
        self.children = tuple(tuple(u for u in order if tree.units[u].parent == p and u != p) for p in order)

    def moves(self, seen: InvariantMonitor, live: int, pending_return: Sequence[bool]) -> Iterator[Move]:
        """Yield every move that is legal now, and some that must be refused."""
        if seen.sync is Sync.NO_BACKWARD:
            yield from self._forward_moves(seen)
            if not seen.path:
                yield from self._moves_at_rest(seen, live, pending_return)
            if not seen.path or self.scope.nested:
                yield from self._backward_moves(seen, live, Sync.SYNC)
                if self.scope.no_sync:
                    yield from self._backward_moves(seen, live, Sync.NO_SYNC)
                if self.scope.autograd_grad:
                    yield from self._backward_moves(seen, live, Sync.AUTOGRAD_GRAD)
        else:
            yield from self._backward_moves(seen, live, seen.sync)
            yield Move(What.CLOSE, event=CLOSING[seen.sync])
            for depth in range(len(seen.path) + 1):
                yield Move(What.CLOSE, event=Event.BACKWARD_FAILED, depth=depth)
            if not seen.path:
                yield Move(What.FORWARD, 0, Event.PRE_FORWARD)
        gathers = sum(facts.copy == UNSHARDING_NOW for facts in seen.facts)
        for unit, facts in enumerate(seen.facts):
            if not facts.full_params and (facts.copy != NOWHERE or gathers < self.scope.prefetch):
                yield Move(What.PREFETCH, unit)
            if facts.full_params or seen.computes(unit):
                yield Move(What.REFUSED, unit, Event.SUMMON)
        yield Move(What.ABANDON)

    def _forward_moves(self, seen: InvariantMonitor) -> Iterator[Move]:
        if not seen.path:
            yield Move(What.FORWARD, 0, Event.PRE_FORWARD)
            if self.scope.stepping:
                yield Move(What.FORWARD, 0, Event.PRE_FORWARD, evaluates=True)
            return
        if self.scope.stepping and seen.may_step:
            yield Move(What.OPTIMIZER_STEP)
        top = seen.path[-1]
        for child in self.children[top]:
            yield Move(What.FORWARD, child, Event.PRE_FORWARD)
        if not seen.facts[top].full_params:
            yield Move(What.REFUSED, top, Event.PRE_FORWARD)
        for event in FORWARD_MOVES:
            refused = event is Event.POST_FORWARD and seen.facts[top].full_params
            yield Move(What.REFUSED if refused else What.FORWARD, top, event)

    def _moves_at_rest(self, seen: InvariantMonitor, live: int, pending_return: Sequence[bool]) -> Iterator[Move]:
        if live:
            yield Move(What.GRAPHS_DROPPED)
        if live or any(facts.copy != NOWHERE for facts in seen.facts):
            yield Move(What.OPTIMIZER_STEP)
        for unit, facts in enumerate(seen.facts):
            if facts.full_params or pending_return[unit]:
                yield Move(What.SUMMON, unit, Event.UNSUMMON_WRITEBACK)
                yield Move(What.SUMMON, unit, Event.UNSUMMON_DISCARD)
            elif self.scope.summoning:
                yield Move(What.SUMMON, unit, Event.SUMMON)

    def _backward_moves(self, seen: InvariantMonitor, live: int, sync: Sync) -> Iterator[Move]:
        for unit, facts in enumerate(seen.facts):
            if not facts.arrived and not self.units[unit].frozen:
                outside = Event.EXTERNAL_GRAD
                yield Move(What.REFUSED, unit, outside) if facts.full_params else Move(What.BACKWARD, unit, outside, sync)
            if not live >> unit & 1:
                continue
            frozen = self.units[unit].frozen
            if facts.full_params:
                yield Move(What.REFUSED, unit, Event.PRE_BACKWARD)
            elif self.scope.again or facts.open or facts.reduction == NONE:
                yield Move(What.BACKWARD, unit, Event.PRE_BACKWARD, sync)
                yield Move(What.BACKWARD, unit, Event.PRE_RECOMPUTE, sync)
                yield Move(What.RECOMPUTE, unit, Event.PRE_RECOMPUTE, sync)
                if not facts.arrived and not frozen and (sync is not Sync.AUTOGRAD_GRAD or seen.queued):
                    yield Move(What.BACKWARD, unit, Event.GRAD_ACCUMULATED, sync)
            if frozen and seen.queued:
                yield Move(What.BACKWARD, unit, Event.INPUT_GRADS_DONE, sync)
            if facts.arrived or (self.scope.again and facts.reduction != NONE):
                yield Move(What.BACKWARD, unit, COMPLETE[sync], sync)
