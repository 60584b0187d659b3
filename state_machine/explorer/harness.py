"""Executes the moves of the model: the real machines, a minimal engine, and the invariant monitor.

The engine here is the shortest that follows `Root`, `Lifecycle` and `Residency`. Each of its effects can be made to fail
half-way (`fail_after`). Then the step is abandoned, as in the real engine, and must leave nothing behind. Some effects never
fail: those that only free memory or change what the modules use, the commits (everything that can fail is before the first), and
a wait in RESHARD.
"""

from collections.abc import Iterator
from typing import Final, assert_never

from state_machine.explorer.invariants import HIDDEN, NONE, NOWHERE, SAME, SHOWN, InvariantMonitor, Seen, Sync, Violation
from state_machine.explorer.model import Model, Move, Tree, What
from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.residency import Effect, Request, Residency, ResidencyState
from state_machine.root import RESTING, Instruction, Root
from state_machine.staleness import CopyAction, CopyEvent, CopyState
from state_machine.table import BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Action, Event, State


class EffectFailed(Exception):
    """An effect of the engine failed half-way."""


UnitSnapshot = tuple[State, ResidencyState, CopyState, bool, Seen]
Snapshot = tuple[tuple[UnitSnapshot, ...], tuple[int, ...], Sync, bool, bool, int, BackwardState]

REQUESTS: Final = {Action.UNSHARD: Request.UNSHARD, Action.KEEP_UNSHARDED: Request.CACHE, Action.RESHARD: Request.RESHARD}
MAY_FAIL: Final = frozenset(
    {
        Effect.ALL_GATHER,
        Effect.WAIT_ALL_GATHER,
        Action.REDUCE_GRADS,
        Action.FLUSH_GRADS,
        Action.GATHER_FULL,
        Action.WRITE_BACK,
        Action.WAIT_REDUCTIONS,
    }
)
BEGINS: Final = {
    Sync.SYNC: BackwardEvent.SYNC_BEGINS,
    Sync.NO_SYNC: BackwardEvent.NO_SYNC_BEGINS,
    Sync.AUTOGRAD_GRAD: BackwardEvent.GRAD_ONLY_BEGINS,
}
RUNS: Final = {
    Sync.NO_BACKWARD: RESTING,
    Sync.SYNC: (BackwardState.RUNNING_SYNC,),
    Sync.NO_SYNC: (BackwardState.RUNNING_NO_SYNC,),
    Sync.AUTOGRAD_GRAD: (BackwardState.RUNNING_NO_GRADS,),
}
ENDS: Final = {
    (False, False): BackwardEvent.CALLBACK_RUNS,
    (False, True): BackwardEvent.CALLBACK_RUNS_INSIDE,
    (True, False): BackwardEvent.FAILS,
    (True, True): BackwardEvent.FAILS_INSIDE,
}
"""The event at the end of a backward, by whether it fails and whether it runs inside a forward."""
NEVER: Final = -1


