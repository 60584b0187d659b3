"""fsdp.EMA: a sharded moving average beside torch's AveragedModel on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp
from tests.support.models import CASES, OPTIONS, Block, Case, Operations, make_net, step
from tests.support.ranks import on_ranks
from tests.support.states import assert_near


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def full(model: nn.Module) -> dict[str, Any]:
    return fsdp.full_state_dict(model, rank0_only=False)


def plain_average(case: Case, steps: int, decay: float) -> tuple[nn.Module, AveragedModel]:
    model = case.model()
    optimizer, average = sgd(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(model)  # its first update copies
    for number in range(steps):
        step(model, optimizer, case.batch(0, number))
        average.update_parameters(model)
    return model, average


def check_average(case: Case, options: dict[str, Any]) -> None:
    plain, average = plain_average(case, 3, 0.9)
    model = fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy, **options)
    optimizer, ema = sgd(model), fsdp.EMA(model, 0.9)
    for number in range(3):
        step(model, optimizer, case.batch(0, number))
        ema.update()
        with ema.averaged_weights(), torch.no_grad():  # in the middle of a training, which goes on as if it had not been
            model(case.batch(0, 7))
    batch = case.batch(0, 9)
    with ema.averaged_weights(), torch.no_grad():
        assert_near(full(model), average.module.state_dict())
        torch.testing.assert_close(model(batch), average(batch), rtol=1e-4, atol=1e-5)
    assert_near(full(model), plain.state_dict())
    torch.testing.assert_close(model(batch), plain(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["net", "tied", "recurrent", "odd"])
def test_it_averages_as_torch_does_on_one_process(name: str) -> None:
    fsdp.simulate(2, lambda rank: check_average(CASES[name], {}))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_averages_every_kind_of_shard(options: dict[str, Any]) -> None:
    fsdp.simulate(3, lambda rank: check_average(CASES["net"], options))


@on_ranks(2)
def test_an_average_in_float32_keeps_what_weights_in_bfloat16_lose(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4).to(torch.bfloat16))
    with torch.no_grad():
        model.weight.fill_(1)
    exact, same = fsdp.EMA(model, 0.999, dtype=torch.float32), fsdp.EMA(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(2)
    for _ in range(3):
        exact.update()
        same.update()
    found = {one: one.state_dict()["averages"]["weight"].local for one in (exact, same)}
    assert found[exact].dtype == torch.float32
    assert torch.allclose(found[exact], torch.tensor(2 - 0.999**3))
    assert torch.equal(found[same], torch.ones_like(found[same])), "bf16 cannot hold so small a step"
    with exact.averaged_weights():
        assert model.weight.dtype == torch.bfloat16
    assert torch.equal(fsdp.to_local(model.weight), torch.full_like(fsdp.to_local(model.weight), 2))


@on_ranks(2)
def test_buffers_are_copied_and_parameters_of_ignored_modules_averaged(rank: int) -> None:
    model = make_net()
    fsdp.fully_shard(model, auto_wrap_policy={Block}, ignored_modules=[model.leave])
    bias, ema = model.leave.bias.detach().clone(), fsdp.EMA(model, 0.5)
    with torch.no_grad():
        model.leave.bias.add_(1)
        model.scale.fill_(3)
    ema.update()
    model.scale.fill_(4)
    with ema.averaged_weights():
        assert torch.allclose(model.leave.bias, bias + 0.5)
        assert torch.equal(model.scale, torch.full_like(model.scale, 3))
    assert torch.allclose(model.leave.bias, bias + 1)
    assert torch.equal(model.scale, torch.full_like(model.scale, 4))


@on_ranks(2)
def test_an_update_is_one_foreach_call_and_communicates_nothing(rank: int) -> None:
    model = fsdp.fully_shard(make_net().requires_grad_(True), auto_wrap_policy={Block})
    ema = fsdp.EMA(model, 0.9)
    if rank:
        return  # an update that communicated would wait for this rank for ever
    with Operations() as called:
        ema.update()
    computing = [name for name in called.names if "detach" not in name]
    assert computing == ["aten._foreach_lerp_.Scalar", "aten.copy_.default", "aten.copy_.default"], "and two buffers"


def test_it_is_saved_with_its_model_and_loaded_on_other_ranks(tmp_path: Path) -> None:
    case = CASES["net"]
    _, average = plain_average(case, 2, 0.9)

    def save(rank: int) -> None:
        model = fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy)
        optimizer, ema = sgd(model), fsdp.EMA(model, 0.9)
        for number in range(2):
            step(model, optimizer, case.batch(0, number))
            ema.update()
        again = fsdp.EMA(model, 0.9)
        with pytest.raises(fsdp.ShardingError, match="the EMA is of another model"):
            fsdp.save(tmp_path / "other", fsdp.fully_shard(case.model()), ema=ema)
        fsdp.save(tmp_path / "without", model)
        with pytest.raises(fsdp.ShardingError, match="holds no averages of weights; leave ema out"):
            fsdp.load(tmp_path / "without", model, ema=ema)
        again.load_state_dict(ema.state_dict())
        assert again.updates == 2
        with again.averaged_weights():
            assert_near(full(model), average.module.state_dict())
        fsdp.save(tmp_path / "own", model, ema=ema)

    def load(rank: int) -> None:
        model = fsdp.fully_shard(case.model())
        ema = fsdp.EMA(model, 0.9)
        fsdp.load(tmp_path / "own", model, ema=ema)
        assert ema.updates == 2
        with ema.averaged_weights():
            assert_near(full(model), average.module.state_dict())

    fsdp.simulate(2, save)
    fsdp.simulate(3, load)


@on_ranks(1)
def test_torchs_distributed_checkpoint_saves_and_loads_it(rank: int, tmp_path: Path) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    ema, other = fsdp.EMA(model, 0.5), fsdp.EMA(model, 0.5)
    with torch.no_grad():
        model.enter.weight.add_(1)
    ema.update()
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"ema": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["ema"])
    assert other.updates == 1
    with ema.averaged_weights():
        expected = full(model)
    with other.averaged_weights():
        assert_near(full(model), expected)


@on_ranks(2)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    ema, before = fsdp.EMA(model, 0.9), full(model)
    for change, text in (
        (lambda state: state.pop("updates"), "Missing"),
        (lambda state: state["averages"].pop("enter.bias"), "Missing"),
        (lambda state: state["averages"].update({"leave.bias": torch.ones(3)}), "has shape"),
        (lambda state: state["averages"].update({"leave.bias": torch.ones(2, dtype=torch.float64)}), "would lose"),
    ):
        state = ema.state_dict()
        state["averages"] = {**state["averages"], "enter.weight": torch.ones(8, 6)}
        change(state)
        with pytest.raises(fsdp.ShardingError, match=text):
            ema.load_state_dict(state)
    with ema.averaged_weights():
        assert_near(full(model), before)


@on_ranks(2)
def test_wrong_arguments_and_moments_are_refused(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    for wrong in (1.5, -0.1, "0.9", True):
        with pytest.raises(fsdp.ShardingError, match="decay must be a number from 0 to 1"):
            fsdp.EMA(model, wrong)
    with pytest.raises(fsdp.ShardingError, match="dtype must be a floating-point"):
        fsdp.EMA(model, dtype=torch.int32)
    ema = fsdp.EMA(model)
    with ema.averaged_weights(), pytest.raises(fsdp.ShardingError, match="leave averaged_weights first"):
        ema.update()
    with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="outside any forward"):
        ema.update()
    fsdp.unwrap(model)
    fsdp.fully_shard(model)
    with pytest.raises(fsdp.ShardingError, match="was wrapped anew since the average was made"):
        ema.update()
