"""No two accesses to the same memory race on a device: shown on virtual streams, for every strategy and option.

Each wait of the engine is left out once, and each time a race is found: that is what the checker is worth.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.comm.simulated import SimulatedCommunicator, current_rank
from tests.support.everything import EVERYTHING
from tests.support.models import ALONE, Block, Net, loss_of, promised
from tests.support.programs import Program
from tests.support.runs import ShardedRun
from tests.support.strategies import programs, trees, world_sizes
from tests.support.trees import TreeSpec
from tests.support.virtual import Harness, Site

BLOCKS: Final = 2
BF16: Final = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF: Final = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
STRATEGIES: Final = {
    "FULL_SHARD": (2, {}),
    "SHARD_GRAD_OP": (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "NO_SHARD": (2, {"sharding_strategy": "NO_SHARD"}),
    "SHARD_GRADIENTS": (2, {"sharding_strategy": "SHARD_GRADIENTS"}),
    "SHARD_OPTIMIZER": (2, {"sharding_strategy": "SHARD_OPTIMIZER"}),
    "HYBRID_SHARD": (4, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
    "one rank": (1, {}),
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "no prefetch": {"prefetch": 0},
    "prefetch": {},
    "deep prefetch": {"prefetch": 2},
    "bf16": {"mp_policy": BF16},
    "bf16, reduced in bf16": {"mp_policy": HALF, "prefetch": 2},
    "reshard": {"reshard_after_forward": True},
    "guard": {"guard": True},
    "in pieces": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002), "prefetch": 2},
    "shared, deterministic": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=1, deterministic=True)},
    "in pieces, on two streams": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002, streams=2), "mp_policy": HALF},
    "in pieces, deterministic": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002, deterministic=True), "prefetch": 2},
    "at the end": {"reduction": fsdp.ReductionPolicy(at_end=True)},
    "static graph": {"reduction": fsdp.ReductionPolicy(static_graph=True)},
    "summed": {"reduction": fsdp.ReductionPolicy(average=False)},
    "divided before and after": {"reduction": fsdp.ReductionPolicy(predivide_factor=2.0)},
    "unused": {"reduction": fsdp.ReductionPolicy(find_unused_parameters=True)},
    "buffers": {"broadcast_buffers": True},
    "weights of rank 0": {"sync_module_states": True},
}
ONLY: Final = {
    "reshard": ("FULL_SHARD", "HYBRID_SHARD", "one rank"),
    "unused": ("NO_SHARD",),
}
"""The strategies of options that contradict the others."""
FEW_OPTIONS: Final = ("deep prefetch", "bf16", "bf16, reduced in bf16", "at the end", "buffers")
REACHED: Final[dict[Site, None]] = {}
"""Every wait of the engine that a test of this file came to."""


def batch(step: int = 0) -> Tensor:
    return torch.linspace(-1, 1, 12).view(2, 6) + step


class Counting(Net):
    """Its ranks have different numbers in a buffer after each forward."""

    def forward(self, x: Tensor) -> Tensor:
        rank = current_rank()
        self.shift.add_(0.125 * rank.rank)
        return super().forward(x)


def net(**options: Any) -> nn.Module:
    torch.manual_seed(3)
    return fsdp.fully_shard(Counting(BLOCKS), auto_wrap_policy={Block}, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def training(**options: Any) -> None:
    """Two steps, clipped, and an evaluation between."""
    model = net(**options)
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(batch(step))).backward()
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch())


def accumulation(**options: Any) -> None:
    """Gradients kept under no_sync, reduced ones accumulated."""
    model = net(**options)
    optimizer = sgd(model)
    for step in range(2):
        for part in range(3):
            with fsdp.no_sync(model) if part == 1 else nullcontext():
                loss_of(model(batch(part))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)


def checkpointing(**options: Any) -> None:
    """Each block in a checkpoint of either kind."""

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.enter(x))
            for number, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=number % 2 == 0)
            return self.leave(x)

    torch.manual_seed(3)
    train(fsdp.fully_shard(Checkpointed(BLOCKS), auto_wrap_policy={Block}, **options))


def reduced_part(bucket: Any, options: dict[str, Any]) -> Tensor:
    """As much of a bucket as a reduction leaves to one rank."""
    rank = current_rank()
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": 2}.get(options.get("sharding_strategy", ""), rank.size)
    buffer: Tensor = bucket.buffer()
    return buffer[: buffer.numel() // shards]


def hooked(fails: bool = False, **options: Any) -> None:
    """A communication hook that computes; if `fails`, in a backward that fails while its result is in flight."""
    model = net(**options)

    def hook(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
        return promised(reduced_part(bucket, options) * 1.0)

    fsdp.register_comm_hook(model, None, hook)
    train(model, fails)


class Broken(Exception):
    pass


def train(model: nn.Module, fails: bool = False) -> None:
    """Three steps; if `fails`, the backward of the second one does, at its end, with everything in flight."""
    optimizer = sgd(model)
    for step in range(3):
        x = batch(step).requires_grad_()
        if fails and step == 1:
            x.register_hook(fail_backward)
        try:
            loss_of(model(x)).backward()
        except Broken:
            continue
        optimizer.step()
        optimizer.zero_grad()


def fail_backward(gradient: Tensor) -> None:
    raise Broken


def failing(**options: Any) -> None:
    """A backward that fails, between two that do not."""
    train(net(**options), fails=True)


def failing_hooked(**options: Any) -> None:
    """The same around a communication hook."""
    hooked(fails=True, **options)


def partial(**options: Any) -> None:
    """A unit that is not used is stepped between the forward and the backward of another, in which it is gathered ahead."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(6), Block(6)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            x = self.first(x)
            return self.second(x) if both else x

    torch.manual_seed(3)
    model = fsdp.fully_shard(Two(), auto_wrap_policy={Block}, **options)
    optimizer = sgd(model.second)
    for step in range(2):
        loss_of(model(batch(step), True)).backward()
    y = model(batch(), False)
    optimizer.step()
    loss_of(y).backward()


