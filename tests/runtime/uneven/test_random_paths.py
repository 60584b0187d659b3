"""Random programs in which each rank draws its own path have the numbers of a single process that averages over the ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp
from fsdp import ReductionPolicy
from tests.support.everything import EVERYTHING
from tests.support.paths import OPTIONS, check, draw_program, sharded


@settings(max_examples=2_000 if EVERYTHING else 15)
@given(st.integers(0, 2**31), st.integers(0, len(OPTIONS)), st.integers(2, 4), st.integers(0, 2**16))
def test_any_program_trains_like_a_single_process(number: int, option: int, ranks: int, seed: int) -> None:
    check(number, option, ranks, seed)


@pytest.mark.parametrize("number", range(3 if EVERYTHING else 1))
def test_deterministic_sums_have_the_same_bits_whatever_ranks_have_learned(number: int) -> None:
    """The first run meets where the second follows the common path; the interleavings of the ranks differ too."""
    program = [step._replace(clips=False) for step in draw_program(number, 3)]  # the norm is summed shard by shard
    policy = ReductionPolicy(deterministic=True)
    runs = [
        fsdp.simulate(3, partial(sharded, program=program, reduction=policy, **kind), seed) for seed, kind in enumerate(KINDS)
    ]
    for one in runs[1:]:
        for name, weight in runs[0][0][1].items():
            assert torch.equal(weight, one[0][1][name]), name


KINDS: list[dict[str, Any]] = [
    {},
    {"prefetch": 3},
    {"sharding_strategy": "SHARD_GRADIENTS"},
    {"sharding_strategy": "NO_SHARD"},
]
