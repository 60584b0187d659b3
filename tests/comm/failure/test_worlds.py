"""After a failure, simulated ranks say and compute step by step what processes over gloo do."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of
from tests.support.stalls import look_soon

PLACES: Final = (
    *("data", "root", "unit", "output", "loss", "module hook", "parameter hook", "accumulate hook", "comm hook"),
    *("end of backward", "recompute", "no_sync", "evaluation", "norm", "summon", "save", "state dict", "step"),
)
"""Where a rank fails, in the order in which a step comes there."""
RANKS: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {
    "first": lambda place: (place, ""),
    "last": lambda place: ("", place),
    "both": lambda place: (place, place),
    "unit": lambda place: (place, "unit"),
    "loss": lambda place: (place, "loss"),
}
"""Where the two ranks fail."""
REPLICAS: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {
    "the first of four": lambda place: (place, "", "", ""),
    "the third of four": lambda place: ("", "", place, ""),
}
"""Where a rank of two replicas fails. Of two that fail at once, others get the error of either."""
AFTER: Final = ("again", "next batch", "next batch without zero_grad", "fails twice", "from a checkpoint")
"""What a rank does when it has caught an error. The last two do the same step again."""
ALL: Final = [(place, ranks, after) for place in PLACES for ranks in RANKS for after in AFTER]
OF_REPLICAS: Final = [
    (place, ranks, after) for place in PLACES if place != "comm hook" for ranks in REPLICAS for after in ("again", "fails twice")
]
"""A communication hook gets no gradients of replicas. Where ranks end for good, some get an error before that in one world."""
CASES: Final = [*ALL, *OF_REPLICAS] if EVERYTHING else [*ALL[::13], *OF_REPLICAS[::11]]
Case = tuple[str, str, str]
STEPS: Final = 4
LIMIT: Final = 1800 if EVERYTHING else 240
"""Seconds for the processes."""


class Mine(Exception):
    """What a rank raises."""


class Block(nn.Module):
    def __init__(self, at: Callable[..., None]) -> None:
        super().__init__()
        self.up, self.down, self.at = nn.Linear(4, 4), nn.Linear(4, 4), at

    def forward(self, x: Tensor) -> Tensor:
        self.at("unit")
        x = torch.tanh(self.up(x))
        if torch._C._current_graph_task_id() != -1:
            self.at("recompute")
        return self.down(x)


class Net(nn.Module):
    def __init__(self, at: Callable[..., None], replays: bool) -> None:
        super().__init__()
        self.enter, self.block, self.leave, self.at, self.replays = nn.Linear(4, 4), Block(at), nn.Linear(4, 2), at, replays

    def forward(self, x: Tensor) -> Tensor:
        self.at("root")
        x = self.enter(x)
        return self.leave(checkpoint(self.block, x, use_reentrant=False) if self.replays else self.block(x))


def play(case: Case, folder: Path, options: dict[str, Any], rank: int) -> list[Any]:
    """What one rank has heard and computed in each attempt, and the weights at the end."""
    place, ranks, after = case
    mine, times = (RANKS | REPLICAS)[ranks](place)[rank], 0

    def is_due(here: str) -> bool:
        nonlocal times
        due = here == mine and times > 0
        times -= due
        return due

    def at(here: str, *_: Any) -> None:
        if is_due(here):
            raise Mine(f"{here} of rank {rank}")

    def hook(state: None, bucket: Any) -> Any:
        at("comm hook")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().chunk(2)[rank] * 1.0)
        return future

    torch.manual_seed(0)
    net = Net(at, replays=place == "recompute")
    model = fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block}, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net.block.up.register_full_backward_hook(partial(at, "module hook"))
    optimizer.register_step_pre_hook(partial(at, "step"))
    if place == "comm hook":
        fsdp.register_comm_hook(model, None, hook)
    if place == "parameter hook":
        net.block.up.weight.register_hook(partial(at, place))
    if place == "accumulate hook":
        net.leave.bias.register_post_accumulate_grad_hook(partial(at, place))

    queue_callback = torch.autograd.Variable._execution_engine.queue_callback

    def forward_and_backward(x: Tensor) -> float:
        output = model(x)
        output.register_hook(partial(at, "output"))
        loss = output.square().mean()
        at("loss")
        loss.register_hook(lambda gradient: queue_callback(partial(at, "end of backward")))
        loss.backward()
        return loss.item()

    def step(number: int) -> float:
        at("data")
        x = torch.linspace(-1, 1, 12).view(3, 4) + rank + 0.1 * number
        if place == "no_sync":
            with fsdp.no_sync(model):
                forward_and_backward(-x)
            at(place)
        loss = forward_and_backward(x)
        for one in ("evaluation", "norm", "state dict"):
            at(one)
        if place == "evaluation":
            with torch.no_grad():
                model(x)
        if place == "norm":
            fsdp.clip_grad_norm_(model, 0.1)
        if place == "summon":
            with fsdp.summon_full_params(model):
                at(place)
        if place == "state dict":
            fsdp.full_state_dict(model)
        if place == "save":
            fsdp.save(folder / f"step {number}", model, extra={"x": 1 if not is_due(place) else object()})
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def attempt(function: Callable[[], Any]) -> bool:
        try:
            log.append(function())
        except (Mine, fsdp.ShardingError, fsdp.WorldError) as error:
            log.append((type(error).__name__, *said(error)))
            error.__traceback__ = None  # its frames have the graph
            return False
        return True

    log: list[Any] = []
    number = fatal = 0
    while number < STEPS and fatal < 2:
        if len(log) == 1:
            times = 2 if after == "fails twice" else 1
        done = attempt(partial(step, number))
        fatal += not done and log[-1][0] == "WorldError"
        number += done or after.startswith("next")
        if not done and after == "next batch":
            optimizer.zero_grad()
        if not done and after == "from a checkpoint":
            attempt(lambda: fsdp.save(folder / "all", model, optimizer) and None)
            attempt(lambda: fsdp.load(folder / "all", model, optimizer) and None)
    if fatal < 2:
        attempt(lambda: [weight.tolist() for weight in fsdp.full_state_dict(model).values()])
    return log


def said(error: Exception) -> tuple[Any, ...]:
    """What an error says in both worlds."""
    if isinstance(error, fsdp.PeerFailed):
        return error.rank, error.unit, error.reason, str(error).partition(" Rank ")[0]
    text = re.sub(r"/\S+/", "", str(error))
    if not isinstance(error, fsdp.WorldError) or "a step apart" in text:
        return (text,)
    # a process may wait in a call that a simulated rank has launched, and then in another one
    return ("The ranks differ.", *re.findall("Only rank . made a forward without gradients", text))


@contextmanager
def new_groups(size: int) -> Iterator[dict[str, Any]]:
    """Two ranks in a group, or four in a mesh of replicas and shards. No failure of an earlier case has closed these groups."""
    if size == 2:
        groups = [dist.new_group()]
        yield {"process_group": groups[0]}
    else:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
        row, column = divmod(dist.get_rank(), 2)
        names, ranks = ("replicas", "shards"), torch.arange(4).view(2, 2)
        mesh = DeviceMesh.from_group([groups[column], groups[2 + row]], "cpu", mesh=ranks, mesh_dim_names=names)
        yield {"mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    dist.barrier()
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def cases_of(size: int) -> list[Case]:
    return [case for case in CASES if len((RANKS | REPLICAS)[case[1]](case[0])) == size]


def in_processes(rank: int, size: int, folder: Path) -> list[list[Any]]:
    """The cases one after the other, each with groups of its own."""
    look_soon()
    found = []
    for number, case in enumerate(cases_of(size)):
        with new_groups(size) as options:
            found.append(play(case, folder / f"case {number}", options, rank))
    return found


@pytest.mark.gloo
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("size", [2, 4], ids=["shards", "replicas"])
def test_simulated_ranks_say_and_compute_what_processes_do(size: int, tmp_path: Path) -> None:
    over_gloo = zip(*results_of(in_processes, size, tmp_path, seconds=LIMIT), strict=True)
    different = []
    for number, (case, processes) in enumerate(zip(cases_of(size), over_gloo, strict=True)):
        options = {} if size == 2 else {"mesh": (2, 2), "sharding_strategy": "HYBRID_SHARD"}
        ranks = fsdp.simulate(size, partial(play, case, tmp_path / f"simulated {number}", options))
        if ranks != [*processes]:
            different.append((case, ranks, processes))
    assert not different, different[0]
