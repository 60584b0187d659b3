"""checkpoint_wrapper: gradients, statistics, randomness and refusals."""

import pytest
import torch
from torch import Tensor, nn

from fsdp.compat.fairscale import checkpoint_wrapper, disable_checkpointing, is_checkpointing, is_recomputing


class Counts(nn.Module):
    """Counts its forwards, and takes and returns more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.phases: list[str] = []

    def forward(self, xs: list[Tensor], *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor], str]:
        self.phases.append("first" if is_checkpointing() else "again" if is_recomputing() else "plain")
        y = self.drop(self.norm(self.linear(xs[0]))) * scale
        return y, {"twice": 2 * y, "count": torch.tensor(len(xs))}, "text"


def run(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    y, more, text = model([x], scale=3.0)
    assert text == "text" and more["count"] == 1
    loss: Tensor = y.square().sum() + more["twice"].sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_a_saved_input_that_is_changed_before_its_recompute_is_noticed(offload_to_cpu: bool) -> None:
    given = torch.ones(2, 4)
    output = checkpoint_wrapper(nn.Linear(4, 4), offload_to_cpu)(given)
    given.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@pytest.mark.parametrize("input_needs_grad", [False, True])
def test_gradients_and_statistics_are_those_of_the_plain_module(offload_to_cpu: bool, input_needs_grad: bool) -> None:
    plain, wrapped = Counts(), Counts()
    assert checkpoint_wrapper(wrapped, offload_to_cpu) is wrapped
    inputs = [torch.linspace(0, 1, 12).view(4, 3).requires_grad_(input_needs_grad) for _ in range(2)]
    assert torch.equal(run(plain, inputs[0]), run(wrapped, inputs[1]))
    assert wrapped.phases == ["first", "again"]
    for mine, value in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and value.grad is not None and torch.equal(mine.grad, value.grad)
    for (name, mine), (other, value) in zip(wrapped.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine, value)
    assert not input_needs_grad or torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


def test_where_nothing_is_to_be_saved_the_forward_runs_once() -> None:
    x = torch.ones(4, 3)
    model = checkpoint_wrapper(Counts())
    with torch.no_grad():
        model([x])
    with disable_checkpointing():
        run(model, x)
    checkpoint_wrapper(model).requires_grad_(False)
    assert not model([x])[0].requires_grad
    assert model.phases == ["plain"] * 3


def test_a_norm_that_opts_out_counts_twice() -> None:
    model = Counts()
    model.norm.disable_patch_batchnorm = True  # type: ignore[assignment]
    run(checkpoint_wrapper(model), torch.ones(4, 3))
    assert model.norm.num_batches_tracked == 2


def test_a_gradient_of_inputs_alone_is_refused() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    y = checkpoint_wrapper(Counts())([x])[0]
    with pytest.raises(RuntimeError, match="cannot pass through a checkpoint, because the parameters inside get their gradients"):
        torch.autograd.grad(y.sum(), x)


def test_a_module_whose_outputs_need_no_gradient_is_refused() -> None:
    class Detaches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    y = checkpoint_wrapper(Detaches(3, 3))(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="no output of the module requires a gradient, so that there is nothing to compute"):
        y.sum().backward()
