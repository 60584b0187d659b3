"""fsdp.summon_full_params: full parameters that are lent, what is written back, and what is refused inside."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.compat.fairscale import FullyShardedDataParallel as FAIRSCALE
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP1
from tests.support.models import (
    CASES,
    Block,
    Case,
    X,
    assert_close,
    is_at_rest,
    join,
    join_all,
    local,
    loss_of,
    make_net,
    two_units,
    world_log,
    wrap,
)
from tests.support.ranks import on_ranks
from tests.support.states import STATEFUL, assert_same_state, assert_state


class TestSummon:
    @STATEFUL
    @on_ranks(3)
    def test_the_same_objects_show_the_full_parameters(self, rank: int, case: Case) -> None:
        model = wrap(case)
        before = dict(model.named_parameters())
        with fsdp.summon_full_params(model):
            assert all(p is before[name] for name, p in model.named_parameters())
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert_same_state(found, {name: p.detach() for name, p in case.model().named_parameters()})
        assert is_at_rest(model)

    @pytest.mark.parametrize("writeback", [True, False])
    @on_ranks(3)
    def test_changes_are_kept_only_when_asked(self, rank: int, writeback: bool) -> None:
        model = wrap(CASES["tied"])
        with fsdp.summon_full_params(model, writeback=writeback), torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        plain = CASES["tied"].model().state_dict()
        assert_state(model, {name: tensor + writeback for name, tensor in plain.items()})

    @pytest.mark.parametrize("writeback", [True, False])
    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
    @on_ranks(2)
    def test_an_evaluation_inside_computes_with_what_is_shown_communicates_nothing_and_changes_nothing(
        self, rank: int, strategy: str, writeback: bool
    ) -> None:
        model, plain = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, sharding_strategy=strategy), make_net()
        with fsdp.summon_full_params(model, writeback=writeback), torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.add_(1)
            before = len(world_log())
            torch.testing.assert_close(model(X), plain(X))
            assert len(world_log()) == before
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(X.T)
        plain = plain if writeback else make_net()
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            loss_of(one(X)).backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X))

    @on_ranks(2)
    def test_an_exception_inside_discards_the_changes(self, rank: int) -> None:
        model = wrap(CASES["net"])
        with pytest.raises(KeyError), fsdp.summon_full_params(model), torch.no_grad():
            for p in model.parameters():
                p.zero_()
            raise KeyError
        assert_state(model, make_net().state_dict())

    def test_each_rank_keeps_its_own_part_of_what_it_wrote(self) -> None:
        def fn(rank: int) -> Tensor:
            model = fsdp.fully_shard(nn.Linear(2, 4, bias=False))
            with fsdp.summon_full_params(model), torch.no_grad():
                model.weight.fill_(rank)
            return model.weight.detach().clone()

        weight = join(fsdp.simulate(2, fn), torch.Size((4, 2)))
        assert weight is not None
        assert weight.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]

    @on_ranks(2)
    def test_gradients_are_set_aside_and_come_back(self, rank: int) -> None:
        model = wrap(CASES["net"])
        loss_of(model(X)).backward()
        before = [p.grad for p in model.parameters()]
        with fsdp.summon_full_params(model):
            assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))

    @on_ranks(2)
    def test_full_parameters_have_their_own_precision(self, rank: int) -> None:
        model = wrap(CASES["net"], mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with fsdp.summon_full_params(model):
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert_same_state(found, {name: p.detach() for name, p in make_net().named_parameters()})

    @on_ranks(2)
    def test_a_part_of_the_model_can_be_summoned(self, rank: int) -> None:
        model = wrap(CASES["net"], in_place=True)
        with fsdp.summon_full_params(model.blocks[1]):
            held = [sum(local(p).numel() for p in block.parameters()) for block in model.blocks]
            assert held[1] == sum(p.numel() for p in make_net().blocks[1].parameters())
            assert held[0] < held[1] > held[2]
        assert len(world_log("all_gather")) == 1

    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
    def test_between_forward_and_backward_it_changes_no_gradient(self, strategy: str) -> None:
        def run(model: nn.Module, peek: bool) -> dict[str, Any]:
            loss = loss_of(model(X))
            if peek:
                with fsdp.summon_full_params(model, writeback=False):
                    assert all(p.isfinite().all() for p in model.parameters())
            loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}

        by_rank = fsdp.simulate(2, lambda rank: run(wrap(CASES["net"], in_place=True, sharding_strategy=strategy), peek=True))
        plain = make_net()
        assert_close(join_all(by_rank, dict(plain.named_parameters())), run(plain, peek=False))


@on_ranks(2)
def test_data_assigned_inside_a_summon_is_written_back_or_refused(rank: int) -> None:
    model = two_units()
    with fsdp.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
    with pytest.raises(fsdp.ShardingError, match="Copy into it instead"), fsdp.summon_full_params(model):
        model.module[0].weight.data = torch.zeros(2, 2)
    assert is_at_rest(model)
    assert min(float(value.min()) for value in fsdp.full_state_dict(model, rank0_only=False).values()) == 7.0


@on_ranks(2)
def test_data_assigned_before_a_summon_is_seen_inside_and_changes_of_it_stay(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter.data, 3.0)
    with fsdp.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            assert bool((parameter == 3).all())
            parameter.mul_(2)
    state = fsdp.full_state_dict(model, rank0_only=False)
    assert all(bool((state[name] == 6).all()) for name, _ in model.named_parameters())
    next(model.parameters()).data = torch.zeros(7, 7, 7)
    with pytest.raises(fsdp.ShardingError, match="was replaced from outside"), fsdp.summon_full_params(model):
        pass


@on_ranks(2)
def test_to_local_inside_a_summon_is_refused(rank: int) -> None:
    """What is lent is not this rank's part, and its gradients are set aside."""
    model = fsdp.fully_shard(nn.Linear(4, 4))
    with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="leave summon_full_params first"):
        fsdp.to_local(model.weight)
    fsdp.to_local(model.weight).square().sum().backward()
    assert is_at_rest(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD"])
@on_ranks(2)
def test_changes_in_inference_mode_are_kept_and_trained_with(rank: int, strategy: str) -> None:
    model, plain = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, sharding_strategy=strategy), make_net()
    with torch.inference_mode(), fsdp.summon_full_params(model):
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(2)
        torch.testing.assert_close(model(X), plain(X))
    for one in (model, plain):
        loss_of(one(X)).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_state(model, plain.state_dict())


