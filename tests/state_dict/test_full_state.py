"""Full parameters: read, lent, changed, saved and loaded into any other world."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import (
    CASES,
    Block,
    Case,
    assert_close,
    is_at_rest,
    join,
    loss_of,
    make_net,
    weights_of,
    world_log,
    wrap,
)

X = torch.linspace(-1, 1, 12).view(2, 6)
STATEFUL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Names, order, dtypes, shapes and every bit."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(found[name], tensor), name


def shifted(case: Case) -> dict[str, Tensor]:
    """A state dict of the plain module that differs from a fresh one everywhere."""
    return {name: tensor + 1 for name, tensor in case.model().state_dict().items()}


class TestFullStateDict:
    @STATEFUL
    @pytest.mark.parametrize("size", [1, 3])
    def test_it_is_the_plain_modules(self, case: Case, size: int) -> None:
        for state in fsdp.simulate(size, lambda rank: fsdp.full_state_dict(wrap(case), rank0_only=False)):
            assert_same_state(state, dict(case.model().state_dict()))

    def test_a_plain_module_can_load_it(self) -> None:
        state = fsdp.simulate(2, lambda rank: fsdp.full_state_dict(wrap(CASES["tied"]), rank0_only=False))[0]
        CASES["tied"].make().load_state_dict(state)

    def test_it_is_a_copy(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            for tensor in fsdp.full_state_dict(model, rank0_only=False).values():
                tensor.zero_()
            assert_same_state(fsdp.full_state_dict(model, rank0_only=False), dict(make_net().state_dict()))

        fsdp.simulate(2, fn)

    def test_it_leaves_gradients_and_memory_alone(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            loss_of(model(X)).backward()
            before = [(p.grad, p.data_ptr()) for p in model.parameters()]
            held = fsdp.memory_bytes(model)
            fsdp.full_state_dict(model, rank0_only=False)
            assert all(p.grad is grad and p.data_ptr() == at for p, (grad, at) in zip(model.parameters(), before, strict=True))
            assert fsdp.memory_bytes(model) == held
            assert is_at_rest(model)

        fsdp.simulate(2, fn)

    def test_it_sends_each_element_once_and_holds_one_range_at_a_time(self) -> None:
        def fn(rank: int) -> int:
            model = wrap(CASES["net"])
            fsdp.full_state_dict(model)
            assert [call.label for call in world_log("broadcast")][::2] == ["Net", "blocks.0", "blocks.1", "blocks.2"]
            return sum(call.received for call in world_log())

        received = sum(fsdp.simulate(2, fn))
        exact = sum(p.numel() * 4 for p in make_net().parameters())
        assert exact <= received <= 1.05 * exact

    def test_other_ranks_get_nothing_unless_asked(self) -> None:
        states = fsdp.simulate(3, lambda rank: fsdp.full_state_dict(wrap(CASES["odd"])))
        assert_same_state(states[0], dict(CASES["odd"].model().state_dict()))
        assert states[1:] == [{}, {}]

    def test_extra_state_of_modules_is_a_part_of_it(self) -> None:
        class Counting(nn.Linear):
            count = 0

            def get_extra_state(self) -> int:
                return self.count

            def set_extra_state(self, count: int) -> None:
                self.count = count

        def fn(rank: int) -> None:
            model, other = (fsdp.fully_shard(nn.Sequential(Counting(3, 3))) for _ in range(2))
            model[0].count = 7
            state = fsdp.full_state_dict(model)
            assert rank != 0 or list(state) == ["0.weight", "0.bias", "0._extra_state"]
            fsdp.load_full_state_dict(other, state if rank == 0 else None)
            assert other[0].count == 7

        fsdp.simulate(2, fn)


class TestIterFullParams:
    @STATEFUL
    @pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
    def test_it_streams_every_parameter_once(self, case: Case, bucket_bytes: int) -> None:
        def fn(rank: int) -> dict[str, Tensor]:
            found = [(n, t.clone()) for n, t in fsdp.iter_full_params(wrap(case), bucket_bytes=bucket_bytes)]
            assert len(found) == len(dict(found))
            return dict(found)

        for found in fsdp.simulate(3, fn):
            wanted = {name: p.detach() for name, p in case.model().named_parameters()}
            assert_same_state({name: found[name] for name in wanted}, wanted)
            assert len(found) == len(wanted)

    def test_parameters_of_ignored_modules_come_along_in_the_dtype_asked_for(self) -> None:
        def fn(rank: int) -> None:
            net = make_net()
            model = fsdp.fully_shard(net, ignored_modules={net.leave})
            found = {name: t.clone() for name, t in fsdp.iter_full_params(model, dtype=torch.bfloat16)}
            assert {t.dtype for t in found.values()} == {torch.bfloat16}
            assert torch.equal(found["leave.weight"], make_net().leave.weight.to(torch.bfloat16))
            assert set(found) == {name for name, _ in make_net().named_parameters()}

        fsdp.simulate(2, fn)

    def test_a_bucket_holds_a_parameter_or_what_was_asked_for(self) -> None:
        def fn(rank: int) -> None:
            sizes = [t.untyped_storage().nbytes() for _, t in fsdp.iter_full_params(wrap(CASES["net"]), bucket_bytes=256)]
            largest = max(p.numel() * 4 for p in make_net().parameters())
            assert max(sizes) == largest > 256

        fsdp.simulate(2, fn)

    def test_no_bytes_are_refused(self) -> None:
        def fn(rank: int) -> None:
            with pytest.raises(fsdp.ShardingError, match="bucket_bytes is 0"):
                next(fsdp.iter_full_params(wrap(CASES["net"]), bucket_bytes=0))

        fsdp.simulate(1, fn)


class TestLoading:
    @STATEFUL
    @pytest.mark.parametrize(("saving", "loading"), [(1, 4), (4, 1), (2, 3), (3, 2)])
    def test_a_state_goes_from_one_world_into_another(self, case: Case, saving: int, loading: int) -> None:
        def save(rank: int) -> dict[str, Tensor]:
            model = wrap(case)
            fsdp.load_full_state_dict(model, shifted(case))
            return fsdp.full_state_dict(model, rank0_only=False)

        def load(rank: int) -> dict[str, Tensor]:
            model = wrap(case)
            before = len(world_log())
            fsdp.load_full_state_dict(model, saved)
            assert [call.kind for call in world_log()[before:]] == ["gather_objects"], "it moves more than word that all fits"
            return fsdp.full_state_dict(model, rank0_only=False)

        saved = fsdp.simulate(saving, save)[0]
        assert_same_state(saved, shifted(case))
        for state in fsdp.simulate(loading, load):
            assert_same_state(state, shifted(case))

    @STATEFUL
    def test_rank_0_alone_may_have_it(self, case: Case) -> None:
        def fn(rank: int) -> dict[str, Tensor]:
            model = wrap(case)
            fsdp.load_full_state_dict(model, shifted(case) if rank == 0 else None)
            return fsdp.full_state_dict(model, rank0_only=False)

        for state in fsdp.simulate(3, fn):
            assert_same_state(state, shifted(case))

    def test_rank_0_must_have_it(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            with pytest.raises(fsdp.ShardingError, match="rank 0 must give the state dict"):
                fsdp.load_full_state_dict(model, shifted(CASES["net"]) if rank == 1 else None)

        fsdp.simulate(2, fn)

    def test_what_one_rank_refuses_no_rank_loads(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            before, state = weights_of(model), shifted(CASES["net"])
            if rank == 1:
                del state["leave.bias"]
            with pytest.raises(fsdp.ShardingError, match=r"missing \['leave.bias'\]") as refusal:
                fsdp.load_full_state_dict(model, state)
            assert rank == 1 or str(refusal.value).startswith("rank 1: ")
            assert_same_state(weights_of(model), before)

        fsdp.simulate(2, fn)

    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
    def test_the_next_forward_computes_with_what_was_loaded(self, strategy: str) -> None:
        def fn(rank: int) -> Tensor:
            model = wrap(CASES["net"], sharding_strategy=strategy)
            model(X)
            fsdp.load_full_state_dict(model, shifted(CASES["net"]))
            return model(X).detach()

        plain = make_net()
        plain.load_state_dict(shifted(CASES["net"]))
        assert all(torch.allclose(output, plain(X), rtol=1e-6) for output in fsdp.simulate(2, fn))

    def test_it_may_not_happen_inside_a_summon(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            state = fsdp.full_state_dict(model, rank0_only=False)
            text = "call it outside any forward, backward and summon_full_params"
            with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match=text):
                fsdp.load_full_state_dict(model, state)

        fsdp.simulate(2, fn)


class TestSummon:
    @STATEFUL
    def test_the_same_objects_show_the_full_parameters(self, case: Case) -> None:
        def fn(rank: int) -> None:
            model = wrap(case)
            before = dict(model.named_parameters())
            with fsdp.summon_full_params(model):
                assert all(p is before[name] for name, p in model.named_parameters())
                found = {name: p.detach().clone() for name, p in model.named_parameters()}
            assert_same_state(found, {name: p.detach() for name, p in case.model().named_parameters()})
            assert is_at_rest(model)

        fsdp.simulate(3, fn)

    @pytest.mark.parametrize("writeback", [True, False])
    def test_changes_are_kept_only_when_asked(self, writeback: bool) -> None:
        def fn(rank: int) -> dict[str, Tensor]:
            model = wrap(CASES["tied"])
            with fsdp.summon_full_params(model, writeback=writeback), torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            return fsdp.full_state_dict(model, rank0_only=False)

        plain = CASES["tied"].model().state_dict()
        for state in fsdp.simulate(3, fn):
            assert_same_state(state, {name: tensor + writeback for name, tensor in plain.items()})

    def test_an_exception_inside_discards_the_changes(self) -> None:
        def fn(rank: int) -> dict[str, Tensor]:
            model = wrap(CASES["net"])
            with pytest.raises(KeyError), fsdp.summon_full_params(model), torch.no_grad():
                for p in model.parameters():
                    p.zero_()
                raise KeyError
            return fsdp.full_state_dict(model, rank0_only=False)

        for state in fsdp.simulate(2, fn):
            assert_same_state(state, dict(make_net().state_dict()))

    def test_each_rank_keeps_its_own_part_of_what_it_wrote(self) -> None:
        def fn(rank: int) -> Tensor:
            model = fsdp.fully_shard(nn.Linear(2, 4, bias=False))
            with fsdp.summon_full_params(model), torch.no_grad():
                model.weight.fill_(rank)
            return model.weight.detach().clone()

        weight = join(fsdp.simulate(2, fn), torch.Size((4, 2)))
        assert weight is not None
        assert weight.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]

    def test_a_forward_inside_does_not_communicate_and_computes_with_what_is_seen(self) -> None:
        def fn(rank: int) -> Tensor:
            model = wrap(CASES["net"])
            with fsdp.summon_full_params(model, writeback=False), torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
                before = len(world_log())
                output = model(X)
                assert len(world_log()) == before
            return output

        plain = make_net()
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(1)
        assert all(torch.allclose(output, plain(X), rtol=1e-6) for output in fsdp.simulate(2, fn))

    def test_gradients_are_set_aside_and_come_back(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"])
            loss_of(model(X)).backward()
            before = [p.grad for p in model.parameters()]
            with fsdp.summon_full_params(model):
                assert all(p.grad is None for p in model.parameters())
            assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))

        fsdp.simulate(2, fn)

    def test_parameters_are_lent_in_their_own_precision(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"], mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            with fsdp.summon_full_params(model):
                found = {name: p.detach().clone() for name, p in model.named_parameters()}
            assert_same_state(found, {name: p.detach() for name, p in make_net().named_parameters()})

        fsdp.simulate(2, fn)

    def test_a_part_of_the_model_can_be_summoned(self) -> None:
        def fn(rank: int) -> None:
            model = wrap(CASES["net"], in_place=True)
            with fsdp.summon_full_params(model.blocks[1]):
                held = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
                assert held[1] == sum(p.numel() for p in make_net().blocks[1].parameters())
                assert held[0] < held[1] > held[2]
            assert len(world_log("all_gather")) == 1

        fsdp.simulate(2, fn)

    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
    def test_between_forward_and_backward_it_changes_no_gradient(self, strategy: str) -> None:
        def run(model: nn.Module, peek: bool) -> dict[str, Any]:
            loss = loss_of(model(X))
            if peek:
                with fsdp.summon_full_params(model, writeback=False):
                    assert all(p.isfinite().all() for p in model.parameters())
            loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}

        def fn(rank: int) -> dict[str, Any]:
            return run(fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, sharding_strategy=strategy), peek=True)

        by_rank, plain = fsdp.simulate(2, fn), make_net()
        found = {name: join([one[name] for one in by_rank], p.shape) for name, p in plain.named_parameters()}
        assert_close(found, run(plain, peek=False))
