"""fsdp.unwrap: from a sharded model back to the plain one, with nothing left of the engine and nothing lost of the user's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.compat import fairscale
from tests.support.models import CASES, OPTIONS, Block, Case, loss_of, make_net
from tests.support.ranks import on_ranks
from tests.support.states import DOORS, Door

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class Derived(torch.optim.AdamW):
    """An optimizer of a user, with torch's step."""


def backward(model: nn.Module, batch: Tensor) -> None:
    loss_of(model(batch)).backward()


def check_is_plain(model: nn.Module, plain: nn.Module) -> None:
    """Nothing of the engine is left on `model`, and its values and gradients are those of `plain`."""
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert type(module._parameters) is dict
        assert not any(getattr(module, name) for name in HOOKS)
    for (name, parameter), (other_name, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (name, type(parameter), parameter.requires_grad) == (other_name, nn.Parameter, expected.requires_grad)
        assert torch.equal(parameter, expected)
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.to_dense(), expected.grad.to_dense(), rtol=1e-5, atol=1e-7)


def train_unwrap_and_train(case: Case, door: Door, options: dict[str, Any]) -> None:
    plain, net = case.model(), case.model()
    objects = dict(net.named_parameters())
    model = door(net, auto_wrap_policy=case.policy, **options)
    for one in (plain, model):
        backward(one, case.batch(0, 0))
    assert fsdp.unwrap(model) is net
    assert dict(net.named_parameters()) == objects, "the user's Parameter objects"
    check_is_plain(net, plain)
    for one in (plain, net):
        backward(one, case.batch(0, 1))
    check_is_plain(net, plain)


@DOORS
@pytest.mark.parametrize("name", ["net", "tied", "recurrent", "odd", "sparse"])
def test_the_model_is_plain_again_and_trains_on(name: str, door: Door) -> None:
    fsdp.simulate(2, lambda rank: train_unwrap_and_train(CASES[name], door, {}))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_comes_back_from_every_kind_of_shard(options: dict[str, Any]) -> None:
    fsdp.simulate(3, lambda rank: train_unwrap_and_train(CASES["net"], fsdp.fully_shard, options))


@on_ranks(2)
def test_wrappers_inside_are_replaced_by_their_modules(rank: int) -> None:
    net, plain = make_net(), make_net()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = fsdp.FullyShardedDataParallel(block)
    check_is_plain(fsdp.unwrap(fsdp.FullyShardedDataParallel(net)), plain)


@on_ranks(2)
def test_other_ranks_may_get_shapes_only(rank: int) -> None:
    plain, model = make_net(), fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    fsdp.unwrap(model, rank0_only=True)
    if rank == 0:
        check_is_plain(model, plain)
    else:
        assert all(parameter.is_meta for parameter in model.parameters())
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]


@on_ranks(2)
def test_hooks_and_methods_of_the_user_are_as_before(rank: int) -> None:
    class Coder(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return self(x).tanh()

    ran: list[str] = []
    model = Coder(4, 4)
    handle = model.weight.register_hook(lambda gradient: ran.append(f"gradient {tuple(gradient.shape)}"))
    model.weight.register_post_accumulate_grad_hook(lambda p: ran.append(f"accumulated {tuple(p.grad.shape)}"))
    fsdp.fully_shard(model)
    model.register_forward_hook(lambda *_: ran.append("forward"))
    fsdp.register_forward_method(model, "encode")
    fsdp.unwrap(model)
    assert "encode" not in model.__dict__
    model.encode(torch.ones(2, 4)).sum().backward()
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert ran == ["forward", "gradient (4, 4)", "accumulated (4, 4)", "forward", "accumulated (4, 4)"]


@on_ranks(2)
def test_a_kept_accumulator_gets_the_gradients_again(rank: int) -> None:
    model, count = nn.Linear(4, 4), []
    node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: count.append(1))
    fsdp.unwrap(fsdp.fully_shard(model))
    model(torch.ones(2, 4)).sum().backward()
    assert len(count) == 1


@on_ranks(2)
def test_the_unwrapped_model_is_wrapped_again(rank: int) -> None:
    plain, model = make_net(), fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    fsdp.fully_shard(fsdp.unwrap(model), sharding_strategy="NO_SHARD")
    for one in (plain, model):
        backward(one, torch.ones(2, 6))
    check_is_plain(fsdp.unwrap(model), plain)


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
def test_the_step_of_an_optimizer_with_state_of_shards_is_refused(rank: int, kind: type[torch.optim.AdamW]) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    optimizer = kind(model.parameters())
    backward(model, torch.ones(2, 6))
    optimizer.step()
    state = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    fsdp.unwrap(model)
    backward(model, torch.ones(2, 6))
    with pytest.raises(
        fsdp.ShardingError, match=r"is of another cut than the parameter, .* take fsdp.full_optim_state_dict before"
    ):
        optimizer.step()
    assert state