@pytest.mark.filterwarnings("ignore:The passed-in `module` is on CPU")
@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("engine", [fsdp, FSDP1, FAIRSCALE])
@on_ranks(2)
def test_a_unit_that_is_refused_keeps_all_from_writing(rank: int, engine: Any, refused: int) -> None:
    wrap_one = {fsdp: fsdp.fully_shard, FSDP1: partial(FSDP1, use_orig_params=True)}.get(engine, engine)
    model = wrap_one(nn.Sequential(wrap_one(nn.Linear(2, 2)), nn.Linear(2, 2)))
    with engine.summon_full_params(model):
        before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(fsdp.ShardingError, match="Copy into it instead"), engine.summon_full_params(model), torch.no_grad():
        for p in model.parameters():
            p.add_(1)
        [*model.parameters()][2 * refused].data = torch.zeros(3, 3)
    with engine.summon_full_params(model):
        assert all(map(torch.equal, model.parameters(), before))


@on_ranks(2)
def test_a_flag_that_is_none_is_refused_before_anything_is_gathered(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4))
    wrong: Any = torch.ones(2)
    with pytest.raises(fsdp.ShardingError, match="writeback must be True"), fsdp.summon_full_params(model, writeback=wrong):
        raise AssertionError("entered")
    model(torch.ones(2, 4))
