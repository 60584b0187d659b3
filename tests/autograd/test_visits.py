"""When a backward reaches a unit and when it leaves it: nothing is freed that autograd still reads, nothing is held longer."""

import gc
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import fsdp
from fsdp.autograd.visits import ForwardCall, NodePrehook
from fsdp.comm.simulated import simulate
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import (
    Block,
    Gradients,
    assert_close,
    assert_grads_as_plain,
    gradients_of,
    is_at_rest,
    join,
    join_all,
    local,
    loss_of,
    units_of,
)
from tests.support.ranks import on_ranks

X = torch.linspace(-1, 1, 12).view(2, 6)


class FrozenFirst(nn.Module):
    """In the backward the trainable gradients are complete before the frozen weight is read. May return its input, too."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.trained = nn.Linear(6, 6)
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        out = self.trained(torch.tanh(self.frozen(x)))
        if self.returns == "output":
            return out, out
        return out, {"the input": x, "a view of the input": x.view(-1).view(2, 6)}[self.returns]


class Chain(nn.Module):
    def __init__(self, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6)
        self.links = nn.ModuleList(FrozenFirst(returns) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for link in self.links:
            x, residual = link(x)
            x = x + residual
        return x


@pytest.mark.parametrize("returns", ["output", "the input", "a view of the input"])
def test_a_frozen_weight_stays_unsharded_until_the_backward_has_left_its_unit(returns: str) -> None:
    assert_grads_as_plain(lambda: Chain(returns), lambda model: loss_of(model(X)).backward(), auto_wrap_policy={FrozenFirst})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_unit_is_left_before_the_next_one_is_reached(prefetch: int) -> None:
    """At every gather no more units are whole than the one that computes and those asked for ahead."""

    def fn(rank: int) -> int:
        model = fsdp.fully_shard(Stack(), auto_wrap_policy={Block}, prefetch=prefetch)
        blocks = units_of(model)[1:]
        most = []

        def count(*_: Any) -> None:
            most.append(sum(unit.flats[0].unsharded.untyped_storage().size() > 0 for unit in blocks))

        for block in model.blocks:
            block.register_full_backward_pre_hook(count)
            block.register_full_backward_hook(count)
        for _ in range(2):
            loss_of(model(X.clone().requires_grad_())).backward()
        return max(most)

    assert max(fsdp.simulate(2, fn)) <= prefetch + 1


def test_an_output_that_is_used_twice_is_reduced_once() -> None:
    def train(model: nn.Module) -> None:
        output = model(X)
        (loss_of(output) + loss_of(output * 2)).backward()

    assert_grads_as_plain(Stack, train, size=1, auto_wrap_policy={Block})


class AccumulatedGrad(nn.Module):
    """A unit, of which a hook carries off the output; or an attribute, which the checkpoint returns as well."""

    def __init__(self, levels: int, returns: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6) if levels == 1 else AccumulatedGrad(levels - 1, "output")
        self.returns = returns

    def forward(self, x: Tensor, more: Tensor) -> Any:
        y = self.linear(x) if isinstance(self.linear, nn.Linear) else self.linear(x, more)
        if self.returns == "an attribute":
            self.aux = y.square()
        return (y, more) if self.returns == "an input" else y


class Checkpointed(nn.Module):
    """The root's own weights are read in the backward around a unit in a reentrant checkpoint."""

    def __init__(self, levels: int, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.gain, self.inner = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), AccumulatedGrad(levels, returns)

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, more: Tensor) -> tuple[Tensor, ...]:
            y = self.inner(x, more)
            y = y[0] if isinstance(y, tuple) else y
            return (y, self.inner.aux) if self.inner.returns == "an attribute" else (y,)

        x = torch.tanh(self.enter(x)) * self.gain
        return torch.tanh(checkpoint(run, x, torch.ones(6, requires_grad=True), use_reentrant=True)[0])


