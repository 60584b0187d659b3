"""Random training programs: what their statements are, how a sharded model runs them, how a plain one does.

A program is a sequence of statements; every rank runs the same ones on its own data. The plain
model runs each on the data of all ranks, and is compared after every statement.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from fsdp.engine import Engine
from fsdp.sharded import sharded_of
from fsdp.simulated import current_rank
from tests.fsdp.trees import BATCH, Broken, Faults, How, TreeSpec, build, split, wrap

LEARNING_RATE = 0.05
MOMENTUM = 0.9

Fault = tuple[str, str, int]
"""In the "forward" or the "backward" of which module, at which occurrence."""


@dataclass(frozen=True)
class Forward:
    """Keep the loss in a slot. `use`: which of the outputs it is made of."""

    slot: int
    use: str = "both"
    optional: bool = True
    input_grad: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Backward:
    """One backward of the sum of some losses. `inputs`: of the inputs' gradients only."""

    slots: tuple[int, ...]
    retain: bool = False
    sync: bool = True
    inputs: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Evaluate:
    """A forward whose output is dropped: under no_grad or inference_mode, or in eval mode with grad."""

    mode: str


@dataclass(frozen=True)
class Drop:
    """Forget a loss."""

    slot: int


@dataclass(frozen=True)
class Zero:
    set_to_none: bool


@dataclass(frozen=True)
class Step:
    """The optimizer's."""


@dataclass(frozen=True)
class Clip:
    max_norm: float
    norm_type: float


@dataclass(frozen=True)
class Toggle:
    """Freeze or thaw the parameters of a leaf."""

    path: str
    trainable: bool


@dataclass(frozen=True)
class Summon:
    """Halve every parameter while lent."""

    writeback: bool


@dataclass(frozen=True)
class Reload:
    """Load the full state dict, doubled."""


Statement = Forward | Backward | Evaluate | Drop | Zero | Step | Clip | Toggle | Summon | Reload
Program = Sequence[Statement]


@dataclass
class Seen:
    """What a statement left on one rank, or in the plain model."""

    raised: bool = False
    value: list[Tensor] = field(default_factory=list)
    """Losses, gradients of inputs, norms."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def data(number: int, rank: int) -> Tensor:
    """What `rank` sees in statement `number`."""
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(1000 * number + rank))


def loss_of(output: Any, use: str) -> Tensor:
    main, aux = split(output)
    weights = torch.linspace(0.5, 1.5, main.numel()).view(main.shape)
    if use == "aux" and aux is not None:
        return (aux * weights).sum()
    loss = (main * main * weights).mean()
    return loss + aux.sum() * 0.3 if use == "both" and aux is not None else loss


@dataclass
class Learner:
    """A model, sharded or plain, and the losses whose backward has not come."""

    tree: TreeSpec
    rank: int
    model: nn.Module
    faults: Faults
    optimizer: torch.optim.Optimizer
    losses: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By slot: the input, and the loss."""

    def forward(self, number: int, statement: Forward | Evaluate) -> Tensor:
        optional = statement.optional if isinstance(statement, Forward) else True
        needs = isinstance(statement, Forward) and (statement.input_grad or self.tree.several_roots)
        x = data(number, self.rank)[:, : self.tree.width].clone().requires_grad_(needs)
        loss = loss_of(self.model(x, How(self.rank, optional)), statement.use if isinstance(statement, Forward) else "both")
        if isinstance(statement, Forward):
            self.losses[statement.slot] = (x, loss)
        return loss.detach()

    def evaluate(self, number: int, statement: Evaluate) -> Tensor:
        if statement.mode == "eval":
            self.model.eval()
            loss = self.forward(number, statement)
            self.model.train()
            return loss
        with torch.no_grad() if statement.mode == "no_grad" else torch.inference_mode():
            return self.forward(number, statement).clone()

    def backward(self, statement: Backward) -> list[Tensor]:
        """The gradients of the inputs."""
        taken = [self.losses[slot] if statement.retain else self.losses.pop(slot) for slot in statement.slots]
        inputs = [x for x, _ in taken if x.requires_grad]
        loss = torch.stack([loss for _, loss in taken]).sum()
        if statement.inputs and not self.tree.reentrant:
            if inputs:
                loss.backward(inputs=inputs, retain_graph=statement.retain)
        else:
            loss.backward(retain_graph=statement.retain)
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return gradients

    def arm(self, fault: Fault | None) -> None:
        self.faults.arm(fault and fault[:2], fault[2] if fault else 0)


