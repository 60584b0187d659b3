"""What the engine once got wrong, each as short as it can be told."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.runtime.registry import unit_ref_of
from state_machine import Event
from tests.support.models import assert_grads_as_plain, is_at_rest
from tests.support.ranks import on_ranks


class UsedInTwoCheckpoints(nn.Module):
    """Its only parameter is used in a checkpoint that is replayed, then in one that runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        def mix(y: Tensor) -> Tensor:
            return torch.tanh(y @ self.weight)

        first = checkpoint(mix, x, use_reentrant=False)
        return checkpoint(mix, first, use_reentrant=True)


def test_a_gradient_from_a_reentrant_checkpoint_inside_the_unit_is_not_the_last_one() -> None:
    """It came in a backward of the checkpoint's own; freeing then took the weight away under the other checkpoint."""
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert_grads_as_plain(UsedInTwoCheckpoints, lambda model: model(x).sum().backward())


class CheckpointsWhatNeedsGrad(nn.Module):
    """A parameter that is used inside a reentrant checkpoint or plainly, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        def mix(y: Tensor) -> Tensor:
            return torch.tanh(y @ self.weight) @ self.weight

        return (checkpoint(mix, x, use_reentrant=True) if x.requires_grad else mix(x)) * self.gain


def test_gradients_from_a_checkpoint_of_one_forward_do_not_complete_another_forward() -> None:
    """In one backward: the last of two forwards was left with one gradient in; the next one freed the first one's weight."""
    x = torch.linspace(-1, 1, 6).view(2, 3)

    def train(model: nn.Module) -> None:
        loss = model(x).sum()
        (loss + model(x.clone().requires_grad_()).sum()).backward()

    assert_grads_as_plain(CheckpointsWhatNeedsGrad, train, reshard_after_forward=True)


def test_autograd_grad_of_an_input_that_is_a_leaf() -> None:
    """Autograd refuses to say whether it comes to a leaf when it was asked for some gradients only."""
    x = torch.linspace(-1, 1, 6).view(2, 3)

    def gradient_of_input(model: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf).sum(), leaf)[0]

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def one_rank(rank: int) -> Tensor:
        model = fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})
        found = gradient_of_input(model)
        assert is_at_rest(model) and all(parameter.grad is None for parameter in model.parameters())
        return found

    wanted = gradient_of_input(make())
    for found in simulate(2, one_rank):
        torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_create_graph_with_gradients_of_parameters_is_refused_by_name(rank: int) -> None:
    model = fsdp.fully_shard(nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(fsdp.ShardingError, match="create_graph=True brings gradients to the parameters of unit 'Linear'"):
        model(x).sum().backward(create_graph=True)
    model(x).sum().backward()
    assert is_at_rest(model)


@pytest.mark.parametrize("wrap", [fsdp.fully_shard, fsdp.FullyShardedDataParallel])
@on_ranks(2)
def test_ctrl_c_inside_a_forward_is_noticed_by_whatever_comes_next(rank: int, wrap: Callable[..., nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = wrap(module, auto_wrap_policy={nn.Linear})
    interrupts = iter((True, False))

    def interrupt(module: nn.Module, inputs: object) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt

    module[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2))
    assert set(fsdp.full_state_dict(model, rank0_only=False)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert is_at_rest(model)
    model(torch.ones(1, 2)).sum().backward()


class ReturnsAView(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


class EditsWhatItGets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(3, 3), ReturnsAView(3, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        y += 1
        y *= 2
        return self.last(y)


def test_a_unit_is_reached_through_a_returned_view_that_was_edited_in_place() -> None:
    """The edit gives the view a new node; only the one behind its base is sure to be entered before the unit."""
    x = torch.linspace(-1, 1, 6).view(2, 3)

    def train(model: nn.Module) -> None:
        model(x).sum().backward()
        if sharded := unit_ref_of(model.second):
            story = list(sharded.engine.root.lifecycles[sharded.index].story)
            assert story.index(Event.PRE_BACKWARD) < story.index(Event.GRAD_ACCUMULATED)

    assert_grads_as_plain(EditsWhatItGets, train, auto_wrap_policy={nn.Linear})
