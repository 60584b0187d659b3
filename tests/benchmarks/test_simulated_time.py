"""The benchmarks over a simulated wire: when it is free again, and that the scripts write what they print."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import overlap
import pytest
import scale
import torch
import torch.distributed as dist
import where
from simulated_link import Link, joined

import fsdp
from tests.support.models import ALONE


@pytest.fixture
def link() -> Iterator[Link]:
    """A kilobyte a millisecond, and a millisecond for each collective; rank 0 of 4."""
    one = Link(bandwidth=1e6, latency=1e-3)
    with joined(one, 4):
        yield one


def test_what_is_launched_together_goes_one_after_another_whatever_the_group(link: Link) -> None:
    groups = [dist.group.WORLD, dist.new_group([0, 1, 2, 3])]
    begin = time.perf_counter()
    # a gather of 4 KB: 3 KB are received
    works = [dist.all_gather_into_tensor(torch.empty(1024), torch.empty(256), group=group, async_op=True) for group in groups]
    assert not works[0].is_completed()
    works[1].wait()
    assert time.perf_counter() - begin >= 2 * (1e-3 + 3e-3)
    assert works[0].is_completed()
    assert link.busy == pytest.approx(2 * 4.072e-3)
    assert link.collectives == {"all_gather": 2} and link.received == {"all_gather": 2 * 3072}


def test_a_future_is_kept_when_the_wire_is_done_and_an_all_reduce_goes_twice(link: Link) -> None:
    tensor = torch.ones(256)
    begin = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (found,) = work.get_future().wait()
    assert time.perf_counter() - begin >= link.busy == pytest.approx(1e-3 + 2 * 768 / 1e6)
    assert found is tensor


def test_another_fake_group_is_torchs_own_again() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with joined(Link(1e9, 0.0), 2):
        assert type(dist.group.WORLD).__name__ == "SimulatedGroup"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert type(dist.group.WORLD).__name__ != "SimulatedGroup"
    dist.destroy_process_group()


def test_ours_sends_over_the_wire_what_it_sends_in_the_simulated_world(link: Link) -> None:
    model = fsdp.fully_shard(overlap.Model(2, 8, 0.0), auto_wrap_policy={overlap.Block}, reduction=ALONE)
    for _ in range(2):
        found = overlap.run(model, torch.ones(1, 8), link)
    unsharded = 2 * 4 * 64 * 4 + 4 * 16  # the root's own 8 elements: padded to 16 bytes a rank
    assert link.received["all_gather"] == (unsharded + 2 * 4 * 64 * 4) * 3 / 4
    assert link.received["all_to_all"] == unsharded * 3 / 4
    assert found["collectives"] == 5 + 3 + 1, "gathers, reductions, and which gradients came"


def test_overlap_writes_what_it_prints(report_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--loads", "0.5", "2", "--repeats", "1", "--blocks", "2", "--milliseconds", "2", "--width", "16")
    report = report_of(overlap, *tiny)
    assert {line["contender"] for line in report["lines"]} == set(overlap.NAMES)
    assert all(line["seconds"] >= 0.95 * report["settings"]["computing"] for line in report["lines"]), "nobody computes in less"
    by = {(line["contender"], line["load"]): line for line in report["lines"]}
    # with the same communication in relation to computing, whatever the bandwidth
    assert by["ours", 2.0]["communication"] == pytest.approx(2 * report["settings"]["computing"], rel=0.05)
    assert by["bare", 2.0]["communication"] == 0
    assert "| load | bare | ddp |" in capsys.readouterr().out


def test_scale_writes_what_it_prints(report_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--units", "4", "8", "--world", "4", "64", "--units-of-worlds", "4", "--repeats", "1")
    report = report_of(scale, *tiny, "--contenders", "ours", scale.OVER_NCCL)
    assert len(report["cases"]) == 2 * 3
    found = {(one["settings"]["contender"], one["settings"]["units"], one["settings"]["world"]): one for one in report["cases"]}
    # exact: a unit is a unit, however many there are and whatever the number of ranks
    few, many, far = (found[scale.OVER_NCCL, *case]["dispatched"] for case in ((4, 4), (8, 4), (4, 64)))
    assert few == far
    assert (many - few) / 4 <= few / 4
    # on the CPU a reduction adds what 64 ranks sent in more operations than what 4 sent
    assert found["ours", 4, 64]["dispatched"] > found["ours", 4, 4]["dispatched"]
    assert "| ours | 8 | 4 |" in capsys.readouterr().out


def test_where_names_the_files_and_functions(report_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(where, "--contenders", "ours", "--units", "3", "--more", "16", "--width", "4")
    functions = report["functions"]["ours"]
    places = {row["place"] for phase in functions.values() for row in phase}
    assert {"C++", "fsdp/runtime/engine", "fsdp/reduction/reducer"} <= places
    assert not [place for place in places if place.startswith("/")]
    assert "| fsdp/runtime/engine |" in (said := capsys.readouterr().out)
    # what one more tensor costs: `nn.ParameterList` reads it once, autograd calls one hook for it
    calls = {(row["place"], row["function"]): row["calls"] for row in report["of_one_more_tensor"]["functions"]["ours"]}
    assert calls["torch/nn/modules/container", "__getitem__"] == calls["fsdp/runtime/backward_hooks", "accumulated"] == 1
    assert "ours: " in said and "for one more tensor, from 12 to 16" in said
    assert where.place_of(fsdp.__file__) == "fsdp/__init__"
    assert where.place_of(dist.__file__) == "torch/distributed/__init__"
    assert where.place_of("/somewhere/else.py") == "else"
