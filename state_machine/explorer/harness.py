"""A world in which the moves of the model are done: the real machines, an engine that obeys them, and the bystander.

The engine here is the shortest that obeys `Root`, `Lifecycle` and `Residency`. Any of its effects can be made to fail
half-way (`fuse`); then the step is abandoned, as the real engine does, and nothing may remain. Not broken off: what
only gives memory back or shows a face, the commits (all that can fail comes before the first), and a wait inside FREE.
"""

from collections.abc import Iterator
from typing import Final

from state_machine.explorer.invariants import NONE, NOWHERE, Bystander, Seen, Sync, Violation
from state_machine.explorer.model import Model, Move, Tree, What
from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.residency import Ask, Effect, Residency, ResidencyState
from state_machine.root import Instruction, Root
from state_machine.table import BackwardState, Strategy
from state_machine.vocabulary import Action, Event, State


class Breakage(Exception):
    """An effect of the engine failed half-way."""


UnitSnapshot = tuple[int, int, bool, Seen]
Snapshot = tuple[tuple[UnitSnapshot, ...], tuple[int, ...], Sync, int, BackwardState]

STATES: Final = {state.value: state for state in State}
RESIDENCES: Final = {state.value: state for state in ResidencyState}
ASKS: Final = {Action.NEED: Ask.NEED, Action.KEEP: Ask.KEEP, Action.FREE: Ask.FREE}
MAY_FAIL: Final = frozenset(
    {Effect.LAUNCH, Effect.AWAIT, Action.REDUCE, Action.FLUSH, Action.LEND, Action.WRITE_BACK, Action.DRAIN}
)
NEVER: Final = -1


