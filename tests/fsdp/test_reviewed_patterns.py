"""Uses that a review of the training patterns found wrong or unsaid, and that are no training program: see tests/patterns."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import assert_close, gradients_of, is_at_rest, join

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


class GoesOn(nn.Linear):
    """Methods that are not over when they have returned."""

    def generator(self, x: Tensor) -> Iterator[Tensor]:
        yield self(x)

    async def coroutine(self, x: Tensor) -> Tensor:
        return self(x)

    async def both(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self(x)


REFUSED_METHODS = {
    "generator": "goes on after it has returned",
    "coroutine": "goes on after it has returned",
    "both": "goes on after it has returned",
    "forward": "is a forward already",
    "__call__": "is a forward already",
}


@pytest.mark.parametrize("name", REFUSED_METHODS)
def test_a_method_that_cannot_be_run_as_a_forward_is_refused(name: str) -> None:
    """A generator met shards; `forward`, registered, was heard twice."""

    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(GoesOn(4, 4))
        with pytest.raises(fsdp.ShardingError, match=f"'{name}' {REFUSED_METHODS[name]}"):
            fsdp.register_forward_method(model, name)
        model(torch.ones(1, 4)).sum().backward()
        assert is_at_rest(model)

    simulate(2, one_rank)


def _replace(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))


def test_param_init_fn_may_not_replace_parameters() -> None:
    """The new ones were no part of any unit."""

    def one_rank(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(fsdp.ShardingError, match=r"param_init_fn replaced a parameter of a Linear; .* copy into it"):
            fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, param_init_fn=_replace)

    simulate(2, one_rank)


def test_to_local_inside_a_summon_is_refused() -> None:
    """What is lent is not this rank's part, and its gradients are set aside."""

    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(nn.Linear(4, 4))
        with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="leave summon_full_params first"):
            fsdp.to_local(model.weight)
        fsdp.to_local(model.weight).square().sum().backward()
        assert is_at_rest(model)

    simulate(2, one_rank)


class Replaces(nn.Module):
    """Puts other data under its parameter, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.w.data = self.w.data * 2
        return x * self.w


@WORLDS
def test_a_state_loaded_after_weights_were_replaced_in_a_forward_is_seen(world_size: int) -> None:
    """The whole parameter still pointed at the data that the forward had made, whatever was gathered."""

    def one_rank(rank: int) -> list[float]:
        model = fsdp.fully_shard(Replaces())
        found = [model(torch.ones(4)).sum().item()]
        fsdp.load_full_state_dict(model, {"w": torch.full((4,), 5.0)})
        found.append(model(torch.ones(4)).sum().item())
        return [*found, fsdp.full_state_dict(model, rank0_only=False)["w"].sum().item()]

    assert simulate(world_size, one_rank) == [[8.0, 40.0, 40.0]] * world_size


class EditsAndFails(nn.Module):
    """Changes a parameter, and runs a backward; one rank fails before or after that."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        loss = self.block(x).sum()
        if self.fails == "before":
            raise ValueError("no")
        loss.backward()
        if self.fails == "after":
            raise ValueError("no")
        return self.block(x) * self.scale


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("failing", [{1}, {0, 1}])
def test_what_a_forward_changed_before_a_backward_of_its_own_is_forgotten_if_it_fails(when: str, failing: set[int]) -> None:
    """On all ranks, or the parameter would be torn: the others had taken the change when they began their backward."""

    def one_rank(rank: int) -> list[float]:
        model = fsdp.fully_shard(EditsAndFails(), auto_wrap_policy={nn.Linear})
        x = torch.ones(2, 4)
        older = model(x).sum()
        model.fails = when if rank in failing else ""
        with pytest.raises(ValueError if rank in failing else fsdp.PeerFailed):
            model(x)
        model.fails = ""
        older.backward()  # nothing it computed with has changed
        return fsdp.full_state_dict(model, rank0_only=False)["scale"].tolist()

    assert simulate(2, one_rank) == [[0.5] * 4] * 2


class Queries(nn.Module):
    """A parameter of the root is the input of a unit, as the queries of DETR are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.queries, self.decoder = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.decoder(self.queries)) + x
        return result


def _train(model: nn.Module, after: Callable[[], None] = lambda: None) -> None:
    """As most loops, it has the loss of one step, and so its graph, until the next one's is there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(50):
        optimizer.zero_grad()
        loss = model(torch.full((3, 4), 1.0 + step % 3)).square().mean()
        loss.backward()
        after()
        optimizer.step()


@WORLDS
def test_what_is_kept_with_a_leaf_does_not_grow_with_the_steps(world_size: int) -> None:
    """The way out of a unit through a leaf was noted at the leaf, once a step, for ever."""
    plain = Queries()
    _train(plain)

    def one_rank(rank: int) -> dict[str, Tensor | None]:
        model = fsdp.fully_shard(Queries(), auto_wrap_policy={nn.Linear})
        sharded = unit_ref_of(model)
        assert sharded is not None
        (queries,) = sharded.unit.unsharded_params
        entries = []

        def count() -> None:
            crossing = get_gradient_edge(queries).node.metadata["fsdp"]
            entries.append(len(crossing.leaves) + len(crossing.reaches))

        _train(model, count)
        assert entries[0] and entries[-1] == entries[5], entries
        assert is_at_rest(model)
        return gradients_of(model)

    found = simulate(world_size, one_rank)
    for name, parameter in plain.named_parameters():
        assert_close({name: join([one[name] for one in found], parameter.shape)}, {name: parameter.grad}, 1e-5)


@WORLDS
def test_an_outer_root_can_be_made_when_nothing_is_kept_under_no_sync_any_more(world_size: int) -> None:
    """What was kept was lost with the inner root; that it is refused is told in tests/patterns."""

    def train(inner: nn.Module, outer: Callable[[], nn.Module]) -> None:
        inner(torch.ones(1, 4)).sum().backward()
        outer()(torch.ones(1, 4)).square().sum().backward()

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Linear(4, 4), nn.Linear(4, 4)

    plain = nn.Sequential(*make())
    plain[0](torch.ones(1, 4)).sum().backward()
    train(plain[0], lambda: plain)

    def one_rank(rank: int) -> dict[str, Tensor | None]:
        inner, last = make()
        fsdp.fully_shard(inner)
        model = nn.Sequential(inner, last)
        with fsdp.no_sync(inner):
            inner(torch.ones(1, 4)).sum().backward()
        with pytest.raises(fsdp.ShardingError, match="unit '0' keeps gradients under no_sync"):
            fsdp.fully_shard(model)
        train(inner, lambda: fsdp.fully_shard(model))
        assert is_at_rest(model)
        return gradients_of(model)

    found = simulate(world_size, one_rank)
    for name, parameter in plain.named_parameters():
        assert_close({name: join([one[name] for one in found], parameter.shape)}, {name: parameter.grad})
