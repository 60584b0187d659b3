"""Each stream of the engine is given the work that it is for, and no other."""

from collections import Counter

import pytest
import torch

from tests.support.accelerator.device import NAME, Scheduler, configure, counted, load
from tests.support.accelerator.placement import CASES, misplaced

load()
torch.set_num_threads(1)


def test_kernels_and_allocations_are_counted_by_stream() -> None:
    configure(Scheduler.LAZY)
    module = torch.get_device_module(NAME)
    side = module.Stream()
    x = torch.ones(4, device=NAME)
    with module.stream(side):
        y = x.clone()
        y.mul_(2.0)
    # torch makes a clone of an allocation and a copy
    assert counted(0) == {0: Counter(allocation=1, fill_=1), side.stream_id: Counter(allocation=1, copy_=1, mul=1)}


@pytest.mark.parametrize("name", CASES)
def test_each_stream_is_given_its_work(name: str) -> None:
    assert misplaced(name) is None
