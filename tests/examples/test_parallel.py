"""The example of several dimensions trains as one process, in the products that fit four processes."""

from argparse import Namespace
from itertools import product
from pathlib import Path

import parallel
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fsdp
from tests.support.everything import EVERYTHING
from tests.support.jobs import run_alone, run_job

SCRIPT = Path(__file__).parents[2] / "examples" / "parallel.py"
PRODUCTS = ["--tp 2", "--pp 2 --ep 2", "--ep 2 --tp 2", "--ep 2 --cp 2", "--tp 2 --pp 2"]


@pytest.mark.gloo
@pytest.mark.parametrize("ways", PRODUCTS)
def test_a_product_of_dimensions_trains_as_one_process(ways: str, tmp_path: Path) -> None:
    ended = run_job(SCRIPT, *ways.split(), "--compare", "--steps", 4, size=4, cwd=tmp_path)
    assert ended.status == 0, ended.output + ended.errors
    assert "on 4 processes (cpu, gloo), dp " in ended.output
    assert "one process has the same losses" in ended.output


@pytest.mark.parametrize("size", [4, 8])
def test_every_product_trains_as_one_process_in_the_simulated_world(size: int) -> None:
    alone = {experts: parallel.train_alone(Namespace(ep=1 + experts, steps=2)) for experts in (False, True)}
    ways = [Namespace(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, steps=2) for dp, tp, pp, cp, ep in product((1, 2, 4, 8), repeat=5)]
    ways = [way for way in ways if parallel.fits(way, size)]
    assert len(ways) == {4: 15, 8: 32}[size]
    # by default every other way of four ranks; and of eight those that no fewer have, with experts
    few = ways[::2] if size == 4 else [way for way in ways if way.ep == 2 == max(way.dp, way.tp, way.pp, way.cp)]
    for seed, way in enumerate(ways if EVERYTHING else few):
        for found in fsdp.simulate(size, lambda rank, way=way: parallel.train(way, torch.device("cpu")), seed):
            assert found == pytest.approx(alone[way.ep > 1], rel=parallel.SAME), way


@pytest.mark.gloo
def test_a_product_that_does_not_fit_the_processes_is_refused(tmp_path: Path) -> None:
    ended = run_alone(SCRIPT, "--tp", "3", cwd=tmp_path)
    assert ended.status == 2
    assert "dp * tp * pp * cp must be 1, the number of processes" in ended.errors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_attention_in_a_ring_is_that_of_one_process(ranks: int) -> None:
    def given() -> list[Tensor]:
        generator = torch.Generator().manual_seed(ranks)
        return [torch.randn(2, 3, 12, 4, generator=generator) for _ in range(4)]

    def around(rank: int) -> list[Tensor]:
        query, key, value, grad = (one.chunk(ranks, dim=2)[rank] for one in given())
        inputs = [one.clone().requires_grad_() for one in (query, key, value)]
        mixed: Tensor = parallel.RingAttention.apply(*inputs, dist.group.WORLD)
        mixed.backward(grad)
        return [mixed.detach(), *(one.grad for one in inputs if one.grad is not None)]

    query, key, value, grad = given()
    inputs = [one.requires_grad_() for one in (query, key, value)]
    mixed = F.scaled_dot_product_attention(*inputs, is_causal=True)
    mixed.backward(grad)
    wanted = [mixed.detach(), *(one.grad for one in inputs)]
    found = zip(*fsdp.simulate(ranks, around), strict=True)
    for parts, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=2), one, rtol=1e-6, atol=1e-6)
