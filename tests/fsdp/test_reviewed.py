"""Uses that were once silently wrong: each gives the plain model's answer, or a sentence."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import simulate
from tests.support.models import is_at_rest


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def wrapped() -> fsdp.FullyShardedDataParallel:
    return fsdp.FullyShardedDataParallel(two_layers(), auto_wrap_policy={nn.Linear})


def test_a_scaler_steps_an_optimizer_of_which_this_rank_holds_nothing() -> None:
    def one_rank(rank: int) -> float:
        model = fsdp.fully_shard(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = fsdp.ShardedGradScaler(model, init_scale=4.0)
        scaler.scale(model(torch.full((1, 1), float("inf") if rank == 0 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert simulate(2, one_rank) == [2.0, 2.0]


def test_loading_between_forward_and_backward_is_refused_like_any_change() -> None:
    def one_rank(rank: int) -> None:
        model = wrapped()
        state = fsdp.full_state_dict(model, rank0_only=False)
        loss = model(torch.ones(1, 3)).sum()
        fsdp.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
        with pytest.raises(fsdp.ShardingError, match="changed in place between its forward and its backward"):
            loss.backward()

    simulate(2, one_rank)


def test_data_assigned_inside_a_summon_is_written_back_or_refused() -> None:
    def one_rank(rank: int) -> float:
        model = wrapped()
        with fsdp.summon_full_params(model):
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter, 7.0)
        with pytest.raises(fsdp.ShardingError, match="Copy into it instead"), fsdp.summon_full_params(model):
            model.module[0].weight.data = torch.zeros(2, 2)
        assert is_at_rest(model)
        return min(float(value.min()) for value in fsdp.full_state_dict(model, rank0_only=False).values())

    assert simulate(2, one_rank) == [7.0, 7.0]


def test_clipping_inside_a_summon_is_refused_and_loses_nothing() -> None:
    def one_rank(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Linear(1, 8, bias=False))
        with fsdp.no_sync(model):
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        with fsdp.summon_full_params(model, writeback=False), pytest.raises(fsdp.ShardingError, match="outside any forward"):
            fsdp.clip_grad_norm_(model, 1.0)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten()

    assert torch.cat(simulate(2, one_rank)).tolist() == [3.0] * 8


def test_clipping_parameters_that_are_not_sharded_is_refused() -> None:
    def one_rank(rank: int) -> None:
        model = nn.ModuleDict({"sharded": fsdp.fully_shard(nn.Linear(2, 2)), "plain": nn.Linear(2, 2)})
        with pytest.raises(fsdp.ShardingError, match=r"'plain\.weight' is not sharded"):
            fsdp.clip_grad_norm_(model, 1.0)

    simulate(2, one_rank)


def test_a_parameter_put_in_a_slot_after_wrapping_is_refused() -> None:
    def one_rank(rank: int) -> None:
        model = wrapped()
        model.module[1].weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(fsdp.ShardingError, match=r"Linear\.weight in unit '1' was replaced by another parameter"):
            model(torch.ones(1, 3))

    simulate(2, one_rank)


def test_what_no_sync_kept_is_reduced_though_it_was_frozen_since() -> None:
    def one_rank(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Linear(1, 8))
        model(torch.ones(1, 1)).sum().backward()
        with fsdp.no_sync(model):
            model(torch.ones(1, 1)).sum().backward()
        model.weight.requires_grad_(False)
        model(torch.ones(1, 1)).sum().backward()
        return torch.empty(0) if model.weight.grad is None else model.weight.grad.flatten()

    assert torch.cat(simulate(2, one_rank)).tolist() == [2.0] * 8


def test_gradients_kept_under_no_sync_are_in_the_books() -> None:
    def one_rank(rank: int) -> None:
        model = wrapped()
        before = fsdp.memory_bytes(model)
        with fsdp.no_sync(model):
            model(torch.ones(1, 3)).sum().backward()
        assert fsdp.memory_bytes(model) == before + 2 * (9 + 3) * 4
        model(torch.ones(1, 3)).sum().backward()
        assert fsdp.memory_bytes(model) == before

    simulate(2, one_rank)


@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_reshard_after_forward_is_a_bool(value: object) -> None:
    def one_rank(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match="reshard_after_forward must be True, False or None"):
            fsdp.fully_shard(nn.Linear(2, 2), reshard_after_forward=value)

    simulate(1, one_rank)


def test_a_class_as_a_policy_is_refused() -> None:
    def one_rank(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match=r"put it in a set: \{Linear\}"):
            fsdp.fully_shard(two_layers(), auto_wrap_policy=nn.Linear)

    simulate(1, one_rank)


def test_a_policy_that_raises_on_one_rank_reaches_all() -> None:
    def one_rank(rank: int) -> str:
        def policy(name: str, module: nn.Module) -> bool:
            return bool({0: True}[rank])

        with pytest.raises((KeyError, fsdp.ShardingError)) as raised:
            fsdp.fully_shard(two_layers(), auto_wrap_policy=policy)
        return str(raised.value)

    texts = simulate(2, one_rank)
    assert texts[1] == "1" and "rank 1 could not wrap its module: KeyError(1)" in texts[0]


@dataclasses.dataclass
class Result:
    value: Tensor
    name: str


class ReturnsADataclass(nn.Linear):
    def forward(self, x: Result) -> Result:
        return Result(super().forward(x.value), x.name)


def test_precision_reaches_into_dataclasses() -> None:
    def one_rank(rank: int) -> Result:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        result: Result = fsdp.fully_shard(ReturnsADataclass(2, 2), mp_policy=policy)(Result(torch.ones(1, 2), "x"))
        return result

    assert [(one.value.dtype, one.name) for one in simulate(2, one_rank)] == [(torch.float32, "x")] * 2


def test_data_assigned_outside_is_what_the_next_forward_gathers_also_ahead() -> None:
    """The unit that is gathered ahead of its forward once was gathered before the new data was noticed."""

    def one_rank(rank: int) -> float:
        model = wrapped()
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        return float(model(torch.ones(1, 3)).abs().sum())

    assert simulate(2, one_rank) == [0.0, 0.0]
