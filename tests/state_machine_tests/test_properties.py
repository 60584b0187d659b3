"""Units that hear any event at any time, and a larger tree than the explorer can exhaust, wandered through.

The bystander here is a third statement of the promises, smaller than the explorer's: it sees instructions alone.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from state_machine.explorer.harness import Harness
from state_machine.explorer.model import Branch, Scope, Tree
from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.residency import Effect, Request, Residency
from state_machine.root import Instruction, Root
from state_machine.table import BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Action, Event, State

ASKS = {Action.UNSHARD: Request.UNSHARD, Action.KEEP_UNSHARDED: Request.CACHE, Action.RESHARD: Request.RESHARD}
KINDS = (BackwardEvent.SYNC_BEGINS, BackwardEvent.NO_SYNC_BEGINS, BackwardEvent.GRAD_ONLY_BEGINS)
CLOSING_EVENTS = (Event.FINAL_CALLBACK, Event.FINAL_CALLBACK_NO_SYNC, Event.BACKWARD_FAILED)
WELL = (BackwardEvent.CALLBACK_RUNS, BackwardEvent.CALLBACK_RUNS_INSIDE)
ENDS = (*WELL, BackwardEvent.FAILS, BackwardEvent.FAILS_INSIDE, BackwardEvent.PASS_BEGINS)
RESTING = (BackwardState.RESTING, BackwardState.RESTING_INSIDE)
SINGLE_EVENTS = [event for event in Event if event not in CLOSING_EVENTS and event is not Event.STEP_ABANDONED]
UNITS = st.integers(0, 2)


class UnitsSeenFromOutside(RuleBasedStateMachine):
    """Three units of one root hear anything at any time, legal or not."""

    def __init__(self) -> None:
        super().__init__()
        strategies = tuple(ReshardPolicy)
        self.root = Root([Lifecycle(f"unit{i}", strategy) for i, strategy in enumerate(strategies)])
        self.homes = [Residency(f"unit{i}") for i in range(3)]
        self.in_memory = [False] * 3
        self.in_flight = [False] * 3
        self.shown = [False] * 3
        self.full_params = [False] * 3
        self.reducing = [False] * 3
        self.callbacks = 0
        self.reduces = self.grad_only = False

    @rule(unit=UNITS, event=st.sampled_from(SINGLE_EVENTS), kind=st.sampled_from(KINDS))
    def on_event(self, unit: int, event: Event, kind: BackwardEvent) -> None:
        before = [(life.state, life.story) for life in self.root.lifecycles], self.root.backward
        try:
            told = self.root.on_event(unit, event)
        except IllegalTransition as refused:
            assert ([(life.state, life.story) for life in self.root.lifecycles], self.root.backward) == before
            assert refused.event is event and event not in refused.legal
            return
        if Action.JOIN_BACKWARD in [one.action for one in told]:
            self.root.begin(kind)
            self.reduces = kind is BackwardEvent.SYNC_BEGINS
            self.grad_only = kind is BackwardEvent.GRAD_ONLY_BEGINS
        elif event is Event.GRAD_ACCUMULATED:
            self.reduces = self.reduces or self.grad_only
        for instruction in told:
            self.watch(instruction, event)

    @rule(unit=UNITS)
    def prefetch(self, unit: int) -> None:
        if not self.full_params[unit]:
            self.ask(unit, Request.PREFETCH)

    @precondition(lambda self: self.root.backward not in RESTING)
    @rule()
    def complete(self) -> None:
        assert self.root.post_backward_event() is (Event.POST_BACKWARD if self.reduces else Event.POST_BACKWARD_NO_SYNC)

    @precondition(lambda self: self.root.backward not in RESTING)
    @rule(ends=st.sampled_from(ENDS), order=st.permutations(range(3)))
    def close(self, ends: BackwardEvent, order: list[int]) -> None:
        well = Event.FINAL_CALLBACK if self.reduces else Event.FINAL_CALLBACK_NO_SYNC
        event = well if ends in WELL else Event.BACKWARD_FAILED
        forwards = [life.state is State.FORWARD for life in self.root.lifecycles]
        told = self.root.end_backward(ends, order)
        assert told is not None
        commits = [one.unit for one in told if one.action is Action.COMMIT]
        assert commits == (order if event is Event.FINAL_CALLBACK else [])
        assert all(one.action is Action.COMMIT for one in told[len(told) - len(commits) :])
        for instruction in told:
            self.watch(instruction, event)
        self.callbacks = 0
        for unit in range(3):
            assert not self.reducing[unit], "a reduction outlives its backward"
            if not forwards[unit]:
                assert self.root.lifecycles[unit].state in (State.IDLE, State.SUMMONED)
                always = unit == 2 and event is not Event.BACKWARD_FAILED
                assert not self.in_memory[unit] or always, "the backward is over and it is not sharded"

    @rule(order=st.permutations(range(3)))
    def abandon(self, order: list[int]) -> None:
        for instruction in self.root.end_backward(BackwardEvent.STEP_ABANDONED, order) or ():
            self.watch(instruction, Event.STEP_ABANDONED)
        self.callbacks = 0
        assert self.root.at_rest
        assert not any(self.in_memory + self.shown + self.full_params + self.reducing)

    def watch(self, instruction: Instruction, event: Event) -> None:
        unit, action = instruction
        match action:
            case Action.UNSHARD | Action.KEEP_UNSHARDED | Action.RESHARD:
                self.ask(unit, ASKS[action])
            case Action.JOIN_BACKWARD:
                self.callbacks += 1
            case Action.REDUCE_GRADS:
                assert event is Event.POST_BACKWARD
                self.reducing[unit] = True
            case Action.FLUSH_GRADS:
                self.reducing[unit] = True
            case Action.COMMIT:
                assert self.reducing[unit], "committed what nobody flushed"
                self.reducing[unit] = False
            case Action.ACCUMULATE_UNSHARDED:
                assert event is Event.FINAL_CALLBACK_NO_SYNC
                self.reducing[unit] = False
            case Action.WAIT_REDUCTIONS:
                self.in_flight[unit] = False
                self.reducing[unit] = False
            case Action.DROP_GRADS:
                assert not self.reducing[unit], "dropped gradients under a reduction in flight"
                assert event in (Event.BACKWARD_FAILED, Event.STEP_ABANDONED)
            case Action.GATHER_FULL:
                assert not self.in_memory[unit], "a whole copy beside the loan"
                self.full_params[unit] = True
            case Action.WRITE_BACK:
                assert self.full_params[unit] and event is Event.UNSUMMON_WRITEBACK
            case Action.FREE_FULL:
                self.full_params[unit] = False

    def ask(self, unit: int, ask: Request) -> None:
        for effect in self.homes[unit].on(ask):
            match effect:
                case Effect.ALL_GATHER:
                    assert not self.in_memory[unit], "gathered what is in memory"
                    self.in_memory[unit] = self.in_flight[unit] = True
                case Effect.WAIT_ALL_GATHER:
                    self.in_flight[unit] = False
                case Effect.USE_UNSHARDED:
                    assert self.in_memory[unit] and not self.in_flight[unit]
                    self.shown[unit] = True
                case Effect.USE_SHARDED:
                    self.shown[unit] = False
                case Effect.FREE_UNSHARDED:
                    assert not self.in_flight[unit], "released under a gather in flight"
                    assert not self.shown[unit], "released what the modules show"
                    self.in_memory[unit] = False

    @invariant()
    def shown_exactly_while_computing(self) -> None:
        computing = [life.state in (State.FORWARD, State.BACKWARD_PRE) for life in self.root.lifecycles]
        assert self.shown == computing

    @invariant()
    def lent_exactly_while_summoned(self) -> None:
        assert self.full_params == [life.state is State.SUMMONED for life in self.root.lifecycles]

    @invariant()
    def one_callback_exactly_while_a_backward_runs(self) -> None:
        assert self.callbacks == (self.root.backward not in RESTING)
        if self.root.backward in RESTING:
            assert not any(life.state in (State.BACKWARD_PRE, State.BACKWARD_POST) for life in self.root.lifecycles)


AFTER_BACKWARD = ReshardPolicy.AFTER_BACKWARD
WIDE = Tree(
    "wide",
    (
        Branch("root", 0, AFTER_BACKWARD),
        Branch("embed", 0, frozen=True),
        Branch("block0", 0),
        Branch("block0.attention", 2),
        Branch("block0.mlp", 2, frozen=True),
        Branch("block1", 0, AFTER_BACKWARD),
        Branch("block1.always", 5, ReshardPolicy.NEVER),
        Branch("block1.adapter", 5),
        Branch("head", 0),
    ),
    Scope(prefetch=3, autograd_grad=True, stepping=True),
)


class Wanderer(RuleBasedStateMachine):
    """Legal moves of the explorer's model, in a tree far too large to exhaust. The harness checks every invariant itself."""

    @initialize()
    def begin(self) -> None:
        self.world = Harness(WIDE)

    @rule(choices=st.lists(st.integers(0, 10_000), min_size=1, max_size=12), fail_after=st.integers(-1, 9))
    def wander(self, choices: list[int], fail_after: int) -> None:
        for choice in choices:
            moves = tuple(self.world.moves())
            self.world.perform(moves[choice % len(moves)])
        moves = tuple(self.world.moves())
        self.world.perform(moves[choices[0] % len(moves)], fail_after)


WANDERERS = [UnitsSeenFromOutside, Wanderer]
TestUnitsSeenFromOutside = UnitsSeenFromOutside.TestCase
TestWanderer = Wanderer.TestCase
TestUnitsSeenFromOutside.settings = settings(stateful_step_count=60)
TestWanderer.settings = settings(stateful_step_count=25)


def test_the_wide_tree_has_frozen_kept_and_nested_units() -> None:
    assert {unit.frozen for unit in WIDE.units} == {True, False}
    assert {unit.reshard_policy for unit in WIDE.units} == set(ReshardPolicy)
    assert any(WIDE.units[unit.parent].parent != unit.parent for unit in WIDE.units)
