"""Shards in host memory: training has the bits of training on the host under every scheduler, and the device holds few bytes."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp.api import wrap
from fsdp.comm.simulated import current_rank
from fsdp.compat.shared.dtype_and_device import change_precision, convert
from fsdp.runtime.registry import engines_in
from tests.device.on_accelerator.check_training import batch, cases, schedules
from tests.device.test_races import BLOCKS, STRATEGIES
from tests.reduction.test_used_params import InnerLinear, ThreeCalls
from tests.support.accelerator.device import NAME, Scheduler, host_waits, load
from tests.support.accelerator.stories import STORIES, first_difference, on_accelerator, on_host
from tests.support.accelerator.world import run
from tests.support.models import Block, Net, loss_of

load()
torch.set_num_threads(1)
OFFLOAD: Final = fsdp.OffloadPolicy()


CHANGED_TOO_EARLY: Final = "weights edited between calls"
"""A story that is refused under this policy: the copy for the first call may read what the forward changes after it."""
UNEVEN: Final = ("different paths", "an evaluation on one rank")
"""Stories with `uneven_paths`, which is refused together with this policy."""


@pytest.mark.parametrize(
    ("story", "strategy"),
    [case for case in cases("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP") if case[0] not in (CHANGED_TOO_EARLY, *UNEVEN)],
)
def test_a_story_has_the_bits_of_the_host(story: str, strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    wanted = on_host(STORIES[story], size, **options)
    # the stories without the policy have both of these, in check_training.py
    few = tuple(Scheduler) if story == "training" else ((Scheduler.RANDOM, Scheduler.STARVE)[len(story) % 2],)
    for scheduler, seed in schedules(len(story), few):
        found = on_accelerator(STORIES[story], size, scheduler, seed, offload_policy=OFFLOAD, **options)
        assert first_difference(found, wanted) is None, f"{scheduler.name}, seed {seed}"


class Changes(nn.Module):
    """Changes the weights of its units between the calls of two of them, and calls the first one `calls` times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.first, self.second, self.calls = Block(6), Block(6), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.first(x)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)
        return self.second(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("backward", [True, False])
def test_weights_that_change_while_copies_of_them_may_be_queued_are_refused(strategy: str, backward: bool) -> None:
    def train(rank: int) -> list[str]:
        net = Changes(1).to(f"{NAME}:{rank}")
        model = fsdp.fully_shard(net, auto_wrap_policy={Block}, sharding_strategy=strategy, offload_policy=OFFLOAD, prefetch=0)
        x, outcomes = batch(rank, 0, f"{NAME}:{rank}"), []
        for calls in (1, 0, 0):  # without a call before the change nothing is queued
            net.calls = calls
            try:
                with torch.set_grad_enabled(backward):
                    y = model(x).sum()
                if backward:
                    y.backward()
                outcomes.append("done")
            except fsdp.ShardingError as refusal:
                outcomes.append(str(refusal).partition(": weights")[0])
        return outcomes

    for scheduler in (Scheduler.LAZY, Scheduler.EAGER):
        for outcomes in run(2, train, scheduler, 1):
            assert outcomes == (["unit 'first'", "done", "done"] if backward else ["done", "unit 'first'", "done"])


def model_of(device: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = fsdp.fully_shard(Net(BLOCKS).to(device), auto_wrap_policy={Block}, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: str, number: int) -> None:
    loss_of(model(batch(rank, number, device))).backward()
    fsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pin", [True, False])
def test_shards_gradients_and_optimizer_state_are_in_host_memory(strategy: str, pin: bool) -> None:
    size, options = STRATEGIES[strategy]

    def train(rank: int) -> int:
        device = f"{NAME}:{rank}"
        model, optimizer = model_of(device, offload_policy=fsdp.OffloadPolicy(pin), **options)
        for number in range(2):
            loss_of(model(batch(rank, number, device))).backward()
            for p in model.parameters():
                assert p.device.type == "cpu" and (p.grad is None or p.grad.device.type == "cpu")
            optimizer.step()
            optimizer.zero_grad()
        for state in optimizer.state.values():
            assert all(value.device.type == "cpu" for value in state.values())
        return engines_in(model, "test")[0].tracker.now

    kept = {"SHARD_GRADIENTS", "SHARD_OPTIMIZER"}
    for now in run(size, train, Scheduler.RANDOM, 1):
        assert now == 0 or strategy in kept


@pytest.mark.parametrize("size", [1, 2])
def test_the_device_holds_two_units_a_bucket_and_its_reduced_part(size: int) -> None:
    def peak(rank: int) -> tuple[int, int]:
        device = f"{NAME}:{rank}"
        torch.manual_seed(3)
        model = fsdp.fully_shard(Net(6).to(device), auto_wrap_policy={Block}, offload_policy=OFFLOAD)
        loss_of(model(batch(rank, 0, device))).backward()
        engine = engines_in(model, "test")[0]
        root, *blocks = [sum(unit.gather_sizes) for unit in engine.units]
        engine.tracker.peak = 0
        loss_of(model(batch(rank, 1, device))).backward()
        # the root's own unit, the one that computes, the one that is gathered ahead, a bucket, and its reduced part
        return engine.tracker.peak, root + 2 * max(blocks) + max(root, *blocks) * (size + 1) // size

    for found, bound in run(size, peak, Scheduler.RANDOM, 1):
        assert 0 < found <= bound


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_works_on_shards_works_in_host_memory(strategy: str, tmp_path: Path) -> None:
    """Checkpoints, averages, copies, summon, optimizer states, full tensors, penalties, unwrap; beside a model on the host."""

    def train(rank: int, device: str, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = model_of(device, sharding_strategy=strategy, **options)
        average = fsdp.EMA(model, 0.5)
        for number in range(2):
            step(model, optimizer, rank, device, number)
            average.update()
        fsdp.save(folder, model, optimizer)
        states = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        step(model, optimizer, rank, device, 2)
        fsdp.load(folder, model, optimizer)
        fsdp.load_full_optim_state_dict(model, optimizer, states)
        step(model, optimizer, rank, device, 2)
        with fsdp.summon_full_params(model, writeback=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        penalty = sum(fsdp.full_tensor(p).pow(2).sum() + fsdp.to_local(p).abs().sum() for p in model.parameters())
        with fsdp.full_parameters(model):
            penalty = penalty + sum(p.square().sum() for p in model.parameters())
        (loss_of(model(batch(rank, 3, device))) + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        copied = deepcopy(model)
        loss_of(copied(batch(rank, 4, device))).backward()
        found = full_weights(copied)
        with average.averaged_weights():
            found |= {f"average {name}": value for name, value in full_weights(model).items()}
        plain = fsdp.unwrap(model)
        assert all(p.device == torch.device(device) for p in plain.parameters())
        loss_of(plain(batch(rank, 5, device))).backward()
        return found | {f"gradient {name}": p.grad.cpu() for name, p in plain.named_parameters() if p.grad is not None}

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu", tmp_path / "host"))
    for scheduler in (Scheduler.LAZY, Scheduler.RANDOM):
        folder = tmp_path / scheduler.name
        found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", folder, offload_policy=OFFLOAD), scheduler, 1)  # noqa: B023
        assert first_difference(found, wanted) is None, scheduler.name


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("scheduler", [Scheduler.LAZY, Scheduler.RANDOM, Scheduler.STARVE])
def test_gradients_are_read_and_weights_changed_right_after_a_backward_under_no_sync(scheduler: Scheduler, strategy: str) -> None:
    def train(rank: int, device: str, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = model_of(device, **options)
        found = {}
        for number in range(3):
            with fsdp.no_sync(model):
                loss_of(model(batch(rank, number, device))).backward()
            for name, p in model.named_parameters():
                found[f"{number}.{name}"] = torch.zeros(0) if p.grad is None else fsdp.to_local(p.grad).clone()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.75)
        step(model, optimizer, rank, device, 3)
        return {**found, **full_weights(model)}

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu", sharding_strategy=strategy))
    found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", sharding_strategy=strategy, offload_policy=OFFLOAD), scheduler, 2)
    assert first_difference(found, wanted) is None


def test_the_host_waits_at_the_ends_of_passes_only() -> None:
    def waits(rank: int) -> int:
        device = f"{NAME}:{rank}"
        model, optimizer = model_of(device, offload_policy=OFFLOAD)
        for number in range(2):
            step(model, optimizer, rank, device, number)
        x = batch(rank, 2, device)
        before = host_waits(rank)
        loss_of(model(x)).backward()
        return host_waits(rank) - before

    # uploads of the forward; uploads and gradients of the backward
    assert run(2, waits, Scheduler.RANDOM, 1) == [3, 3]


@pytest.mark.parametrize("ours", [True, False])
def test_a_scaler_skips_a_step_on_every_rank(ours: bool) -> None:
    def train(rank: int, device: str, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = model_of(device, **options)
        kind = torch.device(device).type
        scaler = fsdp.ShardedGradScaler(model, init_scale=8.0) if ours else torch.amp.GradScaler(kind, init_scale=8.0)
        for number in range(3):
            loss = loss_of(model(batch(rank, number, device)))
            factor = float("inf") if number == 1 and rank == 1 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {**full_weights(model), "scale": torch.tensor(scaler.get_scale())}

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu"))
    found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", offload_policy=OFFLOAD), Scheduler.RANDOM, 1)
    assert first_difference(found, wanted) is None
    assert found[0]["scale"] == 4.0


@pytest.mark.parametrize("outer", [OFFLOAD, None])
def test_a_root_without_parameters_and_units_with_and_without_the_policy_are_clipped_alike(
    outer: fsdp.OffloadPolicy | None,
) -> None:
    def train(rank: int, device: str, inner: fsdp.OffloadPolicy | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 1)).to(device)
        fsdp.fully_shard(model[1], offload_policy=inner)
        fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, offload_policy=None if inner is None else outer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = fsdp.ShardedGradScaler(model, init_scale=8.0)
        for number in range(2):
            scaler.scale(model(batch(rank, number, device)).square().mean()).backward()
            scaler.unscale_(optimizer)
            fsdp.clip_grad_norm_(model, 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return full_weights(model)

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu", None))
    found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", OFFLOAD), Scheduler.RANDOM, 1)
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_a_remainder_is_added_when_the_first_chunk_is_on_the_host(strategy: str) -> None:
    """Each reduction has a stream of its own. Of replicas, the late one is launched before the first is copied to the host."""
    size, own = STRATEGIES[strategy]

    def train(rank: int, device: str, **options: Any) -> dict[str, torch.Tensor]:
        policy = fsdp.ReductionPolicy(streams=3)
        model = fsdp.fully_shard(ThreeCalls().to(device), auto_wrap_policy={InnerLinear}, reduction=policy, **own, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            model(batch(rank, number, device)[:, :4]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_weights(model)

    wanted = fsdp.simulate(size, lambda rank: train(rank, "cpu"))
    for scheduler in Scheduler:
        found = run(size, lambda rank: train(rank, f"{NAME}:{rank}", offload_policy=OFFLOAD), scheduler, 1)
        assert first_difference(found, wanted) is None, scheduler.name


def mesh_of_simulated_ranks(group: Any, mesh: Any, device: torch.device) -> DeviceMesh:
    """A mesh whose DTensors cannot communicate: simulated ranks have no process groups."""
    here = current_rank()
    return DeviceMesh(device.type, torch.arange(here.size), _init_backend=False, _rank=here.rank)


@pytest.mark.parametrize("placement_of", [None, lambda parameter: Shard(parameter.dim() - 1)], ids=["rows", "columns"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_shards_in_host_memory_may_be_dtensors(
    strategy: str, placement_of: Callable[[nn.Parameter], Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrap, "open_mesh", mesh_of_simulated_ranks)

    def train(rank: int, device: str, **options: Any) -> dict[str, torch.Tensor]:
        own = {"dtensors": True, "shard_placement_fn": placement_of, "sharding_strategy": strategy}
        model, optimizer = model_of(device, **own, **options)
        for number in range(3):
            step(model, optimizer, rank, device, number)
        for p in model.parameters():
            assert isinstance(p, DTensor) and p.device_mesh.device_type == torch.device(device).type
            assert p._local_tensor.device.type == optimizer.state[p]["exp_avg"]._local_tensor.device.type == "cpu"
        return {name: p._local_tensor.clone() for name, p in model.named_parameters()}

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu"))
    for scheduler in (Scheduler.LAZY, Scheduler.RANDOM, Scheduler.STARVE):
        found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", offload_policy=OFFLOAD), scheduler, 1)
        assert first_difference(found, wanted) is None, scheduler.name


def test_another_dtype_and_another_precision_after_wrapping() -> None:
    def train(rank: int, device: str, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = model_of(device, **options)
        step(model, optimizer, rank, device, 0)
        engine = engines_in(model, "test")[0]
        if options:
            with pytest.raises(fsdp.ShardingError, match="in host memory by offload_policy and stay there"):
                convert(engine, lambda tensor: tensor.to(device), [0])
        every = range(len(engine.units))
        engine = convert(engine, lambda tensor: tensor.double(), every)
        change_precision(engine, dict.fromkeys(every, fsdp.MixedPrecisionPolicy(param_dtype=torch.float32)), "test")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(2):
            step(model, optimizer, rank, device, number)
        assert all(p.device.type == "cpu" and p.dtype is torch.float64 for p in model.parameters())
        return full_weights(model)

    wanted = fsdp.simulate(2, lambda rank: train(rank, "cpu"))
    for scheduler in (Scheduler.LAZY, Scheduler.RANDOM):
        found = run(2, lambda rank: train(rank, f"{NAME}:{rank}", offload_policy=OFFLOAD), scheduler, 1)
        assert first_difference(found, wanted) is None, scheduler.name


def test_combinations_that_are_not_there_are_refused() -> None:
    net = Net(BLOCKS)
    with pytest.raises(fsdp.ShardingError, match="offload_policy and uneven_paths"):
        fsdp.simulate(1, lambda rank: fsdp.fully_shard(net, offload_policy=OFFLOAD, uneven_paths=True))
    with pytest.raises(fsdp.ShardingError, match="pin_memory must be True or False"):
        fsdp.OffloadPolicy(1)  # type: ignore[arg-type]
    with pytest.raises(fsdp.ShardingError, match="offload_policy must be"):
        fsdp.simulate(1, lambda rank: fsdp.fully_shard(net, offload_policy="cpu"))
