"""Random unit trees: what a module tree looks like, how its units are chosen, and the modules themselves.

Every module maps (batch, width) to (batch, width), so that any of them can be put anywhere.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.comm.simulated import current_rank

BATCH = 3
ROOT_OWN = "tail"
"""The root's own parameter that is always trainable, so that a loss can always be differentiated."""
EDITS: dict[str, Callable[[Tensor], Any]] = {"clamp": lambda p: p.clamp_(-0.4, 0.4), "shrink": lambda p: p.mul_(0.9)}
"""What a leaf may do to its first parameter at the beginning of its forward."""


@dataclass(frozen=True)
class How:
    """What one forward is told: the rank whose data it sees, and whether it takes the optional calls."""

    rank: int
    optional: bool = True
    number: int | None = None
    """That of the statement, where the rank draws itself which of the optional calls it takes."""

    def takes(self, call: int) -> bool:
        """Whether an optional call is taken, by its number."""
        if self.number is None:
            return self.optional
        return bool(Random(f"{self.rank}/{self.number}/{call}").getrandbits(1))


@dataclass(frozen=True)
class LeafSpec:
    """A module of one of the `KINDS`. `ranks`: those on which the branch of kind "branch" is taken."""

    kind: str
    ranks: tuple[int, ...] = ()
    trap: str = "out"
    """Where the node is that can fail in a backward: at the input, at the output, or nowhere."""
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallSpec:
    """One call a group makes: of one part, or of two in a row."""

    parts: tuple[int, ...]
    checkpoint: str = ""
    """"", "reentrant" or "replayed"."""
    edit: bool = False
    """Whether what it returned is edited in place."""
    aux: bool = False
    """Whether the second output is used, where there is one."""
    optional: bool = False


@dataclass(frozen=True)
class GroupSpec:
    """A module with parts. Its own parameter, if it has one, is used inside its checkpoints."""

    parts: tuple["LeafSpec | GroupSpec", ...]
    calls: tuple[CallSpec, ...]
    own: bool = False
    reads: int | None = None
    """The part whose first parameter it computes with before it calls its parts; inside its checkpoints too."""
    returns: str = "tensor"
    trap: str = "out"


@dataclass(frozen=True)
class TreeSpec:
    """A module tree, its units, and the options they are wrapped with."""

    root: GroupSpec
    units: tuple[str, ...] = ()
    """Paths of the inner units."""
    by_hand: bool = False
    """Wrapped one by one, inner ones first, instead of by a policy."""
    inner_wrapper: bool = False
    """Whether those wrapped by hand get a wrapper; otherwise in place."""
    root_wrapper: bool = True
    several_roots: bool = False
    """The outermost module is no unit: each of its parts is a root."""
    ties: tuple[tuple[str, str], ...] = ()
    """Parameters of the second module that are those of the first: paths of two leaves of one kind."""
    options: tuple[tuple[str, Any], ...] = ()
    replicas: int = 0
    """How often the shards are held, if the world can be divided so, with HYBRID_SHARD."""
    width: int = 3
    early_optimizer: bool = False
    """Made before the model is wrapped."""
    feature: str = ""
    """The module whose outputs a forward hook of the user carries off, if any."""
    late_feature: bool = False
    """That hook is set after the model is wrapped."""
    hooked: str = ""
    """The leaf whose parameters have hooks of the user, if any: one doubles the gradient, one counts."""
    uneven: bool = False
    """Whether each rank draws its own optional calls."""
    edit: tuple[str, str] | None = None
    """The leaf that edits its first parameter in its forward, and which of the `EDITS` it makes."""

    @property
    def checkpoints(self) -> set[str]:
        """The kinds of checkpoints in it."""
        groups = (one for _, one in walk(self.root) if isinstance(one, GroupSpec))
        return {call.checkpoint for one in groups for call in one.calls if call.checkpoint}

    @property
    def reentrant(self) -> bool:
        """Whether some checkpoint runs a backward of its own."""
        return "reentrant" in self.checkpoints

    @property
    def reading(self) -> bool:
        """Whether some group computes with a parameter of a part."""
        return any(isinstance(one, GroupSpec) and one.reads is not None for _, one in walk(self.root))

    @property
    def branching(self) -> bool:
        """Whether some ranks use parameters that others do not."""
        return self.uneven or any(isinstance(one, LeafSpec) and one.ranks for _, one in walk(self.root))


def walk(spec: LeafSpec | GroupSpec, path: str = "") -> Iterator[tuple[str, LeafSpec | GroupSpec]]:
    """Every module and its path, outer ones first."""
    yield path, spec
    if isinstance(spec, GroupSpec):
        for number, part in enumerate(spec.parts):
            yield from walk(part, below(path, number))


def below(path: str, number: int) -> str:
    """The path of a part."""
    return f"{path}.parts.{number}" if path else f"parts.{number}"


def first_parameter(spec: LeafSpec | GroupSpec) -> str | None:
    """The name of the first parameter of a module's own."""
    if isinstance(spec, LeafSpec):
        return next(iter(KINDS[spec.kind].shapes(1)))
    return "own" if spec.own else None