@pytest.mark.parametrize(("levels", "returns"), [(1, "output"), (2, "output"), (1, "an input"), (1, "an attribute")])
def test_a_backward_may_begin_at_what_a_hook_has_carried_off_from_a_unit_in_a_reentrant_checkpoint(
    levels: int, returns: str
) -> None:
    """It came past the outer units, whose memory an earlier backward had given back: the process ended."""

    def make() -> nn.Module:
        model = Checkpointed(levels, returns)
        show: dict[str, Any] = {"output": lambda _, y: y, "an input": lambda _, y: y[0], "an attribute": lambda m, _: m.aux}
        kept: list[Tensor] = model.__dict__.setdefault("kept", [])
        model.inner.register_forward_hook(lambda module, args, output: kept.append(show[returns](module, output)))
        return model

    def train(model: Any) -> None:
        model(X).sum().backward(retain_graph=True)
        model.kept[0].square().mean().backward()

    assert_grads_as_plain(make, train, auto_wrap_policy={AccumulatedGrad})


def test_evaluation_collects_nothing() -> None:
    """What units return without a graph is not looked at again, for however long the root's own method runs."""

    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6))

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = self.inner(x)
            self.collected = sum(len(one.captured) for one in gc.get_objects() if isinstance(one, ForwardCall))
            return x

    def fn(rank: int) -> int:
        model = fsdp.fully_shard(Generates(), auto_wrap_policy={nn.Sequential})
        with torch.no_grad():
            model(X, 20)
        return model.collected

    gc.collect()
    assert fsdp.simulate(1, fn) == [0]


class Scaled(nn.Module):
    """A unit with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(6)
        self.scale = nn.Parameter(torch.eye(6))
        self.goes_on: Callable[[Tensor], Tensor] = self.inner.__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.goes_on((x @ self.scale).sin()).sin()


class Aside(nn.Module):
    """Its loss may leave out what its inner units return."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6)
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        return self.scaled(x), x.sum()


