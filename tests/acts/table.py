"""Every act at every moment: the programs of a pair, and what became of them."""

from typing import Final

from tests.acts.trial import Arm, Backward, Do, Forward, Move, Program, Step, Sync, Undo, Zero

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
ORDINARY: Final = (Forward(0), Backward(0), Step(), Zero())


def program_of(act: str, moment: str, block: int) -> Program:
    """An ordinary step; a step in which the act happens; what the act has set is undone; an ordinary step."""
    do: Move = Do(act, block)
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
    return (*ORDINARY, *middle, Undo(), *ORDINARY)


def differs_today(act: str, moment: str) -> bool:
    """Whether a pair is known to be different from plain torch without a word."""
    return (act, moment) in DIFFERS


DIFFERS: Final[dict[tuple[str, str], str]] = {}
"""With the reason."""
