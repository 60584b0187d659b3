"""Programs that compute on a stream of their own, and a backward that fails there with reductions in flight.

Nothing writes late to the memory that it releases, and the next steps have the bits of the host.
"""

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.device.test_races import STRATEGIES
from tests.support.accelerator.device import NAME, load
from tests.support.accelerator.failed_backward import (
    CASES,
    FEW_CASES,
    FEW_SCHEDULES,
    SCHEDULES,
    Failed,
    cleaned_up_elsewhere,
    fail,
    model_of,
    step,
    taken_after_a_failure,
)
from tests.support.accelerator.stories import first_difference
from tests.support.accelerator.world import run
from tests.support.everything import EVERYTHING

load()
torch.set_num_threads(1)


@pytest.mark.parametrize(("strategy", "option"), CASES if EVERYTHING else FEW_CASES)
def test_nothing_writes_late_to_memory_that_was_handed_out_again(strategy: str, option: str) -> None:
    """After the error the program takes all memory that was released."""
    for scheduler, seed in SCHEDULES if EVERYTHING else FEW_SCHEDULES:
        for overwritten, handed_out in taken_after_a_failure(strategy, option, scheduler, seed):
            assert overwritten == 0, f"{scheduler.name}, seed {seed}"
            assert handed_out or (strategy, option) == ("NO_SHARD", "units alone"), "nothing was in flight"


@pytest.mark.parametrize("stays", [True, False], ids=["on its own stream", "on the default stream"])
@pytest.mark.parametrize(("strategy", "option"), CASES if EVERYTHING else FEW_CASES)
def test_the_next_steps_have_the_bits_of_the_host(strategy: str, option: str, stays: bool) -> None:
    """The program stays on its own stream after the error, or has left it before the clean-up."""

    def on_host(rank: int) -> dict[str, Tensor]:
        model, optimizer = model_of(strategy, option)
        step(model, optimizer, 0)
        fail(model)
        return go_on(model, optimizer)

    def on_device(rank: int) -> dict[str, Tensor]:
        device, module = torch.device(NAME, rank), torch.get_device_module(NAME)
        own = module.Stream(device)
        failed[rank] = Failed()
        with torch.device(device):
            with module.stream(own):
                model, optimizer = model_of(strategy, option)
                step(model, optimizer, 0)
                fail(model)
                if stays:
                    return go_on(model, optimizer)
            return go_on(model, optimizer)

    size = STRATEGIES[strategy][0]
    wanted = fsdp.simulate(size, on_host)
    for scheduler, seed in SCHEDULES if EVERYTHING else FEW_SCHEDULES:
        with cleaned_up_elsewhere() as failed:
            found = run(size, on_device, scheduler, seed)
        assert first_difference(found, wanted) is None, f"{scheduler.name}, seed {seed}"


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Train on; return the full weights, on the host."""
    for number in range(2, 4):
        step(model, optimizer, number)
    return {name: value.cpu() for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}
