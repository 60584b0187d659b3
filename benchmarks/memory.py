"""Peak bytes by kind, for 2 to 1,024 ranks, beside FSDP1 and FSDP2 and the floor. Over a process group that sends nothing.

    python benchmarks/memory.py
    python benchmarks/memory.py --world 8 --contenders ours fsdp2

A fake process group plays rank 0 of W on the CPU: values mean nothing, sizes are those of a real run. What is counted,
exactly and for everybody alike, is what torch's allocator gives out during three steps (forward, backward, gradients dropped;
no optimizer, whose state is the same for all), plus the parameters that a rank holds at rest. Taken off that is what the bare
model's activations hold, so that *engine bytes* remain: shards, whole parameters, gradients, buffers. For ours the ledger
says of which kind they are.

The floor: the shards, as many bytes of reduced gradients, one whole unit that computes and one that is gathered ahead, the
root's own parameters, and two units of gradients, one that autograd fills and one on its way. Nothing in it is padded.

On the CPU our reductions exchange chunks and sum them, which needs a place for what the other ranks send (`scratch`), and the
peers' do not. On CUDA the backend reduces, and nobody needs one: `ours_over_nccl` is ours with that one difference.
"""

import argparse
import copy
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    CONTENDERS,
    Contender,
    be_quiet,
    choose,
    draw,
    exact_bar,
    machine,
    no_standard_error,
    print_exact_bars,
    print_markdown,
    write,
)
from configurations import units_of
from step import GPT, Block
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fsdp.collectives import ProcessGroupCollectives, Work
from fsdp.storage import Ledger

OVER_NCCL = "ours_over_nccl"
NAMES = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours", OVER_NCCL)
STEPS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """One number of ranks, in a process of its own. The fields of the model are those of `step.Settings`."""

    contenders: tuple[str, ...]
    world: int
    blocks: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int


def held(model: nn.Module) -> int:
    """Bytes of this rank's parameters, each memory once."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())


def allocated(work: Callable[[], Any]) -> int:
    """The most bytes that `work` holds at once, beside what was there before."""
    gc.collect()
    gc.disable()
    try:
        with no_standard_error(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
    finally:
        gc.enable()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return max(accumulate(count for _, count in sorted(events, key=lambda one: one[0])))


@contextmanager
def backend_reduces() -> Iterator[None]:
    """The engine reduces as it does on CUDA: by the backend, with no place of its own for what the other ranks send."""
    before = ProcessGroupCollectives.reduce_scatter, ProcessGroupCollectives.scratch_bytes

    def reduce_scatter(self: ProcessGroupCollectives, bucket: Tensor, into: Tensor, label: str, *_: bool) -> Work:
        return self.group._reduce_scatter_base(into, bucket, dist.ReduceScatterOptions())

    ProcessGroupCollectives.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
    ProcessGroupCollectives.scratch_bytes = lambda self, bucket, *_: 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessGroupCollectives.reduce_scatter, ProcessGroupCollectives.scratch_bytes = before  # type: ignore[method-assign]


@contextmanager
def peaks_by_kind(found: dict[str, int]) -> Iterator[None]:
    """What every ledger holds, by kind, at the moment it holds most."""
    add = Ledger.add

    def add_and_note(self: Ledger, kind: str, count: int) -> None:
        before = self.peak
        add(self, kind, count)
        if self.peak > before:
            found.clear()
            found.update({kind: size for kind, size in self.held.items() if size})

    Ledger.add = add_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ledger.add = add  # type: ignore[method-assign]


def measure(settings: Settings) -> dict[str, Any]:
    """Every contender on one number of ranks. The process group is set up here, so call it once per process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    be_quiet()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.world)
    try:
        return _measure(settings)
    finally:
        dist.destroy_process_group()


def _measure(settings: Settings) -> dict[str, Any]:
    module = GPT(settings)  # type: ignore[arg-type]
    tokens = torch.zeros(settings.batch, settings.sequence, dtype=torch.int64)
    bare = _without_gradients(copy.deepcopy(module))
    activations = allocated(lambda: _train(bare, tokens))
    report: dict[str, Any] = {"activations": activations, "floor": floor(module, settings.world), "contenders": {}}
    for name in settings.contenders:
        kinds: dict[str, int] = {}
        with peaks_by_kind(kinds), backend_reduces() if name == OVER_NCCL else nullcontext():
            model = contender_of(name).wrap(copy.deepcopy(module), Block)
            _train(model, tokens)  # lazy initialisation
            peak = held(model) + allocated(lambda model=model: _train(model, tokens))
        report["contenders"][name] = {"at_rest": held(model), "peak": peak, "engine": peak - activations, "kinds": kinds}
        del model
        gc.collect()
    return report


