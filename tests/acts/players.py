"""Who performs a program: a model, plain or one rank's, and everything that the moves and acts of a program need.

Rule 1: the plain player is one model that computes on the data of all ranks, one after another in one batch, and its loss is the
        mean of the ranks' losses. So each hook is called once in a pass, as on a rank, and gradients are averages by themselves.
Rule 2: a move or an act reads no value that differs between the ranks, unless it treats values linearly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH: Final = 4
ROWS: Final = 2
LEARNING_RATE: Final = 0.05
POST: Final = "in a post-accumulate hook"
ACTIVATION: Final = "in a hook of an activation"
_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_fpw_module.", "module.")


class Block(nn.Module):
    """A unit: a matrix and a vector to train, a vector that is frozen in the beginning, a buffer, and a mode that can be seen."""

    scale: Tensor

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=not frozen)
        self.register_buffer("scale", torch.linspace(0.8, 1.2, WIDTH))
        self.during: Callable[[], None] = nothing
        self.hooked: Callable[[], None] = nothing
        # torch does not look for hooks that are added while a module's forward runs, if the module had none before
        self.register_forward_hook(lambda module, args, output: None)

    def forward(self, x: Tensor) -> Tensor:
        self.during()
        y = torch.tanh(self.linear(x) * self.gain) * self.scale
        if y.requires_grad:
            y.register_hook(lambda gradient: self.hooked())
        return x + (y if self.training else 0.5 * y)


def nothing() -> None:
    """No act is due."""


class Net(nn.Module):
    """Two units between two layers of the root's own. The second unit is checkpointed."""

    def __init__(self, frozen: bool = True, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, WIDTH, max_norm=max_norm) if max_norm else None
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(frozen), Block(frozen)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + self.table((1000 * x[:, 0]).long().abs() % 6)
        x = torch.tanh(self.enter(x))
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.head(x)


def loss_of(output: Tensor) -> Tensor:
    """Not linear, and no element's gradient is that of another."""
    return (output.square() * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)).mean()


def clean(name: str) -> str:
    """The name that a parameter has in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Raised(Exception):
    """Raised by an act, as by code of the user's that fails."""


@dataclass
class Due:
    """An act that is to happen once, when a moment comes."""

    moment: str
    name: str
    act: Callable[[], None]
    cancel: Callable[[], None] = nothing


