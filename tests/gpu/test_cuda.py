"""On a real device: the order between streams, the peak of memory, and that the host never waits."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp
from fsdp.debug.delays import DELAYS
from fsdp.device.streams import DeviceStreams
from tests.support.floors import expected_peak, make, root_and_block, shards_of
from tests.support.models import (
    CASES,
    Block,
    Case,
    Trained,
    assert_trained_alike,
    is_at_rest,
    loss_of,
    own_batches,
    reference,
    train,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CYCLES = 2_000_000
"""About a millisecond: far longer than anything the tiny models compute."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process alone, over NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """Rank 0 of 8 that do not exist: only shapes and sizes mean anything."""
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def on_device(case: Case, **options: Any) -> nn.Module:
    return fsdp.fully_shard(case.model().cuda(), auto_wrap_policy=case.policy, **options)


def batches(case: Case, steps: int = 3) -> list[list[Tensor]]:
    return [[batch.cuda() for batch in of_step] for of_step in own_batches(case, 0, steps)]


def to_host(trained: Trained) -> Trained:
    gradients = [{name: None if g is None else g.cpu() for name, g in one.items()} for one in trained.gradients]
    return Trained(gradients, {name: weight.cpu() for name, weight in trained.weights.items()})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["net", "net in layers", "net in float64", "tied"])
@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"prefetch": 3}], ids=str)
def test_the_device_trains_as_the_host_does(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    found = to_host(train(on_device(case, **options), batches(case)))
    # kernels of the device sum in another order: some ten roundings of 2^-24
    assert_trained_alike(found, reference(case, 1), within=1e-12 if case.dtype is torch.float64 else 5e-6)


def delayed(
    enter: Callable[[DeviceStreams], AbstractContextManager[Any]],
) -> Callable[[DeviceStreams], AbstractContextManager[Any]]:
    """The same stream, which first does nothing for a long time."""

    @contextmanager
    def entered(streams: DeviceStreams) -> Iterator[None]:
        with enter(streams):
            torch.cuda._sleep(CYCLES)
            yield

    return entered


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("slow", ["gathering", "reducing", "landing", "computing", "optimizer"])
@pytest.mark.parametrize("name", ["net", "net in layers"])
def test_no_delay_on_any_stream_changes_a_bit(slow: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads too early, or overwrites too soon, meets old or foreign bytes where a stream is late."""
    case = CASES[name]
    wanted = to_host(train(on_device(case), batches(case, 4)))
    if slow in ("gathering", "reducing", "landing"):
        monkeypatch.setattr(DeviceStreams, slow, delayed(getattr(DeviceStreams, slow)))
    model = on_device(case)
    if slow == "computing":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))
                module.register_full_backward_hook(lambda *_: torch.cuda._sleep(CYCLES))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        steps = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if slow == "optimizer":
            steps.register_step_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))
        return steps

    found = to_host(train(model, batches(case, 4), optimizer))
    assert_trained_alike(found, wanted, within=0)
    assert is_at_rest(model)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["net in layers"]
    wanted = to_host(train(on_device(case), batches(case, 4)))
    monkeypatch.setenv(DELAYS, str(seed))
    assert_trained_alike(to_host(train(on_device(case), batches(case, 4))), wanted, within=0)


@pytest.mark.usefixtures("one_rank")
def test_after_the_first_steps_the_host_waits_for_nothing() -> None:
    case = CASES["net"]
    model = on_device(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [one for of_step in batches(case, 4) for one in of_step]

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()

    for batch in data[:2]:
        step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[2:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_peak_of_the_device_is_the_floor(prefetch: int) -> None:
    """Beside what the layout says, autograd holds one block's whole gradients, and activations of one row."""
    width = 256
    block = root_and_block(8, width)[1]
    model = fsdp.fully_shard(make(width).cuda(), auto_wrap_policy={Block}, prefetch=prefetch)
    x = torch.ones(1, 6, device="cuda")

    def step() -> None:
        loss_of(model(x)).backward()
        model.zero_grad()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + shards_of(model)
    assert peak <= 1.05 * (expected_peak(8, width, prefetch) + block.unsharded)
    assert fsdp.memory_bytes(model, peak=True) == expected_peak(8, width, prefetch)
    assert torch.cuda.memory_allocated() - before <= 4096


@pytest.mark.usefixtures("one_rank")
def test_a_scaler_skips_the_step_that_overflows() -> None:
    case = CASES["net"]
    model = on_device(case, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fsdp.ShardedGradScaler(model, init_scale=2.0**10, growth_interval=100)
    scales = []
    for spoil in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(case.batch(0, 0).cuda()))).backward()
        if spoil:
            next(p.grad for p in model.parameters() if p.grad is not None)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_a_save_in_the_background_keeps_what_was_there_and_the_device_draws_on(tmp_path: Path) -> None:
    case = CASES["net"]
    model = on_device(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, batches(case), lambda _: optimizer)
    wanted = fsdp.full_state_dict(model)
    saving = fsdp.save(tmp_path / "a", model, optimizer, async_=True)
    train(model, batches(case), lambda _: optimizer)
    drawn = torch.rand(3, device="cuda")
    saving.wait()
    torch.rand(5, device="cuda")
    fsdp.load(tmp_path / "a", model, optimizer)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in fsdp.full_state_dict(model).items())
