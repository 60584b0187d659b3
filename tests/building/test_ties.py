"""Parameters that are tied across units, which were wrapped by hand, in any order, or by a policy."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import Block, Tied, loss_of, units_of
from tests.support.ranks import on_ranks, told
from tests.support.states import DOORS, Door, assert_like_plain


class Shared(nn.Module):
    """Layers of which every other one has the weights of the first, each inside a group, as in models that reuse a block."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2))
        self.leave = nn.Linear(4, 2)
        for group in self.groups[1:]:
            for name in ("up", "down"):
                getattr(group[1], name).weight = getattr(self.groups[0][1], name).weight

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return self.leave(x)


def make(kind: type[nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(kind: type[nn.Module], number: int) -> Tensor:
    return (torch.arange(6) + number) % 11 if kind is Tied else torch.linspace(-1, 1, 12).view(3, 4) + number


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Tensor]]) -> None:
    """One step for each of `batches`, on the average of their losses."""
    for of_step in batches:
        optimizer.zero_grad()
        losses = [loss_of(model(one)) for one in of_step]
        (sum(losses[1:], losses[0]) / len(losses)).backward()
        optimizer.step()


def check_against_plain(model: nn.Module, kind: type[nn.Module], rank: int, ranks: int, optimizer: Any = None) -> None:
    """Train `model` and a plain model with all ranks' batches; compare names and weights."""
    plain = make(kind)
    train(model, optimizer or adam(model), [[batch(kind, ranks * step + rank)] for step in range(3)])
    train(plain, adam(plain), [[batch(kind, ranks * step + one) for one in range(ranks)] for step in range(3)])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_like_plain(model, plain)


@DOORS
@pytest.mark.parametrize(
    "order",
    [
        ("embedding",),
        ("head",),
        ("embedding", "head"),
        ("head", "block", "embedding"),
    ],
    ids="-".join,
)
def test_units_that_share_a_parameter_are_wrapped_by_hand_in_any_order(door: Door, order: tuple[str, ...]) -> None:
    def fn(rank: int) -> dict[str, list[list[str]]]:
        model = make()
        for name in order:
            setattr(model, name, door(getattr(model, name)))
        model = door(model)
        check_against_plain(model, Tied, rank, 2)
        return {unit.name: [info.names for info in unit.param_infos] for unit in units_of(model)}

    owned = fsdp.simulate(2, fn)[0]
    assert ["embedding.weight", "head.weight"] in owned["Tied"]
    assert all(not owned[name] for name in order if name != "block")