@on_ranks(2)
@pytest.mark.parametrize("plain_shards", [False, True])
@pytest.mark.parametrize(("policy", "ignored"), [(None, []), ({nn.Linear}, []), (None, ["leave"])])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
def test_an_optimizer_of_shards_that_are_cut_anew_is_refused(
    rank: int, kind: type[torch.optim.AdamW], plain_shards: bool, policy: set[type[nn.Module]] | None, ignored: list[str]
) -> None:
    """Fused implementations compare no shapes: they would write past the end of the state."""
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, plain_shards=plain_shards)
    optimizer = kind(model.parameters(), fused=True)
    backward(model, torch.ones(2, 6))
    optimizer.step()
    state = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    ignored_modules = [model.get_submodule(name) for name in ignored]
    model = fsdp.unwrap(model)
    fsdp.fully_shard(model, auto_wrap_policy=policy, plain_shards=plain_shards, ignored_modules=ignored_modules)
    backward(model, torch.ones(2, 6))
    with pytest.raises(fsdp.ShardingError, match="full_optim_state_dict before fsdp"):
        optimizer.step()
    with pytest.raises(fsdp.ShardingError):
        fsdp.full_optim_state_dict(model, optimizer)
    fsdp.load_full_optim_state_dict(model, optimizer, state)
    optimizer.step()


@on_ranks(3)
def test_a_model_that_shows_full_values_while_another_is_stepped_is_not_compared(rank: int) -> None:
    """Not with `plain_shards` either, by which nothing but its shape tells a full value from a shard."""
    shown, stepped = (fsdp.fully_shard(make_net(), plain_shards=True) for _ in range(2))
    optimizer = torch.optim.AdamW([*shown.parameters(), *stepped.parameters()])
    backward(shown, torch.ones(2, 6))
    optimizer.step()
    optimizer.zero_grad()
    with fsdp.summon_full_params(shown):
        fsdp.fully_shard(make_net())
        backward(stepped, torch.ones(2, 6))
        optimizer.step()
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Derived])
def test_the_state_of_an_optimizer_that_stepped_the_unwrapped_model_is_cut(
    rank: int, kind: type[torch.optim.AdamW], fused: bool
) -> None:
    plain, model = make_net(), fsdp.fully_shard(make_net())
    wanted, optimizer = (kind(one.parameters(), lr=0.1, fused=fused) for one in (plain, model))
    fsdp.full_optim_state_dict(model, optimizer)
    model = fsdp.unwrap(model)
    for wrap in (nn.Identity(), fsdp.fully_shard):
        wrap(model)
        for one, steps in ((plain, wanted), (model, optimizer)):
            steps.zero_grad()
            backward(one, torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
            steps.step()
    for mine, one in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(fsdp.full_tensor(mine), one)


@on_ranks(2)
def test_a_graph_from_before_is_refused(rank: int) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    loss = loss_of(model(torch.ones(2, 6)))
    fsdp.unwrap(model)
    with pytest.raises(fsdp.ShardingError):
        loss.backward()


@on_ranks(2)
def test_it_is_refused_within_a_step_and_where_something_would_be_lost(rank: int) -> None:
    def refused(model: nn.Module, text: str) -> None:
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.unwrap(model)

    plain, model = make_net(), fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    refused(model.blocks[1], "is a part of root 'Net'; call it on the root")
    refused(nn.Linear(2, 2), "contains no unit")
    with fsdp.summon_full_params(model):
        refused(model, "outside any forward, backward and summon_full_params")
    handle = model.blocks[0].register_forward_hook(lambda *_: refused(model, "outside any forward"))
    model(torch.ones(2, 6))
    handle.remove()
    with fsdp.no_sync(model):
        backward(model, torch.ones(2, 6))
    refused(model, "keeps gradients under no_sync")
    model.zero_grad()
    with fsdp.join(model, lambda: None):
        refused(model, "is inside fsdp.join")
    if rank:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    refused(model, "parameter 'enter.weight' has a gradient on some ranks only")
    model.zero_grad()
    check_is_plain(fsdp.unwrap(model), plain)


@on_ranks(2)
def test_a_module_that_cannot_do_without_its_engine_says_what_to_do(rank: int) -> None:
    model = fairscale.FullyShardedDataParallel(make_net())
    before = model(torch.ones(2, 6))
    with pytest.raises(fsdp.ShardingError, match="cannot do without its engine; call its summon_full_params"):
        fsdp.unwrap(model)
    assert torch.equal(model(torch.ones(2, 6)), before)