def pointed(**options: Any) -> None:
    """Parameters that are pointed at other memory between steps."""
    model = net(**options)
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def edited(**options: Any) -> None:
    """A unit that edits a weight in its forward, and is called twice."""

    class Edits(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.4, 0.4)
            return super().forward(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inplace_updates = Edits(6)
            self.last = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inplace_updates(self.inplace_updates(x)))

    torch.manual_seed(3)
    twice = fsdp.fully_shard(Twice(), auto_wrap_policy={Edits}, **options)
    with torch.no_grad():
        for step in range(2):
            twice(batch(step))


def fold(model: nn.Module, y: Tensor) -> None:
    """Let a value of a forward without a backward reach the weights, so that a wrong one is seen in them."""
    with torch.no_grad():
        for parameter in model.parameters():
            fsdp.to_local(parameter).add_(y.float().mean().to(parameter.device), alpha=0.01)


def evaluated(**options: Any) -> None:
    """Weights are changed right after an evaluation, whose kernels may not have run."""
    model = net(**options)
    with torch.no_grad():
        for step in range(2):
            y = model(batch(step))
            for parameter in model.parameters():
                fsdp.to_local(parameter).mul_(0.75)
            fold(model, y)


def kept(**options: Any) -> None:
    """Under no_sync, gradients are read and weights changed right after the backward."""
    model = net(**options)
    for step in range(2):
        with fsdp.no_sync(model):
            loss_of(model(batch(step))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                local = fsdp.to_local(parameter).mul_(0.75)
                if parameter.grad is not None:
                    local.add_(fsdp.to_local(parameter.grad).sum().to(local.device), alpha=0.01)
    train(model)


def late(**options: Any) -> None:
    """A gradient that comes after its bucket was launched, by way of another stream than the bucket's."""
    model = net(reduction=fsdp.ReductionPolicy(bucket_cap_mb=0.0002, streams=2), **options)
    optimizer = sgd(model)
    for step in range(3):
        decay = sum(fsdp.full_tensor(parameter).square().mean() for parameter in model.parameters())
        (loss_of(model(batch(step))) + 0.1 * decay).backward()
        optimizer.step()
        optimizer.zero_grad()


def edited_between(**options: Any) -> None:
    """A forward that edits the shards of a unit between two calls of it, and before the first call of another one.

    No unit is gathered before its shard is edited: such a copy is dropped, so it does not matter what the gather has read.
    """

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(6), Block(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)
            return self.second(self.first(x))

    torch.manual_seed(3)
    model = fsdp.fully_shard(Outer(), auto_wrap_policy={Block}, reduction=ALONE, **options)
    with torch.no_grad():
        for step in range(2):
            fold(model, model(batch(step)))


def grouped(**options: Any) -> None:
    """Small units that share gathers two by two: a group is gathered into memory that another one has left in the same pass."""
    torch.manual_seed(3)
    net = Net(6)
    two = 2.5 * sum(p.nbytes for p in net.blocks[0].parameters()) / 2**20
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, reduction=fsdp.ReductionPolicy(coalesce_cap_mb=two), **options)
    for step in range(3):
        loss_of(model(batch(step))).backward()


