"""The table of docs/reference/optimizers.md: which optimizers compute on shards what they compute in one process."""

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import CASES, Case, loss_of, weights_of

STEPS: Final = 6
WITHIN: Final = 1e-6
"""The largest difference of a weight, in units of the largest weight of its parameter."""


class Matrices(nn.Module):
    """Two matrices and no vector, for optimizers that accept nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 7, bias=False), nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


class Vectors(nn.Module):
    """Vectors and no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.linspace(0.5, 1.5, 6)), nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain + self.shift)


class Lars(torch.optim.Optimizer):
    """The learning rate of each parameter follows the norms of the parameter and of its gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            update = p.grad + 0.01 * p
            trust = torch.where(p.norm() > 0, p.norm() / (update.norm() + 1e-8), 1.0)
            state["momentum"] = update if "momentum" not in state else 0.9 * state["momentum"] + update * trust
            p.add_(state["momentum"], alpha=-0.1)


class Lamb(torch.optim.Optimizer):
    """As Adam, and each parameter's update is scaled to the norm of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
            ratio = float(p.norm().clamp(0, 10)) / float(update.norm())
            p.sub_(update, alpha=0.01 * ratio)


LAYERS: Final = Case(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), None)
"""Cut between rows and inside them, and with parameters of which some ranks hold nothing."""
MATRICES: Final = Case(Matrices, {nn.Linear})
VECTORS: Final = Case(Vectors, None)
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Row(NamedTuple):
    """One optimizer with its options."""

    make: Make
    case: Case = LAYERS
    refused: str = ""
    """The beginning of the error, in which "..." stands for anything; nothing if the weights are right."""
    needs_closure: bool = False
    remark: str = ""


_CASES: Final = {"Muon": MATRICES, "SparseAdam": CASES["sparse"]}
"""Other models than LAYERS, because the optimizer refuses LAYERS in one process as well."""
_REFUSED: Final = {
    "Adafactor": ("Adafactor.step: ... it needs the full tensor", "means over rows and over columns"),
    "LBFGS": ("LBFGS.step: aten.cat.default ... it needs the full tensor", "one vector of all gradients"),
    "Muon": ("Muon.step: aten.permute.default ... it needs the full tensor", "products of matrices"),
    "SparseAdam": ("SparseAdam does not support dense gradients", "gradients of shards are dense"),
}
"""The beginning of the error, in which "..." stands for anything, and why."""


def rows() -> dict[str, Row]:
    """All optimizers of torch.optim with default options and with each implementation, then others."""
    found: dict[str, Row] = {}
    for name in dir(torch.optim):
        optimizer = getattr(torch.optim, name)
        if (
            isinstance(optimizer, type)
            and issubclass(optimizer, torch.optim.Optimizer)
            and optimizer is not torch.optim.Optimizer
        ):
            refused, remark = _REFUSED.get(name, ("", ""))
            for options in _options(optimizer):
                given = ", ".join(f"{option}=True" for option in options)
                row = Row(_maker(optimizer, options), _CASES.get(name, LAYERS), refused, name == "LBFGS", remark)
                found[f"torch.optim.{name}({given})"] = row
    found["torch.optim.AdamW() with a closure"] = Row(lambda model: torch.optim.AdamW(model.parameters()), needs_closure=True)
    found["torch.optim.AdamW(amsgrad=True, maximize=True)"] = Row(
        lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, maximize=True)
    )
    found["torch.optim.SGD(momentum=0.9, nesterov=True, weight_decay=0.1)"] = Row(
        lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=0.1)
    )
    found["torch.optim.RMSprop(centered=True, momentum=0.9)"] = Row(
        lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9)
    )
    found["torch.optim.Adafactor() of vectors alone"] = Row(
        lambda model: torch.optim.Adafactor(model.parameters()), VECTORS, remark="uses norms and counts of all elements"
    )
    found["torch.optim.SparseAdam() under NO_SHARD"] = found["torch.optim.SparseAdam()"]._replace(
        refused="", remark="gradients stay sparse"
    )
    found["LARS, written with p.norm()"] = Row(lambda model: Lars(model.parameters()), remark="uses norms of all elements")
    found["LAMB, written with p.norm()"] = Row(lambda model: Lamb(model.parameters()), remark="uses norms of all elements")
    return found


def _options(optimizer: type[torch.optim.Optimizer]) -> list[tuple[str, ...]]:
    accepted = inspect.signature(optimizer.__init__).parameters
    return [(), *((option,) for option in ("foreach", "fused") if option in accepted)]


def _maker(optimizer: type[torch.optim.Optimizer], options: tuple[str, ...]) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        # SparseAdam is given what has sparse gradients
        params = [model.embedding.weight] if optimizer is torch.optim.SparseAdam else list(model.parameters())
        return optimizer(params, **dict.fromkeys(options, True))  # type: ignore[arg-type, call-arg]

    return make


def trained(row: Row, ranks: range, **options: Any) -> dict[str, Tensor]:
    """The weights after some steps on the averaged gradients of `ranks`; sharded, if options for that are given."""
    model = row.case.model()
    if options:
        fsdp.fully_shard(model, auto_wrap_policy=row.case.policy, **options)
    optimizer = row.make(model)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            losses = [loss_of(model(row.case.batch(rank, step))) / len(ranks) for rank in ranks]
            torch.autograd.backward(losses)
            return torch.stack(losses).sum().detach()

        if row.needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return weights_of(model)


class Package(NamedTuple):
    """Optimizers of another package, and the version that was tried."""

    package: str
    version: str
    names: tuple[str, ...]
    refused: str
    """As in `Row`, after the name of the class; nothing if they could not be tried."""
    remark: str


ELSEWHERE: Final = (
    Package(
        "torchao.optim",
        "0.18.0",
        ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
        ".step: torchao compiles it, and a compiled step does not know shards",
        "torch.compile refuses tensor classes that it does not know",
    ),
    Package("torchao.optim", "0.18.0", ("CPUOffloadOptimizer",), "", "it needs CUDA or XPU"),
    Package(
        "bitsandbytes.optim",
        "0.50.2",
        ("AdamW8bit", "Adam8bit", "PagedAdamW8bit", "Lion8bit"),
        ".step: bitsandbytes.optimizer_update_32bit.default ... it needs the full tensor",
        "kernels of its own, which are not operators of torch",
    ),
)
"""Their rows are tested where the package is installed."""


def rows_elsewhere() -> Iterator[tuple[str, Row]]:
    """The optimizers of other packages that can be imported."""
    for one in ELSEWHERE:
        if one.refused and find_spec(one.package.partition(".")[0]):
            module = import_module(one.package)
            for name in one.names:
                yield f"{one.package}.{name}", Row(_maker(getattr(module, name), ()), refused=name + one.refused)


def page() -> str:
    """The table, with what each row's test asserts. Rows that say the same are one."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, row in rows().items():
        title = re.sub(r"torch\.optim\.\w+\(.*?\)|p\.norm\(\)", r"`\g<0>`", name)
        result = f"refused: “{row.refused}”" if row.refused else f"right, within {WITHIN:.0e}"
        said.setdefault((result, row.remark or "element by element"), []).append(title)
    for package, version, names, refused, remark in ELSEWHERE:
        result = f"refused: “{names[0]}{refused}”" if refused else "not tried"
        said[result, remark] = [f"`{package}` {version}: {', '.join(f'`{name}`' for name in names)}"]
    lines = [f"| {', '.join(titles)} | {result} | {remark} |" for (result, remark), titles in said.items()]
    return "\n".join(["| optimizer | result | why |", "| --- | --- | --- |", *lines])
