"""What a recompute reads of another root. Activation checkpointing itself is in tests/patterns/checkpointing.py."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.support.models import local


def test_what_a_recompute_reads_of_another_root_belongs_to_the_backward_around_the_checkpoint() -> None:
    """Its gradient comes in a graph task of the checkpoint's own, whose end is not the end of the backward."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def part(x: Tensor) -> Tensor:
                return torch.tanh(nn.functional.linear(x, self.inner.weight))

            return checkpoint(part, part(x), use_reentrant=True)

    def run(model: nn.Module) -> tuple[Tensor, int]:
        calls: list[Tensor] = []
        weight = model.inner.weight
        weight.register_post_accumulate_grad_hook(calls.append)
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        assert weight.grad is not None
        return local(weight.grad), len(calls)

    def one_rank(rank: int) -> tuple[Tensor, int]:
        model = Reads()
        fsdp.fully_shard(model.inner)
        return run(model)

    wanted, _ = run(Reads())
    found = fsdp.simulate(2, one_rank)
    assert [calls for _, calls in found] == [1, 1]
    torch.testing.assert_close(torch.cat([gradient for gradient, _ in found]), wanted)