def nested(**options: Any) -> None:
    """A backward and a step inside a forward, whose later units are used after it. The step moves no version counter."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(6).requires_grad_(False), Block(6)

        def forward(self, x: Tensor) -> Tensor:
            loss_of(self.second(self.first(x))).backward()
            for parameter in self.second.parameters():
                if parameter.grad is not None:
                    fsdp.to_local(parameter.data).add_(fsdp.to_local(parameter.grad), alpha=-0.1)
            optimizer.zero_grad()
            return self.second(self.first(x))

    torch.manual_seed(3)
    model = fsdp.fully_shard(Outer(), auto_wrap_policy={Block}, **options)
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse(**options: Any) -> None:
    """An embedding with sparse gradients, which stay so under NO_SHARD."""
    torch.manual_seed(3)
    table = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 2))
    model = fsdp.fully_shard(table, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model(torch.arange(3) + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def reading(**options: Any) -> None:
    """Weights read outside their unit, gradients clipped by the largest, everything saved and loaded again."""
    model = net(**options)
    optimizer = sgd(model)
    for step in range(2):
        decay = fsdp.full_tensor(model.blocks[0].up.weight).square().mean()
        (loss_of(model(batch(step))) + decay).backward()
        fsdp.clip_grad_norm_(model, 1.0, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        fsdp.load_full_state_dict(model, fsdp.full_state_dict(model, rank0_only=False))
        with fsdp.summon_full_params(model), torch.no_grad():
            model.leave.weight.mul_(0.5)


STORIES: Final[dict[str, Callable[..., None]]] = {
    "training": training,
    "accumulation": accumulation,
    "checkpointing": checkpointing,
    "a communication hook": hooked,
    "a failing backward": failing,
    "a failing backward with a hook": failing_hooked,
    "a step between": partial,
    "parameters pointed elsewhere": pointed,
    "weights edited in a forward": edited,
    "weights edited between calls": edited_between,
    "weights changed after an evaluation": evaluated,
    "weights changed under no_sync": kept,
    "late gradients": late,
    "a step inside a forward": nested,
    "units that share gathers": grouped,
    "sparse gradients": sparse,
    "weights read and loaded": reading,
}


@pytest.mark.parametrize("story", ["training", "failing"])
def test_no_accesses_race_where_the_backend_coalesces(story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCommunicator, "supports_coalescing", lambda *_: True)
    shared = {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=1, predivide_factor=2.0)}
    world = races_of(2, lambda: {"training": training, "failing": failing}[story](**shared))
    assert not world.races, world.races[:5]


def races_of(size: int, story: Callable[[], None], skipped: Site | None = None) -> Harness:
    world = Harness(skipped)
    with world.patched():
        fsdp.simulate(size, world.run(lambda rank: story()))
    if skipped is None:
        REACHED.update(world.sites)
    return world


def strategies_of(story: str) -> list[str]:
    """By default training has all, and each other story those that differ most, and one of the others in turn."""
    if EVERYTHING or story == "training":
        return list(STRATEGIES)
    most = ["FULL_SHARD", "NO_SHARD"]
    others = [name for name in STRATEGIES if name not in most]
    return [*most, others[list(STORIES).index(story) % len(others)]]


@pytest.mark.parametrize(("story", "strategy"), [(story, strategy) for story in STORIES for strategy in strategies_of(story)])
def test_no_accesses_race(story: str, strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    world = races_of(size, lambda: STORIES[story](**options))
    assert all(recorder.operations > 100 for recorder in world.recorders)
    assert not world.races, world.races[:5]


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        (strategy, option)
        for strategy in STRATEGIES
        for option in OPTIONS
        # the others share what these three have to wait for
        if strategy in ONLY.get(option, STRATEGIES)
        and (strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD") or option in FEW_OPTIONS)
    ],
)
def test_no_accesses_race_with_any_option(strategy: str, option: str) -> None:
    size, options = STRATEGIES[strategy]
    world = races_of(size, lambda: training(**options, **OPTIONS[option]))
    assert not world.races, world.races[:5]


@settings(max_examples=6)
@given(st.data(), world_sizes.filter(lambda size: size <= 4), st.integers(0, 2**16))
def test_no_accesses_race_in_any_program(data: st.DataObject, world_size: int, seed: int) -> None:
    tree = data.draw(trees(), label="tree")
    assert_no_races_in(tree, data.draw(programs(tree), label="program"), world_size, seed)


@settings(max_examples=4)
@given(st.data(), st.integers(0, 2**16))
def test_no_accesses_race_in_any_program_on_a_mesh(data: st.DataObject, seed: int) -> None:
    """Two by two ranks."""
    drawn = data.draw(trees(), label="tree")
    tree = replace(drawn, options=(*drawn.options, ("sharding_strategy", "HYBRID_SHARD")), replicas=2)
    assert_no_races_in(tree, data.draw(programs(tree), label="program"), 4, seed)


def assert_no_races_in(tree: TreeSpec, program: Program, world_size: int, seed: int) -> None:
    world = Harness()
    with world.patched():
        fsdp.simulate(world_size, world.run(lambda rank: ShardedRun(tree, rank).run(program)), seed)
    REACHED.update(world.sites)
    assert not world.races, world.races[:5]


_WAITING: Final[list[tuple[Callable[..., None], dict[str, Any]]]] = [
    (training, {"mp_policy": HALF}),
    (partial, {}),
    (pointed, {}),
    (nested, {}),
    (edited_between, {}),
    (grouped, {}),
    (training, {"mp_policy": HALF, "reduction": ALONE}),
    (failing_hooked, {}),
    (training, {}),
]
WAITING: Final = [
    *((story, strategy, more) for story, more in _WAITING for strategy in ("one rank", "FULL_SHARD", "NO_SHARD")),
    (training, "FULL_SHARD", {"broadcast_buffers": True, "sync_module_states": True}),
    (accumulation, "SHARD_GRADIENTS", {}),
    (late, "NO_SHARD", {}),
    (reading, "FULL_SHARD", {}),
    (failing, "FULL_SHARD", {}),
    # nothing comes after the rows on the stream of reductions that would wait for them as well
    (sparse, "NO_SHARD", {"reduction": fsdp.ReductionPolicy(static_graph=True)}),
    (sparse, "one rank", {"sharding_strategy": "NO_SHARD", "reduction": fsdp.ReductionPolicy(static_graph=True)}),
]
"""Story, strategy and options of runs that come to every wait of the engine."""


def test_a_race_is_found_when_any_wait_is_left_out() -> None:
    """Every wait of the engine that a test of this file comes to, one by one, until some run shows a race without it."""

    def run(number: int, skipped: Site | None = None) -> Harness:
        story, strategy, more = WAITING[number]
        size, options = STRATEGIES[strategy]
        return races_of(size, lambda: story(**options, **more), skipped)

    found = [run(number).sites for number in range(len(WAITING))]
    sites = {site: None for of_run in found for site in of_run}
    unnoticed = [
        site for site in sites if not any(site in of_run and run(number, site).races for number, of_run in enumerate(found))
    ]
    assert not unnoticed
    # of this process: where the file runs as a whole, of all tests before
    assert sites.keys() == REACHED.keys(), "a wait that no run above comes to: add one that does"
