"""Both doors: what wrapping leaves as it was, and which unit owns what."""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy

import fsdp
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import Block, Net, Recurrent, Tied, local, loss_of, make_net, units_of
from tests.support.ranks import on_ranks
from tests.support.states import DOORS

OF_CLASSES = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d})
CHOOSE_NOTHING = (ModuleWrapPolicy({nn.Conv2d}), CustomPolicy(lambda module: False), OF_CLASSES, lambda name, module: name == "x")


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("policy", CHOOSE_NOTHING)
def test_a_policy_that_chooses_no_module_warns_with_the_classes_there_are(policy: Any) -> None:
    said = "auto_wrap_policy chooses no module, so all is one unit; the classes with parameters are Block, LayerNorm, Linear"
    with pytest.warns(UserWarning, match=said):
        found = fsdp.simulate(2, lambda rank: len(units_of(fsdp.fully_shard(make_net(), auto_wrap_policy=policy))))
    assert found == [1, 1]


@DOORS
@pytest.mark.parametrize(
    ("policy", "units"),
    [
        (None, ["Net"]),
        ({Block}, ["Net", "blocks.0", "blocks.1", "blocks.2"]),
        ([Block], ["Net", "blocks.0", "blocks.1", "blocks.2"]),
        (ModuleWrapPolicy({Block}), ["Net", "blocks.0", "blocks.1", "blocks.2"]),
        (lambda name, module: name == "blocks.1.up" or name == "leave", ["Net", "blocks.1.up", "leave"]),
        ({Block, nn.Tanh}, ["Net", "blocks.0", "blocks.1", "blocks.2"]),
    ],
    ids=["none", "set", "list", "ModuleWrapPolicy", "callable", "a class that is not there"],
)
@on_ranks(2)
def test_a_policy_chooses_the_units(rank: int, door: Any, policy: Any, units: list[str]) -> None:
    model = door(make_net(), auto_wrap_policy=policy)
    assert [unit.name for unit in units_of(model)] == units
    assert names(model) == names(make_net())
    assert model(torch.ones(2, 6)).shape == (2, 2)


@on_ranks(2)
def test_names_are_plain_through_wrappers_nested_by_hand(rank: int) -> None:
    net = make_net()
    net.blocks[0] = fsdp.FullyShardedDataParallel(net.blocks[0], auto_wrap_policy={nn.Linear})
    net.blocks[1] = checkpoint_wrapper(fsdp.FullyShardedDataParallel(net.blocks[1]))
    net.blocks[2] = fsdp.FullyShardedDataParallel(checkpoint_wrapper(net.blocks[2]))
    model = fsdp.FullyShardedDataParallel(net)
    assert list(fsdp.full_state_dict(model, rank0_only=False)) == list(make_net().state_dict())
    assert [unit.name for unit in units_of(model)] == [
        "Net",
        "blocks.0",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1",
        "blocks.2",
    ]
    assert [name.replace("_checkpoint_wrapped_module.", "") for name in names(model)] == names(make_net())