class World:
    """The units of one tree, the engine that obeys the machines, and the bystander."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.order = tuple(range(len(tree.units)))
        self.model = Model(tree)
        self.root = Root([Lifecycle(unit.name, unit.strategy) for unit in tree.units])
        self.residencies = tuple(Residency(unit.name) for unit in tree.units)
        keeps = tuple(unit.strategy is not Strategy.FREE_AFTER_FORWARD for unit in tree.units)
        always = tuple(unit.strategy is Strategy.KEEP_ALWAYS for unit in tree.units)
        self.seen = Bystander(tuple(unit.name for unit in tree.units), keeps, always)
        self.live = 0
        """The units that some graph can reach, one bit each."""
        self.owed = [False] * len(tree.units)
        """The loan ended by itself (the step was abandoned); the user will still give it back."""
        self.fuse = NEVER
        """How many effects from now one fails."""

    # snapshots: the explorer stands outside the machines, and is the only one that may put them anywhere

    def freeze(self) -> Snapshot:
        """Everything that decides what can come next, hashable. The story of a unit decides nothing."""
        units = tuple(
            (life._state._value_, home._state._value_, owed, facts.freeze())
            for life, home, owed, facts in zip(self.root.lifecycles, self.residencies, self.owed, self.seen.facts, strict=True)
        )
        return (units, self.seen.path, self.seen.sync, self.live, self.root._backward)

    def restore(self, snapshot: Snapshot) -> None:
        """Undo `freeze`."""
        units, self.seen.path, self.seen.sync, self.live, self.root._backward = snapshot
        self.seen.queued = self.seen.sync is not Sync.NO_BACKWARD
        self.seen.committing.clear()
        for unit, (state, residence, owed, facts) in enumerate(units):
            self.root.lifecycles[unit]._state = STATES[state]
            self.residencies[unit]._state = RESIDENCES[residence]
            self.owed[unit] = owed
            self.seen.facts[unit].restore(facts)

    def moves(self) -> Iterator[Move]:
        """Every move that is legal now, and some that must be refused."""
        return self.model.moves(self.seen, self.live, self.owed)

    # doing it

    def perform(self, move: Move, fuse: int = NEVER) -> bool:
        """Do it, let the engine obey, let the bystander look. Return whether an effect failed on the way.

        Raises:
            Violation: a promise is broken, or a legal move is refused.
        """
        self.fuse = fuse
        stashed = tuple(facts.stashed for facts in self.seen.facts)
        try:
            return self._act_or_abandon(move, stashed)
        except (IllegalTransition, RuntimeError) as refused:
            raise Violation(f"a legal move was refused: {refused}") from refused

    def _act_or_abandon(self, move: Move, stashed: tuple[bool, ...]) -> bool:
        try:
            self._act(move, stashed)
        except Breakage:
            self.fuse = NEVER
            self._abandon(stashed)
            return True
        self.seen.check()
        return False

    def _act(self, move: Move, stashed: tuple[bool, ...]) -> None:
        unit, event = move.unit, move.event
        match move.what:
            case What.FORWARD:
                self._move_forward(unit, event)
            case What.BACKWARD | What.REPLAY:
                self.seen.sync = move.sync
                self._move_backward(unit, event)
                if move.what is What.REPLAY:
                    self.seen.check()
                    self._hear(unit, Event.REPLAY_ENDS)
            case What.CLOSE:
                for _ in range(move.depth):
                    self._move_forward(self.seen.path[-1], Event.FORWARD_FAILS)
                self._close(event, stashed)
            case What.WANT:
                self._ask(unit, Ask.WANT)
            case What.OPTIMIZER_STEP:
                for facts in self.seen.facts:
                    facts.stale = facts.copy != NOWHERE
                self.live = 0
            case What.GRAPHS_DROPPED:
                self.live = 0
            case What.LOAN:
                self.owed[unit] = False
                self._hear(unit, event)
            case What.ABANDON:
                self._abandon(stashed)
            case What.REFUSED:
                self._expect_refusal(unit, event)

    def _move_forward(self, unit: int, event: Event) -> None:
        if event is Event.FORWARD_BEGINS:
            self.seen.path += (unit,)
            if not self.seen.facts[unit].lent:
                self.live |= 1 << unit
        else:
            self.seen.path = self.seen.path[:-1]
        self._hear(unit, event)

    def _move_backward(self, unit: int, event: Event) -> None:
        facts = self.seen.facts[unit]
        if event is Event.BACKWARD_REACHES or event is Event.REPLAY_BEGINS:
            facts.open = True
        elif event is Event.GRADIENT_ARRIVES:
            # late entry: who knows what else of the unit will compute without announcing itself
            facts.open = facts.open or facts.reduction == NONE
            facts.arrived = True
        elif event is Event.GRADIENT_FROM_OUTSIDE:
            facts.arrived = True
        elif event is Event.BACKWARD_LEFT or event is Event.GRADIENTS_KEPT:
            facts.open = False
        elif event is Event.GRADIENTS_READY:
            facts.open = False
            facts.arrived = True
        self._hear(unit, event)

    def _close(self, event: Event, stashed: tuple[bool, ...]) -> None:
        for facts in self.seen.facts:
            facts.open = False
        self._obey(self.root.close(event, self.order), event)
        self.seen.sync = Sync.NO_BACKWARD
        self.seen.check_closed(stashed, event)
        self._check_at_rest()

    def _abandon(self, stashed: tuple[bool, ...]) -> None:
        path, self.seen.path = self.seen.path, ()
        self.seen.sync = Sync.NO_BACKWARD
        self.seen.committing.clear()
        for unit, facts in enumerate(self.seen.facts):
            facts.open = False
            self.owed[unit] = self.owed[unit] or facts.lent
        self._obey(self.root.abandon(self.order), Event.STEP_ABANDONED)
        # the exception that made us give up now passes through the forwards it came from
        for unit in reversed(path):
            self._hear(unit, Event.FORWARD_FAILS)
        self.seen.check_abandoned(stashed)
        if not self.root.at_rest:
            raise Violation("given up, and the root is not at rest")

    def _check_at_rest(self) -> None:
        if self.root.backward is not BackwardState.RESTING:
            raise Violation("the backward is closed, and runs")
        for unit, life in enumerate(self.root.lifecycles):
            if unit not in self.seen.path and not self.seen.facts[unit].lent and life.state is not State.IDLE:
                raise Violation(f"{life.unit}: the backward is over and it is {life.state.name}")

    def _expect_refusal(self, unit: int, event: Event) -> None:
        life = self.root.lifecycles[unit]
        state, story = life.state, life.story
        try:
            self.root.hear(unit, event)
        except IllegalTransition:
            if life.state is not state or life.story != story:
                raise Violation(f"{life.unit}: moved while refusing {event.name}") from None
        else:
            raise Violation(f"{life.unit}: {event.name} was not refused")

    # the engine, in short: what the machines say is done

    def _hear(self, unit: int, event: Event) -> None:
        instructions = self.root.hear(unit, event)
        self._obey(instructions, event)
        self.seen.answered(unit, event, tuple(one.action for one in instructions))

    def _obey(self, instructions: tuple[Instruction, ...], event: Event) -> None:
        for unit, action in instructions:
            ask = ASKS.get(action)
            if ask is not None:
                self._ask(unit, ask)
            elif action is Action.REFRESH:
                if self.seen.facts[unit].stale:
                    self._ask(unit, Ask.FREE)
            else:
                self._burn(action)
                self.seen.action(unit, action, event)

    def _ask(self, unit: int, ask: Ask) -> None:
        for effect in self.residencies[unit].on(ask):
            self._burn(effect)
            self.seen.effect(unit, effect)

    def _burn(self, thing: Action | Effect) -> None:
        if self.fuse != NEVER and thing in MAY_FAIL:
            if self.fuse == 0:
                raise Breakage
            self.fuse -= 1