@pytest.mark.parametrize(
    "options",
    [{"sharding_strategy": "NO_SHARD"}, {"sharding_strategy": "SHARD_OPTIMIZER"}, {"plain_shards": True}],
    ids=["NO_SHARD", "SHARD_OPTIMIZER", "plain shards"],
)
@on_ranks(3)
def test_ties_move_under_every_kind_of_shard(rank: int, options: dict[str, Any]) -> None:
    check_against_plain(fsdp.fully_shard(borrowing(**options), **options), Tied, rank, 3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_that_share_weights_are_wrapped_from_the_inside_outwards(ranks: int) -> None:
    def fn(rank: int) -> list[list[str]]:
        model = make(Shared)
        for group in model.groups:
            for block in group:
                fsdp.fully_shard(block)
            fsdp.fully_shard(group)
        fsdp.fully_shard(model)
        check_against_plain(model, Shared, rank, ranks)
        return next([info.names[0] for info in unit.param_infos] for unit in units_of(model) if unit.name == "groups.0.1")

    kept = fsdp.simulate(ranks, fn)[0]
    assert [name.removeprefix("groups.0.1.") for name in kept] == ["norm.weight", "norm.bias", "up.bias", "down.bias"]


@on_ranks(2)
def test_a_policy_of_the_outer_call_meets_a_unit_that_was_wrapped_by_hand(rank: int) -> None:
    model = make(Shared)
    fsdp.fully_shard(model.groups[0][1])
    check_against_plain(fsdp.fully_shard(model, auto_wrap_policy={Block}), Shared, rank, 2)


@on_ranks(2)
def test_a_regrouped_unit_keeps_its_options(rank: int) -> None:
    model = make(Shared)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp.fully_shard(model.groups[0][1], mp_policy=policy, reshard_after_forward=False)
    before = next(unit.config for unit in units_of(model))
    fsdp.fully_shard(model)
    regrouped = next(unit for unit in units_of(model) if unit.name == "groups.0.1")
    assert regrouped.config is before
    assert {flat.unsharded.dtype for flat in regrouped.flats} == {torch.bfloat16}


@on_ranks(2)
def test_an_optimizer_and_gradients_from_between_the_wraps_follow(rank: int) -> None:
    model, plain = borrowing(), make()
    optimizer = adam(model)
    # a gradient of the unit that owns the tied weight, which is kept until the step
    for one in (model, plain):
        loss_of(one.embedding(torch.arange(5))).backward()
    fsdp.fully_shard(model)
    for one in (model, plain):
        loss_of(one(torch.arange(5))).backward()
    for steps in (optimizer, adam(plain)):
        steps.step()
    assert_like_plain(model, plain)


def test_the_state_of_an_optimizer_that_stepped_between_the_wraps_is_refused_by_its_next_step() -> None:
    def fn(rank: int) -> None:
        model = make(Shared)
        fsdp.fully_shard(model.groups[0][1])
        optimizer = adam(model)
        loss_of(model.groups[0][1](torch.ones(2, 4))).backward()
        optimizer.step()
        fsdp.fully_shard(model)
        loss_of(model(batch(Shared, 0))).backward()
        optimizer.step()

    # a rank that has no state notices nothing
    assert "was cut in another way than this model's" in told(2, fn)[1]


def borrowing(**options: Any) -> nn.Module:
    model = make()
    for name in ("embedding", "head"):
        fsdp.fully_shard(getattr(model, name), **options)
    return model


USES: dict[str, Callable[[nn.Module], object]] = {
    "a forward": lambda head: head(torch.ones(2, 8)),
    "a full state dict": fsdp.full_state_dict,
    "a state dict": lambda head: head.state_dict(),
    "loading": lambda head: head.load_state_dict({"weight": torch.ones(11, 8)}),
    "clipping": lambda head: fsdp.clip_grad_norm_(head, 1.0),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_a_unit_that_borrows_is_refused_until_a_unit_around_both_is_made(rank: int, use: str) -> None:
    model = borrowing()
    with pytest.raises(fsdp.ShardingError, match=r"unit 'Linear' uses parameter 'weight' of unit 'Embedding'.*wrap the module"):
        USES[use](model.head)
    model.embedding(torch.arange(3))
    check_against_plain(fsdp.fully_shard(model), Tied, rank, 2)


@on_ranks(2)
def test_an_inner_unit_after_the_outer_one_is_refused(rank: int) -> None:
    model = fsdp.fully_shard(make())
    with pytest.raises(fsdp.ShardingError, match=r"already owned by unit 'Tied', which is around this module"):
        fsdp.fully_shard(model.head)
    check_against_plain(model, Tied, rank, 2)


@on_ranks(2)
def test_two_roots_that_share_a_module_are_refused(rank: int) -> None:
    shared = nn.Linear(3, 3)
    first = fsdp.fully_shard(nn.Sequential(shared, nn.Linear(3, 1)))
    for _ in range(2):
        with pytest.raises(fsdp.ShardingError, match=r"'0\.weight' is already owned by unit 'Sequential', which shares it"):
            fsdp.fully_shard(nn.Sequential(shared, nn.Linear(3, 2)))
        if first is not None:
            first(torch.ones(1, 3)).sum().backward()
        first = None  # also of a root that is gone
        gc.collect()


@on_ranks(2)
def test_a_gradient_on_some_ranks_only_is_refused_before_anything_moves(rank: int) -> None:
    model = borrowing()
    if rank:
        model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    with pytest.raises(fsdp.ShardingError, match=r"parameter 'weight' has a gradient on some ranks only"):
        fsdp.fully_shard(model)
    model.embedding.weight.grad = None
    check_against_plain(fsdp.fully_shard(model), Tied, rank, 2)


@on_ranks(2)
def test_what_would_be_lost_with_a_regrouped_unit_is_refused(rank: int) -> None:
    model = make(Shared)
    block = model.groups[0][1]
    fsdp.fully_shard(block, reduction=fsdp.ReductionPolicy(triggers=("up.weight",)))
    with pytest.raises(fsdp.ShardingError, match=r"reduction\.triggers names parameters of this unit"):
        fsdp.fully_shard(model)
    model = make(Shared)
    block = model.groups[0][1]
    fsdp.fully_shard(block, plain_shards=True)
    with torch.no_grad():
        block.up.weight.mul_(2)
    with pytest.raises(fsdp.ShardingError, match="after the shards were changed"):
        fsdp.fully_shard(model, plain_shards=True)


@pytest.mark.parametrize(("first", "second"), [("embedding", "head"), ("head", "embedding")])
@on_ranks(2, refuses="or those that share it as one unit: fully_shard([module_a, module_b])")
def test_a_tie_that_a_dtensor_has_cut_is_refused(rank: int, first: str, second: str) -> None:
    model = Tied()
    fsdp.fully_shard(getattr(model, first), dtensors=True)
    fsdp.fully_shard(getattr(model, second), dtensors=True)


@on_ranks(2)
def test_a_frozen_tie_may_be_cut_twice(rank: int) -> None:
    model = make(Tied)
    model.embedding.weight.requires_grad_(False)
    wanted = model(batch(Tied, 0))
    for module in (model.head, model):
        fsdp.fully_shard(module, dtensors=True)
    torch.testing.assert_close(model(batch(Tied, 0)), wanted)
    adam(model).step()
