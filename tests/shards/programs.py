"""What scripts do with the parameters and gradients of a model: on one process, with simulated shards, and over gloo.

Each takes the ranks whose data this process trains on, and whether the model is sharded.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import fsdp
from tests.support.models import Block, Case, Net, local, loss_of, weights_of

CASE: Final = Case(lambda: Net(1), {Block})
STEPS: Final = 6
Weights = dict[str, Tensor]
Found = tuple[list[float], Weights]
"""Numbers that a script prints in each step, and the weights at its end."""


def make(sharded: bool) -> nn.Module:
    model = CASE.model()
    return fsdp.fully_shard(model, auto_wrap_policy=CASE.policy) if sharded else model


def losses(model: nn.Module, ranks: range, step: int) -> Iterator[Tensor]:
    """One loss for each rank's batch. They add up to the mean loss."""
    for rank in ranks:
        yield loss_of(model(CASE.batch(rank, step))) / len(ranks)


def backward(model: nn.Module, ranks: range, step: int) -> None:
    for loss in losses(model, ranks, step):
        loss.backward()


def clipped(ranks: range, sharded: bool, norm_type: float = 2.0, foreach: bool | None = None) -> Found:
    """torch's own clipping. The norm that it returns is printed."""
    model, norms = make(sharded), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, ranks, step)
        norms.append(
            float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type, foreach=foreach))
        )
        norm = clip_grad_norm_(model.parameters(), 0.5 * norms[-1], norm_type, error_if_nonfinite=True, foreach=foreach)
        norms.append(norm.item())
        optimizer.step()
    return norms, weights_of(model)


def clipped_by_value(ranks: range, sharded: bool, foreach: bool | None = None) -> Found:
    model = make(sharded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, ranks, step)
        clip_grad_value_(model.parameters(), 0.005, foreach=foreach)
        optimizer.step()
    return [], weights_of(model)


def scaled(ranks: range, sharded: bool) -> Found:
    """torch's GradScaler. In step 2 the batch of rank 1 overflows, in one element of one gradient."""
    model, scales = make(sharded), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in losses(model, ranks, step):
            scaler.scale(loss).backward()
        held = [p.grad for p in model.parameters() if p.grad is not None and local(p.grad).numel()]
        if step == 2 and 1 in ranks:
            local(held[0]).view(-1)[0] = float("inf")
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights_of(model)


QUESTIONS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "norm": lambda p: p.norm(),
    "norm(1)": lambda p: p.norm(1),
    "linalg.norm": torch.linalg.norm,
    "linalg.vector_norm(inf)": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "sum": lambda p: p.sum(),
    "abs.sum": lambda p: p.abs().sum(),
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(correction=0),
    "numel": lambda p: p.numel(),
    "len": len,
    "count_nonzero": lambda p: p.count_nonzero(),
    "isfinite.all": lambda p: torch.isfinite(p).all(),
    "isnan.any": lambda p: p.isnan().any(),
    "foreach_norm": lambda p: torch._foreach_norm([p])[0],
}


def questions(ranks: range, sharded: bool) -> Found:
    """Numbers about parameters and gradients, as scripts log them."""
    model = make(sharded)
    backward(model, ranks, 0)
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad, p.data) if tensor is not None]
    with torch.no_grad():
        return [float(question(tensor)) for question in QUESTIONS.values() for tensor in tensors], weights_of(model)


AVERAGES: Final[dict[str, dict[str, Any]]] = {
    "the mean": {},
    "exponential, one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "exponential, all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "with buffers": {"use_buffers": True},
}


def averaged(ranks: range, sharded: bool, average: str = "the mean") -> Found:
    """torch's AveragedModel, made before wrapping. Its loss is printed."""
    net = CASE.model()
    mean = AveragedModel(net, **AVERAGES[average])
    if sharded:
        for module in (net, mean.module):
            fsdp.fully_shard(module, auto_wrap_policy=CASE.policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, ranks, step)
        optimizer.step()
        mean.update_parameters(net)
    return [loss_of(mean(CASE.batch(0, 99))).item()], weights_of(mean.module)


