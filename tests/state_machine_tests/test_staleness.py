"""Every cell of both tables of the copies, written out a second time by hand, and what they promise from pass to pass."""

import pytest

from state_machine.lifecycle import Lifecycle
from state_machine.root import Root
from state_machine.staleness import COPY_TABLES, GATHERS, Copy, CopyAction, CopyEvent, CopyState
from state_machine.table import BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Event
from tests.state_machine_tests.cells import cells_of, written

WITHIN_A_PASS = """
    STALE GATHERED -> FRESH: CHECK
    STALE GATHERED_LATE -> FRESH: CHECK, WAIT
    STALE GATHERED_IN_BACKWARD -> FRESH:
    STALE USED -> STALE: DROP_COPY
    STALE USED_CHANGED -> STALE: DROP_COPY
    STALE PASS_BEGINS -> STALE:
    STALE EVALUATION_BEGINS -> STALE:
    STALE EVALUATION_ENDS -> STALE:
    STALE COMMITTED -> STALE:
    STALE BACKWARD_INSIDE -> STALE:
    STALE RELEASED -> STALE:
    FRESH USED -> FRESH:
    FRESH USED_CHANGED -> STALE: DROP_COPY
    FRESH PASS_BEGINS -> STALE:
    FRESH EVALUATION_BEGINS -> STALE:
    FRESH EVALUATION_ENDS -> FRESH:
    FRESH COMMITTED -> FRESH:
    FRESH BACKWARD_INSIDE -> FRESH:
    FRESH RELEASED -> STALE:
"""
FROM_PASS_TO_PASS = """
    STALE GATHERED -> FRESH: CHECK, SUM
    STALE GATHERED_LATE -> UNSURE: CHECK, WAIT, SUM
    STALE GATHERED_IN_BACKWARD -> FRESH: SUM
    STALE PASS_BEGINS -> STALE: DROP_COPY
    STALE EVALUATION_BEGINS -> STALE: DROP_COPY
    STALE EVALUATION_ENDS -> STALE:
    STALE USED -> STALE: DROP_COPY
    STALE USED_CHANGED -> STALE: DROP_COPY
    STALE COMMITTED -> STALE:
    STALE BACKWARD_INSIDE -> STALE:
    STALE RELEASED -> STALE:
    FRESH USED -> FRESH:
    FRESH USED_CHANGED -> STALE: DROP_COPY
    FRESH PASS_BEGINS -> UNSURE: ASK
    FRESH EVALUATION_BEGINS -> STALE: DROP_COPY
    FRESH EVALUATION_ENDS -> STALE:
    FRESH COMMITTED -> STALE:
    FRESH BACKWARD_INSIDE -> UNSURE:
    FRESH RELEASED -> STALE:
    UNSURE WEIGHTS_SAME -> FRESH:
    UNSURE WEIGHTS_CHANGED -> STALE: DROP_COPY
    UNSURE USED -> STALE: DROP_COPY
    UNSURE USED_CHANGED -> STALE: DROP_COPY
    UNSURE PASS_BEGINS -> UNSURE: ASK
    UNSURE EVALUATION_BEGINS -> STALE: DROP_COPY
    UNSURE EVALUATION_ENDS -> STALE:
    UNSURE COMMITTED -> STALE:
    UNSURE BACKWARD_INSIDE -> UNSURE:
    UNSURE RELEASED -> STALE:
"""
CELLS = {
    ReshardPolicy.AFTER_FORWARD: WITHIN_A_PASS,
    ReshardPolicy.AFTER_BACKWARD: WITHIN_A_PASS,
    ReshardPolicy.NEVER: FROM_PASS_TO_PASS,
}
RESHARD_NEVER = ReshardPolicy.NEVER


@pytest.mark.parametrize("strategy", [*ReshardPolicy])
def test_the_cells_above_are_the_table(strategy: ReshardPolicy) -> None:
    assert cells_of(COPY_TABLES[strategy]) == written(CELLS[strategy])
    assert set(COPY_TABLES[strategy]) == set(CopyState)


