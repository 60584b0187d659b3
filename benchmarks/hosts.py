"""HYBRID_SHARD against FULL_SHARD where the link between hosts is slower than inside them, beside FSDP2 with the same meshes.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --megabits 100 --times 10 --repeats 5

The hosts are network namespaces of this machine, joined by a bridge (tests/support/hosts.py), with the ranks of a host in one of
them. `tc` (tbf) limits what a host sends to others to `--megabits`, and what its ranks send each other to `--times` as much. All
hosts share the processors of this machine; no delay is added. Needs root, iproute2 and util-linux.

A step is a forward, a backward and SGD, of blocks of two square weights on a batch of few rows, so that communication is most of
it. All contenders take turns in the same processes. The time is that of the slowest rank. `sent` is what all hosts sent to
others in a step, counted by the kernel at their links, with what the protocols add.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Bar, Sample, arguments, be_steady, begin, markdown, write
from engines import CONTENDERS, FSDP2, Ours, turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts, hosts_apart, why_no_hosts

PORT = 29400


@dataclass(frozen=True, slots=True)
class Settings:
    contenders: tuple[str, ...]
    hosts: int
    ranks: int
    megabits: float
    times: float
    blocks: int
    width: int
    rows: int
    repeats: int


class Block(nn.Module):
    """The unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width, bias=False)
        self.leave = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.leave(torch.relu(self.enter(x)))
        return output


HERE: dict[str, Any] = {
    "ours": CONTENDERS["ours"],
    "ours_hybrid": Ours(
        "ours_hybrid",
        'the same with sharding_strategy="HYBRID_SHARD", mesh=(hosts, ranks of a host)',
        sharding_strategy="HYBRID_SHARD",
    ),
    "fsdp2": CONTENDERS["fsdp2"],
    "fsdp2_hsdp": FSDP2(name="fsdp2_hsdp"),
}
HERE["fsdp2_hsdp"].options = "the same on a 2-D mesh (hosts, ranks of a host)"
MESHES: dict[str, Callable[[tuple[int, int]], Any]] = {
    "ours_hybrid": lambda shape: shape,
    "fsdp2_hsdp": lambda shape: init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")),
}
"""Of (hosts, ranks of a host), the mesh of a contender that replicates between hosts."""
NAMES = tuple(HERE)


def sent_here() -> int:
    """Bytes that this host has sent to others."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def rank_main(rank: int, settings: Settings, out: Path) -> None:
    """One rank: every step of every contender, in turns."""
    be_steady()
    size = settings.hosts * settings.ranks
    store = dist.TCPStore("h0", PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    models, losses = {}, {}
    for name in settings.contenders:
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block(settings.width) for _ in range(settings.blocks)))
        shape = settings.hosts, settings.ranks
        models[name] = HERE[name].wrap(plain, Block, **({"mesh": MESHES[name](shape)} if name in MESHES else {}))
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    torch.manual_seed(1 + rank)
    x = torch.randn(settings.rows, settings.width)

    def step(name: str) -> dict[str, float]:
        dist.barrier()
        sent, begin = sent_here(), time.perf_counter()
        loss = models[name](x).square().mean()
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        seconds = time.perf_counter() - begin
        dist.barrier()
        found = torch.tensor([loss.item(), (sent_here() - sent) / settings.ranks])
        dist.all_reduce(found)
        losses[name] = found[0].item() / size
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return {"seconds": slowest.item(), "sent": found[1].item()}

    for name in settings.contenders:
        step(name)
        step(name)  # lazy initialisation, orders that are learned
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings.contenders}
    for _, name in turns(settings.contenders, settings.repeats):
        found[name].append(step(name))
    if rank == 0:
        out.write_text(json.dumps({"steps": found, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Settings, seconds: float) -> dict[str, Any]:
    """Start the ranks on their hosts, and return what rank 0 has found."""
    with tempfile.TemporaryDirectory() as folder, hosts_apart(settings.hosts, Path(folder)) as hosts:
        for host in hosts:
            host.shape(settings.megabits, inside=settings.times * settings.megabits)
        return _run(hosts, settings, Path(folder), seconds)


def _run(hosts: Hosts, settings: Settings, folder: Path, seconds: float) -> dict[str, Any]:
    out, given = folder / "found.json", json.dumps(asdict(settings))
    processes = []
    for rank in range(settings.hosts * settings.ranks):
        command = [sys.executable, __file__, "--rank", str(rank), given, str(out)]
        processes.append(hosts[rank // settings.ranks].start(command, folder / f"{rank}.txt"))
    end = time.monotonic() + seconds
    for process in processes:
        process.wait(max(1.0, end - time.monotonic()))
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(path.read_text() for path in sorted(folder.glob("*.txt"))))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def summarise(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "contender": name,
            "seconds": median(step["seconds"] for step in steps),
            "least": min(step["seconds"] for step in steps),
            "most": max(step["seconds"] for step in steps),
            "sent": median(step["sent"] for step in steps),
            "loss": found["losses"][name],
        }
        for name, steps in found["steps"].items()
    ]


def judge(found: dict[str, Any], settings: Settings) -> list[Bar]:
    samples = {name: Sample.of([step["seconds"] for step in steps]) for name, steps in found["steps"].items()}
    case = f"{settings.hosts} hosts of {settings.ranks} ranks, {settings.times:g} x slower between"
    pairs = (
        ("hosts: HYBRID_SHARD / FULL_SHARD", "ours_hybrid", "ours"),
        ("hosts: HYBRID_SHARD / FSDP2's HSDP", "ours_hybrid", "fsdp2_hsdp"),
        ("hosts: FULL_SHARD / FSDP2", "ours", "fsdp2"),
    )
    return [Bar.ratio(what, 1.0, samples[one], samples[other], case) for what, one, other in pairs if {one, other} <= {*samples}]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        fields = json.loads(sys.argv[3])
        settings = Settings(**{**fields, "contenders": tuple(fields["contenders"])})
        return rank_main(int(sys.argv[2]), settings, Path(sys.argv[4]))
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of a host")
    parser.add_argument("--megabits", type=float, default=200.0, help="a second, that a host may send to others")
    parser.add_argument("--times", type=float, default=10.0, help="how much faster the link inside a host is")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384, help="a block is two squares of it")
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(reason)
    report, names = begin("hosts", options, NAMES, HERE)
    fields = {name: getattr(options, name) for name in Settings.__dataclass_fields__ if name != "contenders"}
    settings = Settings(contenders=names, **fields)
    report["settings"] = asdict(settings)
    found = measure(settings, options.timeout)
    report["steps"], report["lines"] = found["steps"], summarise(found)
    rows = [
        [line["contender"], f"{line['seconds']:.3f}", f"{line['sent'] / 1e6:.2f}", f"{line['loss']:.6f}"]
        for line in report["lines"]
    ]
    print(markdown(["contender", "seconds", "MB between hosts", "loss"], rows))
    write(report, judge(found, settings), options.out)
    return None


if __name__ == "__main__":
    main()