def aside(features: list[Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded, with what the inner unit returns carried off; the optimizer steps the unit around that."""
    model = Aside()
    model.scaled.inner.register_forward_hook(lambda module, args, output: features.append(output))
    fsdp.fully_shard(model, auto_wrap_policy={Block, Scaled})
    return model, torch.optim.SGD([model.scaled.scale], lr=0.1)


@on_ranks(2)
def test_an_older_graph_that_is_kept_does_not_stand_for_the_one_a_backward_comes_to_from_inside(rank: int) -> None:
    """What the unit around returned is gone, and of an earlier forward it is kept, with what that computed with."""
    features: list[Tensor] = []
    model, optimizer = aside(features)
    kept = model(X)[0]
    kept.sum().backward(retain_graph=True)
    optimizer.step()
    features.clear()
    aux = model(X)[1]
    (aux + features[0].square().mean()).backward()
    assert is_at_rest(model)


@pytest.mark.parametrize("beside", [False, True])
@on_ranks(2)
def test_a_changed_parameter_around_is_refused_though_nobody_has_what_its_unit_returned(rank: int, beside: bool) -> None:
    """Also where the backward has come to that unit before, in a newer graph."""
    features: list[Tensor] = []
    model, optimizer = aside(features)
    model(X)
    old = features.pop()
    model(X)[0].sum().backward()
    optimizer.step()
    newer = model(X)[0].sum() if beside else 0.0
    with pytest.raises(fsdp.ShardingError, match="unit 'scaled' were changed in place between its forward and its backward"):
        (old.sum() + newer).backward()


@on_ranks(2)
def test_a_changed_parameter_around_is_no_matter_to_a_backward_that_does_not_go_on_there(rank: int) -> None:
    features: list[Tensor] = []
    model, optimizer = aside(features)
    model(X)[0].sum().backward()
    model.scaled.goes_on = lambda x: model.scaled.inner(x.detach())
    model(X)
    optimizer.step()
    features.pop().sum().backward()
    assert is_at_rest(model)


def test_a_gradient_may_be_asked_of_what_a_unit_is_called_with_inside_itself() -> None:
    def trained(sharded: bool) -> Tensor | None:
        model, kept = Aside(), list[Tensor]()

        def again(x: Tensor) -> Tensor:
            kept.append(x)
            model.scaled.goes_on = model.scaled.inner.__call__
            return model.scaled(x)

        model.scaled.goes_on = again
        if sharded:
            fsdp.fully_shard(model, auto_wrap_policy={Block, Scaled})
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].square().sum(), kept, create_graph=True)
        slope.square().sum().backward()
        assert not sharded or is_at_rest(model)
        return x.grad

    for found in fsdp.simulate(2, lambda rank: trained(sharded=True)):
        assert found is not None
        torch.testing.assert_close(found, trained(sharded=False))


WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


class Queries(nn.Module):
    """A parameter of the root is the input of a unit, as the queries of DETR are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.queries, self.decoder = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.decoder(self.queries)) + x


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


class Side(nn.Module):
    """A unit that leaves an auxiliary loss behind in some way, beside its output."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.act, self.exit = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 6))
        self.way, self.calls = way, 0
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        h = self.exit(self.act(self.enter(x) * self.scale)) + 1
        aux = (torch.sin(h) * self.scale).square().mean()
        if self.way == "a buffer":
            self.buffer = aux
        elif self.way == "another name":
            self.__dict__.pop(f"aux{self.calls}", None)
            self.calls += 1
            self.__dict__[f"aux{self.calls}"] = aux
        elif self.way == "another thread":
            with ThreadPoolExecutor(1) as thread:
                self.aux = thread.submit(lambda: (torch.sin(h) * self.scale).square().mean()).result()
        elif self.way == "a defaultdict":
            self.found = defaultdict(list, aux=[aux])
        elif self.way == "a deque":
            return deque([h, aux])
        elif self.way == "values":
            return {"h": h, "aux": aux}.values()
        return h if self.way in SEEN else h.detach()


class Rest(nn.Module):
    """A unit after that one. Returns its output, and the last of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(6, 6)

    def forward(self, found: Any) -> tuple[Tensor, Tensor]:
        first, *_, last = [found, found] if isinstance(found, Tensor) else found
        return self.exit(first.detach()), last


def beside_a_side(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Side(way), Rest())


LEFT: dict[str, Callable[[Side], Tensor]] = {
    "a buffer": lambda unit: unit.buffer,
    "another name": lambda unit: vars(unit)[f"aux{unit.calls}"],
    "a defaultdict": lambda unit: unit.found["aux"][0],
    "another thread": lambda unit: unit.aux,
}
SEEN: dict[str, Callable[[Side, list[Tensor]], RemovableHandle]] = {
    "what goes into a module": lambda unit, kept: unit.act.register_forward_hook(lambda _, args, out: kept.append(args[0])),
    "what will go in": lambda unit, kept: unit.act.register_forward_pre_hook(lambda _, args: kept.append(args[0])),
    "a sum": lambda unit, kept: unit.exit.register_forward_hook(lambda _, args, out: kept.append(out.sum())),
    "for all modules": lambda unit, kept: register_module_forward_hook(
        lambda module, args, out: kept.append(out) if module is unit.enter else None
    ),
}


@pytest.mark.parametrize("way", [*LEFT, *SEEN, "a deque", "values"])
def test_a_backward_may_begin_at_what_a_unit_leaves_behind(way: str) -> None:
    def train(model: nn.Sequential) -> None:
        unit: Any = model[1]
        kept: list[Tensor] = []
        for _ in range(2):
            handle = SEEN[way](unit, kept) if way in SEEN else None
            _, aux = model(X)
            if handle is not None:
                handle.remove()
                aux = kept.pop().sum()
            elif way in LEFT:
                aux = LEFT[way](unit)
            aux.backward()
            del aux

    assert_grads_as_plain(lambda: beside_a_side(way), train, auto_wrap_policy={Side, Rest})


class Beside(nn.Module):
    """A unit with another one inside. It is given a tensor as an attribute, and returns its input beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own, self.beside = Block(6), nn.Linear(6, 6), torch.zeros(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.own(self.inner(x))) + self.beside, x


def graph_of_earlier(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps. The graph behind the input and the attribute stays, while weights of the unit are stepped."""
    start = torch.ones(6, requires_grad=True)
    x, model.get_submodule("0").beside = torch.sin(X * start), torch.cos(start)  # type: ignore[assignment]
    for _ in range(2):
        for _ in range(3):
            output, same = model(x)
        (output.square().mean() + same.mean()).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    node: Any = model.get_submodule("0").beside.grad_fn  # type: ignore[union-attr]
    assert len(NodePrehook.of(node).reaches) < 4, "one for each call that is gone"


@pytest.mark.parametrize("policy", [{Beside, Block}, {Beside}])
def test_nodes_that_a_unit_is_given_are_not_its_own(policy: set[type[nn.Module]]) -> None:
    """The backward of step 2 through the graph of step 1 was refused: weights of the unit had changed since."""

    def trained(sharded: bool) -> Gradients:
        torch.manual_seed(0)
        model = nn.Sequential(Beside())
        if sharded:
            fsdp.fully_shard(model, auto_wrap_policy=policy)
        graph_of_earlier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return {name: local(p) for name, p in model.named_parameters()}

    found = fsdp.simulate(2, lambda rank: trained(sharded=True))
    assert_close(join_all(found, dict(nn.Sequential(Beside()).named_parameters())), trained(sharded=False))


class Marked(torch.autograd.Function):
    """The identity. Its node keeps an object, by which one sees whether the graph is alive."""

    alive: ClassVar = weakref.WeakSet[Any]()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = nn.Module()
        Marked.alive.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@on_ranks(1)
def test_a_graph_that_leads_to_an_attribute_of_a_unit_is_freed(rank: int) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.unit = nn.Linear(6, 6), Block(6)

        def forward(self, x: Tensor) -> Tensor:
            self.unit.skip = Marked.apply(self.enter(x))  # type: ignore[no-untyped-call]
            y: Tensor = self.unit(torch.cos(self.unit.skip))
            self.unit.skip = None
            return y

    model = fsdp.fully_shard(Skips(), auto_wrap_policy={Block})
    loss_of(model(X)).backward()
    gc.collect()
    assert not Marked.alive


class Derived(nn.Module):
    """A unit whose weights are read in nodes that autograd may run after those before the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6)), nn.Parameter(torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (torch.tanh(self.weight) * self.scale * self.scale.exp())


class Inside(nn.Module):
    """A unit with a module whose hook sees what it computes with."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.act, self.exit, self.reentrant = nn.Tanh(), nn.Linear(6, 6), reentrant
        self.act.register_forward_hook(lambda module, args, output: None)

    def marked(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(Marked.apply(x))  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.marked(x) if self.reentrant is None else checkpoint(self.marked, x, use_reentrant=self.reentrant)
        return self.exit(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use", ["reentrant", "not reentrant", "by itself", "dropped"])
@on_ranks(1)
def test_what_hooks_see_keeps_no_graph_alive(rank: int, use: str) -> None:
    model = fsdp.fully_shard(
        nn.Sequential(nn.Linear(6, 6), Inside({"reentrant": True, "not reentrant": False}.get(use))), auto_wrap_policy={Inside}
    )
    for _ in range(3):
        y = model(X)
        if use == "by itself":
            y = model[1].marked(y)
        if use != "dropped":
            loss_of(y).backward()
        del y
        gc.collect()
        assert not Marked.alive


@on_ranks(2)
def test_the_gradient_of_an_output_with_a_hook_enters_no_unit(rank: int) -> None:
    """Autograd runs hooks of a tensor also where it computes its gradient alone: here on one rank, after a step."""

    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda gradient: None)
            return y

    model = fsdp.fully_shard(nn.Sequential(nn.Linear(6, 6), Hooked(6, 6)), auto_wrap_policy={Hooked})
    output = model(X)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].weight.add_(1)
    if rank == 0:
        (gradient,) = torch.autograd.grad(output.square().sum(), output)
        assert torch.equal(gradient, 2 * output)
    del output
    loss_of(model(X)).backward()


def test_a_graph_may_come_from_another_thread() -> None:
    """Autograd runs nodes by numbers of the threads that made them: here those before the unit ahead of those of the unit."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Derived(), nn.Linear(6, 6))

    def train(model: nn.Module) -> None:
        start = torch.ones(6, requires_grad=True)

        def chain(x: Tensor) -> Tensor:
            for _ in range(500):
                x = x * 1.0
            return x

        with ThreadPoolExecutor(1) as thread:
            x = thread.submit(chain, X * start).result()
        loss_of(model(x)).backward()

    assert_grads_as_plain(make, train, auto_wrap_policy={Derived})


class Equilibrium(nn.Module):
    """A unit whose output has a hook, which runs backwards through another graph of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(0.3 * self.step(x))
        start = z.detach().requires_grad_()
        again = torch.tanh(0.3 * self.step(start))

        def solve(gradient: Tensor) -> Tensor:
            return gradient + torch.autograd.grad(again, start, gradient, retain_graph=True)[0]

        z.register_hook(solve)
        return z


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_hook_on_an_output_may_run_a_backward_through_the_unit(strategy: str) -> None:
    """Autograd runs the hooks of a tensor before those of its node. The unit was not gathered in them."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), Equilibrium(), Equilibrium())

    options: dict[str, Any] = {"auto_wrap_policy": {Equilibrium}, "sharding_strategy": strategy}
    assert_grads_as_plain(make, lambda model: model(X).square().mean().backward(), **options)


class TwoArguments(nn.Module):
    """Takes a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor, other: Tensor | None) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("use", ["tangent", "both"])
