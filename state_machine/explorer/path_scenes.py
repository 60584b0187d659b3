"""The programs of ranks that the explorer of paths runs (explore_paths.py)."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from state_machine.paths import END_OF_FORWARD, PATIENCE, Call, Path, Phase

Program = Sequence[Path]
"""The calls of each step."""
F0, F1, B0, B1, N0 = (
    Call(0, Phase.FORWARD),
    Call(1, Phase.FORWARD),
    Call(0, Phase.BACKWARD),
    Call(1, Phase.BACKWARD),
    Call(0, Phase.EVALUATION),
)
USER: Final = Call(-2, Phase.FORWARD)
"""A collective of the user's own."""
CHANGE: Final = Call(-3, Phase.FORWARD)
"""The optimizer steps."""
CHOICES: Final[tuple[Path, ...]] = (
    (F0, F1, END_OF_FORWARD, B1, B0),
    (F0, END_OF_FORWARD, B0),
    (F1, F0, END_OF_FORWARD, B0),
    (F0, F0, END_OF_FORWARD, B0, B0),
    (N0, F0, END_OF_FORWARD, B0),
    (),
)
"""The paths that a rank may take in a step: all units, one unit left out, another order, one repeated, an evaluation, nothing."""
CHANGES: Final[tuple[Path, ...]] = (CHOICES[0], CHOICES[1], CHOICES[4], CHOICES[5])
"""The paths of ranks that change their weights somewhere in a step, or run out of data."""


def scenes(ranks: int) -> Iterator[tuple[Program, ...]]:
    """Programs of so many ranks: any paths in the first step, and any in the second; then the second again."""
    if ranks == 2:
        for first in itertools.product(CHOICES, repeat=2):
            for second in itertools.product(CHOICES, repeat=2):
                yield tuple((one, two, two) for one, two in zip(first, second, strict=True))
    else:
        for first in itertools.combinations_with_replacement(CHOICES, ranks):
            yield tuple((one, one) for one in first)
    # once the paths are known, ranks may call a collective of the user's own between forward and backward
    late = ((F0, END_OF_FORWARD, USER, B0), (F0, F1, END_OF_FORWARD, USER, B1, B0))
    yield tuple((_without(USER, path), path, path) for path in (late * ranks)[:ranks])
    # a rank has no data left and serves the others, or never had any
    for left in itertools.product(CHANGES[:3], repeat=2):
        for first in ((), (CHANGES[0],), (CHANGES[1],)):
            yield tuple((*first, *left) if rank % 2 else first for rank in range(ranks))
    # what is not wanted any more is dropped
    yield tuple((CHOICES[0], *(CHOICES[1],) * (PATIENCE + 2)) for _ in range(ranks))


def changing_scenes(ranks: int) -> Iterator[tuple[Program, ...]]:
    """Programs in which weights change, at every place in a step: on ranks that take one path at the same place, or not."""
    places = [[(*path[:at], CHANGE, *path[at:]) for at in range(len(path) + 1)] for path in CHANGES]
    for one, other in itertools.product(places, repeat=2):
        for pair in itertools.product(one, other):
            paths = (pair * ranks)[:ranks]
            yield tuple((path, path) for path in paths)
            yield tuple((_without(CHANGE, path), path) for path in paths)


def _without(call: Call, path: Path) -> Path:
    return tuple(one for one in path if one != call)
