"""Peak bytes by kind, for 2 to 1,024 ranks, beside FSDP1 and FSDP2 and the floor. Over a process group that sends nothing.

    python benchmarks/memory.py
    python benchmarks/memory.py --world 8 --contenders ours fsdp2

A fake process group plays rank 0 of W on the CPU: values mean nothing, sizes are those of a real run. What is counted,
exactly and for everybody alike, is what torch's allocator gives out during three steps (forward, backward, gradients dropped;
no optimizer, whose state is the same for all), plus the parameters that a rank holds at rest. Taken off that is what the bare
model's activations hold, so that *engine bytes* remain: shards, unsharded parameters, gradients, buffers. For ours the memory
tracker reports them by kind.

The floor: the shards, as many bytes of reduced gradients, one whole unit that computes and one that is gathered ahead, the
root's own parameters, and two units of gradients, one that autograd fills and one on its way. Nothing in it is padded.

On the CPU our reductions exchange chunks and sum them, which needs a place for what the other ranks send (`scratch`), and the
peers' do not. On CUDA the backend reduces, and nobody needs one: `ours_over_nccl` is ours with that one difference.
"""

import argparse
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import (
    Bar,
    add_sizes,
    alone,
    arguments,
    begin,
    elsewhere,
    markdown,
    no_garbage_collection,
    no_standard_error,
    sizes_of,
    write,
)
from configurations import units_of
from engines import CONTENDERS, TITLES, DoorOfFSDP2, Ours
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from workloads import GPT, Block, Sizes

from fsdp.comm.process_group import ProcessGroupCommunicator
from fsdp.comm.work import Work
from fsdp.device.storage import MemoryTracker

OVER_NCCL = "ours_over_nccl"
DOOR_OVER_NCCL = "door_fsdp2_over_nccl"
ENGINES = {
    **CONTENDERS,
    OVER_NCCL: Ours(OVER_NCCL, "ours, reduced by the backend as over NCCL"),
    DOOR_OVER_NCCL: DoorOfFSDP2(name=DOOR_OVER_NCCL),
}
NAMES = ("bare", "fsdp1", "fsdp1_orig", "fsdp2", "ours", OVER_NCCL, "door_fsdp2", DOOR_OVER_NCCL)
STEPS = 3
SIZES = Sizes(blocks=8, width=256, heads=4, sequence=16, vocabulary=256, batch=1)


@dataclass(frozen=True, slots=True)
class Settings:
    """One number of ranks, in a process of its own."""

    contenders: tuple[str, ...]
    world: int
    sizes: Sizes


