"""A program of moves and acts: played by every rank of a simulated world, then by the plain model, and compared move by move.

Verdict of a program: it is right if every rank has at each move what the plain model has. A move may be refused: on all ranks, by
an error of this package, and then the plain model leaves it out, and everything after it must be right. Where plain torch raises
too, the ranks may raise what they like. Anything else is a fault.
"""

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

import fsdp
from tests.acts.doors import kind_of, plain_player, player
from tests.acts.players import POST, Player, Raised, nothing
from tests.acts.vocabulary import ACTS
from tests.support.models import distance, join, local

WITHIN: Final = {torch.float64: 1e-6, torch.float32: 1e-5}
"""By dtype: sums in another order round differently. In float32, which fairscale's door computes in, one rounding is 6e-8 of the
number; a program of 35 moves has some five of them one after the other in each move, which is 1e-5."""
AT: Final = " / "
"""Between the name of an act that is due and its moment."""
OF_FAIRSCALE: Final = ("a view and its base", "this instance is in ")
REFUSED_LATE: Final = {"set p.grad to ones": "was set inside the forward of unit"}
"""By act, what an error says that refuses it at the end of a forward. What came between has not seen it."""
OURS: Final = (fsdp.ShardingError, fsdp.IllegalTransition, fsdp.PeerFailed)


@dataclass(frozen=True)
class Forward:
    slot: int


@dataclass(frozen=True)
class Backward:
    slot: int
    retain: bool = False


@dataclass(frozen=True)
class Step:
    pass


@dataclass(frozen=True)
class Zero:
    pass


@dataclass(frozen=True)
class Evaluate:
    pass


@dataclass(frozen=True)
class Sync:
    """Whether gradients are reduced from now on."""

    on: bool


@dataclass(frozen=True)
class Do:
    """An act, now."""

    act: str
    block: int = 0


@dataclass(frozen=True)
class Arm:
    """An act, when that moment comes for the first time."""

    moment: str
    act: str
    block: int = 0


@dataclass(frozen=True)
class Undo:
    """What acts have set and what stays, as it was in the beginning."""


Move = Forward | Backward | Step | Zero | Evaluate | Sync | Do | Arm | Undo
Program = Sequence[Move]


