"""What a step costs in exact numbers may fall and must not grow: operations, collectives, bytes, alignment.

A change that lowers a number lowers its ceiling here as well. Gathers, reductions and wire bytes of every strategy stand in
tests/runtime/test_counts.py, padding and alignment of real models in test_wire.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import host
import pytest
import torch
from common import alone
from simulated_link import Link, SimulatedGroup, joined

import fsdp
from tests.support.models import ALONE, Block, Net, loss_of

WORLD = 8
CEILINGS = [
    # contender, tensors in a unit: added to the bare model's, per unit, in forward and in backward; and in clip_grad_norm_, once
    ("ours", 1, 2, 18, 11),
    ("ours", 12, 2, 18, 11),
    # the cut of the reduced gradients is one call; inside it dispatches a slice and a view of each, in 5 µs for 4 instead of 8
    ("ours", 32, 2, 24, 11),
    ("ours_no_shard", 12, 0, 36, 10),
]


@pytest.fixture
def group() -> Iterator[None]:
    """Rank 0 of 8, and nothing is sent."""
    with alone(WORLD):
        yield


@pytest.mark.parametrize(("contender", "tensors", "forward", "backward", "clip"), CEILINGS)
def test_a_unit_dispatches_no_more_operations(
    group: None, monkeypatch: pytest.MonkeyPatch, contender: str, tensors: int, forward: int, backward: int, clip: int
) -> None:
    monkeypatch.setattr(host, "COUNTERS", {"dispatched": host.COUNTERS["dispatched"]})
    settings = host.Settings((), 0, tensors, WORLD, 8, 1, 1)
    bare, found = (host.count(name, settings)["dispatched"] for name in ("bare", contender))
    added = {phase: found[phase]["per_unit"] - bare[phase]["per_unit"] for phase in host.PHASES}
    assert added["forward"] <= forward, found["forward"]["operations_per_unit"]
    assert added["backward"] <= backward, found["backward"]["operations_per_unit"]
    assert added["clip"] <= 0 and found["clip"]["fixed"] <= clip, found["clip"]
    # an optimizer steps what this rank holds
    assert added["step"] <= 0


def test_clipping_takes_one_collective_whatever_the_number_of_parameters() -> None:
    link = Link(1e12, 0.0)
    with joined(link, WORLD):
        for width in (4, 40):
            model = fsdp.fully_shard(Net(2, width), auto_wrap_policy={Block})
            loss_of(model(torch.ones(2, 6))).backward()
            link.reset()
            fsdp.clip_grad_norm_(model, 1.0)
            assert link.collectives.total() <= 1


def test_every_chunk_that_travels_begins_at_a_multiple_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = SimulatedGroup._launch
    travelled = []

    def look(self: SimulatedGroup, kind: str, unsharded: Sequence[torch.Tensor], result: Any, times: int = 1) -> Any:
        if kind in ("all_gather", "all_to_all", "reduce_scatter"):
            travelled.extend((kind, tensor.data_ptr() % 16, tensor.nbytes // WORLD % 16) for tensor in unsharded)
        return launch(self, kind, unsharded, result, times)

    # sizes that nothing divides, and bf16 beside fp32
    half = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with joined(Link(1e12, 0.0), WORLD):
        monkeypatch.setattr(SimulatedGroup, "_launch", look)
        for policy in (None, half):
            model = fsdp.fully_shard(Net(3, 7), auto_wrap_policy={Block}, mp_policy=policy, reduction=ALONE)
            travelled.clear()
            for _ in range(2):
                loss_of(model(torch.ones(2, 6))).backward()
            assert len(travelled) == 2 * (4 + 3 + 4), "units are gathered twice, the root once, and all are reduced once"
            assert all(pointer == chunk == 0 for _, pointer, chunk in travelled), travelled
