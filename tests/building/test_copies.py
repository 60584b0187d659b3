"""copy.deepcopy of a sharded model: independent of the original, with everything that the original has."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import CASES, OPTIONS, Block, Case, is_at_rest, loss_of, make_net, step, units_of
from tests.support.ranks import on_ranks
from tests.support.states import DOORS, Door, assert_near


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state_of(model: nn.Module) -> dict[str, Any]:
    """In full, also of a plain model."""
    sharded = any(unit_ref_of(module) for module in model.modules())
    return fsdp.full_state_dict(model, rank0_only=False) if sharded else dict(model.state_dict())


def same(one: nn.Module, other: nn.Module) -> None:
    assert_near(state_of(one), state_of(other))


def train_with_copy(model: nn.Module, case: Case) -> nn.Module:
    """Train, copy, then train the original and the copy on data of their own. Return the copy."""
    optimizer = sgd(model)
    step(model, optimizer, case.batch(0, 0))
    copied = copy.deepcopy(model)
    of_copy = sgd(copied)
    for number in (1, 2):
        step(model, optimizer, case.batch(0, number))
        step(copied, of_copy, case.batch(0, 10 + number))
    return copied


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["net", "tied", "recurrent", "odd", "sparse"])
@on_ranks("ranks")
def test_a_copy_and_its_original_train_as_plain_ones_do(rank: int, name: str, ranks: int) -> None:
    case = CASES[name]
    plain, model = case.model(), fsdp.FullyShardedDataParallel(case.model(), auto_wrap_policy=case.policy)
    plain_copy, copied = (train_with_copy(one, case) for one in (plain, model))
    assert type(copied) is fsdp.FullyShardedDataParallel and copied.module is not model.module
    same(model, plain)
    same(copied, plain_copy)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_a_copy_has_the_options_and_the_communicators_of_its_original(rank: int, options: dict[str, Any]) -> None:
    case = CASES["net"]
    plain, model = case.model(), fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy, **options)
    plain_copy, copied = (train_with_copy(one, case) for one in (plain, model))
    same(copied, plain_copy)
    for one, other in zip(units_of(copied), units_of(model), strict=True):
        assert (one.name, one.config, one.comm) == (other.name, other.config, other.comm)
        assert [flat.layout for flat in one.flats] == [flat.layout for flat in other.flats]
        assert not {flat.shard.data_ptr() for flat in one.flats} & {flat.shard.data_ptr() for flat in other.flats}


@DOORS
@on_ranks(2)
def test_an_averaged_model_of_torch_averages_shards(rank: int, door: Door) -> None:
    case = CASES["net"]
    averages = []
    for model in (case.model(), door(case.model(), auto_wrap_policy=case.policy)):
        optimizer, average = sgd(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for number in range(3):
            step(model, optimizer, case.batch(0, number))
            average.update_parameters(model)
        averages.append(average)
    plain, sharded = averages
    same(sharded.module, plain.module)
    with torch.no_grad():
        torch.testing.assert_close(sharded(case.batch(0, 9)), plain(case.batch(0, 9)), rtol=1e-4, atol=1e-5)
    assert list(sharded.state_dict()) == list(plain.state_dict())


@on_ranks(2)
def test_a_frozen_copy_teaches_its_original(rank: int) -> None:
    case = CASES["net"]
    models = []
    for student in (case.model(), fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy)):
        teacher, optimizer = copy.deepcopy(student).requires_grad_(False), sgd(student)
        for number in range(3):
            optimizer.zero_grad()
            batch = case.batch(0, number)
            (student(batch) - 2 * teacher(batch)).square().mean().backward()
            optimizer.step()
        models.append((student, teacher))
    for plain, sharded in zip(*models, strict=True):
        same(sharded, plain)


@on_ranks(2)
def test_hooks_of_the_user_keep_their_places_and_the_copy_runs_its_own(rank: int) -> None:
    ran: list[tuple[str, bool]] = []
    model = make_net()
    block = model.blocks[0]

    def note(name: str) -> Callable[..., None]:
        return lambda module, *_: ran.append((name, module is block))

    block.register_forward_hook(note("before"))
    fsdp.fully_shard(model, auto_wrap_policy={Block})
    block.register_forward_hook(note("after"))
    block.up.register_forward_hook(note("inside"))
    model(torch.ones(2, 6))
    copied = copy.deepcopy(model)
    order = [type(getattr(hook, "__self__", None)).__name__ for hook in block._forward_hooks.values()]
    assert order == [type(getattr(hook, "__self__", None)).__name__ for hook in copied.blocks[0]._forward_hooks.values()]
    for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        assert len(getattr(copied.blocks[0], name)) == len(getattr(block, name))
    assert not set(map(id, engine_objects(model))) & set(map(id, engine_objects(copied)))
    ran.clear()
    loss_of(copied(torch.ones(2, 6))).backward()
    assert ran == [("inside", False), ("before", False), ("after", False)]
    assert all(p.grad is None for p in model.parameters())


def engine_objects(model: nn.Module) -> list[object]:
    """The objects whose methods are hooks of the modules."""
    dicts = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    hooks = [getattr(hook, "hook", hook) for m in model.modules() for name in dicts for hook in getattr(m, name).values()]
    return [owner for hook in hooks if (owner := getattr(getattr(hook, "func", hook), "__self__", None)) is not None]


@on_ranks(2)
def test_a_copied_method_that_runs_as_a_forward_is_the_copys_own(rank: int) -> None:
    class Coder(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return self(x).tanh()

    model = fsdp.fully_shard(Coder(4, 4))
    fsdp.register_forward_method(model, "encode")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
        assert not copied.encode(torch.ones(2, 4)).any()
        assert model.encode(torch.ones(2, 4)).any()


@on_ranks(2)
def test_a_module_or_an_object_around_a_sharded_model_is_copied_with_it(rank: int) -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = sgd(model)  # refers to the shards before the model does
            self.model = model

    case = CASES["net"]
    plain, sharded = (Trainer(one) for one in (case.model(), fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy)))
    copies = []
    for trainer in (plain, sharded):
        step(trainer.model, trainer.optimizer, case.batch(0, 0))
        copied = copy.deepcopy(trainer)
        step(copied.model, copied.optimizer, case.batch(0, 1))
        copies.append(copied)
    same(sharded.model, plain.model)
    same(copies[1].model, copies[0].model)


@on_ranks(2)
def test_a_copy_lives_without_its_original_and_a_copy_of_it_too(rank: int) -> None:
    case = CASES["net"]
    plain = case.model()
    model = copy.deepcopy(copy.deepcopy(fsdp.fully_shard(case.model(), auto_wrap_policy=case.policy)))
    for one in (plain, model):
        step(one, sgd(one), case.batch(0, 0))
    same(model, plain)
    assert is_at_rest(model)


@on_ranks(2)
def test_a_copy_that_would_lose_something_is_refused_and_nothing_changes(rank: int) -> None:
    def refused(model: nn.Module, text: str) -> None:
        with pytest.raises(fsdp.ShardingError, match=text):
            copy.deepcopy(model)

    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    refused(model.blocks[1], "unit 'blocks.1' is a part of root 'Net'; copy the root")
    with fsdp.summon_full_params(model):
        refused(model, "outside any forward, backward and summon_full_params")
    handle = model.blocks[0].register_forward_hook(lambda *_: refused(model, "outside any forward"))
    model(torch.ones(2, 6))
    handle.remove()
    with fsdp.no_sync(model):
        loss_of(model(torch.ones(2, 6))).backward()
    refused(model, "keeps gradients under no_sync")
    loss_of(model(torch.ones(2, 6))).backward()
    fsdp.set_requires_gradient_sync(model, False)
    refused(model, "does not reduce its gradients")
    fsdp.set_requires_gradient_sync(model, True)
    with fsdp.join(model, lambda: None):
        refused(model, "is inside fsdp.join")
    copied = copy.deepcopy(model)
    fsdp.register_comm_hook(model, None, lambda state, bucket: bucket.buffer())
    refused(model, "has a communication hook")
    same(copied, model)
