"""What `uneven_paths` costs over gloo: ranks that go the same way, and a rank that leaves units out.

    python benchmarks/uneven.py                 # two processes; about a minute
    python benchmarks/uneven.py --repeats 400

One perceptron trains without the option and with it, in the same processes, taking turns. With the option rank 1 uses all units,
or leaves some out, which rank 0 uses. Before that, all ways have been learned. A step is forward and backward; it begins at a
barrier, and the slowest rank counts. *Added host time* is the processor time of the thread that trains, on the slowest rank, for
each call of a unit: one in the forward, and one in the backward. Threads of gloo do not count. Differences are those of steps
that followed each other, because other work on the machine changes more slowly than that; beside their median stands the
difference of the least times.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Bar, Sample, add_sizes, arguments, begin, no_garbage_collection, over_gloo, print_table, sizes_of, write
from engines import turns
from torch import Tensor, nn

import fsdp

WARM_UP = 12
"""Steps of each kind before any is timed: after them all paths are known, and nothing new is learned."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, its batch, and how often each kind of step is timed."""

    units: int = 12
    width: int = 256
    batch: int = 64
    repeats: int = 200


class Tower(nn.Module):
    """Layers of which a rank may leave the first ones out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(sizes.width, sizes.width) for _ in range(sizes.units))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for layer in self.layers[skipped:]:
            x = torch.relu(layer(x))
        return x


def kinds(sizes: Sizes) -> dict[str, int]:
    """The kinds of steps: how many units rank 1 leaves out. "without the option" uses all."""
    few, many = sizes.units // 6, sizes.units // 2
    return {"without the option": 0, "all alike": 0, f"rank 1 skips {few}": few, f"rank 1 skips {many}": many}


def times(rank: int, sizes: Sizes) -> dict[str, list[tuple[float, float]]]:
    """Wall seconds, and processor seconds of the training thread, of each step, by kind; the slowest rank's."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds(sizes)}
    models = {}
    for uneven in (False, True):
        torch.manual_seed(0)
        models[uneven] = fsdp.fully_shard(Tower(sizes), auto_wrap_policy={nn.Linear}, uneven_paths=uneven)
    x = torch.randn(sizes.batch, sizes.width)
    with no_garbage_collection():
        for repeat, name in turns([*found], WARM_UP + sizes.repeats):
            model = models[name != "without the option"]
            dist.barrier()
            began, used = time.perf_counter(), time.thread_time()
            model(x, kinds(sizes)[name] if rank == 1 else 0).sum().backward()
            taken = torch.tensor([time.perf_counter() - began, time.thread_time() - used])
            for parameter in model.parameters():
                parameter.grad = None
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if repeat >= WARM_UP:
                found[name].append((float(taken[0]), float(taken[1])))
    return found


def judge(found: dict[str, list[tuple[float, float]]], sizes: Sizes) -> tuple[list[dict[str, Any]], list[Bar]]:
    wall = {name: Sample.of([1000 * one for one, _ in steps]) for name, steps in found.items()}
    host = {name: Sample.of([1000 * one for _, one in steps]) for name, steps in found.items()}
    rows = [{"kind": name, "wall_ms": asdict(wall[name]), "host_ms": asdict(host[name])} for name in found]

    def more(name: str, than: str, which: int) -> tuple[float, float]:
        """The median of the differences of steps that followed each other, and the difference of the least ones, in ms."""
        pairs = zip(found[name], found[than], strict=True)
        samples = host if which else wall
        return 1000 * statistics.median(one[which] - other[which] for one, other in pairs), (samples[name] - samples[than]).least

    calls = 2 * sizes.units
    added, least = (1000 * one / calls for one in more("all alike", "without the option", 1))
    bars = [Bar("uneven: added host µs a call, all alike", 2.0, added, of_minima=least)]
    for name in found:
        if "skips" in name:
            median, least = more(name, "all alike", 0)
            bars.append(Bar("uneven: ms more than computing the units", 1.0, median, name, least))
    return rows, bars


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = [
        [row["kind"], *(f"{row[time][which]:.2f}" for time in ("wall_ms", "host_ms") for which in ("least", "median"))]
        for row in rows
    ]
    print_table(["step", "ms least", "median", "host ms least", "median"], table)


def main() -> None:
    parser = arguments(__doc__)
    add_sizes(parser, Sizes())
    options = parser.parse_args()
    sizes = sizes_of(options, Sizes())
    report, _ = begin("uneven", options, ["ours"])
    found = over_gloo(times, sizes, 2, options.timeout)
    rows, bars = judge(found, sizes)
    show(rows)
    write({**report, "settings": asdict(sizes), "rows": rows}, bars, options.out)


if __name__ == "__main__":
    main()