@DOORS
@on_ranks(2)
def test_wrapping_inner_units_first_is_wrapping_by_policy(rank: int, door: Any) -> None:
    one, other = make_net(), make_net()
    for number, block in enumerate(one.blocks):
        one.blocks[number] = door(block)
    gradients = []
    for model in (door(one), door(other, auto_wrap_policy={Block})):
        loss_of(model(torch.arange(12.0).view(2, 6))).backward()
        gradients.append(torch.cat([local(p.grad).reshape(-1) for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


@on_ranks(2)
def test_in_place_leaves_object_class_and_isinstance_alone(rank: int) -> None:
    net = make_net()
    assert fsdp.fully_shard(net, auto_wrap_policy={Block}) is net
    assert type(net) is Net
    assert all(type(block) is Block for block in net.blocks)


@on_ranks(1)
def test_the_wrapper_shows_the_module(rank: int) -> None:
    net = make_net()
    model = fsdp.FullyShardedDataParallel(net)
    assert isinstance(model, nn.Module)
    assert model.module is net
    assert [name for name, _ in model.named_modules()][:3] == ["", "", "enter"]


@DOORS
@on_ranks(3)
def test_parameters_are_the_original_objects_with_their_attributes(rank: int, door: Any) -> None:
    net = make_net()
    before = dict(net.named_parameters())
    dims = {name: p.dim() for name, p in before.items()}
    for name, p in before.items():
        p.mark = name  # type: ignore[attr-defined]
    model = door(net, auto_wrap_policy={Block})
    for _ in range(2):
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert all(p.mark == name and p.dim() == dims[name] for name, p in after.items())  # type: ignore[attr-defined]
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in after.values())
        loss_of(model(torch.ones(2, 6))).backward()


def test_each_rank_holds_its_share() -> None:
    held = fsdp.simulate(4, lambda rank: sum(local(p).numel() for p in fsdp.fully_shard(make_net()).parameters()))
    assert sum(held) == sum(p.numel() for p in make_net().parameters())
    assert max(held) < sum(held) / 3


@on_ranks(2)
def test_tied_parameters_in_one_unit_are_stored_once(rank: int) -> None:
    model = fsdp.fully_shard(Tied())
    assert model.head.weight is model.embedding.weight
    assert len(units_of(model)[0].param_infos) == len(list(Tied().parameters()))


@on_ranks(2)
def test_tied_parameters_across_units_belong_to_the_unit_around_both(rank: int) -> None:
    model = fsdp.fully_shard(Tied(), auto_wrap_policy={Block, nn.Embedding, nn.Linear})
    owned = {unit.name: [place.names for place in unit.param_infos] for unit in units_of(model)}
    assert owned["Tied"] == [["embedding.weight", "head.weight"]]
    assert owned["embedding"] == owned["head"] == []


@on_ranks(2)
def test_a_shared_unit_owns_its_parameters_and_comes_after_every_unit_around_it(rank: int) -> None:
    class Around(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside, self.own = inside, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.inside(x))

    shared = nn.Linear(4, 4)
    inner = Around(shared)
    model = nn.Sequential(shared, inner, Around(inner))
    for one in (shared, inner):
        fsdp.fully_shard(one)
    fsdp.fully_shard(model, auto_wrap_policy={Around})
    units = units_of(model)
    engine = unit_ref_of(model).engine
    assert [unit.name for unit in units] == ["Sequential", "2", "1", "0"]
    assert [sorted(inside) for inside in engine.descendants] == [[1, 2, 3], [2, 3], [3], []]
    assert [[place.names for place in unit.param_infos] for unit in units[2:]] == [
        [["own.weight"], ["own.bias"]],
        [["weight"], ["bias"]],
    ]


def test_gradients_there_before_are_sharded_along() -> None:
    def fn(rank: int) -> Tensor:
        net = make_net()
        for p in net.parameters():
            p.grad = torch.arange(p.numel(), dtype=p.dtype).view(p.shape)
        model = fsdp.fully_shard(net)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        return local(net.enter.weight.grad).reshape(-1)

    assert torch.equal(torch.cat(fsdp.simulate(3, fn)), torch.arange(48.0))


@on_ranks(2)
def test_an_lstm_computes_with_the_weights_it_trains(rank: int) -> None:
    torch.manual_seed(0)
    model = fsdp.fully_shard(Recurrent(), auto_wrap_policy={nn.LSTM})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(4, 2, 6)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[3] < losses[2] < losses[1] < losses[0]
    second_book = zip(model.lstm._flat_weights, model.lstm._flat_weights_names, strict=True)
    assert all(weight is getattr(model.lstm, name) for weight, name in second_book)


@on_ranks(2)
def test_buffers_stay_unsharded_and_the_same_objects(rank: int) -> None:
    net = make_net()
    buffers = dict(net.named_buffers())
    model = fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block})
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert torch.equal(net.scale, make_net().scale)


@on_ranks(3)
def test_sync_module_states_gives_every_rank_the_first_ranks_model(rank: int) -> None:
    torch.manual_seed(rank)
    net = Net()
    net.scale.add_(rank)
    net.shift.add_(rank)
    net.blocks[0].up.weight.data = net.blocks[0].up.weight.data.t().contiguous().t()
    model = fsdp.fully_shard(net, auto_wrap_policy={Block}, sync_module_states=True)
    state = {**fsdp.full_state_dict(model, rank0_only=False), "shift": net.shift}
    torch.manual_seed(0)
    plain = Net()
    assert all(torch.equal(state[name], tensor) for name, tensor in {**plain.state_dict(), "shift": plain.shift}.items())


@DOORS
@on_ranks(1)
def test_a_unit_refuses_to_be_pickled_and_its_hooks_to_be_copied_alone(rank: int, door: Any) -> None:
    model = door(make_net(), auto_wrap_policy={Block})
    with pytest.raises(fsdp.ShardingError, match=r"its hooks cannot be copied without its module; copy.deepcopy the model"):
        copy.deepcopy(model.blocks[0]._forward_hooks)
    with pytest.raises(fsdp.ShardingError, match=r"unit '\S+' cannot be pickled.* what fsdp.full_state_dict\(model\) returns"):
        pickle.dumps(model)