def parameters_of(tree: TreeSpec) -> dict[str, bool]:
    """The name of every parameter, tied ones once, and whether it is trainable at first."""
    found = {} if tree.several_roots else {ROOT_OWN: True}
    again = {other for _, other in tree.ties}
    for path, one in walk(tree.root):
        if isinstance(one, LeafSpec) and path not in again:
            found |= {f"{path}.{name}": name not in one.frozen for name in KINDS[one.kind].shapes(1)}
        elif isinstance(one, GroupSpec) and one.own:
            found[f"{path}.own"] = True
    return found


class Broken(Exception):
    """What a fault raises."""


@dataclass
class Faults:
    """The fault that is armed in one model: in the forward or the backward of one module, at one of its occurrences."""

    armed: "tuple[str, str] | None" = None
    countdown: int = 0

    def arm(self, armed: "tuple[str, str] | None", countdown: int = 0) -> None:
        self.armed, self.countdown = armed, countdown

    def passes(self, where: str, path: str) -> None:
        if self.armed == (where, path):
            if not self.countdown:
                self.armed = None
                raise Broken(f"{where} of {path}")
            self.countdown -= 1


class _Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faults: Faults, path: str) -> Tensor:
        ctx.faults, ctx.path = faults, path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.faults.passes("backward", ctx.path)
        return gradients[0], None, None


class Kind(NamedTuple):
    """A leaf: the shapes of its parameters (a function of the width), and what it adds to its input."""

    shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
    add: Callable[[Any, Tensor, How], Tensor]


def _branch(m: Any, x: Tensor, how: How) -> Tensor:
    y = torch.tanh(F.linear(x, m.weight))
    return y + m.other if how.rank in m.spec.ranks else y


def _look_up(m: Any, x: Tensor, how: How) -> Tensor:
    return F.embedding(torch.arange(x.shape[0], device=x.device) * 3 % 7, m.table)


KINDS: dict[str, Kind] = {
    "linear": Kind(lambda d: {"weight": (d, d), "bias": (d,)}, lambda m, x, how: torch.tanh(F.linear(x, m.weight, m.bias))),
    "norm": Kind(lambda d: {"weight": (d,), "bias": (d,)}, lambda m, x, how: F.layer_norm(x, x.shape[1:], m.weight, m.bias, 1.0)),
    "scale": Kind(lambda d: {"gain": (d,)}, lambda m, x, how: x * m.gain),
    "scalar": Kind(lambda d: {"gain": ()}, lambda m, x, how: torch.sin(x) * m.gain),
    "single": Kind(lambda d: {"shift": (1,)}, lambda m, x, how: m.shift.expand_as(x)),
    "empty": Kind(lambda d: {"nothing": (0, 3), "gain": (d,)}, lambda m, x, how: x * m.gain + m.nothing.sum()),
    "embedding": Kind(lambda d: {"table": (7, d)}, _look_up),
    "wide": Kind(
        lambda d: {"up": (2 * d + 1, d), "down": (d, 2 * d + 1)},
        lambda m, x, how: F.linear(torch.tanh(F.linear(x, m.up)), m.down),
    ),
    "detached": Kind(lambda d: {"weight": (d, d)}, lambda m, x, how: F.linear(x, m.weight.detach()) + m.weight.mean(0)),
    "never_trained": Kind(lambda d: {"weight": (d, d)}, lambda m, x, how: F.linear(x, m.weight.detach())),
    "branch": Kind(lambda d: {"weight": (d, d), "other": (d,)}, _branch),
    "unused": Kind(lambda d: {"gain": (d,), "never": (2, 3)}, lambda m, x, how: torch.sin(x) * m.gain),
    "double": Kind(lambda d: {"gain": (d,), "fine": (d,)}, lambda m, x, how: x * m.gain + m.fine.to(x.dtype)),
}


class Leaf(nn.Module):
    def __init__(self, spec: LeafSpec, path: str, width: int, faults: Faults) -> None:
        super().__init__()
        self.spec, self.path, self.faults = spec, path, faults
        self.edit = ""
        for name, shape in KINDS[spec.kind].shapes(width).items():
            dtype = torch.float64 if name == "fine" else torch.float32
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=name not in spec.frozen))

    def forward(self, x: Tensor, how: How) -> Tensor:
        self.faults.passes("forward", self.path)
        if self.edit:
            with torch.no_grad():
                EDITS[self.edit](getattr(self, str(first_parameter(self.spec))))
        if self.spec.trap == "in":
            x = _Trap.apply(x, self.faults, self.path)
        y = x + KINDS[self.spec.kind].add(self, x, how)
        return _Trap.apply(y, self.faults, self.path) if self.spec.trap == "out" else y


@dataclass
class Record:
    """An output with fields, one of which is no tensor."""

    main: Tensor
    aux: Tensor
    note: str = "a note"


