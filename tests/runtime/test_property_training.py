"""Random trees of units, random training programs, random interleavings of the ranks: the numbers of plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import ReductionPolicy
from tests.support.against_plain import check
from tests.support.programs import Backward, Clip, Forward, Step
from tests.support.strategies import programs, trees, world_sizes
from tests.support.summands import Summands
from tests.support.trees import CallSpec, GroupSpec, LeafSpec, TreeSpec


@given(st.data(), world_sizes, st.integers(0, 2**16))
def test_any_program_on_any_tree_trains_like_the_plain_model(data: st.DataObject, world_size: int, seed: int) -> None:
    tree = data.draw(trees(), label="tree")
    program = data.draw(programs(tree), label="program")
    check(tree, program, world_size, seed)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "replayed"])
def test_what_cancels_in_a_gradient_is_counted(kind: str) -> None:
    """The check of the property allows for its rounding."""
    weight, x = nn.Parameter(torch.ones(2)), torch.tensor([3.0, 5.0], requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return weight * x + weight * -x

    loss = (twice(x) if kind == "plain" else checkpoint(twice, x, use_reentrant=kind == "reentrant")).sum()
    summands = Summands()
    with summands.heard():
        loss.backward(retain_graph=kind == "plain")
    assert weight.grad is not None and not weight.grad.any()
    assert summands.counts == {weight: 2} and torch.equal(summands.sizes[weight], torch.tensor([6.0, 10.0]))
    if kind == "plain":  # no hook is left in a graph that is kept
        loss.backward()
        assert summands.counts == {weight: 2}


@pytest.mark.parametrize("order", range(4))
def test_ranks_fail_alike_when_one_of_them_has_launched_a_bucket(order: int) -> None:
    """It is complete on the rank that takes the branch, after the first of two replays; the second one fails on all."""
    branch = GroupSpec((LeafSpec("branch", ranks=(0,), trap=""),), (CallSpec((0,), checkpoint="replayed"),))
    tree = TreeSpec(branch, ("parts.0",), options=(("reduction", ReductionPolicy(bucket_cap_mb=0.0001)),), width=5)
    trained = [(Forward(slot), Backward((slot,)), Step()) for slot in range(2)]
    failed = (Forward(2), Forward(3), Backward((2, 3), fault=("forward", "parts.0", 1)))
    check(tree, (*trained[0], *trained[1], *failed, Clip(0.1, 2.0), *trained[0]), 2, order)