def learn(tree: TreeSpec, rank: int, sharded: bool) -> Learner:
    faults = Faults()
    model = build(tree, faults)
    optimizer = optimizer_of(model) if tree.early_optimizer else None
    if sharded:
        model = wrap(tree, model)
    return Learner(tree, rank, model, faults, optimizer or optimizer_of(model))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def toggle(model: nn.Module, statement: Toggle) -> None:
    prefix = f"{statement.path}."
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(prefix):
            parameter.requires_grad_(statement.trainable)


class ShardedRun:
    """One rank runs a program, and checks after every statement what must hold without knowing the right numbers."""

    def __init__(self, tree: TreeSpec, rank: int) -> None:
        self.learner = learn(tree, rank, sharded=True)
        self.model = self.learner.model
        self.engines: list[Engine] = []
        for module in self.model.modules():
            one = sharded_of(module)
            if one is not None and one.engine not in self.engines:
                self.engines.append(one.engine)
        self.parameters = list(self.model.parameters())
        self.may_keep = False
        """A forward whose backward may come: the root, and what is not resharded after a forward, stays whole."""

    def run(self, program: Program) -> list[Seen]:
        seen = [self.see(Seen())]
        for number, statement in enumerate(program):
            seen.append(self.see(self.execute(number, statement)))
            self.check_rest()
        return seen

    def execute(self, number: int, statement: Statement) -> Seen:
        learner, model = self.learner, self.model
        seen = Seen()
        match statement:
            case Forward() | Backward():
                before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
                learner.arm(statement.fault)
                try:
                    seen.value = [learner.forward(number, statement)] if isinstance(statement, Forward) else self.backward(statement)
                except Broken:
                    seen.raised = True
                    self.check_untouched(before)
                learner.arm(None)
                if isinstance(statement, Forward) and not seen.raised:
                    self.may_keep = True
            case Evaluate():
                seen.value = [learner.evaluate(number, statement)]
                self.may_keep |= statement.mode == "eval"
            case Drop():
                del learner.losses[statement.slot]
            case Zero():
                learner.optimizer.zero_grad(set_to_none=statement.set_to_none)
            case Step():
                learner.optimizer.step()
            case Clip():
                seen.value = [fsdp.clip_grad_norm_(model, statement.max_norm, statement.norm_type)]
            case Toggle():
                toggle(model, statement)
            case Summon():
                with fsdp.summon_full_params(model, writeback=statement.writeback), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            case Reload():
                full = fsdp.full_state_dict(model)
                fsdp.load_full_state_dict(model, {name: value * 2 for name, value in full.items()})
        return seen

    def backward(self, statement: Backward) -> list[Tensor]:
        rank = current_rank()
        assert rank is not None
        backwards, called = [engine.backward_number for engine in self.engines], len(rank.log)
        try:
            with nullcontext() if statement.sync else fsdp.no_sync(self.model):
                found = self.learner.backward(statement)
        finally:
            joined = [engine for engine, number in zip(self.engines, backwards, strict=True) if engine.backward_number != number]
            self.may_keep &= len(joined) < len(self.engines)
        assert [engine.backward_number - number for engine, number in zip(self.engines, backwards, strict=True)].count(1) == len(joined)
        reduced = [call.label for call in rank.log[called:] if call.kind == "reduce_scatter"]
        buckets = [unit.name for engine in joined for unit in engine.units for flat in unit.flats if any(flat.trainable)]
        if not statement.sync:
            assert not reduced
        elif self.learner.tree.reentrant:
            # each checkpoint is a backward of its own: a unit used in several of them may be complete twice
            assert set(reduced) == set(buckets)
        else:
            assert sorted(reduced) == sorted(buckets)
        return found

    def check_untouched(self, before: dict[str, Tensor | None]) -> None:
        for name, parameter in self.model.named_parameters():
            then, now = before[name], parameter.grad
            assert (then is None) == (now is None), f"{name} has another .grad after a failed step"
            assert then is None or now is None or torch.equal(then, now), f"{name} has another .grad after a failed step"

    def check_rest(self) -> None:
        now = list(self.model.parameters())
        assert len(now) == len(self.parameters) and all(one is other for one, other in zip(now, self.parameters, strict=True))
        for engine in self.engines:
            assert engine.root.at_rest
            held = {kind: count for kind, count in engine.ledger.held.items() if count and kind != "shards"}
            if self.may_keep:
                held.pop("whole", None)
            assert not held, f"at rest, {engine.units[0].name} holds {held}"
            assert not any(engine.whole(index) for index in range(len(engine.units)))

    def see(self, seen: Seen) -> Seen:
        for name, parameter in self.model.named_parameters():
            seen.gradients[name] = None if parameter.grad is None else parameter.grad.detach().clone()
            seen.weights[name] = parameter.detach().clone()
        return seen


