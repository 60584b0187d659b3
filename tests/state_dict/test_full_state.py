"""Full parameters: read, lent, changed, saved and loaded into any other world."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp
from fsdp.compat.ddp import DistributedDataParallel
from fsdp.compat.fully_shard import fully_shard
from fsdp.device.storage import is_base
from fsdp.runtime.registry import unit_ref_of
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict import full_state
from tests.support.everything import some
from tests.support.models import CASES, Case, Counting, X, is_at_rest, local, loss_of, make_net, two_units, world_log, wrap
from tests.support.ranks import on_ranks
from tests.support.states import STATEFUL, assert_same_state, refused_whole, shifted


@on_ranks(2)
def test_hooks_of_modules_are_not_called(rank: int) -> None:
    """What is saved is what the module has, and what is loaded is what was saved, whatever hooks make of either."""

    def hooked() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        model.register_state_dict_post_hook(lambda m, d, *_: d.update({"0.running_var": d["0.running_var"] * 2}))
        model[1].register_load_state_dict_pre_hook(lambda m, d, prefix, *_: d.update({prefix + "bias": d[prefix + "bias"] + 1}))
        return fsdp.fully_shard(model)

    model, other = hooked(), hooked()
    full = fsdp.full_state_dict(model, rank0_only=False)
    assert torch.equal(full["0.running_var"], torch.ones(4))
    fsdp.load_full_state_dict(other, full if rank == 0 else None)
    assert_same_state(fsdp.full_state_dict(other, rank0_only=False), full)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_device_that_is_not_there_is_refused_on_every_rank_and_breaks_no_gather(
    what: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:  # as if the device failed in the first copy
        monkeypatch.setattr(full_state, "agree_on_refusals", lambda *_: None)

    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            loss_of(model(CASES["net"].batch(0, rank))).backward()
            optimizer.step()
            with pytest.raises(Exception, match=r"(?i)cuda|nvidia") if rank == 0 or not late else nullcontext():
                if what == "weights":
                    fsdp.full_state_dict(model, device="cuda:99")
                else:
                    fsdp.full_optim_state_dict(model, optimizer, device="cuda:99")

    fsdp.simulate(2, fn)


class TestFullStateDict:
    @STATEFUL
    @pytest.mark.parametrize("size", [1, 3])
    @on_ranks("size")
    def test_it_is_the_plain_modules(self, rank: int, case: Case, size: int) -> None:
        assert_same_state(fsdp.full_state_dict(wrap(case), rank0_only=False), dict(case.model().state_dict()))

    @on_ranks(2)
    def test_it_is_a_copy(self, rank: int) -> None:
        model = wrap(CASES["net"])
        for tensor in fsdp.full_state_dict(model, rank0_only=False).values():
            tensor.zero_()
        assert_same_state(fsdp.full_state_dict(model, rank0_only=False), dict(make_net().state_dict()))

    @on_ranks(2)
    def test_it_leaves_gradients_and_memory_alone(self, rank: int) -> None:
        model = wrap(CASES["net"])
        loss_of(model(X)).backward()
        before = [(p.grad, p.data_ptr()) for p in model.parameters()]
        held = fsdp.memory_bytes(model)
        fsdp.full_state_dict(model, rank0_only=False)
        assert all(p.grad is grad and p.data_ptr() == at for p, (grad, at) in zip(model.parameters(), before, strict=True))
        assert fsdp.memory_bytes(model) == held
        assert is_at_rest(model)

    def test_it_sends_each_element_once_and_holds_one_range_at_a_time(self) -> None:
        def fn(rank: int) -> int:
            model = wrap(CASES["net"])
            fsdp.full_state_dict(model)
            assert [call.label for call in world_log("broadcast")][::2] == ["Net", "blocks.0", "blocks.1", "blocks.2"]
            return sum(call.received for call in world_log() if call.label != "full_state_dict")  # which asks all first

        received = sum(fsdp.simulate(2, fn))
        exact = sum(p.numel() * 4 for p in make_net().parameters())
        assert exact <= received <= 1.05 * exact

    def test_other_ranks_get_nothing_unless_asked(self) -> None:
        states = fsdp.simulate(3, lambda rank: fsdp.full_state_dict(wrap(CASES["odd"])))
        assert_same_state(states[0], dict(CASES["odd"].model().state_dict()))
        assert states[1:] == [{}, {}]

    @on_ranks(2)
    def test_extra_state_of_modules_is_a_part_of_it(self, rank: int) -> None:
        model, other = (fsdp.fully_shard(nn.Sequential(Counting(3, 3))) for _ in range(2))
        model[0].count = 7
        state = fsdp.full_state_dict(model)
        assert rank != 0 or list(state) == ["0.weight", "0.bias", "0._extra_state"]
        fsdp.load_full_state_dict(other, state if rank == 0 else None)
        assert other[0].count == 7


class TestIterFullParams:
    @STATEFUL
    @pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
    @on_ranks(3)
    def test_it_streams_every_parameter_once(self, rank: int, case: Case, bucket_bytes: int) -> None:
        streamed = [(n, t.clone()) for n, t in fsdp.iter_full_params(wrap(case), bucket_bytes=bucket_bytes)]
        found, wanted = dict(streamed), {name: p.detach() for name, p in case.model().named_parameters()}
        assert_same_state({name: found[name] for name in wanted}, wanted)
        assert len(streamed) == len(found) == len(wanted)

    @on_ranks(2)
    def test_parameters_of_ignored_modules_come_along_in_the_dtype_asked_for(self, rank: int) -> None:
        net = make_net()
        model = fsdp.fully_shard(net, ignored_modules={net.leave})
        found = {name: t.clone() for name, t in fsdp.iter_full_params(model, dtype=torch.bfloat16)}
        assert {t.dtype for t in found.values()} == {torch.bfloat16}
        assert torch.equal(found["leave.weight"], make_net().leave.weight.to(torch.bfloat16))
        assert set(found) == {name for name, _ in make_net().named_parameters()}

    @on_ranks(2)
    def test_a_bucket_holds_a_parameter_or_what_was_asked_for(self, rank: int) -> None:
        sizes = [t.untyped_storage().nbytes() for _, t in fsdp.iter_full_params(wrap(CASES["net"]), bucket_bytes=256)]
        largest = max(p.numel() * 4 for p in make_net().parameters())
        assert max(sizes) == largest > 256

    @pytest.mark.parametrize("given", [{"bucket_bytes": 0}, {"bucket_bytes": "all"}, {"dtype": "meta"}])
    @on_ranks(1)
    def test_no_bytes_and_no_dtype_are_refused(self, rank: int, given: dict[str, object]) -> None:
        ((name, value),) = given.items()
        with pytest.raises(fsdp.ShardingError, match=f"{name} is {value!r}"):
            next(fsdp.iter_full_params(wrap(CASES["net"]), **given))  # type: ignore[arg-type]


class TestLoading:
    @STATEFUL
    @pytest.mark.parametrize(("saving", "loading"), [(2, 3), *some((4, 1), (1, 4), (3, 2))])
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

    @pytest.mark.parametrize(
        "given", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32]
    )
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2])
    @on_ranks(2)
    def test_a_dtype_is_taken_where_nothing_is_lost(self, rank: int, given: torch.dtype, dtype: torch.dtype) -> None:
        about = torch.finfo(given)
        least = about.tiny if given is torch.float8_e8m0fnu else about.tiny * about.eps
        values = torch.tensor([1 + about.eps, about.max, least]).to(given)
        fits = torch.equal(values.to(dtype).double(), values.double())
        net = nn.Module()
        net.register_buffer("scale", torch.zeros(3, dtype=dtype))
        net.weight = nn.Parameter(torch.zeros(4))
        model, state = fsdp.fully_shard(net), {"weight": torch.ones(4), "scale": values}
        if not fits:
            with pytest.raises(fsdp.ShardingError, match=f"'scale' is {given}, the model has {dtype}, which would lose some"):
                fsdp.load_full_state_dict(model, state)
            return
        fsdp.load_full_state_dict(model, state)
        assert torch.equal(net.scale.double(), values.double())

    @on_ranks(2)
    def test_what_one_rank_refuses_no_rank_loads(self, rank: int) -> None:
        model, state = wrap(CASES["net"]), shifted(CASES["net"])
        if rank == 1:
            state["more"] = state.pop("leave.bias")
        with refused_whole(model, r"Missing key\(s\): \['leave.bias'\]. Unexpected key\(s\): \['more'\]") as refusal:
            fsdp.load_full_state_dict(model, state)
        assert rank == 1 or str(refusal.value).startswith("rank 1: ")

    @pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
    @on_ranks(2)
    def test_the_next_forward_computes_with_what_was_loaded(self, rank: int, strategy: str) -> None:
        plain, model = make_net(), wrap(CASES["net"], sharding_strategy=strategy)
        plain.load_state_dict(shifted(CASES["net"]))
        model(X)
        fsdp.load_full_state_dict(model, shifted(CASES["net"]))
        assert torch.allclose(model(X), plain(X), rtol=1e-6)


@on_ranks(2)
def test_loading_between_forward_and_backward_is_refused_like_any_change(rank: int) -> None:
    model = two_units()
    state = fsdp.full_state_dict(model, rank0_only=False)
    loss = model(torch.ones(1, 3)).sum()
    fsdp.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
    with pytest.raises(fsdp.ShardingError, match="changed in place between its forward and its backward"):
        loss.backward()


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "native": fsdp.fully_shard,
    "DTensors": partial(fsdp.fully_shard, dtensors=True),
    "FSDP2": fully_shard,
    "DDP": DistributedDataParallel,
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("door", WRAPPED)
@on_ranks("size")
def test_each_value_of_a_state_dict_has_a_storage_of_its_own(rank: int, door: str, size: int) -> None:
    """What looks for ties by storages, such as the writers of safetensors, would drop all values of a storage but the first."""
    model = WRAPPED[door](make_net())
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        found = get_model_state_dict(model, options=options)
        values = [local(value) for value in found.values() if not isinstance(value, ShardedValue) and value.numel()]
        assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in values)


@pytest.mark.parametrize("door", ["DDP", "DTensors", "FSDP2"])
@on_ranks(2)
def test_values_are_the_memory_of_the_model_and_ties_are_one_storage(rank: int, door: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    WRAPPED[door](model)
    for state in (model.state_dict(), model.state_dict()):
        first, second = (local(state[name]) for name in ("0.weight", "1.weight"))
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    version = model[0].weight._version
    first.fill_(1)
    assert bool((local(model[0].weight) == 1).all())
    assert door != "DDP" or model[0].weight._version > version  # torch counts no changes of the parts of DTensors
    if door == "DDP":  # torch makes no DTensor of a part in inference mode
        with torch.inference_mode():
            model.state_dict()
        assert not model.state_dict()["0.weight"].is_inference()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("door", ["DDP", "DTensors", "FSDP2"])
@on_ranks("size")
def test_values_outlive_the_model_and_the_memory_does_not_outlive_them(rank: int, door: str, size: int) -> None:
    model = nn.Linear(100, 100)
    wrapper = WRAPPED[door](model)
    shard = unit_ref_of(model).unit.flats[0].shard  # type: ignore[union-attr]
    memory, state = weakref.ref(shard), model.state_dict()
    assert is_base(shard)
    wanted = local(state["weight"]).clone()
    del model, wrapper, shard
    gc.collect()
    others = [torch.full_like(wanted, 7) for _ in range(20)]  # in memory that was freed
    assert torch.equal(local(state["weight"]), wanted) and others
    del state
    assert memory() is None


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
@on_ranks(2)
def test_a_buffer_whose_dtype_no_other_can_be_converted_to_comes_from_rank_0(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("packed", torch.full((8,), rank, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    fsdp.fully_shard(model)
    full = fsdp.full_state_dict(model)
    fsdp.load_full_state_dict(model, full if rank == 0 else None)
    assert not bool(model.packed.view(torch.uint8).any())
