"""`fsdp.stats` has the numbers of the last step, the log says what the engine decides, and a profile names the phases."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp
from tests.support.models import Block, X, loss_of, make_net, world_log
from tests.support.ranks import on_ranks


def step(model: nn.Module) -> None:
    loss_of(model(X)).backward()


@on_ranks(2)
def test_counts_are_those_of_the_last_step(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    assert not any(number for name, number in fsdp.stats(model).items() if not name.startswith("bytes"))
    for _ in range(2):
        step(model)
    before = len(world_log())
    with fsdp.no_sync(model):
        step(model)
    step(model)
    calls = world_log()[before:]
    kinds = Counter(call.kind for call in calls)
    with torch.no_grad():
        model(X)  # belongs to no step
    found = fsdp.stats(model)
    assert (found["step"], found["gathers"], found["reductions"]) == (3, kinds["all_gather"], kinds["reduce_scatter"])
    received = sum(call.received for call in calls if call.kind == "all_gather")
    assert received < found["gather_bytes"] and received == pytest.approx(found["gather_bytes"] / 2)
    assert found["reduce_bytes"] == sum(one.bytes for one in fsdp.reducer_stats(model))
    assert 0 < found["gather_wait_s"] < found["forward_s"] + found["backward_s"]
    assert (found["bytes_held"], found["bytes_peak"]) == (fsdp.memory_bytes(model), fsdp.memory_bytes(model, peak=True))
    assert all(isinstance(number, int | float) for number in found.values())


@on_ranks(2)
def test_the_numbers_of_several_roots_are_added(rank: int) -> None:
    both = nn.Sequential(*(fsdp.fully_shard(nn.Linear(6, 6)) for _ in range(2)))
    both(X).sum().backward()
    found = fsdp.stats(both)
    assert (found["step"], found["gathers"], found["reductions"]) == (1, 2, 2)


def test_a_step_that_was_abandoned_is_not_counted() -> None:
    def one_rank(rank: int) -> float:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
        handle = model.blocks[1].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
        handle.remove()
        step(model)
        return fsdp.stats(model)["gathers"]

    gathers = 4 + 3  # the root's own unit stays gathered
    assert fsdp.simulate(1, one_rank) == [gathers]


def test_the_log_says_what_is_learned_and_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
        for _ in range(3):
            step(model)
        with torch.no_grad():
            model.blocks[0](X @ torch.ones(6, 8))
        model.blocks[1].register_forward_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            step(model)

    with caplog.at_level(logging.INFO, "fsdp"):
        fsdp.simulate(1, one_rank)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told[:3] == [
        ("INFO", "order of reductions learned from rank 0: ['blocks.2', 'blocks.1', 'blocks.0', 'Net']"),
        ("INFO", "forward of 'Net': schedule learned: ['Net', 'blocks.0', 'blocks.1', 'blocks.2']"),
        ("INFO", "backward of 'Net': schedule learned: ['blocks.2', 'blocks.1', 'blocks.0']"),
    ]
    assert ("INFO", "forward of 'Net': order changed: ['blocks.0']") in told
    assert told[-1][0] == "WARNING" and "rank 0 abandons the step in unit 'Net': ZeroDivisionError" in told[-1][1]


def test_without_a_configuration_the_log_is_silent(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    logging.getLogger("fsdp").warning("nobody reads this")
    assert "nobody" not in "".join(capfd.readouterr())


@on_ranks(1)
def test_a_profile_names_the_phases_and_nothing_is_named_without_one(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    step(model)
    handlers = _handlers(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(model)
    names = {event.name for event in profiled.events()}
    assert {"fsdp::all_gather blocks.1", "fsdp::wait_all_gather blocks.2", "fsdp::reduce_grads blocks.0"} <= names
    step(model)
    assert _handlers(model) == handlers


def _handlers(model: nn.Module) -> object:
    from fsdp.runtime.registry import engines_in

    (engine,) = engines_in(model, "test")
    return dict(engine._action_handlers), [dict(one) for one in engine._effect_handlers]