class Harness:
    """The units of one tree, a minimal engine, and the invariant monitor."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.order = tuple(range(len(tree.units)))
        self.model = Model(tree)
        self.root = Root([Lifecycle(unit.name, unit.reshard_policy) for unit in tree.units])
        self.residencies = tuple(Residency(unit.name) for unit in tree.units)
        keeps = tuple(unit.reshard_policy is not ReshardPolicy.AFTER_FORWARD for unit in tree.units)
        always = tuple(unit.reshard_policy is ReshardPolicy.NEVER for unit in tree.units)
        self.seen = InvariantMonitor(tuple(unit.name for unit in tree.units), keeps, always)
        self.live = 0
        """The units that some graph can reach, one bit each."""
        self.pending_return = [False] * len(tree.units)
        """Whether the step was abandoned while the unit was summoned: the user has still to leave `summon_full_params`."""
        self.fail_after = NEVER
        """The number of effects before the one that fails."""

    # snapshots: only the explorer may set the states of the machines

    def freeze(self) -> Snapshot:
        """Return everything that the next moves depend on, hashable. They do not depend on the story of a unit."""
        units = tuple(
            (life.state, home.state, copy.state, pending_return, facts.freeze())
            for life, home, copy, pending_return, facts in zip(
                self.root.lifecycles, self.residencies, self.root.copies, self.pending_return, self.seen.facts, strict=True
            )
        )
        seen = self.seen
        return (units, seen.path, seen.sync, seen.may_step, seen.evaluates, self.live, self.root.backward)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot of `freeze`."""
        seen = self.seen
        units, seen.path, seen.sync, seen.may_step, seen.evaluates, self.live, self.root.backward = snapshot
        self.root.in_backward = self.root.backward not in RESTING
        self.seen.queued = self.seen.sync is not Sync.NO_BACKWARD
        self.seen.committing.clear()
        for unit, (state, residence, copy, pending_return, facts) in enumerate(units):
            self.root.copies[unit].state = copy
            self.root.lifecycles[unit].state = state
            self.residencies[unit].state = residence
            self.pending_return[unit] = pending_return
            self.seen.facts[unit].restore(facts)

    def moves(self) -> Iterator[Move]:
        """Yield every move that is legal now, and some that must be refused."""
        return self.model.moves(self.seen, self.live, self.pending_return)

    # executing moves

    def perform(self, move: Move, fail_after: int = NEVER) -> bool:
        """Execute a move and check the invariants. Return whether an effect failed on the way.

        Raises:
            Violation: an invariant is violated, or a legal move is refused.
        """
        self.fail_after = fail_after
        accumulated = tuple(facts.accumulated for facts in self.seen.facts)
        try:
            try:
                self._act(move, accumulated)
            except EffectFailed:
                self.fail_after = NEVER
                self._abandon(accumulated)
                return True
        except (IllegalTransition, RuntimeError) as refused:
            raise Violation(f"a legal move was refused: {refused}") from refused
        self.seen.check()
        if self.root.backward not in RUNS[self.seen.sync]:
            raise Violation(f"the backward is {self.root.backward.name}, but the backward that runs is {self.seen.sync.name}")
        return False

    def _act(self, move: Move, accumulated: tuple[bool, ...]) -> None:
        unit, event = move.unit, move.event
        match move.what:
            case What.FORWARD:
                if event is Event.PRE_FORWARD and not self.seen.path:
                    self._begin_pass(accumulated, move.evaluates)
                self._move_forward(unit, event)
            case What.BACKWARD | What.RECOMPUTE:
                self.seen.sync = move.sync
                self._move_backward(unit, event)
                if move.what is What.RECOMPUTE:
                    self.seen.check()
                    self._on_event(unit, Event.POST_RECOMPUTE)
            case What.CLOSE:
                for _ in range(move.depth):
                    self._move_forward(self.seen.path[-1], Event.FORWARD_FAILED)
                kind = ENDS[event is Event.BACKWARD_FAILED, self._is_inside]
                self._close(event, self.root.end_backward(kind, self.order), accumulated)
            case What.PREFETCH:
                self._request(unit, Request.PREFETCH)
            case What.OPTIMIZER_STEP:
                for facts, always in zip(self.seen.facts, self.seen.always, strict=True):
                    if facts.copy != NOWHERE:
                        facts.stale = SHOWN if self.seen.path and not always else HIDDEN
                self.live = 0
            case What.GRAPHS_DROPPED:
                self.live = 0
            case What.SUMMON:
                self.pending_return[unit] = False
                self._on_event(unit, event)
            case What.ABANDON:
                self._abandon(accumulated)
            case What.REFUSED:
                self._expect_refusal(unit, event)
            case _:
                assert_never(move.what)

    def _begin_pass(self, accumulated: tuple[bool, ...], evaluates: bool) -> None:
        dead = self.root.end_backward(BackwardEvent.PASS_BEGINS, self.order)
        if (dead is None) is not (self.seen.sync is Sync.NO_BACKWARD):
            raise Violation("a failed backward was not noticed, or one was noticed that does not exist")
        if dead is not None:
            self._close(Event.BACKWARD_FAILED, dead, accumulated)
        self.seen.begin_pass(evaluates)
        event = CopyEvent.EVALUATION_BEGINS if evaluates else CopyEvent.PASS_BEGINS
        compared = [unit for unit in self.order if CopyAction.ASK in self._copy_event(unit, event)]
        # the ranks compare version counters and checksums, which show every change
        changed = any(self.seen.facts[unit].stale != SAME for unit in compared)
        for unit in compared:
            self.seen.facts[unit].doubt = self.seen.facts[unit].doubt or changed
            self._copy_event(unit, CopyEvent.WEIGHTS_CHANGED if changed else CopyEvent.WEIGHTS_SAME)
        for unit in self.order:
            if self.seen.always[unit] and self.seen.facts[unit].stale != SAME:
                raise Violation(f"{self.tree.units[unit].name}: a stale copy was kept from pass to pass")

    def _copy_event(self, unit: int, event: CopyEvent) -> tuple[CopyAction, ...]:
        actions = self.root.copies[unit].on(event)
        if CopyAction.DROP_COPY in actions:
            self.seen.drop(unit)
            self._request(unit, Request.RESHARD)
        return actions

    def _move_forward(self, unit: int, event: Event) -> None:
        if event is Event.PRE_FORWARD:
            self.seen.path += (unit,)
            if not self.seen.facts[unit].full_params:
                self.live |= 1 << unit
        else:
            self.seen.path = self.seen.path[:-1]
        self._on_event(unit, event)
        if event is Event.PRE_FORWARD:
            self.seen.check_used(unit)
        if not self.seen.path:
            failed = event is Event.FORWARD_FAILED
            for other in self.order:
                self._request(other, Request.PASS_FAILS if failed else Request.PASS_ENDS)
            if self.seen.evaluates:
                self.root.evaluation_ends()
                for facts in self.seen.facts:
                    facts.doubt = True
            self.seen.check_pass_ended(failed)

    def _move_backward(self, unit: int, event: Event) -> None:
        facts = self.seen.facts[unit]
        if event is Event.PRE_BACKWARD or event is Event.PRE_RECOMPUTE:
            facts.open = True
        elif event is Event.GRAD_ACCUMULATED:
            # late entry: other parts of the unit may compute without an event
            facts.open = facts.open or facts.reduction == NONE
            facts.arrived = True
            if self.seen.sync is Sync.AUTOGRAD_GRAD:
                self.seen.sync = Sync.SYNC
        elif event is Event.EXTERNAL_GRAD:
            facts.arrived = True
        elif event is Event.INPUT_GRADS_DONE or event is Event.POST_BACKWARD_NO_SYNC:
            facts.open = False
        elif event is Event.POST_BACKWARD:
            facts.open = False
            facts.arrived = True
        if event is Event.POST_BACKWARD or event is Event.POST_BACKWARD_NO_SYNC:
            found = self.root.post_backward_event()
            if found is not event:
                raise Violation(f"{self.tree.units[unit].name}: got {found.name} where {event.name} is true")
        self._on_event(unit, event)
        if unit not in self.seen.path and facts.open:
            self.seen.check_used(unit)

    @property
    def _is_inside(self) -> bool:
        """Whether a backward that ends now ends inside a forward. It matters only if an optimizer may step there."""
        return bool(self.seen.path) and self.tree.scope.stepping

    def _close(self, event: Event, instructions: tuple[Instruction, ...] | None, accumulated: tuple[bool, ...]) -> None:
        for facts in self.seen.facts:
            facts.open = False
        if self._is_inside:
            self.seen.backward_inside()
        self._execute(instructions, event)
        self.seen.sync = Sync.NO_BACKWARD
        self.seen.check_closed(accumulated, event)
        self._check_at_rest()

    def _abandon(self, accumulated: tuple[bool, ...]) -> None:
        path, self.seen.path = self.seen.path, ()
        self.seen.sync = Sync.NO_BACKWARD
        self.seen.committing.clear()
        for unit, facts in enumerate(self.seen.facts):
            facts.open = False
            self.pending_return[unit] = self.pending_return[unit] or facts.full_params
        self._execute(self.root.end_backward(BackwardEvent.STEP_ABANDONED, self.order), Event.STEP_ABANDONED)
        # the exception now leaves the forwards that it came from
        for unit in reversed(path):
            self._on_event(unit, Event.FORWARD_FAILED)
        self.seen.check_abandoned(accumulated)
        if not self.root.at_rest:
            raise Violation("abandoned, but the root is not at rest")

    def _check_at_rest(self) -> None:
        if self.root.backward is not (BackwardState.RESTING_INSIDE if self._is_inside else BackwardState.RESTING):
            raise Violation("the backward is over, but still runs")
        for unit, life in enumerate(self.root.lifecycles):
            if unit not in self.seen.path and not self.seen.facts[unit].full_params and life.state is not State.IDLE:
                raise Violation(f"{life.unit}: the backward is over and it is {life.state.name}")

    def _expect_refusal(self, unit: int, event: Event) -> None:
        life = self.root.lifecycles[unit]
        state, story = life.state, life.story
        try:
            self.root.on_event(unit, event)
        except IllegalTransition:
            if life.state is not state or life.story != story:
                raise Violation(f"{life.unit}: moved while refusing {event.name}") from None
        else:
            raise Violation(f"{life.unit}: {event.name} was not refused")

    # the minimal engine

    def _on_event(self, unit: int, event: Event) -> None:
        instructions = self.root.on_event(unit, event)
        self._execute(instructions, event)
        self.seen.after_event(unit, event, tuple(one.action for one in instructions))

    def _execute(self, instructions: tuple[Instruction, ...] | None, event: Event) -> None:
        for unit, action in instructions or ():
            request = REQUESTS.get(action)
            if request is not None:
                self._request(unit, request)
            elif action is Action.DROP_STALE:
                moved = self.seen.facts[unit].stale == SHOWN
                self._copy_event(unit, CopyEvent.USED_CHANGED if moved else CopyEvent.USED)
            else:
                self._count_down(action)
                self.seen.action(unit, action, event)
                if action is Action.JOIN_BACKWARD:
                    self.root.begin(BEGINS[self.seen.sync])
                elif action is Action.COMMIT and not self.tree.units[unit].frozen:
                    self.root.copies[unit].on(CopyEvent.COMMITTED)
                    self.seen.facts[unit].doubt = self.seen.facts[unit].doubt or self.seen.always[unit]

    def _request(self, unit: int, request: Request) -> None:
        for effect in self.residencies[unit].on(request):
            if effect is Effect.ALL_GATHER:
                actions = self.root.before_gather(unit)
                self.seen.gathers(unit, CopyAction.CHECK in actions, CopyAction.WAIT in actions, CopyAction.SUM in actions)
            self._count_down(effect)
            self.seen.effect(unit, effect)
            if effect is Effect.FREE_UNSHARDED:
                self.root.copies[unit].on(CopyEvent.RELEASED)

    def _count_down(self, step: Action | Effect) -> None:
        if self.fail_after != NEVER and step in MAY_FAIL:
            if self.fail_after == 0:
                raise EffectFailed
            self.fail_after -= 1
