"""A trace says exactly what the engine did, in a format that others read, and changes nothing."""

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import engines_in
from tests.support.models import Block, Operations, X, loss_of, make_net, world_log
from tests.support.ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "full shard": {},
    "gathered once": {"sharding_strategy": "SHARD_GRAD_OP"},
    "replicated": {"sharding_strategy": "NO_SHARD"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)},
}


def step(model: nn.Module) -> None:
    loss_of(model(X)).backward()


def engine_of(model: nn.Module) -> Engine:
    (engine,) = engines_in(model, "test")
    return engine


def traced(options: dict[str, Any], steps: int = 2, size: int = 4) -> list[tuple[dict[str, Any], list[Any], int]]:
    """For each rank: the trace of some steps, the calls of the simulated world meanwhile, and the peak of the engine's bytes."""

    def one_rank(rank: int) -> tuple[dict[str, Any], list[Any], int]:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, **options)
        step(model)
        before = len(world_log())
        with fsdp.trace(model) as trace:
            for _ in range(steps):
                step(model)
        return trace.document(), world_log()[before:], fsdp.memory_bytes(model, peak=True)

    return fsdp.simulate(size, one_rank)


def of_category(document: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event.get("cat") == category]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_collectives_are_those_of_the_world_and_the_peak_of_bytes_is_that_of_the_engine(options: dict[str, Any]) -> None:
    for document, calls, peak in traced(options):
        found = [event["args"] for event in of_category(document, "collective")]
        assert Counter((one["collective"], one["unit"]) for one in found) == Counter((one.kind, one.label) for one in calls)
        assert sum(one["received"] for one in found) == sum(one.received for one in calls)
        assert max(sum(event["args"].values()) for event in of_category(document, "memory")) == peak


def test_a_file_has_what_the_format_asks_for(tmp_path: Path) -> None:
    def one_rank(rank: int) -> Path:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
        with fsdp.trace(model) as trace:
            step(model)
        return trace.save(tmp_path / "trace-{rank}.json")

    paths = fsdp.simulate(2, one_rank)
    assert [path.name for path in paths] == ["trace-0.json", "trace-1.json"]
    for rank, path in enumerate(paths):
        document = json.loads(path.read_text(encoding="utf-8"))
        for event in document["traceEvents"]:
            assert event["ph"] in "XCiM" and event["pid"] == rank and isinstance(event["tid"], int) and event["name"]
            assert event["ph"] == "M" or event["ts"] >= 0
            assert event["ph"] != "X" or event["dur"] >= 0
            assert event["ph"] != "i" or event["s"] == "t"
            assert event["ph"] != "C" or all(isinstance(count, int) for count in event["args"].values())
        lanes = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
        assert {"steps", "computing", "engine", "events", "gathers", "reductions", "other collectives"} <= lanes


def test_slices_of_a_lane_are_nested_or_apart() -> None:
    for document, _, _ in traced({"prefetch": 2}):
        for thread in {event["tid"] for event in document["traceEvents"]}:
            ends: list[float] = []
            for event in [one for one in document["traceEvents"] if one["ph"] == "X" and one["tid"] == thread]:
                while ends and ends[-1] <= event["ts"] + 1e-3:
                    ends.pop()
                assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3
                ends.append(event["ts"] + event["dur"])


def test_events_are_those_of_the_story_and_every_unit_computes() -> None:
    def one_rank(rank: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
        with fsdp.trace(model) as trace:
            step(model)
        stories = {one.unit: [event.name for event in one.story] for one in engine_of(model).root.lifecycles}
        return trace.document(), stories

    document, stories = fsdp.simulate(2, one_rank)[0]
    found: dict[str, list[str]] = {unit: [] for unit in stories}
    for event in of_category(document, "event"):
        found[event["args"]["unit"]].append(event["args"]["event"])
    assert found == stories
    computed = {(event["args"]["kind"], event["args"]["unit"]) for event in of_category(document, "compute")}
    assert computed == {(kind, unit) for kind in ("forward", "backward") for unit in stories}


@on_ranks(1)
def test_steps_are_counted_and_an_abandoned_one_is_marked(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    with fsdp.trace(model) as trace:
        with pytest.raises(ZeroDivisionError):
            handle = model.blocks[1].register_forward_hook(lambda *_: 1 // 0)
            step(model)
        handle.remove()
        step(model)
        step(model)
    assert [event["args"]["abandoned"] for event in of_category(trace.document(), "step")] == [True, False, False]


@on_ranks(2)
def test_accumulated_backwards_belong_to_one_step(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    with fsdp.trace(model) as trace:
        for _ in range(2):
            with fsdp.no_sync(model):
                step(model)
            step(model)
    assert len(of_category(trace.document(), "step")) == 2


@on_ranks(1)
def test_a_trace_dispatches_no_operation_and_changes_no_gradient(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    found = []
    for _ in range(2):
        step(model)
    for is_traced in (False, True):
        model.zero_grad()
        with Operations() as called:
            if is_traced:
                with fsdp.trace(model):
                    step(model)
            else:
                step(model)
        found.append((called.names, [parameter.grad.clone() for parameter in model.parameters()]))
    (plain, one), (other, two) = found
    assert plain == other and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@on_ranks(2)
def test_after_a_trace_everything_is_as_it_was(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    engine = engine_of(model)
    handlers, effects = dict(engine._action_handlers), [dict(one) for one in engine._effect_handlers]
    with pytest.raises(ZeroDivisionError), fsdp.trace(model):
        step(model)
        raise ZeroDivisionError
    assert engine._action_handlers == handlers and list(engine._effect_handlers) == effects
    assert type(engine.tracker.held) is dict
    assert all(type(one._story) is deque and one.story for one in engine.root.lifecycles)
    assert all(comm.recorder is None for comm in engine.comms.each().values() if comm.size > 1)


def test_wrong_uses_are_refused() -> None:
    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
        with fsdp.trace(model) as trace:
            with pytest.raises(fsdp.ShardingError, match=r"this model is traced already; leave the outer"), fsdp.trace(model):
                pass
            with pytest.raises(fsdp.ShardingError, match=r"trace.save: the trace still runs"):
                trace.save("anywhere.json")
        with pytest.raises(fsdp.ShardingError, match=r"trace.save: .*missing/trace.json: No such file"):
            trace.save("missing/trace.json")
        output = model(X)
        model.blocks[0].register_forward_pre_hook(lambda *_: fsdp.trace(model).__enter__())
        with pytest.raises(fsdp.ShardingError, match="trace: call it outside any forward"):
            model(X)
        del output

    fsdp.simulate(1, one_rank)
    with pytest.raises(fsdp.ShardingError, match="trace: Linear contains no unit"), fsdp.trace(nn.Linear(2, 2)):
        pass
