"""One rank of four, 2 x 2 with tensor parallelism, fails in several ways. Run as a script, it is one rank over gloo.

python -m tests.comm.failure.dimension_programs RANK WORLD_SIZE FOLDER PROGRAM ...
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp

LIMIT: Final = 40
"""Seconds until a rank prints its stacks and dies."""
STEPS: Final = 4
_mark: Final[list[Path]] = []
"""The file in which a process that fails writes when."""


class Mine(Exception):
    """What one rank's own code raises."""


class Told(NamedTuple):
    """What a rank was told when a step failed."""

    kind: str
    text: str
    rank: int | None
    unit: str | None
    reason: str


def told(error: BaseException) -> Told:
    if isinstance(error, fsdp.PeerFailed):
        return Told("PeerFailed", str(error), error.rank, error.unit, error.reason)
    return Told(type(error).__name__, str(error), None, None, "")


_made: list[DeviceMesh] = []
"""The mesh of this process, for all programs: torch takes equal meshes for one, and uses the groups of the first."""


def make_mesh() -> DeviceMesh:
    return _made[0] if _made else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Net(nn.Sequential):
    skipped = -1
    """The block that a forward leaves out."""
    at_end: Callable[[], object] = dict
    """Called at the end of a forward, when the other ranks of tensor parallelism need this one no more in it."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self):
            if number != self.skipped:
                x = block(x)
        self.at_end()
        return x


def plain() -> Net:
    torch.manual_seed(0)
    return Net(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3)))


def distribute(mesh: DeviceMesh, **options: Any) -> Net:
    model = plain()
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fsdp.fully_shard(model, mesh=mesh["dp"], auto_wrap_policy={nn.Sequential}, **options)


def batch(step: int, coordinate: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + coordinate))


def fail(*_: Any) -> None:
    mark_time()
    raise Mine("no")


def mark_time() -> None:
    for path in _mark:
        own = path.with_suffix(f".{dist.get_rank()}")
        own.write_text(str(time.time()))
        own.replace(path)  # another rank may read it, or fail too


def seconds() -> float:
    """For how long the failing rank has failed."""
    return time.time() - float(_mark[0].read_text()) if _mark else 0.0


def fail_at_end(model: Net) -> Any:
    model.at_end = fail  # type: ignore[method-assign]
    return SimpleNamespace(remove=lambda: model.__dict__.pop("at_end", None))


PLACES: Final[dict[str, Callable[[Net], Any]]] = {
    "a forward": lambda model: model[1].register_forward_pre_hook(fail),
    "a backward": lambda model: model[2].register_full_backward_pre_hook(fail),
    "the end of a forward": fail_at_end,
}
"""Where a step fails."""


class Retried(NamedTuple):
    """Training in which a step failed and was done again."""

    told: list[Told]
    seconds: list[float]
    losses: list[float]
    weights: list[Tensor]


def retried(place: str, failing: int | None, agree: bool = False) -> Retried:
    """Train. One rank fails in the second step, or all do (None); every rank does it again."""
    mesh = make_mesh()
    model = distribute(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = Retried([], [], [], [])
    for step in range(STEPS):
        handle = PLACES[place](model) if step == 1 and failing in (dist.get_rank(), None) else None
        while True:
            try:
                loss = model(batch(step, mesh["dp"].get_local_rank())).square().mean()
                total = loss.detach().clone()
                dist.all_reduce(total, group=mesh["tp"].get_group())  # the user's own
                loss.backward()
                break
            except (Mine, fsdp.PeerFailed) as error:
                found.told.append(told(error))
                found.seconds.append(seconds())
                if handle is not None:
                    handle.remove()
                assert all(p.grad is None for p in model.parameters())
                if agree:
                    fsdp.agree_abandoned(model)
        dist.all_reduce(total, group=mesh["dp"].get_group())
        found.losses.append(total.item() / 4)
        optimizer.step()
        optimizer.zero_grad()
    found.weights.extend(p.full_tensor().clone() for p in model.parameters())  # type: ignore[attr-defined]
    return found


def alone() -> Retried:
    """The same training by one process."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = Retried([], [], [], [])
    for step in range(STEPS):
        losses = [model(batch(step, coordinate)).square().mean() / 2 for coordinate in range(2)]
        torch.stack(losses).sum().backward()
        found.losses.append(float(sum(losses)))
        optimizer.step()
        optimizer.zero_grad()
    found.weights.extend(p.detach().clone() for p in model.parameters())
    return found


