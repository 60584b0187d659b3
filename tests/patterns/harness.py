"""One program text, run on plain replicas and on shards, and what the two left compared.

Rule 1: a program says `yield` where a backward that synchronises has just ended, and nowhere else; or `yield AVERAGE_ONLY`,
        where only replicas come by, because for shards it is inside a forward, or where gradients are not numbers.
Rule 2: the plain replicas are advanced in lockstep, and at every yield their gradients become the mean. That is linear, so it
        is right for gradients that accumulate as well.
Rule 3: nothing is compared more loosely than the pattern says.
"""

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.params.shown_params import owning_unit
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import Gradients, assert_close, distance, is_at_rest, join_all, kept_always, local


@dataclass(frozen=True)
class Pattern:
    """A program, why it is here, and what is expected of it."""

    name: str
    reason: str
    program: "Program"
    refused: str | None = None
    """What the refusals of `Run.refused` must say."""
    gathers: int | None = None
    """How often rank 0 calls all_gather over the whole program, two ranks, default options."""
    reductions: int | None = None
    cost: str = ""
    """Where these numbers come from."""
    within: float = 1e-6
    """How far gradients and weights may be off, in units of each tensor's largest value."""
    notes_within: float = 1e-5
    disagrees: bool = False
    """Its ranks may want different gathers at one time. Then every rank must hear of it, by name; else the numbers are right."""
    slow: bool = False
    """Seconds a run: two ranks will do."""


PATTERNS: Final[dict[str, Pattern]] = {}

AVERAGE_ONLY: Final = "the replicas are averaged, and nothing is compared"

Yields = Iterator[str | None]
Program = Callable[["Run"], Yields]


def pattern(name: str, reason: str, **expected: Any) -> Callable[[Program], Program]:
    """Enter a program into the table."""

    def enter(program: Program) -> Program:
        assert name not in PATTERNS, f"two patterns are called {name!r}"
        PATTERNS[name] = Pattern(name, reason, program, **expected)
        return program

    return enter


@dataclass
class Outcome:
    """What a program left on one rank."""

    steps: list[Gradients] = field(default_factory=list)
    """Every model's gradients, at each yield and at the end."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    """Parameters that are not sharded: each rank's own business."""
    notes: list[tuple[str, Tensor | None]] = field(default_factory=list)
    resting: list[tuple[int, int]] = field(default_factory=list)
    """Of each root: the bytes held just after wrapping, and at the end."""
    at_rest: bool = True
    refusals: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    raised: str = ""
    """The exception that ended the program, if one did."""