def held(model: nn.Module) -> int:
    """Bytes of this rank's parameters, each memory once."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())


def allocated(work: Callable[[], Any]) -> int:
    """The most bytes that `work` holds at once, beside what was there before."""
    profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with no_garbage_collection(), no_standard_error(), profiling as profiler:
        work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return max(accumulate(count for _, count in sorted(events, key=lambda one: one[0])))


@contextmanager
def backend_reduces() -> Iterator[None]:
    """The engine reduces as it does on CUDA: by the backend, with no place of its own for what the other ranks send."""

    def reduce_scatter(self: ProcessGroupCommunicator, bucket: Tensor, into: Tensor, label: str, *_: bool) -> Work:
        return self.group._reduce_scatter_base(into, bucket, dist.ReduceScatterOptions())

    with patch.object(ProcessGroupCommunicator, "reduce_scatter", reduce_scatter):
        yield


@contextmanager
def peaks_by_kind(found: dict[str, int]) -> Iterator[None]:
    """What every ledger holds, by kind, at the moment it holds most."""
    add = MemoryTracker.add

    def add_and_note(self: MemoryTracker, kind: str, count: int) -> None:
        before = self.peak
        add(self, kind, count)
        if self.peak > before:
            found.clear()
            found.update({kind: size for kind, size in self.held.items() if size})

    with patch.object(MemoryTracker, "add", add_and_note):
        yield


def measure(settings: Settings) -> dict[str, Any]:
    """Every contender on one number of ranks. The process group is set up here, so call it once per process."""
    with alone(settings.world):
        return _measure(settings)


def _measure(settings: Settings) -> dict[str, Any]:
    module = GPT(settings.sizes)
    tokens = torch.zeros(settings.sizes.batch, settings.sizes.sequence, dtype=torch.int64)
    bare = _without_gradients(copy.deepcopy(module))
    activations = allocated(lambda: _train(bare, tokens))
    report: dict[str, Any] = {"activations": activations, "floor": floor(module, settings.world), "contenders": {}}
    for name in settings.contenders:
        kinds: dict[str, int] = {}
        with peaks_by_kind(kinds), backend_reduces() if name in (OVER_NCCL, DOOR_OVER_NCCL) else nullcontext():
            model = ENGINES[name].wrap(copy.deepcopy(module), Block)
            _train(model, tokens)  # lazy initialisation
            peak = held(model) + allocated(lambda model=model: _train(model, tokens))
        report["contenders"][name] = {"at_rest": held(model), "peak": peak, "engine": peak - activations, "kinds": kinds}
        del model
        gc.collect()
    return report


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


def judge(cases: Sequence[dict[str, Any]]) -> list[Bar]:
    """The ledger's peak and the allocator's against the floor, and ours against the peers', at the worst number of ranks."""
    bars = []
    for name in ("ours", OVER_NCCL):
        mine = [case for case in cases if name in case["contenders"]]
        if not mine:
            continue
        booked = [sum(case["contenders"][name]["kinds"].values()) / case["floor"] for case in mine]
        engine = [case["contenders"][name]["engine"] / case["floor"] for case in mine]
        bars.append(_worst("memory: ledger's peak / floor", 1.05, booked, mine, name))
        bars.append(_worst("memory: engine bytes / floor", 1.05, engine, mine, name))
        for peer in ("fsdp1", "fsdp1_orig", "fsdp2"):
            with_peer = [case for case in mine if peer in case["contenders"]]
            ratios = [case["contenders"][name]["engine"] / case["contenders"][peer]["engine"] for case in with_peer]
            if ratios:
                bars.append(_worst(f"memory: engine bytes / {TITLES[peer]}", 1.0, ratios, with_peer, name))
    door = [case for case in cases if {DOOR_OVER_NCCL, "fsdp2"} <= case["contenders"].keys()]
    if door:
        ratios = [case["contenders"][DOOR_OVER_NCCL]["engine"] / case["contenders"]["fsdp2"]["engine"] for case in door]
        bars.append(_worst("memory: engine bytes / FSDP2", 1.0, ratios, door, DOOR_OVER_NCCL))
    return bars


def _worst(measure: str, limit: float, values: Sequence[float], cases: Sequence[dict[str, Any]], name: str) -> Bar:
    value, world = max(zip(values, (case["settings"]["world"] for case in cases), strict=True))
    return Bar(measure, limit, value, f"{name}, {world} ranks")


def show(cases: Sequence[dict[str, Any]]) -> None:
    rows = []
    for case in cases:
        for name, one in case["contenders"].items():
            kinds = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in one["kinds"].items())
            sizes = [one["at_rest"], one["peak"], one["engine"]]
            ratio = f"{one['engine'] / case['floor']:.3f}"
            rows.append([str(case["settings"]["world"]), name, *(f"{size / 1e6:.2f}" for size in sizes), ratio, kinds])
    header = ["ranks", "contender", "MB at rest", "peak", "engine bytes", "/ floor", "of which the ledger names"]
    print(markdown(header, rows))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8, 32, 128, 512, 1024], help="ranks of the fake group")
    add_sizes(parser, SIZES)
    return parser.parse_args()


def main() -> None:
    options = parse()
    report, names = begin("memory", options, NAMES, ENGINES)
    settings = [Settings(names, world, sizes_of(options, SIZES)) for world in options.world]
    cases = [{"settings": asdict(one), **elsewhere(measure, one, options.timeout)} for one in settings]
    show(cases)
    write({**report, "cases": cases}, judge(cases), options.out)


if __name__ == "__main__":
    main()
