"""Random training programs: what their statements are, and what a learner, sharded or plain, does for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fsdp
from tests.support.trees import BATCH, Faults, Group, How, Leaf, TreeSpec, build, split, wrap

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
    """One backward of the sum of some losses. `only`: for the gradients of the inputs, by `backward` or by `grad`."""

    slots: tuple[int, ...]
    retain: bool = False
    sync: bool = True
    only: str = ""
    fault: Fault | None = None
    of: str = "loss"
    """What it begins at: the "loss" of each forward, the "features" a hook carried off, if there are any, or "both"."""
    slope: bool = False
    """Whether it goes through the gradients of the inputs too, which have a graph."""
    penalties: tuple[tuple[str, str], ...] = ()
    """On parameters outside any forward: a "norm", or the sum of "squares", and whose."""


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
    came: dict[str, int] = field(default_factory=dict)
    """How often the hooks that hear of gradients were called, by parameter; in the plain model, once for each that came."""


def data(number: int, rank: int) -> Tensor:
    """What `rank` sees in statement `number`."""
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(1000 * number + rank))


def loss_of(output: Any, use: str) -> Tensor:
    main, aux = split(output)
    weights = torch.linspace(0.5, 1.5, main.numel(), device=main.device).view(main.shape)
    if use == "aux" and aux is not None:
        return (aux * weights).sum()
    loss = (main * main * weights).mean()
    return loss + aux.sum() * 0.3 if use == "both" and aux is not None else loss


class Alive(NamedTuple):
    """What a forward left that a backward may begin or end at."""

    x: Tensor
    loss: Tensor
    features: tuple[Tensor, ...]


@dataclass
class Learner:
    """A model, sharded or plain, and the losses whose backward has not come."""

    tree: TreeSpec
    rank: int
    sharded: bool
    model: nn.Module
    faults: Faults
    optimizer: torch.optim.Optimizer
    features: list[Tensor]
    """What the hook of the user has carried off; replays add to it."""
    losses: dict[int, Alive] = field(default_factory=dict)
    """By slot."""

    def forward(self, number: int, statement: Forward | Evaluate) -> Tensor:
        optional = statement.optional if isinstance(statement, Forward) else True
        needs = isinstance(statement, Forward) and (statement.input_grad or self.tree.several_roots)
        x = data(number, self.rank)[:, : self.tree.width].clone().requires_grad_(needs)
        self.features.clear()
        how = How(self.rank, optional, number if self.tree.uneven else None)
        loss = loss_of(self.model(x, how), statement.use if isinstance(statement, Forward) else "both")
        if isinstance(statement, Forward):
            self.losses[statement.slot] = Alive(x, loss, tuple(one for one in self.features if one.requires_grad))
        return loss.detach()

    def evaluate(self, number: int, statement: Evaluate) -> Tensor:
        if statement.mode == "eval":
            self.model.eval()
            loss = self.forward(number, statement)
            self.model.train()
            return loss
        with torch.no_grad() if statement.mode == "no_grad" else torch.inference_mode():
            return self.forward(number, statement).clone()

    def only_asks(self, statement: Backward) -> bool:
        """Whether a backward is `torch.autograd.grad`, which leaves no gradient in a parameter."""
        some = any(self.losses[slot].x.requires_grad for slot in statement.slots)
        return statement.only == "grad" and some and not self.tree.reentrant

    def backward(self, statement: Backward) -> list[Tensor]:
        """The gradients of the inputs."""
        only_asks = self.only_asks(statement)
        taken = [self.losses[slot] if statement.retain else self.losses.pop(slot) for slot in statement.slots]
        inputs = [one.x for one in taken if one.x.requires_grad]
        loss = self._loss(statement, taken, inputs)
        found: Sequence[Tensor | None]
        if only_asks:
            found = torch.autograd.grad(loss, inputs, retain_graph=statement.retain, allow_unused=True)
        else:
            some = {"inputs": inputs} if statement.only and inputs and not self.tree.reentrant else {}
            loss.backward(retain_graph=statement.retain, **some)
            found = [x.grad for x in inputs]
        gradients = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, found, strict=True)]
        for x in inputs:
            x.grad = None
        return gradients

    def _loss(self, statement: Backward, taken: Sequence[Alive], inputs: Sequence[Tensor]) -> Tensor:
        terms = [one.loss for one in taken if statement.of != "features" or not one.features]
        if statement.of != "loss":
            terms += [feature.square().mean() for one in taken for feature in one.features]
        if statement.slope and inputs and not self.tree.reentrant:
            slopes = torch.autograd.grad(torch.stack(terms).sum(), inputs, create_graph=True, allow_unused=True)
            terms += [0.1 * slope.square().sum() for slope in slopes if slope is not None]
        parameters = dict(self.model.named_parameters())
        terms += [0.1 * self._penalty(kind, parameters[name]).float() for kind, name in statement.penalties]
        return torch.stack(terms).sum()

    def _penalty(self, kind: str, parameter: nn.Parameter) -> Tensor:
        if kind == "norm":
            return (fsdp.full_tensor(parameter) if self.sharded else parameter).norm()
        return (fsdp.to_local(parameter) if self.sharded else parameter).square().sum()

    def let_go(self) -> None:
        """A hook of the model has carried tensors off, and their graph leads to the model: nobody would free either."""
        self.features.clear()

    def arm(self, fault: Fault | None) -> None:
        self.faults.arm(fault and fault[:2], fault[2] if fault else 0)


def learn(tree: TreeSpec, rank: int, sharded: bool) -> Learner:
    faults, features = Faults(), list[Tensor]()
    model = build(tree, faults)
    optimizer = optimizer_of(model) if tree.early_optimizer else None
    if not tree.late_feature:
        carry_off(tree, model, features)
    if sharded:
        model = wrap(tree, model)
    if tree.late_feature:
        carry_off(tree, model, features)
    return Learner(tree, rank, sharded, model, faults, optimizer or optimizer_of(model), features)


def carry_off(tree: TreeSpec, model: nn.Module, features: list[Tensor]) -> None:
    """Set a forward hook on a module inside that puts what it returns in a list."""
    for module in model.modules():
        if tree.feature and isinstance(module, Leaf | Group) and module.path == tree.feature:
            module.register_forward_hook(lambda module, args, output: features.append(split(output)[0]))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def toggle(model: nn.Module, statement: Toggle) -> None:
    prefix = f"{statement.path}."
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(prefix):
            parameter.requires_grad_(statement.trainable)
