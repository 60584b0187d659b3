"""Every act at every moment: the programs of a pair, and what becomes of them.

A cell of the table is a set of codes: R for right; T where plain torch raises too; S and a number for a refusal by that sentence;
D and a number where the model is different from the plain one, for the reason of that number. More than one code: it depends on
the strategy or the door, or on whose parameter it is.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from tests.acts.doors import DOORS
from tests.acts.trial import Arm, Backward, Do, Forward, Move, Program, Step, Sync, Undo, Verdict, Zero, judge
from tests.acts.vocabulary import ACTS, FIRST

MOMENTS_OF_HOOKS: Final = (
    "in a pre-hook",
    "inside a forward",
    "in a tensor hook",
    "in a post-accumulate hook",
    "in a recompute",
)
MOMENTS: Final = (
    "before a forward",
    "in a pre-hook",
    "inside a forward",
    "between forward and backward",
    "between two backwards of one graph",
    "in a tensor hook",
    "in a post-accumulate hook",
    "in a recompute",
    "between micro-batches",
    "after the backward",
    "after the step",
)
BLOCKS: Final = (0, 1)
"""The hooks are in block 0, and the recompute is that of block 1. So an act is on the unit of the moment, or on another one."""
SIZES: Final = (2, 1, 3)
ORDINARY: Final = (Forward(0), Backward(0), Step(), Zero())


class Pair(NamedTuple):
    """An act at a moment, in one world."""

    act: str
    moment: str
    block: int
    door: str
    size: int = 2


def program_of(act: str, moment: str, block: int) -> Program:
    """What the act needs; an ordinary step; a step in which the act happens; what it has set is undone; an ordinary step."""
    do: Move = Do(act, block)
    first = (Do(FIRST[act], block),) if act in FIRST else ()
    match moment:
        case "before a forward":
            middle: Program = (do, *ORDINARY)
        case "between forward and backward":
            middle = (Forward(0), do, Backward(0), Step(), Zero())
        case "between two backwards of one graph":
            middle = (Forward(0), Backward(0, retain=True), do, Backward(0), Step(), Zero())
        case "between micro-batches":
            middle = (Sync(False), Forward(0), Backward(0), do, Sync(True), Forward(0), Backward(0), Step(), Zero())
        case "after the backward":
            middle = (Forward(0), Backward(0), do, Step(), Zero())
        case "after the step":
            middle = (Forward(0), Backward(0), Step(), do, Zero(), *ORDINARY)
        case _:
            middle = (Arm(moment, act, block), *ORDINARY)
    return (*first, *ORDINARY, *middle, Undo(), *ORDINARY)


def pairs(act: str, moment: str) -> Iterator[Pair]:
    """A pair in all its worlds of two ranks: fully sharded on either unit, and through every other door on one of them."""
    for number, door in enumerate(DOORS):
        both = door == "FULL_SHARD"
        yield from (Pair(act, moment, block, door) for block in (BLOCKS if both else (number % 2,)))


def sample() -> list[Pair]:
    """Every third pair, each in a world that follows from its name."""
    found = []
    for act in ACTS:
        for moment in MOMENTS:
            number = crc32(f"{act}, {moment}".encode())
            if number % 3 == 0:
                door, block, size = list(DOORS)[number // 3 % len(DOORS)], number // 32 % 2, SIZES[number // 64 % 3]
                found.append(Pair(act, moment, block, door, size))
    return found


def outcome(pair: Pair) -> tuple[str, Verdict]:
    """ "right", "too", or the sentence of the first refusal; or "fault"."""
    verdict = judge(program_of(pair.act, pair.moment, pair.block), pair.door, pair.size)
    if verdict.fault:
        return "fault", verdict
    if verdict.refusals:
        return sentence(verdict.refusals[0]), verdict
    return "too" if verdict.too else "right", verdict


def sentence(text: str) -> str:
    """The first sentence of a refusal, or its part before a semicolon, without the names and numbers of this model."""
    text = re.sub(r"^\w+: ", "", text).partition("\n")[0]
    text = re.sub(r"^\w+\.step\b", "optimizer.step", text)
    text = re.sub(r"'[^']*'|\(\d[^()]*\)|\baten[.\w]+|\d+(\.\d+)?", "…", text)
    text = re.split(r"; |\. ", text, maxsplit=1)[0].strip().rstrip(".")
    return text.replace("|", "/").replace("`", "")


DIFFERS: Final[dict[tuple[str, str], str]] = {}
"""Pairs that are different from plain torch, and the reason why they stay so."""
