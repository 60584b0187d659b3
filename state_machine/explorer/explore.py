"""Visits every reachable joint state of small trees of units, and reports the shortest path to a violated invariant.

The search is breadth first, from rest, and has no bound on depth. It ends when no new state is reachable, so its result holds for
passes of any length. It is deterministic: moves come in the order of the model, and never from a set or hash.
The trees are small because an error between units shows up between two or three of them. The scope of each tree says what its
exploration leaves out, and some other tree includes it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

from state_machine.explorer import collector_off
from state_machine.explorer.harness import NEVER, Harness, Snapshot
from state_machine.explorer.invariants import Sync, Violation
from state_machine.explorer.model import Branch, Move, Scope, Tree, What
from state_machine.table import ReshardPolicy

AFTER_BACKWARD: Final = ReshardPolicy.AFTER_BACKWARD
NEVER_RESHARD: Final = ReshardPolicy.NEVER
EVERYTHING: Final = Scope(breakage=True)
WITH_AUTOGRAD_GRAD: Final = Scope(breakage=True, autograd_grad=True)
STEPPING: Final = Scope(breakage=True, stepping=True)

TREES: Final = (
    Tree("alone", (Branch("root", 0, AFTER_BACKWARD),), WITH_AUTOGRAD_GRAD),
    Tree("alone-frozen", (Branch("root", 0, frozen=True),), WITH_AUTOGRAD_GRAD),
    Tree("pair", (Branch("root", 0, AFTER_BACKWARD), Branch("child", 0)), EVERYTHING),
    Tree("pair-frozen", (Branch("root", 0, AFTER_BACKWARD), Branch("child", 0, frozen=True)), WITH_AUTOGRAD_GRAD),
    Tree("pair-kept", (Branch("root", 0), Branch("child", 0, AFTER_BACKWARD)), Scope(prefetch=2)),
    Tree("alone-always", (Branch("root", 0, NEVER_RESHARD),), STEPPING),
    Tree("pair-always", (Branch("root", 0, NEVER_RESHARD), Branch("child", 0, NEVER_RESHARD)), Scope(summoning=False)),
    Tree(
        "pair-stepping",
        (Branch("root", 0, AFTER_BACKWARD), Branch("child", 0, NEVER_RESHARD, frozen=True)),
        Scope(stepping=True, summoning=False, no_sync=False),
    ),
    Tree(
        "pair-kept-stepping",
        (Branch("root", 0), Branch("child", 0, AFTER_BACKWARD)),
        Scope(stepping=True, summoning=False, no_sync=False),
    ),
    Tree(
        "chain", (Branch("root", 0, AFTER_BACKWARD), Branch("block", 0), Branch("leaf", 1)), Scope(summoning=False, again=False)
    ),
    Tree(
        "chain-summoned",
        (Branch("root", 0), Branch("block", 0, AFTER_BACKWARD), Branch("leaf", 1)),
        Scope(no_sync=False, nested=False, again=False),
    ),
    Tree(
        "chain-frozen",
        (Branch("root", 0, AFTER_BACKWARD), Branch("block", 0, frozen=True), Branch("adapter", 1)),
        Scope(no_sync=False, summoning=False),
    ),
    Tree(
        "tree",
        (Branch("root", 0, AFTER_BACKWARD), Branch("left", 0), Branch("leaf", 1), Branch("right", 0, frozen=True)),
        Scope(nested=False, no_sync=False, summoning=False),
    ),
)


KINDS: Final = {Sync.NO_SYNC: " under no_sync", Sync.AUTOGRAD_GRAD: " by autograd.grad"}


class Report(NamedTuple):
    """The result of one exploration."""

    name: str
    """Of the tree, or of the scene of buckets."""
    states: int
    transitions: int
    refusals: int
    violations: int
    story: tuple[str, ...]
    """The shortest path to the first violation, and the violation."""
    seconds: float


@collector_off()
def search(
    name: str, harness: Any, perform: Callable[[Any, int], object], describe: Callable[..., str], breakage: bool = False
) -> Report:
    """Visit every joint state of a harness that can be reached. Stops at the first depth with a violation.

    `perform` makes a move, of which the effect after so many fails; it returns whether one failed. With `breakage` each effect
    fails once. `describe` puts a move into words: the state before it, the move, and the number of that effect.
    """
    began = time.perf_counter()
    start = harness.freeze()
    came_from: dict[Any, tuple[Any, Any, int] | None] = {start: None}
    frontier = deque((start,))
    transitions = refusals = 0
    story: tuple[str, ...] = ()
    try:
        while frontier:
            step = None
            here = frontier.popleft()
            harness.restore(here)
            for move in tuple(harness.moves()):
                fail_after = NEVER
                while True:
                    step = here, move, fail_after
                    harness.restore(here)
                    transitions += 1
                    refusals += move.what is What.REFUSED
                    broke = perform(move, fail_after)
                    there = harness.freeze()
                    if there not in came_from:
                        came_from[there] = step
                        frontier.append(there)
                    if not breakage or (fail_after != NEVER and not broke):
                        break
                    fail_after += 1
    except Violation as violation:
        steps = [f"=> {violation}"]
        step = step or came_from[here]  # the state itself may be the violation
        while step is not None:
            steps.append(describe(*step))
            step = came_from[step[0]]
        story = tuple(reversed(steps))
    seconds = time.perf_counter() - began
    return Report(name, len(came_from), transitions, refusals, int(bool(story)), story, seconds)


def explore(tree: Tree) -> Report:
    """Visit every reachable joint state of the tree."""
    harness = Harness(tree)
    return search(tree.name, harness, harness.perform, partial(_describe, tree), tree.scope.breakage)


def _describe(tree: Tree, before: Snapshot, move: Move, fail_after: int) -> str:
    """Describe a move in words."""
    name, event = tree.units[move.unit].name, move.event.name
    words = {
        What.FORWARD: f"{name}: {event}",
        What.BACKWARD: f"{name}: {event}" + KINDS.get(move.sync, ""),
        What.RECOMPUTE: f"{name}: PRE_RECOMPUTE, POST_RECOMPUTE" + KINDS.get(move.sync, ""),
        What.CLOSE: "all: " + ", ".join(["FORWARD_FAILED"] * move.depth + [event]),
        What.PREFETCH: f"{name}: prefetched",
        What.OPTIMIZER_STEP: "the optimizer steps",
        What.GRAPHS_DROPPED: "the user drops every graph",
        What.SUMMON: f"{name}: {event}",
        What.ABANDON: "all: STEP_ABANDONED",
        What.REFUSED: f"{name}: {event}, which must be refused",
    }[move.what]
    return words if fail_after == NEVER else f"{words}, and effect {fail_after + 1} of it fails"


def run(name: str) -> int:
    """Explore the tree of that name, or all of them; print a table, and return the exit status."""
    trees = [tree for tree in TREES if name in ("all", tree.name)]
    if not trees:
        print(f"no tree {name!r}; there are: all, {', '.join(tree.name for tree in TREES)}")
        return 2
    return print_reports("tree", "units", ((len(tree.units), explore(tree)) for tree in trees))


def print_reports(kind: str, size: str, reports: Iterable[tuple[int, Report]]) -> int:
    """Print a row for each exploration, with its size, and the story of a violation; return the exit status."""
    print(f"{kind:<20} {size:>5} {'joint states':>12} {'transitions':>12} {'refused':>8} {'violations':>10} {'seconds':>8}")
    failed = False
    for count, found in reports:
        print(
            f"{found.name:<20} {count:>5} {found.states:>12,} {found.transitions:>12,} "
            f"{found.refusals:>8,} {found.violations:>10} {found.seconds:>8.1f}"
        )
        for step in found.story:
            print(f"    {step}")
        failed = failed or found.violations > 0
    return int(failed)