def test_a_backward_may_begin_at_a_tangent(use: str) -> None:
    """Rank 0 alone computes one: ranks that are threads share the level of forward-mode differentiation.

    What its unit gets beside it has a layout that knows no tangents.
    """

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        x = torch.linspace(-1, 1, 8).view(2, 4) + rank
        if rank == 1:
            return model(x, None).pow(2).sum()
        with forward_ad.dual_level():
            value, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)), torch.eye(2).to_sparse()))
        return (value + tangent if use == "both" else tangent).pow(2).sum()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return TwoArguments()

    def fn(rank: int) -> list[Tensor]:
        model = fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})
        loss_of(model, rank).backward()
        return [fsdp.full_tensor(p.grad) for p in model.parameters()]

    plain = make()
    (sum(loss_of(plain, rank) for rank in range(2)) / 2).backward()
    for gradients in fsdp.simulate(2, fn):
        for gradient, p in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, p.grad)


@pytest.mark.parametrize("recomputed", [False, True])
@on_ranks(2)
def test_compiled_autograd_is_refused_and_changes_nothing(rank: int, recomputed: bool) -> None:
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
    x = torch.ones(2, 4, requires_grad=True)
    loss = (checkpoint(model, x, use_reentrant=True) if recomputed else model(x)).sum()
    if rank == 0:  # torch's switch is one for all ranks that are threads
        plain = nn.Linear(2, 2)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            plain(torch.ones(1, 2)).sum().backward()  # of no unit
        assert plain.weight.grad is not None
        with compiled_autograd._enable(torch.compile), pytest.raises(fsdp.ShardingError, match="under compiled autograd"):
            loss.backward()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
