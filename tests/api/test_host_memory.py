"""`fsdp.offload` and `fsdp.onload` on the host, where nothing moves and the same calls are refused.

That a device is free meanwhile is tested in tests/device/on_accelerator/check_phases.py.
"""

import pytest
import torch
from torch import nn

import fsdp


def trained(phases: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 4), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if phases:
            fsdp.offload(model, optimizer)
            for call in (lambda: model(torch.ones(2, 4)), optimizer.step, model.state_dict, lambda: fsdp.full_state_dict(model)):
                with pytest.raises(fsdp.ShardingError, match=r"call fsdp\.onload\(model\) first"):
                    call()
            fsdp.onload(model)
    return fsdp.full_state_dict(model, rank0_only=False)


def test_training_goes_on_with_the_same_bits_and_calls_in_between_are_refused() -> None:
    wanted = fsdp.simulate(2, lambda rank: trained(False))
    found = fsdp.simulate(2, lambda rank: trained(True))
    for mine, plain in zip(found, wanted, strict=True):
        assert mine.keys() == plain.keys() and mine
        assert all(torch.equal(mine[name], value) for name, value in plain.items())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_that_were_put_away_together_come_back_together(order: tuple[int, int]) -> None:
    def fn(rank: int) -> None:
        models = nn.ModuleList(fsdp.fully_shard(nn.Linear(4, 4)) for _ in range(2))
        fsdp.offload(models)
        for number in order:
            fsdp.onload(models[number])
        for model in models:
            model(torch.ones(2, 4)).sum().backward()

    fsdp.simulate(2, fn)


def test_a_model_is_not_wrapped_again_meanwhile() -> None:
    def fn(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(4, 4))
        fsdp.offload(model)
        with pytest.raises(fsdp.ShardingError, match=r"call fsdp\.onload\(model\) first"):
            fsdp.fully_shard(nn.Sequential(model))
        fsdp.onload(model)
        fsdp.fully_shard(nn.Sequential(model))(torch.ones(2, 4)).sum().backward()

    fsdp.simulate(2, fn)
