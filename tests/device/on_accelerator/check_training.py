"""Training on the pretend accelerator has the bits of training on the host, under every scheduler, and makes no host wait."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.runtime.engine import Engine
from fsdp.runtime.passes import Passes
from tests.device.test_races import BLOCKS, OPTIONS, STRATEGIES, Broken, fail_backward
from tests.support.accelerator.device import NAME, Scheduler, failing_allocation, host_waits, load
from tests.support.accelerator.stories import STORIES, first_difference, on_accelerator, on_host
from tests.support.accelerator.world import run
from tests.support.everything import EVERYTHING
from tests.support.models import Block, Net, loss_of

load()
torch.set_num_threads(1)
NOT_HERE: Final = {
    "parameters pointed elsewhere": "torch refuses `p.data = x` for a tensor subclass of a device type that it does not ship",
    "sparse gradients": "torch has no sparse tensors of a device type that it does not ship",
}
"""Stories that this device type cannot run, and why."""
SEEDS: Final = {Scheduler.EAGER: (0,), Scheduler.LAZY: (0,), Scheduler.RANDOM: (1, 2), Scheduler.STARVE: (0, 1, 2, 3, 4, 5)}
WAITS: Final = {"NO_SHARD": 1}
"""Host waits in a step. Under NO_SHARD the host reads which gradients came late on other ranks."""


def schedules(index: int, of: tuple[Scheduler, ...] = tuple(Scheduler)) -> list[tuple[Scheduler, int]]:
    """The schedulers and seeds of a case: each scheduler with all of its seeds, or by default these with one seed each."""
    if EVERYTHING:
        return [(scheduler, seed) for scheduler, seeds in SEEDS.items() for seed in seeds]
    return [(scheduler, SEEDS[scheduler][index % len(SEEDS[scheduler])]) for scheduler in of]


def cases(*chosen: str) -> list[tuple[str, str]]:
    """Stories and strategies. By default each story has one of three chosen strategies, and training has them all."""
    names = [name for name in STORIES if name not in NOT_HERE]
    if EVERYTHING:
        return [(story, strategy) for story in names for strategy in STRATEGIES]
    return [("training", strategy) for strategy in STRATEGIES] + [
        (story, chosen[number % 3]) for number, story in enumerate(names) if story != "training"
    ]


@pytest.mark.parametrize(("story", "strategy"), cases("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
def test_a_story_has_the_bits_of_the_host(story: str, strategy: str) -> None:
    size, options = STRATEGIES[strategy]
    wanted = on_host(STORIES[story], size, **options)
    few = tuple(Scheduler) if story == "training" else (Scheduler.RANDOM, Scheduler.STARVE)
    for scheduler, seed in schedules(len(story), few):
        found = on_accelerator(STORIES[story], size, scheduler, seed, **options)
        assert first_difference(found, wanted) is None, f"{scheduler.name}, seed {seed}"


@pytest.mark.parametrize("name", [name for name in OPTIONS if EVERYTHING or name in ("bf16", "deep prefetch", "in pieces")])
def test_an_option_has_the_bits_of_the_host(name: str) -> None:
    options = {**OPTIONS[name], **({"sharding_strategy": "NO_SHARD"} if name == "unused" else {})}
    wanted = on_host(STORIES["training"], 2, **options)
    for scheduler, seed in schedules(len(name), (Scheduler.LAZY, Scheduler.STARVE)):
        found = on_accelerator(STORIES["training"], 2, scheduler, seed, **options)
        assert first_difference(found, wanted) is None, f"{scheduler.name}, seed {seed}"


def model_of(rank: int, device: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = fsdp.fully_shard(Net(BLOCKS).to(device), auto_wrap_policy={Block}, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rank: int, step: int, device: str) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_makes_no_host_wait(strategy: str) -> None:
    size, options = STRATEGIES[strategy]

    def waits(rank: int) -> list[int]:
        device = f"{NAME}:{rank}"
        model, optimizer = model_of(rank, device, **options)
        found = []
        for step in range(4):
            x = batch(rank, step, device)
            before = host_waits(rank)
            loss_of(model(x)).backward()
            fsdp.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(host_waits(rank) - before)
        return found[2:]  # the first steps learn the order of the units

    for found in run(size, waits, Scheduler.RANDOM, 1):
        assert found == [WAITS.get(strategy, 0)] * 2


def steps_with_a_failure(rank: int, number: int, **options: Any) -> tuple[dict[str, Tensor], bool, int]:
    """Three steps. In the second one allocation `number` fails, and the step is repeated from its beginning."""
    device = f"{NAME}:{rank}"
    model, optimizer = model_of(rank, device, **options)
    failed, made = False, 0

    def train(step: int) -> None:
        loss_of(model(batch(rank, step, device))).backward()

    for step in range(3):
        if step == 1:
            with failing_allocation(rank, number) as count:
                try:
                    train(step)
                except torch.OutOfMemoryError:
                    failed = True
                made = count()
            if failed:
                optimizer.zero_grad()
                train(step)
        else:
            train(step)
        optimizer.step()
        optimizer.zero_grad()
    weights = fsdp.full_state_dict(model, rank0_only=False)
    return {name: value.cpu() for name, value in weights.items()}, failed, made


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if EVERYTHING or name in ("FULL_SHARD", "NO_SHARD")])
def test_each_allocation_of_a_step_may_fail_once(strategy: str) -> None:
    """On all ranks alike, as ranks with equal memory run out of it: each raises, and the repeated step loses nothing."""
    size, options = STRATEGIES[strategy]
    never = 1 << 40
    wanted, failed, made = run(size, lambda rank: steps_with_a_failure(rank, never, **options), Scheduler.RANDOM, 1)[0]
    assert not failed and made > 50
    for number in range(0, made, 1 if EVERYTHING else 1 + made // 8):
        found = run(size, lambda rank: steps_with_a_failure(rank, number, **options), Scheduler.RANDOM, number)  # noqa: B023
        for weights, failed, _ in found:
            assert failed, number
            assert all(torch.equal(weights[name], value) for name, value in wanted.items()), number


def _clip(model: nn.Module) -> None:
    fsdp.clip_grad_norm_(model, 1.0)


def _summon(model: nn.Module) -> None:
    with fsdp.summon_full_params(model):
        assert all(p.untyped_storage().nbytes() for p in model.parameters())


def _save_and_load(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def _save_in_full(model: nn.Module) -> None:
    fsdp.load_full_state_dict(model, fsdp.full_state_dict(model, rank0_only=False))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("follows", [None, _clip, _summon, _save_and_load, _save_in_full])
def test_nothing_begins_while_autograd_cleans_up_after_a_backward(
    follows: Callable[[nn.Module], None] | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's thread for a device drops a failed backward when the program goes on already. The clean-up is slow here."""
    clean_up, notify, begun = Passes.on_backward_failed, Engine.notify_peers, [threading.Event(), threading.Event()]

    def clean_up_late(passes: Passes) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):
            begun[passes.engine.comms.world_comm.rank].set()
            time.sleep(0.05)
        clean_up(passes)

    def notify_late(engine: Engine, *args: Any) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):
            time.sleep(0.05)
        notify(engine, *args)

    def weights(rank: int, device: str, fails: bool) -> dict[str, Tensor]:
        model, optimizer = model_of(rank, device)
        for step in range(3):
            x = batch(rank, step, device).requires_grad_()
            if fails and step == 1:
                x.register_hook(fail_backward)
                with pytest.raises(Broken):
                    loss_of(model(x)).backward()
                begun[rank].wait(0.2)  # until the thread is in the middle of it, if it does it
                if follows is not None:
                    follows(model)
                x = batch(rank, step, device).requires_grad_()
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = fsdp.full_state_dict(model, rank0_only=False)
        return {name: value.cpu() for name, value in found.items()}

    wanted = fsdp.simulate(2, lambda rank: weights(rank, "cpu", False))
    monkeypatch.setattr(Passes, "on_backward_failed", clean_up_late)
    monkeypatch.setattr(Engine, "notify_peers", notify_late)
    found = run(2, lambda rank: weights(rank, f"{NAME}:{rank}", True), Scheduler.RANDOM, seed)
    assert first_difference(found, wanted) is None


def test_a_root_without_parameters_has_the_device_of_its_units() -> None:
    """Its messages to other ranks are made there. A group for a device alone would send tensors of the host as copies."""

    def waits(rank: int) -> int:
        device = f"{NAME}:{rank}"
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).to(device)
        fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
        x = batch(rank, 0, device)
        for _ in range(3):  # the first steps learn the order of the units
            before = host_waits(rank)
            model(x).sum().backward()
        return host_waits(rank) - before

    assert run(2, waits, Scheduler.RANDOM, 1) == [0, 0]
