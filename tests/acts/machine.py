"""Random programs of moves and acts, as a Hypothesis state machine.

Rule 1: a rule only writes a move down. The teardown plays the program: on simulated ranks from beginning to end, then on the plain
        model. A simulated world runs one function on all ranks, so a world that waits for the next rule would need threads that
        wait for Hypothesis, and a rank that hangs would hang it. Written down, a program is a value: it is played again, cut and
        printed as it is, and the same program gives the same run.
Rule 2: a rule is not guarded by what plain torch would raise, since `trial.judge` knows it. Guards only keep programs interesting.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.acts.doors import DOORS
from tests.acts.table import MOMENTS_OF_HOOKS, differs_today
from tests.acts.trial import Arm, Backward, Do, Evaluate, Forward, Move, Step, Sync, Undo, Zero, judge
from tests.acts.vocabulary import ACTS

acts = st.sampled_from(sorted(ACTS))
blocks = st.integers(0, 1)
LIVE = 2
"""Graphs at one time."""


class ActsAtAnyMoment(RuleBasedStateMachine):
    """A model that is trained, on which a user acts."""

    def __init__(self) -> None:
        super().__init__()
        self.door = ""
        self.size = 1
        self.order = 0
        self.program: list[Move] = []
        self.live: list[int] = []

    @initialize(door=st.sampled_from(list(DOORS)), size=st.sampled_from((2, 1, 3)), order=st.integers(0, 7), warm=st.booleans())
    def wrap(self, door: str, size: int, order: int, warm: bool) -> None:
        self.door, self.size, self.order = door, size, order
        if warm:
            self.ordinary_step()

    @rule()
    def ordinary_step(self) -> None:
        self.program += [Forward(9), Backward(9), Step(), Zero()]

    @precondition(lambda self: len(self.live) < LIVE)
    @rule()
    def forward(self) -> None:
        slot = len(self.program)
        self.live.append(slot)
        self.program.append(Forward(slot))

    @precondition(lambda self: self.live)
    @rule(last=st.booleans(), retain=st.sampled_from((False, False, True)))
    def backward(self, last: bool, retain: bool) -> None:
        slot = self.live[-1 if last else 0]
        if not retain:
            self.live.remove(slot)
        self.program.append(Backward(slot, retain))

    @rule()
    def step(self) -> None:
        self.program.append(Step())

    @rule()
    def zero(self) -> None:
        self.program.append(Zero())

    @rule()
    def evaluate(self) -> None:
        self.program.append(Evaluate())

    @rule(on=st.booleans())
    def sync(self, on: bool) -> None:
        self.program.append(Sync(on))

    @rule(act=acts, block=blocks)
    def do(self, act: str, block: int) -> None:
        self.program.append(Do(act, block))

    @rule(moment=st.sampled_from(MOMENTS_OF_HOOKS), act=acts, block=blocks)
    def arm(self, moment: str, act: str, block: int) -> None:
        if not differs_today(act, moment):
            self.program.append(Arm(moment, act, block))

    @rule()
    def undo(self) -> None:
        self.program.append(Undo())

    def teardown(self) -> None:
        """Equal, or refused on all ranks by a sentence, and the next legal step is right."""
        if self.door:
            program = [*self.program, Sync(True), Zero(), Undo(), Forward(9), Backward(9), Step()]
            check(program, self.door, self.size, self.order)


def check(program: list[Move], door: str, size: int, order: int) -> None:
    """Raises AssertionError with the program, ready to be played again."""
    fault = judge(program, door, size, order).fault
    assert not fault, f"{fault}\ncheck([{', '.join(map(repr, program))}], {door!r}, {size}, {order})"


def machine(settings: Any) -> None:
    """Play as many programs as the settings say."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(ActsAtAnyMoment, settings=settings)
