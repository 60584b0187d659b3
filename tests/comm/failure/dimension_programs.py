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
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from tests.building import test_experts as experts
from tests.support.stalls import look_soon

LIMIT: Final = 40
"""Seconds for each program. Then a rank prints its stacks and dies."""
STEPS: Final = 3
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
    at_end: Callable[[], object] = dict
    """Called at the end of a forward, when the other ranks of tensor parallelism need this one no more in it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        self.at_end()
        return x


def plain() -> Net:
    torch.manual_seed(0)
    return Net(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3)))


def distribute(mesh: DeviceMesh, parallel: bool = True, **options: Any) -> Net:
    model = plain()
    for block in model if parallel else ():
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan, src_data_rank=None)  # type: ignore[arg-type]  # without communication
    return fsdp.fully_shard(model, mesh=mesh["dp"], auto_wrap_policy={nn.Sequential}, **options)


def batch(step: int, coordinate: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * step + coordinate))


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


def ended_beside() -> Told:
    """The last rank ends while its neighbour waits for it in a group that was got before wrapping: what each rank says."""
    mesh = make_mesh()
    held = dist.new_group(mesh["tp"].mesh.tolist(), use_local_synchronization=True)
    model = distribute(mesh)

    def use(*_: Any) -> None:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1), group=held)

    model[1].register_forward_pre_hook(use)
    try:
        model(batch(0, mesh["dp"].get_local_rank()))
    except RuntimeError as error:
        found = told(error)
        return found._replace(text="\n".join([found.text, *getattr(error, "__notes__", ())]))
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


def context_fails(culprit: int) -> tuple[Told, float]:
    """Data and context parallelism: ranks of a sequence wait for each other in each block, where one fails in the second step."""
    mesh = make_mesh()
    model = plain()
    fsdp.fully_shard(model, mesh=mesh["dp", "tp"]._flatten("data"), auto_wrap_policy={nn.Sequential})
    for block in model:
        # inside a unit, which all have gathered; after wrapping, so that it is the group over which failures are passed on
        block[1].register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(1), group=mesh.get_group("tp")))
    for step in range(3):
        if step == 1 and dist.get_rank() == culprit:
            model[1][1].register_forward_pre_hook(fail, prepend=True)
        try:
            model(batch(step, dist.get_rank())).square().mean().backward()
        except (Mine, fsdp.WorldError) as error:
            return told(error), seconds()
    raise AssertionError("nobody was told")


def experts_retried(failing: int) -> Retried:
    """One rank fails in the loss of the second step, where no hook sees it. Then it waits for all, and they for each other."""
    model, mesh = experts.prepared()
    experts.wrap(model, mesh, sharding_strategy="SHARD_GRAD_OP")
    found = Retried([], [], [], [])

    def attempt(step: int) -> float:
        loss = model(experts.batch(step, dist.get_rank())).square().mean()
        if step == 1 and dist.get_rank() == failing and not found.told:
            fail()
        loss.backward()
        return float(loss.item())

    while len(found.losses) < STEPS:
        try:
            found.losses.append(attempt(len(found.losses)))
        except (Mine, fsdp.PeerFailed) as error:
            found.told.append(told(error))
            found.seconds.append(seconds())
    found.weights.extend(fsdp.full_tensor(p.grad).clone() for p in model.parameters())
    return found


class Staged(NamedTuple):
    """This rank's stage of a pipeline of two, each sharded over two ranks."""

    mesh: DeviceMesh
    index: int
    module: nn.Module
    make_schedule: Callable[[], Schedule1F1B]
    loss: nn.Module

    def run(self, schedule: Schedule1F1B, data: Tensor, losses: list[Tensor] | None = None) -> None:
        schedule.step(data) if self.index == 0 else schedule.step(target=data, losses=losses)

    def fail_in(self, place: str, micro_batch: int, how: Callable[..., Any] = fail) -> None:
        """Call `how` in a micro-batch of the step that follows, once."""
        count = 0

        def hook(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == micro_batch + 1:
                how()

        unit: Any = self.loss if place == "loss" else self.module[1]  # type: ignore[index]
        (unit.register_full_backward_hook if place == "backward" else unit.register_forward_pre_hook)(hook)


def make_stage() -> Staged:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, module, loss = mesh["pp"].get_local_rank(), plain(), nn.MSELoss()
    fsdp.fully_shard(module, mesh=mesh["dp"], auto_wrap_policy={nn.Sequential}, sharding_strategy="SHARD_GRADIENTS")

    def make_schedule() -> Schedule1F1B:
        stage = fsdp.PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        return Schedule1F1B(stage, 4, loss_fn=loss)

    return Staged(mesh, index, module, make_schedule, loss)


def cause_of(error: BaseException) -> BaseException:
    """What was told, under errors of torch's schedule."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, Mine | fsdp.WorldError):
        found = found.__cause__
    return found or error


def stage_fails(place: str, failing: int, micro_batch: int, how: Callable[..., Any] = fail) -> tuple[Told, float]:
    """A pipeline in which one rank fails in a micro-batch of the second step."""
    stage = make_stage()
    schedule = stage.make_schedule()
    for step in range(3):
        if step == 1 and dist.get_rank() == failing:
            stage.fail_in(place, micro_batch, how)
        try:
            stage.run(schedule, torch.randn(8, 6, generator=torch.Generator().manual_seed(step)))
        except Exception as error:
            return told(cause_of(error)), seconds()
    raise AssertionError("nobody was told")


def stage_retried(place: str, failing: int | None, micro_batch: int) -> Retried:
    """The same, and every rank does the step again: the weights of its stage."""
    stage = make_stage()
    schedule = stage.make_schedule()
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.05, momentum=0.9)
    found = Retried([], [], [], [])
    for step in range(3):
        if step == 1 and dist.get_rank() == failing:
            stage.fail_in(place, micro_batch)
        losses: list[Tensor] = []
        while True:
            try:
                stage.run(schedule, batch(step, stage.mesh["dp"].get_local_rank(), rows=8), losses)
                break
            except Exception as error:
                cause = cause_of(error)
                found.told.append(told(cause))
                found.seconds.append(seconds())
                if not isinstance(cause, Mine | fsdp.PeerFailed):
                    return found
                schedule = stage.make_schedule()  # torch's keep losses and buffers of the step that failed
        found.losses.extend(loss.item() for loss in losses)
        optimizer.step()
        optimizer.zero_grad()
    found.weights.extend(full.clone() for _, full in fsdp.iter_full_params(stage.module))
    return found


def stage_evaluates_alone() -> tuple[Told, float]:
    """Rank 3 waits for a message of rank 1, which waits for it in a norm over the stages. Rank 2 waits for rank 3, too."""
    stage = make_stage()
    schedule = stage.make_schedule()
    stage.run(schedule, batch(0, stage.mesh["dp"].get_local_rank(), rows=8))
    fsdp.clip_grad_norm_(stage.module, 1.0, pp_mesh=stage.mesh["pp"])
    begin = time.monotonic()
    try:
        if dist.get_rank() == 3:
            schedule.eval(target=batch(1, 1, rows=8), losses=[])
        fsdp.clip_grad_norm_(stage.module, 1.0, pp_mesh=stage.mesh["pp"])
    except Exception as error:
        mark_time()
        return told(cause_of(error)), time.monotonic() - begin
    raise AssertionError("nobody was told")


def stages_receive() -> tuple[Told, float]:
    """Both stages wait for a message of the other one. No rank waits in a collective."""
    stage = make_stage()
    stage.make_schedule()
    group = stage.mesh.get_group("pp")
    begin = time.monotonic()
    try:
        dist.recv(torch.empty(1), group=group, group_src=1 - stage.index)
    except Exception as error:
        return told(cause_of(error)), time.monotonic() - begin
    raise AssertionError("nobody was told")


STAGES: Final = (("forward", 0, 2), ("forward", 3, 0), ("loss", 3, 1), ("backward", 0, 3), ("backward", 3, 1))
"""Where a rank of a stage fails, which one, and in which micro-batch."""
LATE: Final = STAGES[3]
"""The other stage has reduced its gradients already."""


def wraps_otherwise(**options: Any) -> tuple[Told, float]:
    """One rank wraps with other options, or does not parallelise its modules."""
    mesh = make_mesh()
    begin = time.monotonic()
    try:
        distribute(mesh, **(options if dist.get_rank() == 3 else {}))
    except (fsdp.ShardingError, fsdp.WorldError) as error:
        return told(error), time.monotonic() - begin
    raise AssertionError("nobody was refused")


def told_in_the_third_step(before: Callable[[nn.Module, DeviceMesh], object]) -> tuple[Told, float]:
    """What a rank is told in a step before which some rank has done something else, and after how long."""
    mesh = make_mesh()
    model = distribute(mesh)
    for step in range(3):
        begin = time.monotonic()
        try:
            if step == 2:
                before(model, mesh)
            model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        except RuntimeError as error:
            return told(error), time.monotonic() - begin
    raise AssertionError("nobody was told")


def calls_another(model: Any, mesh: DeviceMesh) -> None:
    """One rank calls another collective of tensor parallelism than its neighbour."""
    if dist.get_rank() == 3:
        model[1].register_forward_pre_hook(lambda *_: dist.barrier(group=mesh["tp"].get_group()))


def crosses(model: Any, mesh: DeviceMesh) -> None:
    """Ranks 0 and 3 wait for their neighbours of tensor parallelism, which wait for ranks 3 and 0 in a gather."""
    if dist.get_rank() in (0, 3):
        dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())


def fails_twice() -> list[tuple[Told, float]]:
    """What each rank is told, and after how long, if rank 2 fails twice before the ranks meet in the group of all."""
    model = fsdp.fully_shard(plain(), mesh=make_mesh(), sharding_strategy="HYBRID_SHARD", auto_wrap_policy={nn.Sequential})
    found: list[tuple[Told, float]] = []
    while True:
        begin = time.monotonic()
        try:
            loss = model(batch(0, 0)).square().mean()
            if dist.get_rank() == 2 and len(found) < 2:
                loss.register_hook(lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(fail))
            loss.backward()
        except (Mine, fsdp.WorldError) as error:
            found.append((told(error), time.monotonic() - begin))
        else:
            return found


def told_after_a_step(does: Callable[[nn.Module], object]) -> tuple[Told, float]:
    """What a rank is told that does something else than others after a step with HYBRID_SHARD."""
    model = fsdp.fully_shard(plain(), mesh=make_mesh(), sharding_strategy="HYBRID_SHARD", auto_wrap_policy={nn.Sequential})
    model(batch(0, 0)).square().mean().backward()
    begin = time.monotonic()
    try:
        does(model)
    except RuntimeError as error:
        mark_time()
        return told(error), time.monotonic() - begin
    raise AssertionError("nobody was told")


def evaluates_alone(model: nn.Module) -> None:
    """Rank 3 waits for rank 2 of its replica in a gather, and the others for rank 3 in a state dict."""
    if dist.get_rank() == 3:
        model(batch(0, 0))
    fsdp.full_state_dict(model)


def disagrees_beside(model: nn.Module) -> None:
    """Rank 1 disagrees with ranks 2 and 3 in a group of all. Afterwards rank 0 waits for rank 1 in a gather."""
    if dist.get_rank() == 0:
        while not _mark[0].exists():
            time.sleep(0.05)
        model(batch(0, 0))
    elif dist.get_rank() == 1:
        fsdp.save(_mark[0].with_suffix(".saved"), model)
    else:
        fsdp.full_optim_state_dict(model, torch.optim.SGD(model.parameters()))


def is_slow() -> list[Told]:
    """One rank computes for longer than ranks wait before they look for a reason."""
    mesh = make_mesh()
    model = distribute(mesh)
    for step in range(3):
        if step == 2 and dist.get_rank() == 3:
            model[1].register_forward_pre_hook(lambda *_: time.sleep(2))
        try:
            model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        except RuntimeError as error:
            return [told(error)]
    return []


PROGRAMS: Final[dict[str, Callable[[], Any]]] = {
    **{f"{place}, rank {rank}": lambda place=place, rank=rank: retried(place, rank) for place in PLACES for rank in (0, 3)},
    "all fail": lambda: retried("a forward", None),
    "agreed": lambda: retried("a backward", 3, agree=True),
    "killed beside": ended_beside,
    **{f"context {culprit}": lambda culprit=culprit: context_fails(culprit) for culprit in (0, 3)},
    "experts": lambda: experts_retried(3),
    "apart": apart,
    **{f"stage {stage}": lambda stage=stage: stage_retried(*stage) for stage in (*STAGES, ("", None, 0))},
    "stage evaluates alone": stage_evaluates_alone,
    "stages receive": stages_receive,
    "stage late": lambda: stage_fails(*LATE),
    "stage killed": lambda: stage_fails("forward", 3, 2, lambda: (mark_time(), os.kill(os.getpid(), signal.SIGKILL))),
    "disagrees": lambda: wraps_otherwise(sharding_strategy="SHARD_GRAD_OP"),
    "leaves out": lambda: wraps_otherwise(parallel=False),
    "crosses": lambda: told_in_the_third_step(crosses),
    "fails twice": fails_twice,
    "evaluates alone": lambda: told_after_a_step(evaluates_alone),
    "disagrees beside": lambda: told_after_a_step(disagrees_beside),
    "is slow": is_slow,
    "calls another": lambda: told_in_the_third_step(calls_another),
    "killed": lambda: ended(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "ends": lambda: ended(lambda: sys.exit(0)),
}


ENDING: Final = ("killed", "killed beside", "ends", "stage killed")
"""The programs in which the last rank ends."""
FOR_GOOD: Final = (
    *("apart", "calls another", "crosses", "evaluates alone", "disagrees beside"),
    *("stage evaluates alone", "stages receive"),
)
"""Those after which no rank can go on."""


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    look_soon()
    os.environ.setdefault("FSDP_RETURN_SECONDS", "10")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    _made.append(make_mesh())
    _mark.append(folder / "failed")
    found = {}
    for name in sys.argv[4:]:
        faulthandler.dump_traceback_later(LIMIT, exit=True)  # in place of the one before
        found[name] = PROGRAMS[name]()
        torch.save(found, folder / f"{rank}.pt")
    (folder / f"{rank}.done").touch()
    waits_for = range(size - any(name in found for name in ENDING))
    end = time.monotonic() + 20
    while not all((folder / f"{one}.done").exists() for one in waits_for) and time.monotonic() < end:
        time.sleep(0.05)  # its end is not to be what the others notice
    if not any(name in found for name in (*ENDING, *FOR_GOOD)):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    # not as `__main__`: the test loads what is saved
    from tests.comm.failure import dimension_programs

    dimension_programs.main()