class PlainRun:
    """The plain model runs a program on the data of all ranks.

    `gradients` are averages over the ranks; `sizes` are the sums of the absolute values they were summed from.
    """

    def __init__(self, tree: TreeSpec, world_size: int) -> None:
        first = learn(tree, 0, sharded=False)
        self.learners = [Learner(tree, rank, first.model, first.faults, first.optimizer) for rank in range(world_size)]
        self.model = first.model
        self.parameters = dict(self.model.named_parameters())
        self.sizes = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def execute(self, number: int, statement: Statement) -> list[Seen]:
        """What it leaves, seen by each rank: only `raised` and `value` differ."""
        seen = [Seen() for _ in self.learners]
        first = self.learners[0]
        match statement:
            case Forward() | Evaluate() | Backward():
                self._pass(number, statement, seen)
            case Drop():
                for learner in self.learners:
                    del learner.losses[statement.slot]
            case Zero():
                first.optimizer.zero_grad(set_to_none=statement.set_to_none)
                for size in self.sizes.values():
                    size.zero_()
            case Step():
                first.optimizer.step()
            case Clip():
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), statement.max_norm, statement.norm_type)
                factor = float(min(statement.max_norm / (norm + 1e-6), 1.0))
                for size in self.sizes.values():
                    size.mul_(factor)
                for one in seen:
                    one.value = [norm]
            case Toggle():
                toggle(self.model, statement)
            case Summon() | Reload():
                factor = 2.0 if isinstance(statement, Reload) else 0.5 if statement.writeback else 1.0
                with torch.no_grad():
                    for parameter in self.parameters.values():
                        parameter.mul_(factor)
        return seen

    def _pass(self, number: int, statement: Forward | Evaluate | Backward, seen: list[Seen]) -> None:
        """One rank after the other; if it fails, it leaves the gradients as they were."""
        before = {name: p.grad for name, p in self.parameters.items()}
        sums: dict[str, Tensor] = {}
        sizes = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for learner, one in zip(self.learners, seen, strict=True):
            for parameter in self.parameters.values():
                parameter.grad = None
            learner.arm(None if isinstance(statement, Evaluate) else statement.fault)
            try:
                match statement:
                    case Forward():
                        one.value = [learner.forward(number, statement)]
                    case Evaluate():
                        one.value = [learner.evaluate(number, statement)]
                    case Backward():
                        one.value = learner.backward(statement)
            except Broken:
                one.raised = True
            learner.arm(None)
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    share = parameter.grad / len(self.learners)
                    sums[name] = sums[name] + share if name in sums else share
                    sizes[name] += share.abs()
        failed = any(one.raised for one in seen)
        for name, parameter in self.parameters.items():
            then = before[name]
            parameter.grad = then
            if name in sums and not failed:
                parameter.grad = sums[name] if then is None else then + sums[name]
                self.sizes[name] += sizes[name]