def contender_of(name: str) -> Contender:
    return CONTENDERS["ours" if name == OVER_NCCL else name]


def _train(model: nn.Module, tokens: Tensor) -> None:
    for _ in range(STEPS):
        model(tokens, tokens).backward()
        model.zero_grad()


def _without_gradients(model: nn.Module) -> nn.Module:
    """A gradient goes as soon as it comes."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return model


def floor(module: nn.Module, world: int, prefetch: int = 1) -> int:
    """Bytes, in fp32; see the head of this file."""
    root, *blocks = (4 * unit.numel for unit in units_of(module, Block))
    shards = (root + sum(blocks)) // world
    return 2 * shards + root + (prefetch + 1) * max(blocks) + 2 * max(blocks)


def measure_elsewhere(settings: Settings, timeout: float) -> dict[str, Any]:
    """`measure` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        try:
            return process.apply_async(measure, (settings,)).get(timeout)
        except multiprocessing.TimeoutError:
            raise SystemExit(f"{settings} did not finish within {timeout:.0f} s and was ended") from None


def judge(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ledger's peak and the allocator's against the floor, and ours against the peers', at the worst number of ranks."""
    bars = []
    for name in ("ours", OVER_NCCL):
        mine = [case for case in cases if name in case["contenders"]]
        if not mine:
            continue
        booked = [sum(case["contenders"][name]["kinds"].values()) / case["floor"] for case in mine]
        engine = [case["contenders"][name]["engine"] / case["floor"] for case in mine]
        bars.append(exact_bar(f"{name}: ledger's peak / floor", max(booked), 1.05))
        bars.append(exact_bar(f"{name}: engine bytes by the allocator / floor", max(engine), 1.05))
        for peer in ("fsdp1", "fsdp1_orig", "fsdp2"):
            ratios = [c["contenders"][name]["engine"] / c["contenders"][peer]["engine"] for c in mine if peer in c["contenders"]]
            if ratios:
                bars.append(exact_bar(f"{name}: engine bytes / {peer}", max(ratios), 1.0))
    return bars


def show(cases: Sequence[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        for name, one in case["contenders"].items():
            kinds = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in one["kinds"].items())
            sizes = [one["at_rest"], one["peak"], one["engine"]]
            ratio = f"{one['engine'] / case['floor']:.3f}"
            rows.append([str(case["settings"]["world"]), name, *(f"{size / 1e6:.2f}" for size in sizes), ratio, kinds])
    print_markdown(["ranks", "contender", "MB at rest", "peak", "engine bytes", "/ floor", "of which the ledger names"], rows)


def picture(cases: Sequence[dict[str, Any]], path: Path) -> None:
    def plot(axes: Any) -> None:
        worlds = [case["settings"]["world"] for case in cases]
        for name in cases[0]["contenders"]:
            if name != "bare":
                axes.plot(worlds, [case["contenders"][name]["engine"] / 1e6 for case in cases], marker="o", label=name)
        axes.plot(worlds, [case["floor"] / 1e6 for case in cases], color="black", linestyle=":", label="floor")
        axes.set(xscale="log", xlabel="ranks", ylabel="MB", ylim=(0, None), title="Engine bytes at the peak of a step")
        axes.legend()

    draw(plot, path)


def parse() -> tuple[list[Settings], argparse.Namespace, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"from {', '.join(NAMES)}; all by default")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8, 32, 128, 512, 1024], help="ranks of the fake group")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is ended")
    parser.add_argument("--date", help="written into the results; today by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/ by default")
    options = parser.parse_args()
    names, skipped = choose(options.contenders, NAMES)
    fields = ("blocks", "width", "heads", "sequence", "vocabulary", "batch")
    of_model = {name: getattr(options, name) for name in fields}
    return [Settings(contenders=names, world=world, **of_model) for world in options.world], options, skipped


def main() -> None:
    settings, options, skipped = parse()
    cases = [{"settings": asdict(one), **measure_elsewhere(one, options.timeout)} for one in settings]
    bars = judge(cases)
    report = {
        "benchmark": "memory",
        "machine": machine(options.date),
        "options": {name: contender_of(name).options for name in settings[0].contenders},
        "skipped": skipped,
        "cases": cases,
        "bars": bars,
    }
    path = write(report, options.out)
    show(cases)
    print_exact_bars(bars)
    picture(cases, path.with_suffix(".png"))
    print(f"\nraw numbers: {path}")


if __name__ == "__main__":
    main()
