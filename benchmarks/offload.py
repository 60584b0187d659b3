"""How much of the copies between host and device a step with an offload policy hides, against max(computing, transfers).

    python benchmarks/offload.py
    python benchmarks/offload.py --blocks 32 --prefetch 2

The engine runs on the pretend accelerator of the tests, on simulated ranks, with `offload_policy`. Its own streams
(`DeviceStreams`) are over queues that keep a clock and measure nothing: an operation begins when its stream is there and the host
has launched it, and ends after a given time. So the figures are exact, the same in every run, and those of an engine whose host
costs nothing. Collectives take no time: they only order streams.

Computing: a block's forward takes one unit of time, its backward two. Transfers: each rank has one wire to its device and one to
its host, as PCIe has, on which copies go one after another. `load` is the time of all copies to the device in terms of computing.
They are twice as many bytes as go to the host, because each shard is copied for the forward and for the backward. The optimizer's
step on the host is left out.

`ideal` is max(computing, transfers). A forward computes for half the time of a backward, and copies as much to the device. So
between loads of 0.67 and 1.33 the forward waits for copies and the backward for computing, one after the other. No engine that
copies each shard twice reaches the ideal. `by_pass` is the sum of the ideals of the two passes. The first copy of a pass has
nothing to hide behind, and neither has the last gradient.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import Bar, arguments, be_steady, begin, markdown, write
from engines import Bare
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
import fsdp
from fsdp.building import attach
from fsdp.comm.simulated import current_rank
from fsdp.device.home import HostHome
from fsdp.device.streams import DeviceStreams
from tests.support.accelerator import world
from tests.support.accelerator.build import missing
from tests.support.accelerator.device import Scheduler, load
from tests.support.accelerator.world import PretendWork, run

DEVICE = "pretend"
LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
HERE = {"ours": Bare("ours", "fully_shard(module, auto_wrap_policy={unit}, offload_policy=OffloadPolicy())")}


class Clock:
    """The time of the host, of each wire, and of each stream, in units of a block's forward."""

    def __init__(self) -> None:
        self.host = 0.0
        self.seconds_a_byte = 0.0
        self.wires = {"to device": 0.0, "to host": 0.0}
        self.busy = {"to device": 0.0, "to host": 0.0}
        self.current = TimedStream()

    def compute(self, seconds: float) -> None:
        """On the current stream."""
        self.current.now = max(self.current.now, self.host) + seconds

    def copy(self, wire: str, tensor: Tensor) -> None:
        """On the current stream, when the wire is free."""
        taken = tensor.nbytes * self.seconds_a_byte
        begin = max(self.current.now, self.host, self.wires[wire])
        self.current.now = self.wires[wire] = begin + taken
        self.busy[wire] += taken

    def wait_host(self, until: float) -> None:
        self.host = max(self.host, until)


class TimedStream:
    def __init__(self) -> None:
        self.now = 0.0

    def wait_stream(self, other: "TimedStream") -> None:
        self.now = max(self.now, other.now)

    def wait_event(self, event: "TimedEvent") -> None:
        self.now = max(self.now, event.at)


class TimedEvent:
    def __init__(self, clock: Clock) -> None:
        self.at = 0.0
        self._clock = clock

    def record(self, stream: TimedStream) -> None:
        self.at = max(stream.now, self._clock.host)

    def wait(self) -> None:
        self._clock.current.wait_event(self)

    def synchronize(self) -> None:
        self._clock.wait_host(self.at)