@pytest.mark.parametrize("trained", [False, True])
@on_ranks(2)
def test_reading_a_module_between_passes_sees_living_shards(rank: int, trained: bool) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    if trained:
        loss_of(model(torch.ones(2, 6))).backward()
    penalty = sum(fsdp.to_local(block.up.weight).square().sum() for block in model.blocks)
    penalty.backward()
    for block in model.blocks:
        assert block.up.weight.untyped_storage().size() > 0
        assert block.up.weight.grad is not None or not block.up.weight.numel()


def test_what_wrapping_does_for_a_unit_does_not_grow_with_the_units() -> None:
    """Calls of functions, which are exact; with a loop over all units for each of them they would grow."""

    def calls(count: int) -> int:
        made = 0

        def heard(frame: Any, event: str, argument: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
        gc.collect()
        gc.disable()  # what a collection frees calls functions too, and it is of other tests
        sys.setprofile(heard)
        try:
            fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
        finally:
            sys.setprofile(None)
            gc.enable()
        return made

    _, few, more, most = fsdp.simulate(1, lambda rank: [calls(count) for count in (20, 20, 60, 100)])[0]  # the first may import
    assert most - more == pytest.approx(more - few, rel=0.01)


@on_ranks(2)
def test_parameters_that_dtensors_replace_are_freed_unit_by_unit(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    most, seen = 0, []

    def initialise(module: nn.Module) -> None:
        nonlocal most
        seen.append(weakref.ref(module.weight))
        most = max(most, sum(parameter() is not None for parameter in seen))

    fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, dtensors=True, param_init_fn=initialise)
    assert most == 1


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which has the groups and the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


@on_ranks(2)
def test_optimizers_around_others_train_what_replaces_parameters(rank: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    fsdp.fully_shard(model, dtensors=True)
    assert [*map(id, optimizer.inner.param_groups[0]["params"])] == [*map(id, model.parameters())]


def _replace(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))


@on_ranks(2)
def test_param_init_fn_may_not_replace_parameters(rank: int) -> None:
    """The new ones were no part of any unit."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(fsdp.ShardingError, match=r"param_init_fn replaced a parameter of a Linear; .* copy into it"):
        fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, param_init_fn=_replace)


USES: dict[str, tuple[Callable[[nn.Module], AbstractContextManager[object]], str]] = {
    "summon": (fsdp.summon_full_params, "fully_shard: call it outside any forward, backward and summon_full_params"),
    "join": (lambda inner: fsdp.join(inner, lambda: None), "is inside fsdp.join"),
    "trace": (fsdp.trace, "unit 'Linear' is traced; call it outside fsdp.trace"),
    "no_sync": (fsdp.no_sync, "does not reduce its gradients"),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_a_root_around_a_unit_in_use_is_refused_and_nothing_changes(rank: int, use: str) -> None:
    context, text = USES[use]
    inner = fsdp.fully_shard(nn.Linear(3, 3))
    model = nn.Sequential(inner, nn.Linear(3, 3))
    with context(inner):
        if use == "summon":
            nn.init.constant_(inner.weight, 7.0)
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.fully_shard(model)
    assert use != "summon" or bool((fsdp.full_tensor(inner.weight) == 7.0).all())
    fsdp.fully_shard(model)


OF_THE_OUTERMOST: dict[str, dict[str, Any]] = {
    "broadcast_buffers=True": {"broadcast_buffers": True},
    "reduction.average=False": {"reduction": fsdp.ReductionPolicy(average=False)},
    "reduction.predivide_factor=2.0": {"reduction": fsdp.ReductionPolicy(predivide_factor=2.0)},
    "reduction.deterministic=True": {"reduction": fsdp.ReductionPolicy(deterministic=True)},
}


@pytest.mark.parametrize("option", OF_THE_OUTERMOST)
@on_ranks(2)
def test_an_option_of_an_inner_unit_that_the_outermost_one_decides_is_not_lost(rank: int, option: str) -> None:
    given = OF_THE_OUTERMOST[option]
    model = nn.Sequential(fsdp.fully_shard(nn.BatchNorm1d(3), **given), nn.Linear(3, 3))
    with pytest.raises(fsdp.ShardingError, match=f"unit '0' was wrapped with {option}, and that of the outermost unit counts"):
        fsdp.fully_shard(model)
    fsdp.fully_shard(model, **given)
