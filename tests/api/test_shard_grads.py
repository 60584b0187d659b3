"""Gradients of shards by `torch.autograd.grad` and `backward(inputs=...)`: those of the plain model, or a refusal."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input

import fsdp
from tests.support.models import Block, loss_of, make_net
from tests.support.ranks import on_ranks

SIZES = pytest.mark.parametrize("size", [2, 3])
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "NO_SHARD"])


def batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 12).view(2, 6)


def shard(strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    return fsdp.fully_shard(make_net(), auto_wrap_policy={Block}, sharding_strategy=strategy, **options)


def plain_gradients(size: int, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The averages over the ranks."""
    net = make_net()
    (sum(loss_of(net(batch(rank))) for rank in range(size)) / size).backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None and (names is None or name in names)}


def full_values(model: nn.Module, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Each gradient in full: put into the weights, and gathered."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = gradients.get(name)
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    return fsdp.full_state_dict(model, rank0_only=False)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))


@SIZES
@STRATEGIES
@pytest.mark.parametrize("allow_unused", [False, True])
@on_ranks("size")
def test_autograd_grad_gives_the_reduced_parts_and_leaves_grad_alone(
    rank: int, size: int, strategy: str, allow_unused: bool
) -> None:
    model = shard(strategy)
    loss_of(model(batch(0))).backward()
    before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    parameters = dict(model.named_parameters())
    for _ in range(2):
        gradients = torch.autograd.grad(loss_of(model(batch(rank))), list(parameters.values()), allow_unused=allow_unused)
    for parameter, object_before, value in before:
        assert parameter.grad is object_before
        assert value is None or torch.equal(object_before, value)
    assert all(g is not None and g.shape == p.shape for g, p in zip(gradients, parameters.values(), strict=True))
    assert_same(full_values(model, dict(zip(parameters, gradients, strict=True))), plain_gradients(size))


@SIZES
@STRATEGIES
@on_ranks("size")
def test_backward_with_inputs_brings_the_gradients_of_these_alone(rank: int, size: int, strategy: str) -> None:
    chosen = ["enter.weight", "blocks.1.up.weight", "blocks.1.up.bias", "leave.bias"]
    model = shard(strategy)
    parameters = dict(model.named_parameters())
    for _ in range(2):
        model.zero_grad()
        loss_of(model(batch(rank))).backward(inputs=[parameters[name] for name in chosen])
    assert all(p.grad is None for name, p in parameters.items() if name not in chosen)
    assert_same(full_values(model, {name: p.grad for name, p in parameters.items()}), plain_gradients(size, chosen))


@on_ranks(2)
def test_a_subset_and_the_graph_kept_for_another_call(rank: int) -> None:
    model = shard()
    parameters = dict(model.named_parameters())
    x = batch(rank).requires_grad_()
    loss = loss_of(model(x))
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert first[0] is not None
    (one,) = torch.autograd.grad(loss, parameters["leave.weight"], retain_graph=True)
    two = torch.autograd.grad(loss, [parameters["enter.weight"], parameters["enter.bias"]])
    found = full_values(model, {"leave.weight": one, "enter.weight": two[0], "enter.bias": two[1]})
    assert_same(found, plain_gradients(2, ["leave.weight", "enter.weight", "enter.bias"]))


@on_ranks(2)
def test_a_parameter_that_no_rank_used_is_none_where_that_is_allowed_and_named_elsewhere(rank: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = fsdp.fully_shard(Half())
    parameters = [model.used.weight, model.left.weight]
    found = torch.autograd.grad(loss_of(model(torch.ones(2, 4))), parameters, allow_unused=True)
    assert [one is None for one in found] == [False, parameters[1].numel() > 0]
    zeros = torch.autograd.grad(loss_of(model(torch.ones(2, 4))), parameters, materialize_grads=True)
    assert zeros[1] is not None and not zeros[1].any()
    if parameters[1].numel():
        with pytest.raises(fsdp.ShardingError, match=r"autograd.grad: a parameter of a sharded model was not used by any rank"):
            torch.autograd.grad(loss_of(model(torch.ones(2, 4))), parameters)
    else:
        torch.autograd.grad(loss_of(model(torch.ones(2, 4))), parameters)


def with_hook(model: nn.Module) -> Tensor:
    next(p for p in model.parameters() if p.numel()).register_post_accumulate_grad_hook(lambda parameter: None)
    return loss_of(model(batch(0)))


def after_no_sync(model: nn.Module) -> Tensor:
    with fsdp.no_sync(model):
        loss_of(model(batch(0))).backward()
    return loss_of(model(batch(0)))


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.numel()]