def ended(how: Callable[[], None]) -> tuple[Told, float, Told]:
    """The last rank ends in a forward: what the others are told then, after how long, and when they want to go on."""
    mesh = make_mesh()
    model = distribute(mesh)

    def end(*_: Any) -> None:
        mark_time()
        how()

    for step in range(3):
        if step == 1 and dist.get_rank() == 3:
            model[1].register_forward_pre_hook(end)
        try:
            model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        except fsdp.PeerFailed as error:
            first, after = told(error), seconds()
            break
    try:
        model(batch(0, 0))
    except fsdp.WorldError as error:
        return first, after, told(error)
    raise AssertionError("went on without a rank")


def apart() -> tuple[Told, float, Told]:
    """One rank fails in the last unit of a backward, which needs no tensor parallelism: what each rank is told, and then."""
    mesh = make_mesh()
    model = distribute(mesh)
    heard: list[tuple[Told, float]] = []
    handle = model[0][0].weight.register_hook(fail) if dist.get_rank() == 0 else None
    while len(heard) < 2:
        try:
            model(batch(0, mesh["dp"].get_local_rank())).square().mean().backward()
        except (Mine, fsdp.WorldError) as error:
            heard.append((told(error), seconds()))
            if handle is not None:
                handle.remove()
    return heard[0][0], heard[0][1], heard[1][0]


def disagrees() -> tuple[Told, float]:
    """One rank wraps with another option."""
    mesh = make_mesh()
    begin = time.monotonic()
    try:
        distribute(mesh, sharding_strategy="SHARD_GRAD_OP" if dist.get_rank() == 3 else "FULL_SHARD")
    except fsdp.ShardingError as error:
        return told(error), time.monotonic() - begin
    raise AssertionError("nobody was refused")


def calls_another() -> tuple[Told, float]:
    """One rank leaves a unit out."""
    mesh = make_mesh()
    model = distribute(mesh)
    begin = time.monotonic()
    try:
        for step in range(3):
            given = batch(step, mesh["dp"].get_local_rank())
            begin = time.monotonic()
            model.skipped = 1 if step == 2 and dist.get_rank() == 3 else -1
            model(given).square().mean().backward()
    except RuntimeError as error:
        return told(error), time.monotonic() - begin
    raise AssertionError("nobody was told")


PROGRAMS: Final[dict[str, Callable[[], Any]]] = {
    **{f"{place}, rank {rank}": lambda place=place, rank=rank: retried(place, rank) for place in PLACES for rank in (0, 3)},
    "all fail": lambda: retried("a forward", None),
    "agreed": lambda: retried("a backward", 3, agree=True),
    "apart": apart,
    "disagrees": disagrees,
    "calls another": calls_another,
    "killed": lambda: ended(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "ends": lambda: ended(lambda: sys.exit(0)),
}


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    os.environ.setdefault("FSDP_RETURN_SECONDS", "10")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    _made.append(make_mesh())
    _mark.append(folder / "failed")
    found = {}
    for name in sys.argv[4:]:
        found[name] = PROGRAMS[name]()
        torch.save(found, folder / f"{rank}.pt")
    if not {"killed", "ends", "calls another", "apart"} & {*found}:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    # not as `__main__`: the test loads what is saved
    from tests.comm.failure import dimension_programs

    dimension_programs.main()