class TimedQueues:
    """See `fsdp.device.streams.Queues`. All work runs at once, on the default stream of the accelerator."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def stream(self) -> TimedStream:
        return TimedStream()

    def event(self) -> TimedEvent:
        return TimedEvent(self._clock)

    def current(self) -> TimedStream:
        return self._clock.current

    @contextmanager
    def entered(self, stream: TimedStream) -> Iterator[None]:
        before, self._clock.current = self._clock.current, stream
        try:
            yield
        finally:
            self._clock.current = before


CLOCKS: dict[int, Clock] = {}
"""Of each rank."""


def clock() -> Clock:
    """Of the rank that runs."""
    rank = current_rank()
    assert rank is not None
    return CLOCKS.setdefault(rank.rank, Clock())


class Computes(torch.autograd.Function):
    """Computes nothing with its weights, for one unit of time, and two in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        clock().compute(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        clock().compute(2.0)
        return gradient, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


class Block(nn.Module):
    """The unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Computes.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class TimedWork(PretendWork):
    """A collective that is over when the stream that launched it has come there."""

    __slots__ = ("_over",)

    def __init__(self, event: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__(event, tensors)
        self._over = TimedEvent(clock())
        self._over.record(clock().current)

    def wait(self) -> None:
        self._over.wait()
        super().wait()


@dataclass(frozen=True, slots=True)
class Settings:
    ranks: tuple[int, ...]
    loads: tuple[float, ...]
    blocks: int
    prefetch: int
    width: int


@contextmanager
def timed() -> Iterator[None]:
    """Engines that are made inside have streams that keep the clock, and copies between host and device take time."""
    upload, bring = HostHome.upload, HostHome.bring

    def timed_upload(home: HostHome, shard: Tensor, *given: Any) -> None:
        clock().copy("to device", shard)
        upload(home, shard, *given)

    def timed_bring(home: HostHome, local: Tensor) -> Tensor:
        clock().copy("to host", local)
        return bring(home, local)

    def make_streams(device: torch.device, lanes: int, offloads: bool) -> DeviceStreams:
        return DeviceStreams(TimedQueues(clock()), lanes, offloads)

    with (
        mock.patch.object(attach, "make_streams", make_streams),
        mock.patch.object(HostHome, "upload", timed_upload),
        mock.patch.object(HostHome, "bring", timed_bring),
        mock.patch.object(world, "PretendWork", TimedWork),
    ):
        yield


def measure(settings: Settings) -> list[dict[str, float]]:
    """One line for each number of ranks and each load. All ranks do the same."""

    def train(rank: int) -> list[dict[str, float]]:
        device = torch.device(DEVICE, rank)
        module = nn.Sequential(*(Block(settings.width) for _ in range(settings.blocks))).to(device)
        offload = fsdp.OffloadPolicy()
        model = fsdp.fully_shard(module, auto_wrap_policy={Block}, offload_policy=offload, prefetch=settings.prefetch)
        x = torch.ones(1, device=device, requires_grad=True)
        return [_step(model, x, settings, share) for share in settings.loads]

    be_steady()
    load()
    found = []
    with timed():
        for ranks in settings.ranks:
            CLOCKS.clear()
            found += [{"ranks": ranks, **line} for line in run(ranks, train, Scheduler.EAGER)[0]]
    return found


def _step(model: nn.Module, x: Tensor, settings: Settings, share: float) -> dict[str, float]:
    here, rank = clock(), current_rank()
    assert rank is not None
    forward, backward = float(settings.blocks), 2.0 * settings.blocks
    copied = 2 * settings.blocks * settings.width**2 * 4 / rank.size
    here.seconds_a_byte = share * (forward + backward) / copied
    for _ in range(3):  # the order of the units is learned
        began, before = here.host, dict(here.busy)
        model(x).sum().backward()
        here.wait_host(here.current.now)
        model.zero_grad()
    upload, download = (here.busy[wire] - before[wire] for wire in ("to device", "to host"))
    taken, ideal = here.host - began, max(forward + backward, upload)
    by_pass = max(forward, upload / 2) + max(backward, upload / 2, download)
    return {"load": share, "step": taken, "ideal": ideal, "to_ideal": taken / ideal, "to_by_pass": taken / by_pass}


def judge(lines: Sequence[dict[str, float]], settings: Settings) -> list[Bar]:
    bars = []
    for ranks in settings.ranks:
        mine = [line for line in lines if line["ranks"] == ranks]
        for what, key in (("max(computing, transfers)", "to_ideal"), ("the same of each pass", "to_by_pass")):
            value, worst = max((line[key], line["load"]) for line in mine)
            case = f"{ranks} rank{'s' if ranks > 1 else ''}, {settings.blocks} blocks, load {worst:g}"
            bars.append(Bar(f"offload: step / {what}", 1.10, value, case))
    return bars


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="copies to the device / computing")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--prefetch", type=int, default=1, help="units that are gathered ahead")
    parser.add_argument("--width", type=int, default=8, help="a block is a square of it")
    return parser.parse_args()


def main() -> None:
    if (why := missing()) is not None:
        raise SystemExit(why)
    options = parse()
    report, _ = begin("offload", options, tuple(HERE), HERE)
    settings = Settings(tuple(options.ranks), tuple(options.loads), options.blocks, options.prefetch, options.width)
    report["settings"] = asdict(settings)
    lines = report["lines"] = measure(settings)
    names = ("step", "ideal", "to_ideal", "to_by_pass")
    rows = [[str(one["ranks"]), f"{one['load']:g}", *(f"{one[name]:.2f}" for name in names)] for one in lines]
    print(markdown(["ranks", "load", *names], rows))
    write(report, judge(lines, settings), options.out)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of autograd for a device may still drop a graph, and Python must not end in the middle of that