def inside_no_sync(model: nn.Module, loss: Tensor) -> None:
    with fsdp.no_sync(model):
        torch.autograd.grad(loss, parameters_of(model))


REFUSED: dict[str, tuple[Callable[[nn.Module], Tensor], Callable[[nn.Module, Tensor], object], str]] = {
    "create_graph": (
        lambda model: loss_of(model(batch(0))),
        lambda model, loss: torch.autograd.grad(loss, parameters_of(model), create_graph=True),
        "because create_graph=True is given, and reduced gradients have no graph",
    ),
    "is_grads_batched": (
        lambda model: model(batch(0)),
        lambda model, out: torch.autograd.grad(
            out, parameters_of(model), grad_outputs=torch.ones(3, *out.shape), is_grads_batched=True
        ),
        "because is_grads_batched=True is given, and gradients are reduced one by one",
    ),
    "no_sync": (lambda model: loss_of(model(batch(0))), inside_no_sync, "because it is inside no_sync, which reduces nothing"),
    "after no_sync": (
        after_no_sync,
        lambda model, loss: torch.autograd.grad(loss, parameters_of(model)),
        "because gradients accumulated under no_sync would be added",
    ),
    "a hook": (
        with_hook,
        lambda model, loss: torch.autograd.grad(loss, parameters_of(model)),
        "because a parameter has a post-accumulate hook, which would run",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@on_ranks(2)
def test_what_a_backward_cannot_give_is_refused_with_the_reason(rank: int, kind: str) -> None:
    begin, ask, reason = REFUSED[kind]
    model = shard()
    loss = begin(model)
    with pytest.raises(fsdp.ShardingError) as caught:
        ask(model, loss)
    assert f"autograd.grad cannot give the gradients of a sharded model's parameters, {reason}; call backward()" in str(
        caught.value
    )
    loss_of(model(batch(rank))).backward()


@on_ranks(2)
def test_inside_a_backward_it_is_refused(rank: int) -> None:
    model = shard()
    said: list[str] = []

    def ask(gradient: Tensor) -> None:
        with pytest.raises(fsdp.ShardingError) as caught:
            torch.autograd.grad(other, parameters_of(model))
        said.append(str(caught.value))

    other = loss_of(model(batch(rank)))
    loss = loss_of(model(batch(rank)))
    loss.register_hook(ask)
    loss.backward()
    assert "because a backward is running" in said[0]


@on_ranks(2)
def test_parameters_and_other_tensors_in_one_call_are_refused(rank: int) -> None:
    model = shard()
    x = batch(rank).requires_grad_()
    loss = loss_of(model(x))
    with pytest.raises(fsdp.ShardingError, match=r"a sharded model and other tensors are asked for in one call; ask for the"):
        torch.autograd.grad(loss, [x, *model.parameters()])
    # the remedy
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()))


@on_ranks(2)
def test_other_calls_are_as_before(rank: int) -> None:
    shard()
    x = torch.ones(3, requires_grad=True)
    weight = nn.Parameter(torch.ones(3))
    y = x * weight * 2
    assert torch.equal(torch.autograd.grad(y.sum(), [x, weight], retain_graph=True)[1], torch.full((3,), 2.0))
    y.sum().backward(inputs=[weight])
    assert x.grad is None and weight.grad is not None


@on_ranks(2)
def test_an_unsharded_parameter_inside_its_forward_gives_its_own_gradient(rank: int) -> None:
    """As on a plain module: a gradient of this rank's own computation."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(1, 2, 4))

        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad((self.weight * x.detach()).sum(), self.weight)
            assert torch.equal(slope, x)
            return x * self.weight * slope

    fsdp.fully_shard(Inner())(torch.full((4,), float(rank + 1))).sum().backward()


@pytest.mark.parametrize("no_sync", [False, True])
@on_ranks(2)
def test_a_pipeline_schedule_that_splits_the_backward_is_refused_in_its_first_step(rank: int, no_sync: bool) -> None:
    model = shard()
    x = batch(rank).requires_grad_()
    with pytest.raises(RuntimeError) as caught:  # torch's own, with ours as its cause
        output = model(x)
        with fsdp.no_sync(model) if no_sync else nullcontext():
            stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
    assert isinstance(caught.value.__cause__, fsdp.ShardingError)
    assert "would find no gradient of sharded weights: make the stage a fsdp.PipelineStage" in str(caught.value.__cause__)
    output = model(x)
    with pytest.warns(UserWarning, match="reduces gradients with each micro-batch, .* make it a fsdp.PipelineStage"):
        stage_backward(output, torch.ones_like(output), [x])
    assert all(p.grad is not None for p in parameters_of(model))