class Run:
    """What a program is given. This one is a replica on plain modules; see `UnitRef` for the other."""

    sharded = False

    def __init__(self, of: Pattern, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.models: list[nn.Module] = []
        self.ignored: set[Tensor] = set()
        self.outcome = Outcome()
        self._pattern = of

    # the model ------------------------------------------------------------------------------

    def shard(self, module: nn.Module, policy: Any = None, **options: Any) -> Any:
        self.models.append(module)
        self.ignored.update(p for one in options.get("ignored_modules", ()) for p in one.parameters())
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def scaler(self, model: nn.Module, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **options)

    def method(self, module: nn.Module, name: str) -> None:
        """From now on this method may be called as the forward may."""

    def full(self, parameter: Tensor) -> Tensor:
        """The whole value, for anything."""
        return parameter

    def local(self, parameter: Tensor) -> Tensor:
        """What this rank holds, for what treats every element alike."""
        return parameter

    def refused(self, attempt: Callable[[], Any]) -> None:
        """What sharding must refuse, with the pattern's text. A plain module may allow it, so a replica skips it."""

    # data and notes -------------------------------------------------------------------------

    def data(self, number: int, *shape: int) -> Tensor:
        """The same on every run, different on every rank and for every number."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * number + self.rank))

    def tokens(self, number: int, *shape: int, vocabulary: int) -> Tensor:
        return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1000 * number + self.rank))

    def note(self, name: str, value: Tensor | float | None) -> None:
        """A value that must be that of the replica of this rank."""
        self.outcome.notes.append((name, None if value is None else local(torch.as_tensor(value)).clone()))

    # what the harness does ------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all models. Each model's names begin with its number."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{number}.{name}", parameter

    def snapshot(self) -> None:
        self.outcome.steps.append({name: None if p.grad is None else local(p.grad).clone() for name, p in self.parameters()})

    def finish(self) -> Outcome:
        self.snapshot()
        self.outcome.weights = {name: local(p).clone() for name, p in self.parameters()}
        self.outcome.own = {name for name, p in self.parameters() if p in self.ignored}
        return self.outcome


class UnitRef(Run):
    """One rank, simulated or a process, on shards."""

    sharded = True

    def __init__(self, of: Pattern, rank: int, size: int, options: dict[str, Any]) -> None:
        super().__init__(of, rank, size)
        self._options = options
        self._floors: list[int] = []

    def shard(self, module: nn.Module, policy: Any = None, **options: Any) -> Any:
        model = fsdp.fully_shard(module, auto_wrap_policy=policy, **{**self._options, **options})
        self.models.append(model)
        self._floors.append(fsdp.memory_bytes(model))
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return fsdp.no_sync(model)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        return fsdp.clip_grad_norm_(model, max_norm)

    def scaler(self, model: nn.Module, **options: Any) -> torch.amp.GradScaler:
        return fsdp.ShardedGradScaler(model, "cpu", **options)

    def method(self, module: nn.Module, name: str) -> None:
        fsdp.register_forward_method(module, name)

    def full(self, parameter: Tensor) -> Tensor:
        return fsdp.full_tensor(parameter)

    def local(self, parameter: Tensor) -> Tensor:
        return fsdp.to_local(parameter)

    def refused(self, attempt: Callable[[], Any]) -> None:
        assert self._pattern.refused is not None, "the pattern does not say what the refusal says"
        try:
            attempt()
        except (fsdp.ShardingError, fsdp.IllegalTransition) as refusal:
            text = str(refusal)
        else:
            raise AssertionError("nothing was refused")
        assert re.search(self._pattern.refused, text), f"the refusal says: {text}"
        self.outcome.refusals += 1

    def finish(self) -> Outcome:
        super().finish()
        self.outcome.own = {name for name, p in self.parameters() if owning_unit(p) is None}
        for model, floor in zip(self.models, self._floors, strict=True):
            sharded = unit_ref_of(model)
            if sharded is not None and sharded.index == 0:  # not wrapped again as a part of another
                self.outcome.resting.append((floor, fsdp.memory_bytes(model) - kept_always(model)))
                self.outcome.at_rest &= is_at_rest(model)
        rank = current_rank()
        if rank is not None:
            self.outcome.calls.update(call.kind for call in rank.log)
        return self.outcome


def attempt(of: Pattern, rank: int, size: int, **options: Any) -> Outcome:
    """`perform`, or what it raised."""
    try:
        return perform(of, rank, size, **options)
    except Exception:
        return Outcome(raised=traceback.format_exc())


def perform(of: Pattern, rank: int, size: int, **options: Any) -> Outcome:
    """The program on one rank of whatever world there is, from its beginning to its end."""
    torch.manual_seed(0)
    run = UnitRef(of, rank, size, options)
    for said in of.program(run):
        if said is not AVERAGE_ONLY:
            run.snapshot()
    return run.finish()


@cache
def reference(name: str, size: int) -> tuple[Outcome, ...]:
    """The program on `size` plain replicas, each with the same random numbers; what each of them left."""
    of = PATTERNS[name]
    runs = [Run(of, rank, size) for rank in range(size)]
    programs = [of.program(run) for run in runs]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random = [torch.get_rng_state()] * size
        while True:
            said = []
            for rank, program in enumerate(programs):
                torch.set_rng_state(random[rank])
                said.append(next(program, "ended"))
                random[rank] = torch.get_rng_state()
            assert len(set(said)) == 1, "the program yields differently on some ranks"
            if said[0] == "ended":
                break
            _average(runs)
            for run in runs:
                if said[0] is not AVERAGE_ONLY:
                    run.snapshot()
    outcomes = tuple(run.finish() for run in runs)
    _assert_replicas_agree(outcomes)
    return outcomes


def _average(runs: Sequence[Run]) -> None:
    """Put the mean over the replicas into every `.grad`; what is missing on some counts as zero."""
    done: set[Tensor] = set()
    for ranks in zip(*(run.parameters() for run in runs), strict=True):
        parameters = [parameter for _, parameter in ranks]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and parameters[0] not in done and parameters[0] not in runs[0].ignored:
            mean = torch.stack([gradient.to_dense() for gradient in gradients]).sum(0) / len(runs)
            for parameter in parameters:
                parameter.grad = mean.clone()
        done.add(parameters[0])


def _assert_replicas_agree(outcomes: Sequence[Outcome]) -> None:
    """Replicas that differ in the end have a program that forgot to say where it synchronises."""
    first = outcomes[0]
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            assert name in first.own or torch.equal(weight, first.weights[name]), f"the replicas' {name} differ"


TOLD: Final = ("WorldError: The ranks disagree", "or was left out there", "while this rank waited for it to go on")
"""What ranks are told that disagree: so, or that one of them has left a backward out, and what that one hears when others end."""


def compare(of: Pattern, outcomes: Sequence[Outcome]) -> None:
    """The outcomes of all ranks against those of the plain replicas."""
    if of.disagrees and any(found.raised for found in outcomes):
        for rank, found in enumerate(outcomes):
            assert any(words in found.raised for words in TOLD), f"rank {rank} was not told: {found.raised}"
        return
    plain = reference(of.name, len(outcomes))
    for rank, (found, wanted) in enumerate(zip(outcomes, plain, strict=True)):
        assert not found.raised, f"rank {rank} raised:\n{found.raised}"
        assert bool(found.refusals) == bool(of.refused), "a pattern that is refused says so, and only such a one"
        assert found.own == wanted.own, f"sharded on one side only: {found.own ^ wanted.own}"
        assert [name for name, _ in found.notes] == [name for name, _ in wanted.notes]
        for (name, value), (_, other) in zip(found.notes, wanted.notes, strict=True):
            assert_noted_alike(f"note {name!r} of rank {rank}", value, other, of.notes_within)
        assert len(found.steps) == len(wanted.steps)
        own = {name: wanted.weights[name] for name in wanted.own}
        assert_close({name: found.weights[name] for name in own}, own, of.within)
    shared = {name: weight for name, weight in plain[0].weights.items() if name not in plain[0].own}
    for number, wanted_step in enumerate(plain[0].steps):
        found_step = join_all([found.steps[number] for found in outcomes], shared)
        assert_close(found_step, {name: wanted_step[name] for name in shared}, of.within)
    assert_close(join_all([found.weights for found in outcomes], shared), {**shared}, of.within)
    for found in outcomes:
        assert found.at_rest, "a unit is not IDLE, or is still whole"
        assert all(floor == now for floor, now in found.resting), f"(after wrapping, at the end): {found.resting}"


def assert_noted_alike(what: str, value: Tensor | None, other: Tensor | None, within: float) -> None:
    if value is None or other is None:
        assert value is other, f"{what} is {value}, not {other}"
        return
    assert value.shape == other.shape and value.dtype is other.dtype, what
    if other.is_floating_point() or other.is_complex():
        wide = torch.complex128 if other.is_complex() else torch.float64
        assert distance(value.to(wide), other.to(wide)) <= within, f"{what} is off by {distance(value, other):.3g}"
    else:
        assert torch.equal(value, other), what