def averaged_by_hand(ranks: range, sharded: bool) -> Found:
    """Deep copies of the parameters that follow them."""
    model = make(sharded)
    kept = {name: copy.deepcopy(p).requires_grad_(False) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, ranks, step)
        optimizer.step()
        for name, p in model.named_parameters():
            kept[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    return [float(mean.norm()) for mean in kept.values()], {name: local(mean).clone() for name, mean in kept.items()}


# loops of frameworks --------------------------------------------------------------------


def trainer(ranks: range, sharded: bool, no_sync: bool = False) -> Found:
    """The loop of HF's Trainer: groups by weight decay, accumulation, scaler, clipping by torch, scheduler, logged numbers."""
    model = make(sharded)
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias") and "norm" not in name]
    others = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * (1 - step / 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    logged = [float(sum(p.numel() for p in model.parameters() if p.requires_grad))]
    for step in range(STEPS):
        for micro in range(2):
            accumulates = sharded and no_sync and micro == 0
            with fsdp.no_sync(model) if accumulates else nullcontext():
                for loss in losses(model, ranks, 2 * step + micro):
                    scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        logged += [norm.item(), scaler.get_scale(), scheduler.get_last_lr()[0]]
    return logged, weights_of(model)


def lightning(ranks: range, sharded: bool) -> Found:
    """Lightning's automatic loop: backward and clipping in the closure of the step, and the norm of each gradient is logged."""
    model, logged = make(sharded), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for loss in losses(model, ranks, step):
                loss.backward()
                total += loss.detach()
            norms = {name: p.grad.data.norm(2) for name, p in model.named_parameters() if p.grad is not None}
            logged.append(torch.tensor(list(norms.values())).norm(2).item())
            in_groups = [p for group in optimizer.param_groups for p in group["params"]]
            clip_grad_norm_(in_groups, max_norm=0.1, norm_type=2.0)
            return total

        optimizer.step(closure)  # type: ignore[arg-type]
    return logged, weights_of(model)


def fabric(ranks: range, sharded: bool) -> Found:
    """Fabric's manual loop: clipping by norm with a check for infinities, and by value."""
    model, logged = make(sharded), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        backward(model, ranks, step)
        in_groups = [p for group in optimizer.param_groups for p in group["params"]]
        norm = clip_grad_norm_(in_groups, max_norm=0.1, norm_type=2.0, error_if_nonfinite=True)
        logged.append(norm.item())
        clip_grad_value_(in_groups, clip_value=0.02)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return logged, weights_of(model)


def toggled(ranks: range, sharded: bool) -> Found:
    """Lightning's manual loop with two optimizers. Each is toggled: meanwhile the other one's parameters need no gradient."""
    model = make(sharded)
    parts = [[*model.enter.parameters(), *model.leave.parameters()], [*model.blocks.parameters()]]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            for p in parts[1 - number]:
                p.requires_grad_(False)
            backward(model, ranks, step)
            for p in parts[1 - number]:
                p.requires_grad_(True)
            clip_grad_norm_(parts[number], 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [], weights_of(model)


Program = Callable[[range, bool], Found]
PROGRAMS: Final[dict[str, Program]] = {
    "clip_grad_norm_": clipped,
    "clip_grad_norm_, foreach=True": lambda ranks, sharded: clipped(ranks, sharded, foreach=True),
    "clip_grad_norm_, foreach=False": lambda ranks, sharded: clipped(ranks, sharded, foreach=False),
    "clip_grad_norm_ by the sum": lambda ranks, sharded: clipped(ranks, sharded, 1.0),
    "clip_grad_norm_ by the largest": lambda ranks, sharded: clipped(ranks, sharded, float("inf")),
    "clip_grad_norm_ by the largest, foreach=False": lambda ranks, sharded: clipped(ranks, sharded, float("inf"), False),
    "clip_grad_value_": clipped_by_value,
    "clip_grad_value_, foreach=True": lambda ranks, sharded: clipped_by_value(ranks, sharded, True),
    "GradScaler": scaled,
    "numbers of tensors": questions,
    **{
        f"AveragedModel, {average}": lambda ranks, sharded, average=average: averaged(ranks, sharded, average)
        for average in AVERAGES
    },
    "an average by hand": averaged_by_hand,
    "Trainer": trainer,
    "Trainer with no_sync": lambda ranks, sharded: trainer(ranks, sharded, no_sync=True),
    "Lightning": lightning,
    "Fabric": fabric,
    "Lightning, two optimizers": toggled,
}
"""What must give the numbers of one process."""
