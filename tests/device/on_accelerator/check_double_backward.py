"""Double backwards on ranks whose threads have made different numbers of autograd nodes.

Autograd runs the node with the highest sequence number first, and each thread counts its own nodes. On a device, the nodes of the
second graph are made by another thread than those of the first. So the order of both depends on what a rank has done before.
See docs/reference/limits.md.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.accelerator.device import NAME, Scheduler, load
from tests.support.accelerator.world import run
from tests.support.models import Block

load()
torch.set_num_threads(1)
MANY = 2000
"""More nodes than both graphs of a step have."""


def weights_after(own_nodes: bool, threads: bool = True, **options: Any) -> list[list[Tensor]]:
    """The shards of two ranks after steps with a gradient penalty. `own_nodes`: rank 1 makes nodes that rank 0 does not make."""

    def train(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device(NAME, rank), torch.autograd.set_multithreading_enabled(threads):
            model = fsdp.fully_shard(nn.Sequential(Block(8), Block(8), Block(8)), auto_wrap_policy={Block}, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(3):
                if step == 1 and rank == 1 and own_nodes:
                    alone = torch.ones(1, requires_grad=True)
                    for _ in range(MANY):
                        torch.autograd.grad(alone.square(), alone, create_graph=True)
                x = torch.arange(16.0).view(2, 8).div(16).requires_grad_()
                real, loss = model(x.detach()), model(x)
                (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
                (real.square().mean() + slope.square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [fsdp.to_local(parameter).detach().cpu() for parameter in model.parameters()]

    return run(2, train, Scheduler.EAGER)


def test_ranks_that_have_made_different_numbers_of_nodes_disagree() -> None:
    weights_after(own_nodes=False)
    with pytest.raises(fsdp.WorldError, match=r"The ranks disagree .* pass uneven_paths=True"):
        weights_after(own_nodes=True)


@pytest.mark.parametrize("remedy", [{"threads": False}, {"uneven_paths": True}], ids=["one thread", "uneven paths"])
def test_the_remedies_make_the_order_equal(remedy: dict[str, Any]) -> None:
    for found, wanted in zip(weights_after(True, **remedy), weights_after(False), strict=True):
        torch.testing.assert_close(found, wanted)
