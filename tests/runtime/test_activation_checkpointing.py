"""What a recompute reads of another root, and of its own unit if it is compiled. See also tests/patterns/checkpointing.py."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.support.models import Block, local


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("reentrant", "what"), [(False, "module"), (True, "module"), (False, "forward")])
def test_a_compiled_part_of_a_unit_is_recomputed(reentrant: bool, what: str, backend: str) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(4)

        def forward(self, x: Tensor) -> Tensor:
            part: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return part

    def run(shards: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(Part(), Part())
        for part in model:
            if what == "module":
                part.inner.compile(backend=backend)
            else:
                part.inner.forward = torch.compile(part.inner.forward, backend=backend)
        if shards:
            fsdp.fully_shard(model)
        model(torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()).square().sum().backward()
        return {name: fsdp.full_tensor(p.grad) if shards else p.grad for name, p in model.named_parameters()}

    for found in fsdp.simulate(2, lambda rank: run(shards=True)):
        torch.testing.assert_close(found, run(shards=False))
