"""What some ranks use and others do not, in buckets that are launched early, in portions, or by agreement of once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.autograd.frames import in_backward
from tests.support.models import assert_close, assert_grads_as_plain, gradients_of, is_at_rest, join_all
from tests.support.ranks import on_ranks

X = torch.linspace(-1, 1, 8).view(2, 4)
STRATEGIES = ("FULL_SHARD", "NO_SHARD", "SHARD_GRADIENTS")
PIECES = fsdp.ReductionPolicy(bucket_cap_mb=2**-14)


class Partly(nn.Module):
    """Rank 0 uses one parameter more, in a unit that is ready at the end of the backward only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.some, self.linear = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.linear(torch.tanh(x @ self.enter))
        return x * self.some if rank == 0 else x


class Portions(nn.Module):
    """Parameters of one unit get gradients in a reentrant checkpoint and outside of it; in the former each rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.w, self.b = (nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(x @ (self.b if rank else self.w))

        x = checkpoint(inner, x @ self.a, use_reentrant=True)
        return torch.tanh(x @ self.w) @ self.b


class InnerLinear(nn.Linear):
    pass


class ThreeCalls(nn.Module):
    """Of one unit, the middle one in a reentrant checkpoint: its gradients come in two portions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = InnerLinear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, torch.tanh(self.inner(x)), use_reentrant=True)  # type: ignore[arg-type]
        return self.head(self.inner(torch.tanh(x)))


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_remainder_waits_until_the_first_reduction_has_left_the_bucket(streams: int, seed: int) -> None:
    """With a lane free it was filled while the first was on its way, which gave back the memory under the second."""

    options: dict[str, Any] = {"auto_wrap_policy": {InnerLinear}, "reduction": fsdp.ReductionPolicy(streams=streams)}
    assert_grads_as_plain(ThreeCalls, lambda model: model(X).sum().backward(), seed=seed, **options)


class OnOneRank(Portions):
    """Only rank 0 uses a parameter in the checkpoint."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = checkpoint(lambda x: torch.tanh(x @ self.w) if rank == 0 else torch.tanh(x), x @ self.a, use_reentrant=True)
        return torch.tanh(x @ self.w) @ self.b


class Early(nn.Module):
    """Rank 0 alone uses all of a bucket, so it alone reduces it early; then a checkpoint brings more for that bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.some = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)), nn.Parameter(torch.ones(4))
        # of another precision, hence in a bucket of its own
        self.fine = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        def body(x: Tensor) -> Tensor:
            x = torch.tanh(x @ self.a) * self.fine.float()
            return x * self.some if rank == 0 else x

        return body(checkpoint(body, x.clone().requires_grad_(), use_reentrant=True))


class BehindAnEarlyOne(nn.Module):
    """Rank 0 alone reduces the root's bucket early, so it alone comes to that of the unit before a use outside brings more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.a, self.some = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(functional.linear(x, self.inner.weight, self.inner.bias))
        x = torch.tanh(self.inner(x)) @ self.a
        return x * self.some if rank == 0 else x


def linear_layers(name: str, module: nn.Module) -> bool:
    """A policy for models with such layers and without."""
    return isinstance(module, nn.Linear)


def trained(rank: int, kind: type[nn.Module], steps: int, policy: fsdp.ReductionPolicy, **options: Any) -> Any:
    model = fsdp.fully_shard(kind(), auto_wrap_policy=linear_layers, reduction=policy, **options)
    for _ in range(steps):
        model.zero_grad()
        model(X, rank).square().sum().backward()
        assert is_at_rest(model)
    return gradients_of(model)


@pytest.mark.parametrize("kind", [Partly, Portions, OnOneRank, Early, BehindAnEarlyOne])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "HYBRID_SHARD"])
@pytest.mark.parametrize(
    "policy",
    [
        fsdp.ReductionPolicy(),
        PIECES,
        fsdp.ReductionPolicy(bucket_cap_mb=2**-14, static_graph=True),
        fsdp.ReductionPolicy(bucket_cap_mb=1, at_end=True),
    ],
    ids=["default", "in pieces", "in pieces, static", "at the end"],
)
def test_ranks_may_use_different_parameters(kind: type[nn.Module], strategy: str, policy: fsdp.ReductionPolicy) -> None:
    # a mesh of one row: those who shard are everyone
    options: dict[str, Any] = {"mesh": (1, 2)} if strategy == "HYBRID_SHARD" else {}
    found = fsdp.simulate(2, lambda rank: trained(rank, kind, 3, policy, sharding_strategy=strategy, **options))
    plain = kind()
    for rank in range(2):
        (plain(X, rank).square().sum() / 2).backward()
    wanted = gradients_of(plain)
    if strategy == "NO_SHARD":
        for one in found:
            assert_close(one, wanted)
    else:
        assert_close(join_all(found, dict(plain.named_parameters())), wanted)


@on_ranks(2)
def test_a_unit_that_some_ranks_do_not_come_to_may_be_frozen(rank: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, chosen: int) -> Tensor:
            return self.layers[chosen](torch.tanh(self.layers[0](x)))

    policy = fsdp.ReductionPolicy(find_unused_parameters=True)
    model = fsdp.fully_shard(Branches(), auto_wrap_policy={nn.Linear}, sharding_strategy="NO_SHARD", reduction=policy)
    for step in range(3):
        if step == 1:
            model.layers[2].requires_grad_(False)
        model.zero_grad()
        model(X, 1 + rank).square().sum().backward()
    assert model.layers[1].weight.grad is not None and model.layers[2].weight.grad is None


@on_ranks(2)
def test_a_unit_that_was_counted_as_unused_may_not_be_thawed_in_a_recompute(rank: int) -> None:
    class Thaws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if in_backward():
                self.requires_grad_(True)
            return super().forward(x)

    policy = fsdp.ReductionPolicy(find_unused_parameters=True)
    layers = nn.Sequential(nn.Linear(4, 4), Thaws(4, 4))
    model = fsdp.fully_shard(layers, auto_wrap_policy={nn.Linear}, sharding_strategy="NO_SHARD", reduction=policy)
    loss = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum()
    layers[1].requires_grad_(False)
    with pytest.raises(fsdp.ShardingError, match="they were thawed in a recompute"):
        loss.backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS", "SHARD_OPTIMIZER"])
def test_a_frozen_teacher_that_follows_through_data_is_seen(strategy: str) -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.teacher(x) - self.student(x)).square().mean()

    def run(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(X)
            losses.append(float(loss))
            loss.backward()
            optimizer.step()
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
        return losses

    wanted = run(Distilled())
    for found in fsdp.simulate(
        2, lambda rank: run(fsdp.fully_shard(Distilled(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy))
    ):
        assert found == pytest.approx(wanted, rel=1e-5)