def test_an_event_without_a_row_is_refused_and_changes_nothing() -> None:
    copy = Copy("layers.3", RESHARD_NEVER)
    with pytest.raises(RuntimeError, match=r"the copy of unit 'layers\.3': WEIGHTS_SAME is not allowed in STALE"):
        copy.on(CopyEvent.WEIGHTS_SAME)
    assert copy.state is CopyState.STALE


def told(events: str) -> list[str]:
    """Play events to a copy that stays from pass to pass; return what each asks for."""
    copy = Copy("layers.3", RESHARD_NEVER)
    return ["+".join(action.name for action in copy.on(CopyEvent[event])) for event in events.split()]


def test_a_loop_without_accumulation_asks_nothing() -> None:
    step = "PASS_BEGINS RELEASED GATHERED COMMITTED"
    assert told(f"{step} {step} {step}") == ["DROP_COPY", "", "CHECK+SUM", ""] * 3


def test_accumulation_asks_and_gathers_once() -> None:
    assert told("PASS_BEGINS GATHERED PASS_BEGINS WEIGHTS_SAME USED PASS_BEGINS WEIGHTS_CHANGED")[1:] == [
        "CHECK+SUM",
        "ASK",
        "",
        "",
        "ASK",
        "DROP_COPY",
    ]


def test_around_an_evaluation_everything_is_gathered_anew() -> None:
    assert told("GATHERED EVALUATION_BEGINS RELEASED GATHERED EVALUATION_ENDS PASS_BEGINS")[1:] == [
        "DROP_COPY",
        "",
        "CHECK+SUM",
        "",
        "DROP_COPY",
    ]


def test_which_gather_it_is_depends_on_the_backward_of_the_root() -> None:
    def root_in(*events: BackwardEvent) -> Root:
        root = Root([Lifecycle("root", RESHARD_NEVER)])
        if events:
            root.on_event(0, Event.PRE_FORWARD)
            root.on_event(0, Event.PRE_BACKWARD)
            root.begin(events[0])
            for event in events[1:]:
                root.end_backward(event, (0,))
        return root

    late = (CopyAction.CHECK, CopyAction.WAIT, CopyAction.SUM)
    assert root_in().before_gather(0) == (CopyAction.CHECK, CopyAction.SUM)
    for kind in (BackwardEvent.SYNC_BEGINS, BackwardEvent.NO_SYNC_BEGINS, BackwardEvent.GRAD_ONLY_BEGINS):
        assert root_in(kind).before_gather(0) == (CopyAction.SUM,)
        assert root_in(kind, BackwardEvent.CALLBACK_RUNS).before_gather(0) == (CopyAction.CHECK, CopyAction.SUM)
        assert root_in(kind, BackwardEvent.CALLBACK_RUNS_INSIDE).before_gather(0) == late
        assert root_in(kind, BackwardEvent.FAILS_INSIDE).before_gather(0) == late
        assert root_in(kind, BackwardEvent.CALLBACK_RUNS_INSIDE, BackwardEvent.PASS_BEGINS).before_gather(0) == late[::2]
    beginning = Root([Lifecycle("root", RESHARD_NEVER)])
    beginning.on_event(0, Event.PRE_BACKWARD)
    assert beginning.before_gather(0) == (CopyAction.SUM,)
    assert set(GATHERS) == set(BackwardState)


def test_a_backward_inside_a_forward_makes_every_kept_copy_unsure() -> None:
    for end in (BackwardEvent.CALLBACK_RUNS_INSIDE, BackwardEvent.FAILS_INSIDE):
        root = Root([Lifecycle("root", RESHARD_NEVER), Lifecycle("child", ReshardPolicy.AFTER_BACKWARD)])
        root.before_gather(0)
        root.before_gather(1)
        root.on_event(1, Event.PRE_BACKWARD)
        root.begin(BackwardEvent.SYNC_BEGINS)
        root.end_backward(end, (0, 1))
        assert [copy.state for copy in root.copies] == [CopyState.UNSURE, CopyState.FRESH]
        assert root.at_rest