@dataclass
class Player:
    """A model, and what a program has left to be used later."""

    model: nn.Module
    net: Net
    """What was wrapped."""
    ranks: tuple[int, ...]
    """Whose data it computes on."""
    synchronise: Callable[[bool], None]
    """Says whether backwards reduce gradients from now on."""
    another: Callable[[float | None], nn.Module]
    """Makes one more model like this one, wrapped. The number is the `max_norm` of an embedding that it has."""
    plain: bool = False
    without: tuple[str, ...] = ()
    """Acts that the users of this door do not have: nothing happens."""
    replicated: bool = False
    """Whether each rank has all elements of a gradient, so that gradients under no_sync are its own."""
    optimizer: torch.optim.Optimizer = field(init=False)
    trained: set[str] = field(init=False)
    """The parameters that required gradients in the beginning."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Of forwards whose backward has not come."""
    due: list[Due] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    """Of hooks that acts have added."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What acts keep for other acts."""
    reads: list[tuple[str, Any]] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    """The acts that have ended since somebody looked."""
    begun: list[str] = field(default_factory=list)
    """Those of hooks and forwards that have begun since then, and may have raised."""
    blocks: tuple[Block, ...] = ()
    """The user's own modules, under whatever wraps them."""
    local_gradients: bool = False
    """Whether gradients are kept under no_sync, so that they are not averages."""
    syncs: bool = True
    undone: bool = False
    """Whether an error since somebody looked has said that what its forward did is undone. In plain torch it stays."""
    follows: bool = False
    """Whether it does what ranks did in a move that was refused: moments bring nothing."""
    late: bool = False
    """Whether what is due in a post-accumulate hook waits for the end of the backward."""

    def __post_init__(self) -> None:
        self.trained = {name for name, p in self.parameters().items() if p.requires_grad}
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], LEARNING_RATE, momentum=0.9)
        self.blocks = tuple(m for m in self.model.modules() if isinstance(m, Block))
        self.blocks[0].during = lambda: self.reached("inside a forward", not _in_backward())
        self.blocks[0].hooked = lambda: self.reached(ACTIVATION)
        self.blocks[1].during = lambda: self.reached("in a recompute", _in_backward())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that the modules show now, by the names of the plain model."""
        return {clean(name): p for name, p in self.model.named_parameters()}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def data(self, number: int) -> Tensor:
        return torch.cat([_data(number, rank) for rank in self.ranks]).to(self.dtype)

    def outputs(self, output: Tensor) -> tuple[Tensor, ...]:
        """By rank."""
        return output.chunk(len(self.ranks))

    def loss(self, output: Tensor) -> Tensor:
        return torch.stack([loss_of(part) for part in self.outputs(output)]).mean()

    def evaluate(self, number: int, model: nn.Module | None = None) -> tuple[Tensor, ...]:
        """The outputs of a forward without a graph."""
        with torch.no_grad():
            return self.outputs((model or self.model)(self.data(number)))

    def backward(self, loss: Tensor, retain: bool = False) -> None:
        loss.backward(retain_graph=retain)
        self.reached(POST, self.syncs and self.late)
        self.local_gradients = not self.syncs

    def caught(self, error: BaseException) -> None:
        """An error of a forward was caught."""
        self.undone |= any(note.startswith("fsdp: undone is ") for note in getattr(error, "__notes__", ()))

    def read(self, name: str, value: Any) -> None:
        self.reads.append((name, value))

    @property
    def hooked(self) -> bool:
        """Whether what is due in a post-accumulate hook happens there."""
        return self.syncs and not self.late

    # acts that are due ----------------------------------------------------------------------

    def reached(self, moment: str, really: bool = True) -> None:
        """Do what is due at this moment. An act may bring the moment again, for those that are still due."""
        for one in [one for one in self.due if really and not self.follows and one.moment == moment]:
            self.do_if_due(one)

    def do_if_due(self, one: Due) -> None:
        """Do an act, unless another act has brought its moment."""
        if one in self.due:
            self.begun.append(one.name)
            self.forget(one)
            one.act()

    def forget(self, one: Due) -> None:
        """An act is not due any more."""
        self.due.remove(one)
        one.cancel()

    def trains(self, parameter: Tensor) -> bool:
        """torch calls hooks of a parameter that was frozen after the forward too; ranks have no gradient for them."""
        return parameter.requires_grad

    def cancel(self) -> None:
        """Nothing is due any more."""
        while self.due:
            self.forget(self.due[-1])

    def arm(self, moment: str, name: str, act: Callable[[], None]) -> None:
        """Do `act` when `moment` comes for the first time. Hooks on shards wait for a backward that synchronises."""
        one = Due(moment, name, act)
        weight = self.parameters()["blocks.0.linear.weight"]
        match moment:
            case "in a pre-hook":
                handle: Any = self.blocks[0].register_forward_pre_hook(lambda module, args: self.reached(moment))
            case "in a tensor hook":
                handle = weight.register_hook(lambda gradient: self.reached(moment, self.syncs and self.trains(weight)))
            case "in a post-accumulate hook":
                handle = weight.register_post_accumulate_grad_hook(lambda p: self.reached(moment, self.hooked and self.trains(p)))
            case _:
                handle = None
        if handle is not None:
            one.cancel = handle.remove
        self.due.append(one)

    def abandon(self) -> None:
        """What a user does whose pass has failed. Gradients of a parameter that the optimizer does not have go too."""
        self.losses.clear()
        self.cancel()
        self.model.zero_grad()
        self.zero()

    def zero(self) -> None:
        """Gradients of this rank stay where the optimizer does not have the parameter."""
        self.optimizer.zero_grad()
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.local_gradients &= any(p.grad is not None and id(p) not in known for p in self.model.parameters())

    def undo(self) -> None:
        """Everything that an act has set and that stays, as it was in the beginning."""
        for name, parameter in self.parameters().items():
            parameter.requires_grad_(name in self.trained)
            if parameter.grad_dtype != parameter.dtype:
                parameter.grad, parameter.grad_dtype = None, parameter.dtype
        while self.handles:
            self.handles.pop().remove()
        self.model.train()
        self.cancel()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _data(number: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank), dtype=torch.float64)
