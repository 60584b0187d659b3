"""Every act at every moment: the programs of a pair, and what becomes of them.

A cell of the table is a set of codes: R for right; T where plain torch raises too; S and a number for a refusal by that sentence;
D and a number where the model is different from the plain one, for the reason of that number. More than one code: it depends on
the strategy or the door, or on whose parameter it is.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from tests.acts.doors import DOORS, STRATEGIES, WITHOUT
from tests.acts.players import ACTIVATION, POST
from tests.acts.trial import Arm, Backward, Do, Forward, Move, Program, Step, Sync, Undo, Verdict, Zero, judge
from tests.acts.vocabulary import ACTS, FIRST

MOMENTS_OF_HOOKS: Final = (
    "in a pre-hook",
    "inside a forward",
    "in a tensor hook",
    "in a post-accumulate hook",
    "in a recompute",
    ACTIVATION,
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
    ACTIVATION,
    "between micro-batches",
    "after the backward",
    "after the step",
)
BLOCKS: Final = (0, 1)
"""The hooks are in block 0, and the recompute is that of block 1. So an act is on the unit of the moment, or on another one."""
ORDINARY: Final = (Forward(0), Backward(0), Step(), Zero())


class Pair(NamedTuple):
    """An act at a moment, in one world."""

    act: str
    moment: str
    block: int
    door: str
    size: int = 2


def has_moment(moment: str, door: str, size: int) -> bool:
    """Whether the moment comes on all ranks. Where users see parts, a hook runs on the ranks that have one: two of three."""
    return moment != POST or size < 3 or door not in WITHOUT


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


def worlds(size: int) -> list[Pair]:
    """Every pair that comes on so many ranks, each in a world that follows from its name."""
    found = []
    for act in ACTS:
        for moment in MOMENTS:
            number = crc32(f"{act}, {moment}".encode())
            door = list(DOORS)[number // 3 % len(DOORS)]
            if has_moment(moment, door, size):
                found.append(Pair(act, moment, number // 32 % 2, door, size))
    return found


def sample() -> list[Pair]:
    """Every third pair, and those of `REFUSED`."""
    third = [pair for pair in worlds(2) if crc32(f"{pair.act}, {pair.moment}".encode()) % 3 == 0]
    return list(dict.fromkeys([*third, *REFUSED]))


THROUGH_ALL_DOORS: Final = (
    ("optimizer.step()", "between micro-batches"),
    ("set p.grad to ones", "between micro-batches"),
    ("set p.grad_dtype", "before a forward"),
)
ON_ANOTHER_UNIT: Final = {
    ("in a tensor hook", 1): (
        *("optimizer.step()", "clip the gradients", "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
        *("scale p.grad in place", "freeze a parameter", "evaluate the model", "evaluate one module"),
    ),
    ("in a recompute", 0): ("optimizer.step()",),
}
REFUSED: Final = (
    *(pair for act, moment in THROUGH_ALL_DOORS for pair in pairs(act, moment)),
    *(Pair(act, moment, block, "FULL_SHARD") for (moment, block), acts in ON_ANOTHER_UNIT.items() for act in acts),
)
"""Pairs that are refused: through every door, or on the unit that is not that of the hook or recompute."""


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


_VIEWS: Final = (
    "through fairscale's door the gradients of a module come together, because it computes with views of one parameter"
)
_ACCUMULATES: Final = "through the doors, and where every rank holds all elements, p.grad is this rank's own, as in torch's DDP"
_ALIAS: Final = "torch counts no change through .data; with guard=True it is refused"
_NESTED: Final = "through fairscale's door a forward inside a forward of the same unit fails"
_ASSIGNED: Final = "through FSDP2's door the parameters stay the same objects, and the optimizer goes on with them"
_OTHER_OBJECT: Final = (
    "inside a forward, a hook or a recompute modules may show unsharded parameters: what is set on one does not stay"
)
_GIVEN: Final = "an optimizer that was given a parameter inside a forward is refused in its next step"
_NO_STATE: Final = "a rank that holds no element of a parameter keeps no optimizer state of it"
_PUT_IN: Final = (
    "what is put in after wrapping is refused by the next forward; FSDP1's door leaves it whole and warns, as torch does"
)
_PEER: Final = "through the doors of FSDP1, FSDP2 and fairscale it raises an error of another class, or of torch"
_DTENSOR: Final = "through the door of FSDP2 `p.data = x` changes no DTensor, as in torch, and the next forward refuses it"
_CONVERTED: Final = "inside a backward, and under no_sync, a conversion is refused late, or ends in torch's error"
OUTSIDE: Final = tuple(moment for moment in MOMENTS if moment not in MOMENTS_OF_HOOKS)
_IN_FORWARDS: Final = ("in a pre-hook", "inside a forward")
_WHOLE: Final = ("NO_SHARD", "ddp")
"""Doors that never shard parameters."""
_CUT: Final = tuple(door for door in DOORS if door not in _WHOLE)
_OWN: Final = (*(door for door in _CUT if door in STRATEGIES), *_WHOLE)
_DIFFER: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]] = (
    (
        _DTENSOR,
        MOMENTS,
        ("put the kept p.data back", "replace p.data", "replace p.data, keep the old one"),
        ("fully_shard",),
    ),
    (
        _VIEWS,
        ("in a recompute",),
        ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
        ("fairscale",),
    ),
    (
        _ACCUMULATES,
        ("between micro-batches",),
        ("add the gradient to a weight",),
        ("HYBRID_SHARD", "NO_SHARD", "torch_fsdp", "fully_shard", "ddp", "fairscale"),
    ),
    (
        _ACCUMULATES,
        ("between micro-batches",),
        ("read the value of a gradient", "read a gradient of the root", "read the norm of every gradient"),
        ("fully_shard",),
    ),
    (_ALIAS, (*_IN_FORWARDS, "in a recompute", ACTIVATION), ("change a weight through .data",), _CUT),
    (
        _NESTED,
        _IN_FORWARDS,
        (
            *("evaluate with the model frozen, and thaw it", "call the model frozen, thaw it", "evaluate the model"),
            *("replace p.data, evaluate, put it back", "evaluate in inference mode", "a forward whose output is dropped"),
            "a forward that fails, caught",
        ),
        ("fairscale",),
    ),
    (
        _NESTED,
        ("in a recompute",),
        (
            *("evaluate with the model frozen, and thaw it", "evaluate the model", "evaluate one module"),
            *("evaluate in inference mode", "a forward that fails, caught"),
        ),
        ("fairscale",),
    ),
    (
        _ASSIGNED,
        (*OUTSIDE, "in a post-accumulate hook"),
        ("load the kept state dict with assign=True",),
        ("fully_shard",),
    ),
    (_OTHER_OBJECT, ("in a recompute", ACTIVATION), ("replace p.data, evaluate, put it back",), tuple(DOORS)),
    (_DTENSOR, _IN_FORWARDS, ("replace p.data, evaluate, put it back",), ("fully_shard",)),
    (_OTHER_OBJECT, (*_IN_FORWARDS, "in a recompute", ACTIVATION), ("put the kept p.data back",), _CUT),
    (_NO_STATE, MOMENTS, ("read the shapes of the optimizer's state",), STRATEGIES),
    (_PUT_IN, MOMENTS, ("replace a module inside a unit", "replace a parameter"), ("torch_fsdp",)),
    (_PUT_IN, _IN_FORWARDS, ("replace a module inside a unit",), tuple(DOORS)),
    (_PEER, ("in a recompute",), ("replace p.data", "replace p.data, keep the old one"), ("fairscale",)),
    (_PEER, (*_IN_FORWARDS, "in a recompute", ACTIVATION), ("enter no_sync and leave it",), ("torch_fsdp",)),
    (_GIVEN, (*_IN_FORWARDS, "in a recompute"), ("add a parameter group",), tuple(DOORS)),
    (
        _PEER,
        (
            *(one for one in OUTSIDE if one not in ("between forward and backward", "between micro-batches")),
            "in a post-accumulate hook",
        ),
        ("deepcopy the model, and evaluate the copy",),
        ("fairscale",),
    ),
    (_PEER, tuple(one for one in MOMENTS if one != "in a recompute"), ("look a row up with max_norm",), ("fully_shard",)),
    (
        _CONVERTED,
        ("in a recompute", ACTIVATION, "between micro-batches"),
        ("convert the model",),
        (*_OWN, "fairscale"),
    ),
)
UNSEEN: Final = {
    (act, moment)
    for moment in ("in a pre-hook", "inside a forward", "in a recompute", ACTIVATION)
    for act in (
        *("replace p.grad by its half", "scale p.grad in place", "scale p.grad.data in place", "zero p.grad in place"),
        *("delete p.grad", "put a kept p.grad in again", "add the gradient to a weight", "read p.grad.shape"),
        *("read the value of a gradient", "read which parameters have a gradient", "read the norm of every gradient"),
        *("set p.grad_dtype", "add a post-accumulate hook", "convert the model", "read a gradient of the root"),
    )
} | {("set p.grad to ones", "in a recompute"), ("add a parameter group", ACTIVATION)}
"""Pairs that are different where an earlier backward has left gradients, or another act comes before, which the programs of the
table do not have: modules show unsharded parameters then, whose `.grad` is None, and whose conversion is an error. Python finds
`.grad` on the class, and a class of our own would make every use of a parameter slower, see use_after_free.py."""
DIFFERS: Final = {
    (act, moment, door): reason
    for reason, moments, acts, doors in _DIFFER
    for moment in moments
    for act in acts
    for door in doors
}
"""Pairs that are different from plain torch through a door in some world, and the reason why they stay so."""
ON_ONE_RANK: Final = {
    ("change a weight through .data", moment, door)
    for moment in ("between forward and backward", "between two backwards of one graph", "in a tensor hook", POST)
    for door in ("SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER")
}
"""On one rank shards are ordinary tensors, of which torch counts no change through `.data`, and these strategies keep a copy."""

ON_THREE_RANKS: Final = {("set p.grad_dtype", moment, "torch_fsdp") for moment in MOMENTS} | {
    (act, moment, door)
    for act in (
        *("replace p.data", "replace p.data, keep the old one", "put the kept p.data back"),
        "replace p.data, evaluate, put it back",
    )
    for moment in (*_IN_FORWARDS, "in a recompute")
    for door in ("torch_fsdp", "fairscale")
}
"""Where shards are ordinary tensors, a rank that holds nothing of a parameter has no gradient of it, runs no hooks, and does not
see that the others point it at other memory inside a forward: they gather its unit again, and all hear that they disagree."""


def differs(act: str, moment: str, door: str, size: int) -> bool:
    """Whether a pair is known to be different from plain torch."""
    pair = (act, moment, door)
    return pair in DIFFERS or (size == 1 and pair in ON_ONE_RANK) or (size > 2 and pair in ON_THREE_RANKS)
