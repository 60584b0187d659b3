"""Visits every state that small trees of units can reach together, and reports the shortest way to a broken promise.

Breadth first, from rest, without a bound on depth: the search ends when nothing new is reachable, so what it reports
holds for passes of any length. Deterministic: moves come in the order of the model, no set or hash decides anything.
The trees are small because whatever goes wrong between units goes wrong between two or three of them; what each
exploration leaves out to stay small is written in its scope, and some other tree has it.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from state_machine.explorer.harness import NEVER, Snapshot, World
from state_machine.explorer.invariants import Sync, Violation
from state_machine.explorer.model import Branch, Move, Scope, Tree, What
from state_machine.table import Strategy

KEEP: Final = Strategy.KEEP_AFTER_FORWARD
ALWAYS: Final = Strategy.KEEP_ALWAYS
EVERYTHING: Final = Scope(breakage=True)

TREES: Final = (
    Tree("alone", (Branch("root", 0, KEEP),), EVERYTHING),
    Tree("alone-frozen", (Branch("root", 0, frozen=True),), EVERYTHING),
    Tree("pair", (Branch("root", 0, KEEP), Branch("child", 0)), EVERYTHING),
    Tree("pair-frozen", (Branch("root", 0, KEEP), Branch("child", 0, frozen=True)), EVERYTHING),
    Tree("pair-kept", (Branch("root", 0), Branch("child", 0, KEEP)), Scope(prefetch=2)),
    Tree("alone-always", (Branch("root", 0, ALWAYS),), EVERYTHING),
    Tree("pair-always", (Branch("root", 0, ALWAYS), Branch("child", 0, ALWAYS)), Scope(lending=False)),
    Tree("chain", (Branch("root", 0, KEEP), Branch("block", 0), Branch("leaf", 1)), Scope(lending=False, again=False)),
    Tree(
        "chain-lent",
        (Branch("root", 0), Branch("block", 0, KEEP), Branch("leaf", 1)),
        Scope(no_sync=False, nested=False, again=False),
    ),
    Tree(
        "chain-frozen",
        (Branch("root", 0, KEEP), Branch("block", 0, frozen=True), Branch("adapter", 1)),
        Scope(no_sync=False, lending=False),
    ),
    Tree(
        "tree",
        (Branch("root", 0, KEEP), Branch("left", 0), Branch("leaf", 1), Branch("right", 0, frozen=True)),
        Scope(nested=False, no_sync=False, lending=False),
    ),
)


class Report(NamedTuple):
    """What one exploration found."""

    tree: str
    states: int
    transitions: int
    refusals: int
    violations: int
    story: tuple[str, ...]
    """The shortest way to the first violation, and the violation."""
    seconds: float


def explore(tree: Tree) -> Report:
    """Visit every reachable joint state of the tree. Stops at the first depth with a violation."""
    began = time.perf_counter()
    world = World(tree)
    start = world.freeze()
    came_from: dict[Snapshot, tuple[Snapshot, Move, int] | None] = {start: None}
    frontier = deque((start,))
    transitions = refusals = 0
    while frontier:
        here = frontier.popleft()
        world.restore(here)
        for move in tuple(world.moves()):
            fuse = NEVER
            while True:
                world.restore(here)
                transitions += 1
                refusals += move.what is What.REFUSED
                try:
                    broke = world.perform(move, fuse)
                except Violation as violation:
                    story = (*_story(tree, came_from, here), _told(tree, move, fuse), f"=> {violation}")
                    return Report(tree.name, len(came_from), transitions, refusals, 1, story, time.perf_counter() - began)
                there = world.freeze()
                if there not in came_from:
                    came_from[there] = (here, move, fuse)
                    frontier.append(there)
                if not tree.scope.breakage or (fuse != NEVER and not broke):
                    break
                fuse += 1
    return Report(tree.name, len(came_from), transitions, refusals, 0, (), time.perf_counter() - began)


def _story(tree: Tree, came_from: dict[Snapshot, tuple[Snapshot, Move, int] | None], snapshot: Snapshot) -> tuple[str, ...]:
    steps: list[str] = []
    step = came_from[snapshot]
    while step is not None:
        before, move, fuse = step
        steps.append(_told(tree, move, fuse))
        step = came_from[before]
    return tuple(reversed(steps))


def _told(tree: Tree, move: Move, fuse: int) -> str:
    """A move in words."""
    name, event = tree.units[move.unit].name, move.event.name
    words = {
        What.FORWARD: f"{name}: {event}",
        What.BACKWARD: f"{name}: {event}" + (" under no_sync" if move.sync is Sync.KEEPING else ""),
        What.REPLAY: f"{name}: REPLAY_BEGINS, REPLAY_ENDS" + (" under no_sync" if move.sync is Sync.KEEPING else ""),
        What.CLOSE: "all: " + ", ".join(["FORWARD_FAILS"] * move.depth + [event]),
        What.WANT: f"{name}: prefetch wants it",
        What.OPTIMIZER_STEP: "the optimizer steps",
        What.GRAPHS_DROPPED: "the user drops every graph",
        What.LOAN: f"{name}: {event}",
        What.ABANDON: "all: STEP_ABANDONED",
        What.REFUSED: f"{name}: {event}, which must be refused",
    }[move.what]
    return words if fuse == NEVER else f"{words}, and effect {fuse + 1} of it fails"


def chosen(name: str) -> Sequence[Tree]:
    """The trees of that name, or all of them."""
    return [tree for tree in TREES if name in ("all", tree.name)]


def run(name: str) -> int:
    """Explore, print a table, and return the exit status."""
    trees = chosen(name)
    if not trees:
        print(f"no tree {name!r}; there are: all, {', '.join(tree.name for tree in TREES)}")
        return 2
    print(f"{'tree':<14} {'units':>5} {'joint states':>12} {'transitions':>12} {'refused':>8} {'violations':>10} {'seconds':>8}")
    failed = False
    for tree in trees:
        found = explore(tree)
        print(
            f"{found.tree:<14} {len(tree.units):>5} {found.states:>12,} {found.transitions:>12,} "
            f"{found.refusals:>8,} {found.violations:>10} {found.seconds:>8.1f}"
        )
        for step in found.story:
            print(f"    {step}")
        failed = failed or found.violations > 0
    return int(failed)
