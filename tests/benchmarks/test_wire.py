"""What `benchmarks/wire.py` computes is what the engine does, and the bars hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import wire
from configurations import CONFIGURATIONS, UnitShapes, units_of

import fsdp
from tests.support.models import Block, Net, loss_of, world_log

PUBLISHED = {"Llama-3-8B": 8_030_261_248, "Qwen3-4B": 4_022_468_096, "Mixtral-8x7B": 46_702_792_704}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_models_have_as_many_parameters_as_those_that_are_published(name: str) -> None:
    model = CONFIGURATIONS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert sum(unit.numel for unit in units_of(model)) == PUBLISHED[name]
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("strategy", "world"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("SHARD_GRADIENTS", 2), ("SHARD_OPTIMIZER", 3)]
)
def test_the_bytes_are_those_that_the_engine_sends(strategy: str, world: int) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def one_rank(rank: int) -> int:
        model = fsdp.fully_shard(Net(), auto_wrap_policy={Block}, mp_policy=policy, sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            before = len(world_log())
            loss_of(model(torch.ones(2, 6))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(call.received for call in world_log()[before:] if call.kind in ("all_gather", "reduce_scatter"))

    units = units_of(Net(), Block)
    row = wire.measure("net", units, strategy, world)
    flags = 2 * sum(len(unit.shapes) for unit in units) * (world - 1) / world
    assert fsdp.simulate(world, one_rank) == [row.received - flags] * world


WORST = {"Llama-3-8B": (373, 0.025863), "Qwen3-4B": (423, 0.027298), "Mixtral-8x7B": (506, 0.009644)}
"""Of 8 to 512 ranks, and how much is padding there; it may only become less."""


@pytest.mark.parametrize("model", WORST)
def test_the_script_writes_what_it_prints_and_the_bars_hold(
    report_of: Callable[..., Any], capsys: pytest.CaptureFixture[str], model: str
) -> None:
    report = report_of(wire, "--models", model, "--world", "8", "512")
    # HYBRID_SHARD shares shards among 8 ranks, which the worst number need not be a multiple of
    worst, padding = WORST[model]
    assert len(report["rows"]) == len(wire.STRATEGIES) * 3 - (worst % wire.HOST != 0)
    assert report["worst_padding"][model]["padding"] <= padding
    assert [bar["holds"] for bar in report["bars"]] == [True] * 3
    assert f"| {model} | FULL_SHARD | 512 |" in capsys.readouterr().out


def test_padding_of_others_is_counted_by_their_own_rules() -> None:
    unit = UnitShapes("two", ((8, 3), (16,)))
    # over 5 ranks: 8 rows are padded to 10, 16 to 20; and 40 elements in a row need nothing
    assert wire.fsdp2_padded(unit, 5) == 10 * 3 + 20
    assert wire.fsdp1_padded(unit, 5) == 40
    assert wire.fsdp1_padded(unit, 7) == 42
