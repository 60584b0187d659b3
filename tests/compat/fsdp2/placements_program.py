"""One rank of two over gloo: what the engine does with parameters that are cut along their second dimension."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp
from fsdp.runtime.registry import unit_ref_of
from tests.support.processes import be_a_rank

Step = Callable[[Any], Any]


class Net(nn.Module):
    """The parent reads the weight of a layer, which another unit may have; a buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return out + x @ self.inner.weight.t() @ self.inner.weight * 0.1


class Clamped(nn.Linear):
    """Changes its weight in place in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(model: Any, **options: Any) -> Any:
    for child in list(model.children()):
        fsdp.fully_shard(child, dtensors=True, shard_placement_fn=columns, **options)
    return fsdp.fully_shard(model, dtensors=True, shard_placement_fn=columns, **options)


def batch(step: int, rank: int, width: int = 5) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(2 * step + rank))


def train(model: Any, ranks: list[int], accumulates: bool = False) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    wrapped = unit_ref_of(model) is not None
    for step in range(4):
        if wrapped and accumulates:
            fsdp.set_requires_gradient_sync(model, step % 2 == 1)
        torch.stack([model(batch(step, rank)).square().mean() for rank in ranks]).mean().backward()
        if not accumulates or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def hooked(model: Any, ranks: list[int]) -> dict[str, Tensor]:
    """Hooks on parameters double the gradient."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return train(model, ranks)


def by_comm_hook(model: Any) -> dict[str, Tensor]:
    """A communication hook sees gradients in the shapes of the full parameters."""

    def average(world: int, bucket: Any) -> Any:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()], shapes
        total = bucket.buffer().clone()
        dist.all_reduce(total)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(total.div_(world).view(world, -1)[dist.get_rank()])
        return future

    fsdp.register_comm_hook(model, dist.get_world_size(), average)
    return train(model, [dist.get_rank()])


def in_place(make: Callable[[nn.Module], nn.Module], ranks: list[int]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make(nn.Sequential(Clamped(5, 4)))
    for rank in ranks[:1]:
        model(batch(0, rank))
    return {name: full(p) for name, p in model.named_parameters()}


def close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    torch.testing.assert_close(mine, expected)
    return True


def run(rank: int, size: int, folder: Path) -> Any:
    everybody, alone = list(range(size)), [rank]
    expected = train(net(), everybody)
    model = sharded(net())
    kept = [p.full_tensor() for p in model.parameters()]  # as code that has looked at the weights does
    results: dict[str, Any] = {
        "placements": {name: str(p.placements) for name, p in model.named_parameters()},
        "rows": [tuple(p.to_local().shape) for p in model.inner.parameters()],
        "trained": close(train(model, alone), expected),
        "guard": close(train(sharded(net(), guard=True), alone), expected),
        "uneven_paths": close(train(sharded(net(), uneven_paths=True), alone), expected),
        "coalesced": close(train(sharded(net(), reduction=fsdp.ReductionPolicy(coalesce_cap_mb=1)), alone), expected),
        "kept": close(train(sharded(net(), reshard_after_forward=False), alone), expected),
        "accumulated": close(train(sharded(net()), alone, True), train(net(), everybody, True)),
        "hooks": close(hooked(sharded(net()), alone), hooked(net(), everybody)),
        "comm_hook": close(by_comm_hook(sharded(net())), expected),
        "in_place": close(in_place(sharded, alone), in_place(lambda one: one, everybody)),
    }
    other = sharded(net())
    other.load_state_dict(model.state_dict())
    results["loaded"] = close({n: full(p) for n, p in other.named_parameters()}, expected)
    other.load_state_dict({name: value + 1 for name, value in expected.items()})
    results["loaded_full"] = close({n: full(p) - 1 for n, p in other.named_parameters()}, expected)
    results["full_value"] = torch.equal(fsdp.full_tensor(model.inner.weight), full(model.inner.weight))
    results["full_state_dict"] = close(fsdp.full_state_dict(model, rank0_only=False), expected)
    ema = fsdp.EMA(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    ema.update()
    with ema.averaged_weights():
        results["averaged"] = close({n: full(p) - 0.5 for n, p in model.named_parameters()}, expected)
    results["looked_at"] = all(one.requires_grad for one in kept)
    refused = []
    for attempt in (
        lambda: fsdp.fully_shard(nn.Linear(2, 2), shard_placement_fn=columns),
        lambda: fsdp.fully_shard(nn.Linear(2, 2), dtensors=True, shard_placement_fn=7),  # type: ignore[arg-type]
        lambda: fsdp.fully_shard(nn.Linear(2, 2), dtensors=True, shard_placement_fn=lambda p: 1),
        lambda: fsdp.fully_shard(nn.Linear(2, 2), dtensors=True, shard_placement_fn=lambda p: Shard(1)),
        lambda: fsdp.fully_shard(nn.Linear(2, 2), dtensors=True, shard_placement_fn=lambda p: Shard(0 if p.dim() < 2 else rank)),
    ):
        try:
            attempt()
            refused.append("")
        except ValueError as refusal:
            refused.append(str(refusal))
    results["refused"] = refused
    return results


if __name__ == "__main__":
    be_a_rank(run)
