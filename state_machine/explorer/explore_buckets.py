"""Visits every reachable joint state of a few buckets on one or two ranks, and reports the shortest path to a violated invariant.

The search is that of explore.py: breadth first, from rest, without a bound on depth.
"""

from typing import Any, Final

from state_machine.bucket import BucketEvent, BucketKind, BucketState
from state_machine.explorer.bucket_harness import BucketHarness, Move, Part, Scene, What
from state_machine.explorer.explore import Report, print_reports, search

ORDINARY, BEHIND, EARLY, UNUSED, AT_END = BucketKind

SCENES: Final = (
    Scene("ordinary", (Part(0, ORDINARY), Part(1, ORDINARY)), ((1,), (0,))),
    Scene("ordinary-shared", (Part(0, ORDINARY), Part(1, ORDINARY, frozen=True)), ((1, 0),)),
    Scene("ordinary-kept", (Part(0, ORDINARY),), ((0,),), no_sync=True),
    Scene("early", (Part(0, EARLY), Part(0, EARLY)), ((1,), (0,)), bare=1, outside=False, more=False),
    Scene("early-shared", (Part(0, BEHIND), Part(1, EARLY)), ((1, 0),), outside=False),
    Scene("early-kept", (Part(0, EARLY),), ((0,),), no_sync=True),
    Scene("early-at-once", (Part(0, EARLY), Part(1, BEHIND)), ((0,), (1,)), gathers=False, at_once=True),
    Scene("find-unused", (Part(0, UNUSED), Part(0, UNUSED)), ((0,), (1,)), gathers=False, at_once=True, apart=True),
    Scene("find-unused-hooked", (Part(0, UNUSED), Part(0, UNUSED)), ((0,), (1,)), gathers=False, apart=True),
    Scene("at-end", (Part(0, AT_END), Part(1, AT_END)), ((1,), (0,)), outside=False),
    Scene("alone", (Part(0, ORDINARY), Part(1, ORDINARY)), ((1,), (0,)), 1, no_sync=True, breakage=True),
    Scene("alone-behind", (Part(0, BEHIND), Part(1, BEHIND)), ((1,), (0,)), 1, breakage=True),
    Scene("alone-early", (Part(0, BEHIND), Part(1, EARLY)), ((0,), (1,)), 1, 2, no_sync=True, breakage=True),
    Scene("alone-early-frozen", (Part(0, BEHIND, frozen=True), Part(1, EARLY, frozen=True)), ((0, 1),), 1, breakage=True),
    Scene("alone-unused", (Part(0, UNUSED), Part(1, UNUSED)), ((1, 0),), 1, apart=True, no_sync=True, breakage=True),
    Scene("alone-unused-frozen", (Part(0, UNUSED, frozen=True), Part(1, UNUSED)), ((0,), (1,)), 1, apart=True, breakage=True),
    Scene("alone-at-end", (Part(0, AT_END), Part(1, AT_END, frozen=True)), ((0,), (1,)), 1, no_sync=True, breakage=True),
    Scene(
        "alone-unused-at-end",
        (Part(0, AT_END), Part(1, AT_END), Part(1, AT_END, frozen=True)),
        ((0,), (1,), (2,)),
        1,
        apart=True,
        breakage=True,
    ),
)


def explore_buckets(scene: Scene, used: set[tuple[BucketKind, BucketState, BucketEvent]] | None = None) -> Report:
    """Visit every reachable joint state of the scene. `used` gets the rows that were used."""
    harness = BucketHarness(scene)
    report = search(scene.name, harness, lambda move, _: harness.perform(move), _describe)
    if used is not None:
        used |= harness.used
    return report


def _describe(before: Any, move: Move, _: int) -> str:
    """Describe a move in words. A step that a rank takes by itself is described by its name in `todo`."""
    if move.what is What.GOES_ON:
        todo = before[1][move.rank][4][7]
        return f"rank {move.rank}: {' '.join(str(one) for one in todo[0])}"
    return f"rank {move.rank}: {move.what.name} {move.of}"


def run() -> int:
    """Explore, print a table, and return the exit status."""
    return print_reports("scene", "ranks", ((scene.ranks, explore_buckets(scene)) for scene in SCENES))
