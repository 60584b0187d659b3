"""A training step over gloo: every contender on the same model, the same batches, the same processes, in turn.

    python benchmarks/step.py                      # about two minutes on two cores
    python benchmarks/step.py --contenders fsdp2 ours --repeats 20

Two processes of one thread each hold one copy of the model per contender, all from the same initial weights. A
repeat goes round the contenders, each time beginning with another; each runs `--steps` whole steps (forward, backward,
optimizer) after a barrier, and the slower rank's time counts. Beside it stands the processor time of all ranks
together. What the contenders computed is compared as well: a fast wrong answer ends the program with an error.
"""

import argparse
import copy
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import CONTENDERS, Bar, Sample, be_quiet, choose, machine, print_bars, print_table, rotated, warn_if_busy, write
from torch import Tensor, nn

NAMES = ("bare", "ddp", "fsdp1", "fsdp1_orig", "fsdp2", "ours", "ours_no_shard")
BATCHES = 4  # the same few batches again and again: the loss moves, so that a wrong update shows
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Settings:
    """One run, as asked for on the command line."""

    contenders: tuple[str, ...]
    world: int
    steps: int
    repeats: int
    blocks: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    optimizer: str
    timeout: float


class Block(nn.Module):
    """A transformer block of twelve parameters: the unit of every contender that has units."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small language model whose forward returns the loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.positions = nn.Parameter(0.02 * torch.randn(settings.sequence, settings.width))
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.blocks))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        loss: Tensor = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss


class Runner:
    """One contender: its model, its optimizer, and how far it has come."""

    def __init__(self, name: str, module: nn.Module, settings: Settings) -> None:
        self.model = CONTENDERS[name].wrap(copy.deepcopy(module), Block)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if settings.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=3e-4, foreach=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
        self.losses: list[Tensor] = []

    def run(self, batches: Sequence[tuple[Tensor, Tensor]], steps: int) -> tuple[float, float]:
        """Seconds of one step by the clock and of the processor, over `steps` of them after everybody has arrived."""
        gc.collect()
        gc.disable()
        dist.barrier()
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self.model(*batches[len(self.losses) % len(batches)])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        elapsed = time.perf_counter() - clock, time.process_time() - processor
        gc.enable()
        return elapsed[0] / steps, elapsed[1] / steps


def work(rank: int, port: int, settings: Settings, results: Any) -> None:
    """One rank, from the first handshake to the last loss; rank 0 hands the numbers to the launcher."""
    torch.set_num_threads(1)
    be_quiet()
    patience = timedelta(seconds=settings.timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.world, timeout=patience)
    torch.manual_seed(0)
    module = GPT(settings)
    runners = {name: Runner(name, module, settings) for name in settings.contenders}
    batches = list(_batches(rank, settings))

    for runner in runners.values():
        runner.run(batches, steps=2)  # lazy initialisation, first allocations
    gc.freeze()  # what exists by now is not looked through again
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in settings.contenders}
    for repeat in range(settings.repeats):
        for name in rotated(settings.contenders, repeat):
            times[name].append(runners[name].run(batches, settings.steps))

    report = {}
    for name, runner in runners.items():
        clock, processor = torch.tensor(times[name], dtype=torch.float64).unbind(dim=1)
        dist.all_reduce(clock := clock.contiguous(), op=dist.ReduceOp.MAX)
        dist.all_reduce(processor := processor.contiguous())
        losses = torch.stack(runner.losses).double()
        dist.all_reduce(losses)
        report[name] = {
            "seconds_per_step": clock.tolist(),
            "processor_seconds_per_step": processor.tolist(),
            "losses": (losses / settings.world).tolist(),
        }
    if rank == 0:
        results.put(report)
    dist.barrier()
    dist.destroy_process_group()


def _batches(rank: int, settings: Settings) -> Sequence[tuple[Tensor, Tensor]]:
    """Other batches on every rank, the same for every contender."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (settings.batch, settings.sequence + 1)
    rows = [torch.randint(settings.vocabulary, shape, generator=generator) for _ in range(BATCHES)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def launch(settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Run `work` on every rank. Whoever fails takes the others along, and nobody outlives the time-out."""
    # the launcher keeps the store, on a port the system chose: no port is guessed, none can be lost in between
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(
        work, args=(store.port, settings, results), nprocs=settings.world, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + settings.timeout
    try:
        # a full pipe keeps rank 0 from ending until somebody reads, so look before everyone has ended
        while not ranks.join(timeout=0.5):
            if not results.empty():
                return results.get()
            if time.monotonic() > deadline:
                raise SystemExit(f"the ranks did not finish within {settings.timeout:.0f} s and were ended")
        return results.get()
    finally:
        _end(ranks.processes)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


def compare_losses(report: dict[str, dict[str, list[float]]]) -> tuple[float, list[str]]:
    """The largest distance between two contenders, and a sentence for each one that computed something else.

    `bare` shares no gradients, so it agrees with the others only before the first update.
    """
    first = {name: one["losses"][:1] for name, one in report.items()}
    whole = {name: one["losses"] for name, one in report.items() if name != "bare"}
    worst, complaints = 0.0, []
    for group in (first, whole):
        for (reference, expected), (name, losses) in combinations(group.items(), 2):
            gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
            distance = math.inf if any(map(math.isnan, gaps)) else max(gaps)
            worst = max(worst, distance)
            if distance > LOSS_TOLERANCE:
                complaints.append(f"{name} and {reference} differ by {distance:.2e} over {len(losses)} step(s)")
    return worst, complaints


def judge(samples: dict[str, Sample]) -> list[Bar]:
    """FSDP1 is held to the faster of its two forms."""
    if "ours" not in samples:
        return []
    bars = []
    fsdp1 = [samples[name] for name in ("fsdp1", "fsdp1_orig") if name in samples]
    if fsdp1:
        best = Sample(min(s.least for s in fsdp1), min(s.median for s in fsdp1))
        bars.append(Bar("step: ours / the faster FSDP1", 0.80, samples["ours"] / best))
    if "fsdp2" in samples:
        bars.append(Bar("step: ours / FSDP2", 0.70, samples["ours"] / samples["fsdp2"]))
    if "ddp" in samples and "ours_no_shard" in samples:
        bars.append(Bar("step: ours with NO_SHARD / DDP", 1.00, samples["ours_no_shard"] / samples["ddp"]))
    return bars


def show(samples: dict[str, Sample], report: dict[str, dict[str, list[float]]]) -> None:
    beside = [name for name in ("bare", "fsdp1", "fsdp2") if name in samples]
    rows = []
    for name, sample in samples.items():
        ratios = [f"{(sample / samples[other]).least:.2f}" for other in beside]
        times = sample.least, sample.median, min(report[name]["processor_seconds_per_step"])
        rows.append([name, *(f"{1e3 * seconds:.1f}" for seconds in times), *ratios])
    print_table(["contender", "min ms", "median ms", "processor ms", *(f"min / {name}" for name in beside)], rows)


def parse() -> tuple[Settings, argparse.Namespace, dict[str, str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"from {', '.join(NAMES)}; all by default")
    parser.add_argument("--steps", type=int, default=1, help="steps in one measurement")
    parser.add_argument("--repeats", type=int, default=40, help="measurements of each contender")
    parser.add_argument("--world", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which the ranks are ended")
    parser.add_argument("--date", help="written into the results; today by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/ by default")
    options = parser.parse_args()
    names, skipped = choose(options.contenders, NAMES)
    fields = {name: getattr(options, name) for name in Settings.__dataclass_fields__ if name != "contenders"}
    return Settings(contenders=names, **fields), options, skipped


def main() -> None:
    settings, options, skipped = parse()
    report: dict[str, Any] = {
        "benchmark": "step",
        "machine": machine(options.date),
        "settings": asdict(settings),
        "options": {name: CONTENDERS[name].options for name in settings.contenders},
        "skipped": skipped,
    }
    warn_if_busy(report["machine"])
    report["contenders"] = launch(settings)
    samples = {name: Sample.of(one["seconds_per_step"]) for name, one in report["contenders"].items()}
    bars = judge(samples)
    worst, complaints = compare_losses(report["contenders"])
    report["ratios_to_bare"] = {name: asdict(s / samples["bare"]) for name, s in samples.items() if "bare" in samples}
    report["bars"] = [bar.as_json() for bar in bars]
    report["largest_loss_difference"] = worst
    path = write(report, options.out)

    show(samples, report["contenders"])
    print_bars(bars)
    print(f"\nlosses agree within {worst:.1e} (allowed {LOSS_TOLERANCE:.0e})" if not complaints else "")
    print(f"raw numbers: {path}")
    if complaints:
        raise SystemExit("the losses differ: " + "; ".join(complaints))


if __name__ == "__main__":
    main()