class Slotted:
    """An output whose tensors are in slots."""

    __slots__ = ("aux", "main")

    def __init__(self, main: Tensor, aux: Tensor) -> None:
        self.main, self.aux = main, aux


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda main, aux: main,
    "view": lambda main, aux: torch.cat((main, aux), 1)[:, : main.shape[1]],
    "reshaped": lambda main, aux: main.view(-1).view(main.shape),
    "tuple": lambda main, aux: (main, aux),
    "chunks": lambda main, aux: torch.cat((main, aux), 1).chunk(2, 1),
    "dict": lambda main, aux: {"main": main, "aux": aux},
    "record": Record,
    "slotted": Slotted,
    "nested": lambda main, aux: ([main], {"more": (aux, None)}),
}


def split(output: Any) -> tuple[Tensor, Tensor | None]:
    """The main output and the other one."""
    match output:
        case Tensor():
            return output, None
        case [main], {"more": (aux, None)}:
            return main, aux
        case (main, aux):
            return main, aux
        case {"main": main, "aux": aux}:
            return main, aux
    return output.main, output.aux


class Group(nn.Module):
    def __init__(self, spec: GroupSpec, path: str, width: int, faults: Faults) -> None:
        super().__init__()
        self.spec, self.path, self.faults = spec, path, faults
        self.parts = nn.ModuleList(make(part, below(path, number), width, faults) for number, part in enumerate(spec.parts))
        if spec.own:
            self.own = nn.Parameter(torch.zeros(width))

    def _through(self, parts: tuple[int, ...], x: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
        main, aux = x * self.own if self.spec.own else x, None
        if self.spec.reads is not None:
            weight = getattr(self.parts[self.spec.reads], str(first_parameter(self.spec.parts[self.spec.reads])))
            square = weight.shape == (main.shape[1],) * 2
            main = main + torch.tanh(F.linear(main, weight)) if square else main * (1.0 + 0.1 * weight.sum())
        for part in parts:
            main, aux = split(self.parts[part](main.view_as(main) if part % 2 else main, how))
        return main, aux

    def _call(self, call: CallSpec, x: Tensor, how: How) -> Tensor:
        if call.checkpoint:
            main, aux = checkpoint(self._through, call.parts, x, how, use_reentrant=call.checkpoint == "reentrant")
        else:
            main, aux = self._through(call.parts, x, how)
        if call.edit:
            main.mul_(0.75)
        return x + main + aux if call.aux and aux is not None else x + main

    def forward(self, x: Tensor, how: How) -> Any:
        self.faults.passes("forward", self.path)
        if self.spec.trap == "in":
            x = _Trap.apply(x, self.faults, self.path)
        first = None
        for number, call in enumerate(self.spec.calls):
            if not call.optional or how.takes(number):
                x = torch.tanh(self._call(call, x, how))
                first = x if first is None else first
        if (tail := getattr(self, ROOT_OWN, None)) is not None:
            x, first = x * tail, None if first is None else first * tail
        if self.spec.trap == "out":
            x = _Trap.apply(x, self.faults, self.path)
        return RETURNS[self.spec.returns](x * 1.0, (x if first is None else first) * 0.5)


def make(spec: LeafSpec | GroupSpec, path: str, width: int, faults: Faults) -> nn.Module:
    return (Leaf if isinstance(spec, LeafSpec) else Group)(spec, path, width, faults)  # type: ignore[arg-type]


def build(tree: TreeSpec, faults: Faults) -> nn.Module:
    """The plain model, with the same weights every time."""
    model = make(tree.root, "", tree.width, faults)
    if not tree.several_roots:
        setattr(model, ROOT_OWN, nn.Parameter(torch.zeros(tree.width)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    for one, other in tree.ties:
        first, second = model.get_submodule(one), model.get_submodule(other)
        for name, parameter in first._parameters.items():
            second._parameters[name] = parameter
    if tree.hooked:
        for parameter in model.get_submodule(tree.hooked).parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 2)
    if tree.edit:
        model.get_submodule(tree.edit[0]).edit = tree.edit[1]
    return model


def wrap(tree: TreeSpec, model: nn.Module) -> nn.Module:
    """Shard it as the tree says."""
    options = dict(tree.options)
    if tree.replicas:
        rank = current_rank()
        replicas = gcd(tree.replicas, rank.size)
        shape = replicas, rank.size // replicas
        options["mesh"] = init_device_mesh("cpu", shape) if options.get("dtensors") else shape
    paths = tree.units
    if tree.by_hand:
        for path in reversed(paths):
            module = model.get_submodule(path)
            if tree.inner_wrapper:
                parent, _, number = path.rpartition(".")
                model.get_submodule(parent)[int(number)] = fsdp.FullyShardedDataParallel(module, **options)
            else:
                fsdp.fully_shard(module, **options)
    elif not tree.several_roots:
        options["auto_wrap_policy"] = lambda name, module: name in paths
    if tree.several_roots:
        return model
    return fsdp.FullyShardedDataParallel(model, **options) if tree.root_wrapper else fsdp.fully_shard(model, **options)