@dataclass
class Seen:
    """What a move left on one rank, or in the plain model."""

    raised: str = ""
    """"refused" by this package, "raised" by an act, or an "accident"."""
    text: str = ""
    trace: str = ""
    ran: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    reads: list[tuple[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    local_gradients: bool = False
    undone: bool = False


@dataclass
class Verdict:
    fault: str = ""
    refusals: list[str] = field(default_factory=list)
    too: list[str] = field(default_factory=list)
    """What plain torch raises as well."""

    def with_fault(self, fault: str) -> "Verdict":
        self.fault = fault
        return self


def play(program: Program, door: str, rank: int) -> list[Seen]:
    """On one rank."""
    at = player(door, rank)
    seen = [perform(at, number, move) for number, move in enumerate(program)]
    finish(at)
    return seen


def finish(at: Player) -> None:
    """Hooks of every module would stay, and the player: torch keeps what a checkpoint recomputes where that fails."""
    at.cancel()
    for block in at.blocks:
        block.during = block.hooked = nothing
    while at.handles:
        at.handles.pop().remove()
    at.kept.clear()
    at.losses.clear()


def perform(at: Player, number: int, move: Move) -> Seen:
    """Do one move, and say what it left."""
    at.reads, at.ran, at.begun, at.undone = [], [], [], False
    seen = Seen()
    try:
        execute(at, number, move)
    except Exception as error:
        at.caught(error)
        seen.raised = "raised" if isinstance(error, Raised) else "refused" if isinstance(error, OURS) else "accident"
        seen.text = "" if isinstance(error, Raised) else f"{type(error).__name__}: {error}"
        seen.trace = "".join(traceback.format_exception(error)) if seen.raised == "accident" else ""
    if seen.raised and is_pass(move, at):
        at.abandon()
    return see(at, seen)


def is_pass(move: Move, at: Player) -> bool:
    """Whether the model was called. An act that has called it is known by the acts that began or ended inside."""
    return isinstance(move, Forward | Backward | Evaluate) or bool(at.ran or at.begun)


def see(at: Player, seen: Seen) -> Seen:
    seen.ran, seen.begun, seen.local_gradients, seen.undone = list(at.ran), list(at.begun), at.local_gradients, at.undone
    seen.reads = [(name, frozen(value)) for name, value in at.reads]
    for name, parameter in at.parameters().items():
        seen.weights[name] = local(parameter).clone()
        seen.gradients[name] = None if parameter.grad is None else local(parameter.grad).clone()
    seen.buffers = {f"{number}.scale": block.scale.clone() for number, block in enumerate(at.blocks)}
    return seen


def frozen(value: Any) -> Any:
    """A value that later moves do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [frozen(one) for one in value] if isinstance(value, tuple | list) else value


def act_of(at: Player, name: str, block: int, called: str = "") -> Any:
    def do() -> None:
        if name not in at.without:
            ACTS[name](at, block)
        at.ran.append(called or name)

    return do


def execute(at: Player, number: int, move: Move) -> None:
    match move:
        case Forward(slot):
            output = at.model(at.data(number))
            at.losses[slot] = at.loss(output)
            at.read("outputs", at.outputs(output))
        case Backward(slot, retain):
            if slot in at.losses:
                loss = at.losses[slot] if retain else at.losses.pop(slot)
                at.backward(loss, retain)
        case Step():
            at.optimizer.step()
        case Zero():
            at.zero()
        case Evaluate():
            at.read("outputs", at.evaluate(number))
        case Sync(on):
            at.synchronise(on)
            at.syncs = on
        case Do(name, block):
            act_of(at, name, block)()
        case Arm(moment, name, block):
            called = f"{name}{AT}{moment}, {block}"
            at.arm(moment, called, act_of(at, name, block, called))
        case Undo():
            at.undo()


def judge(program: Program, door: str, size: int, seed: int = 0) -> Verdict:
    try:
        ranks = fsdp.simulate(size, lambda rank: play(program, door, rank), seed)
    except Exception as error:
        return Verdict(f"the world ended: {type(error).__name__}: {error}")
    verdict = against_plain(program, door, ranks)
    if verdict.fault and any(isinstance(move, Arm) and move.moment == POST for move in program):
        other = against_plain(program, door, ranks, late=True)
        return verdict if other.fault else other
    return verdict


def against_plain(program: Program, door: str, ranks: Sequence[Sequence[Seen]], late: bool = False) -> Verdict:
    """`late`: what is due in a post-accumulate hook happens at the end of the backward, when averages are known."""
    verdict = Verdict()
    happened = tuple((one.raised in ("refused", "accident"), tuple(not_refused_late(one)), tuple(one.begun)) for one in ranks[0])
    plain = plain_run(tuple(program), kind_of(door), len(ranks), happened, late)
    for number, move in enumerate(program):
        found, wanted = [seen[number] for seen in ranks], plain[number]
        where = f"move {number}, {move}: "
        kinds = {one.raised for one in found}
        if len(kinds) > 1 and "" in kinds:
            texts = [one.text or one.raised for one in found if one.raised]
            return verdict.with_fault(where + "raised on some ranks only: " + texts[0])
        if kinds & {"refused", "accident"}:
            said = plain_raises(program, door, len(ranks), happened, number)
            own = [one for one in found if not one.text.startswith("PeerFailed")]
            if wanted.raised == "accident":
                return verdict.with_fault(f"{where}an act goes on where plain torch raises {first_line(wanted.text)}")
            if said:
                verdict.too.append(said)
            elif ("accident" in kinds or not own) and not is_of_fairscale(door, own):
                return verdict.with_fault(f"{where}an accident: {(own or found)[0].text}\n{(own or found)[0].trace}")
            else:
                verdict.refusals.append(own[0].text)
            if [name for name in found[0].begun if name in found[0].ran] != found[0].ran:
                return verdict  # an act ran inside another one; the plain model would do them one after the other
        elif wanted.raised == "accident":
            if wanted.text.startswith("CheckpointError"):
                # plain torch notices that a recompute is not what the forward was; nothing can be compared from here on
                verdict.too.append(first_line(wanted.text))
                return verdict
            return verdict.with_fault(where + "goes on where plain torch raises " + first_line(wanted.text))
        if any(one.undone for one in found):
            return verdict  # the error of a forward says that what it did is undone, in plain torch it stays
        wrong = differs(found, wanted)
        if wrong:
            return verdict.with_fault(where + wrong)
    return verdict


def not_refused_late(seen: Seen) -> list[str]:
    """The acts that ended in a move, without those that the end of the forward has refused."""
    late = [act for act, said in REFUSED_LATE.items() if seen.raised == "refused" and said in seen.text]
    return [name for name in seen.ran if name.partition(AT)[0] not in late]


def is_of_fairscale(door: str, found: Sequence[Seen]) -> bool:
    """Whether ranks raised what fairscale or torch raise through fairscale's door: modules compute with views of one parameter,
    which torch guards against changes, and an instance says in which state it may be called."""
    return door == "fairscale" and all(any(said in one.text for said in OF_FAIRSCALE) for one in found)


Happened = tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...]
"""Of each move, whether it was refused, the acts that ended in it, and those that were due and began in it."""


@lru_cache(maxsize=64)
def plain_run(program: tuple[Move, ...], kind: str, size: int, happened: Happened, late: bool) -> list[Seen]:
    """What each move leaves in the plain model, which leaves out what was refused."""
    at = plain_player(kind, size)
    at.late = late
    try:
        return [follow(at, number, move, *happened[number]) for number, move in enumerate(program)]
    finally:
        finish(at)


def follow(at: Player, number: int, move: Move, refused: bool, ran: tuple[str, ...], begun: tuple[str, ...]) -> Seen:
    """The plain model does what the ranks did: a move that was refused it leaves out, but not the acts that ended before."""
    if not refused:
        return perform(at, number, move)
    at.reads, at.ran, at.begun, at.follows = [], [], [], True
    try:
        for called in ran:
            for due in [one for one in at.due if one.name == called][:1]:
                at.do_if_due(due)
    except Exception as error:
        return see(at, Seen("accident", f"{type(error).__name__}: {error}"))
    finally:
        at.follows = False
    for called in (Counter(begun) - Counter(at.begun)).elements():
        for due in [one for one in at.due if one.name == called][:1]:
            at.begun.append(called)
            at.forget(due)
    if is_pass(move, at):
        at.abandon()
    return see(at, Seen("refused"))


def plain_raises(program: Program, door: str, size: int, happened: Happened, number: int) -> str:
    """What the plain model raises at this move, if it does."""
    at = plain_player(door, size)
    try:
        for before, move in enumerate(program[:number]):
            follow(at, before, move, *happened[before])
        seen = perform(at, number, program[number])
    finally:
        finish(at)
    return first_line(seen.text) if seen.raised == "accident" else ""


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def differs(found: Sequence[Seen], wanted: Seen) -> str:
    """What is not as in the plain model, or nothing."""
    for rank, one in enumerate(found):
        if not one.raised:
            text = reads_differ(one, wanted, rank)
            if text:
                return f"rank {rank}: {text}"
        for name, buffer in wanted.buffers.items():
            if not near(one.buffers[name], buffer):
                return f"rank {rank}: buffer {name} differs"
        if list(one.weights) != list(wanted.weights):
            return f"rank {rank}: the parameters are {sorted(set(one.weights) ^ set(wanted.weights))} on one side only"
    for name, weight in wanted.weights.items():
        text = tensors_differ([one.weights[name] for one in found], weight)
        if text:
            return f"weight {name} {text}"
        if not found[0].local_gradients:
            text = tensors_differ([one.gradients[name] for one in found], wanted.gradients[name])
            if text:
                return f"gradient {name} {text}"
    return ""


def tensors_differ(parts: Sequence[Tensor | None], wanted: Tensor | None) -> str:
    if wanted is None:
        return "is there, in plain torch it is None" if any(part is not None and part.numel() for part in parts) else ""
    try:
        found = join(unpadded(parts, wanted.numel()), wanted.shape)
    except AssertionError:
        return "differs between the replicas"
    except RuntimeError:
        return f"has not the elements of {tuple(wanted.shape)}: {[None if part is None else tuple(part.shape) for part in parts]}"
    if found is None:
        return "is None, in plain torch it is there"
    if found.dtype is not wanted.dtype:
        return f"is {found.dtype}, in plain torch {wanted.dtype}"
    return "" if near(found, wanted) else f"is off by {distance(found, wanted):.3g}"


def unpadded(parts: Sequence[Tensor | None], numel: int) -> list[Tensor | None]:
    """fairscale pads each parameter to equal parts."""
    held = [part.reshape(-1) for part in parts if part is not None]
    total = sum(part.numel() for part in held)
    return [torch.cat(held)[:numel]] if numel < total < 2 * numel else list(parts)


def near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and distance(one, other) <= WITHIN[one.dtype]


def reads_differ(one: Seen, wanted: Seen, rank: int) -> str:
    if one.ran != wanted.ran:
        return f"the acts that ran are {one.ran}, in plain torch {wanted.ran}"
    for (name, value), (other_name, other) in zip(one.reads, wanted.reads, strict=False):
        if name != other_name:
            return f"reads {name}, in plain torch {other_name}"
        if name.startswith("outputs"):
            if not near(value[0], other[rank]):
                return (
                    f"{name} are off by {distance(value[0], other[rank]):.3g}"
                    if value[0].shape == other[rank].shape
                    else f"{name} differ in shape"
                )
        elif not same(value, other):
            return f"reads {name} as {value}, in plain torch {other}"
    return "" if len(one.reads) == len(wanted.reads) else "reads more or less than plain torch"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= WITHIN[torch.float64] * max(1.0, abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
