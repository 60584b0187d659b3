"""fsdp.full_parameters: loss terms on weights, beside a single process with the same terms; and what is refused inside."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fsdp
from tests.support.models import assert_close, local, world_log
from tests.support.ranks import on_ranks

STEPS: Final = 3
X: Final = torch.linspace(-1, 1, 4 * 2 * 4).view(4, 2, 4)
STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD")


def net(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 3))
    model[2].requires_grad_(not frozen)
    return model


def penalty(model: nn.Module) -> Tensor:
    parameters = list(model.parameters())
    first = parameters[0]
    orthogonal = (first @ first.T - torch.eye(len(first))).square().sum()
    squares = sum((p.pow(2).sum() for p in parameters), torch.zeros(()))
    norms = sum((p.norm() for p in parameters), torch.zeros(()))
    spectral = torch.linalg.matrix_norm(parameters[2], 2)
    tied = (parameters[4] - parameters[4].T).abs().mean()
    return 0.1 * squares + 0.2 * norms + 0.05 * orthogonal + 0.1 * spectral + tied


def loss_before(model: Any, x: Tensor) -> Tensor:
    term = penalty(model)
    return model(x).square().sum() + term  # type: ignore[no-any-return]


def loss_after(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum() + penalty(model)  # type: ignore[no-any-return]


def loss_without_forward(model: Any, x: Tensor) -> Tensor:
    return penalty(model)


def loss_recomputed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().sum() + penalty(model)  # type: ignore[no-any-return]


LOSSES: Final = {
    "before": loss_before,
    "after": loss_after,
    "without a forward": loss_without_forward,
    "beside a recompute": loss_recomputed,
}
Loss = Callable[[Any, Tensor], Tensor]


def sharded(strategy: str = "FULL_SHARD", size: int = 2, frozen: bool = False, **options: Any) -> Any:
    mesh = {"mesh": (size // 2, 2)} if strategy == "HYBRID_SHARD" else {}
    return fsdp.FullyShardedDataParallel(net(frozen), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, **mesh, **options)


def train(model: Any, loss: Loss, batches: list[Tensor], around: Callable[[], Any], no_sync: bool = False) -> None:
    """Each step has one backward for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, x in enumerate(batches):
            silent = fsdp.no_sync(model) if no_sync and number < len(batches) - 1 else nullcontext()
            with silent, around():
                loss(model, x + step).backward()
        optimizer.step()


def trained(strategy: str, size: int, loss: Loss, micro: int = 1, frozen: bool = False, **options: Any) -> Callable[[int], Any]:
    def fn(rank: int) -> Any:
        model = sharded(strategy, size, frozen, **options)
        train(model, loss, [X[rank] * (n + 1) for n in range(micro)], lambda: fsdp.full_parameters(model), no_sync=micro > 1)
        return fsdp.full_state_dict(model, rank0_only=False)

    return fn


def plain(size: int, loss: Loss, micro: int = 1, frozen: bool = False) -> dict[str, Tensor]:
    def average(model: Any, x: Tensor) -> Tensor:
        losses = [loss(model, X[rank] * x.flatten()[0] + x.flatten()[1]) for rank in range(size)]
        return torch.stack(losses).mean()

    model = net(frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for n in range(micro):
            average(model, torch.tensor([float(n + 1), float(step)])).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("strategy", "size"), [*product(STRATEGIES, (2, 3)), ("HYBRID_SHARD", 4)])
def test_terms_on_weights_train_as_on_one_process(strategy: str, loss: str, size: int) -> None:
    expected = plain(size, LOSSES[loss])
    for found in fsdp.simulate(size, trained(strategy, size, LOSSES[loss])):
        assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("frozen", [False, True])
def test_they_accumulate_under_no_sync_and_leave_frozen_parameters_out(strategy: str, frozen: bool) -> None:
    expected = plain(2, loss_after, micro=3, frozen=frozen)
    for found in fsdp.simulate(2, trained(strategy, 2, loss_after, micro=3, frozen=frozen)):
        assert_close(found, expected)


@on_ranks(2)
def test_a_value_has_the_dtype_of_the_shard(rank: int) -> None:
    alone, model = net(), sharded(mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    wanted = penalty(alone)
    wanted.backward()
    with fsdp.full_parameters(model):
        assert all((p * 1).dtype is torch.float32 and p.dtype is torch.float32 for p in model.parameters())
        term = penalty(model)
        assert (term - wanted).detach().abs() < 1e-6
        term.backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        # the gradient has passed through bf16, as each gradient of the unit does
        torch.testing.assert_close(fsdp.full_tensor(mine.grad), theirs.grad, rtol=1e-2, atol=1e-2)


@on_ranks(2)
def test_ranks_may_use_the_values_in_other_terms(rank: int) -> None:
    """Every rank gathers alike. The loss of rank 1 leaves the term out, so half of it counts."""
    model, alone = sharded(), net()
    (penalty(alone) / 2).backward()
    with fsdp.full_parameters(model):
        (penalty(model) * (rank == 0)).backward()
    found = {name: fsdp.full_tensor(p.grad) for name, p in model.module.named_parameters()}
    assert_close(found, {name: p.grad for name, p in alone.named_parameters()})


def test_a_rank_that_uses_no_value_is_named() -> None:
    def fn(rank: int) -> None:
        model = sharded()
        with fsdp.full_parameters(model):
            loss = model(X[rank]).sum()
            if rank == 0:
                loss = loss + penalty(model)
            loss.backward()

    with pytest.raises(fsdp.WorldError, match="rank"):
        fsdp.simulate(2, fn)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_without_autograd_values_are_full_and_have_no_graph(rank: int, mode: Any) -> None:
    wanted, model = penalty(net()).detach(), sharded()
    with fsdp.full_parameters(model):
        with mode():
            assert (penalty(model) - wanted).abs() < 1e-6 and not penalty(model).requires_grad
        assert (penalty(model).detach() - wanted).abs() < 1e-6 and penalty(model).requires_grad


METHODS: Final[list[Callable[[Tensor], Tensor]]] = [
    *(lambda p: p.view(-1), lambda p: p.reshape(-1), lambda p: p.flatten(), lambda p: p.ravel(), lambda p: p[None]),
    *(lambda p: p.view_as(p.detach()), lambda p: p[0], lambda p: p[:1], lambda p: p.quantile(0.5)),
    *(lambda p: p + p.new_ones(p.shape), lambda p: p * sum(p.flatten().tolist()), lambda p: nn.utils.parameters_to_vector([p])),
]


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_methods_that_shards_override_get_full_values(rank: int, method: Callable[[Tensor], Tensor]) -> None:
    model, alone = sharded(), net()
    with fsdp.full_parameters(model):
        for one in (model, alone):
            sum((method(p).square().sum() for p in one.parameters()), torch.zeros(())).backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(fsdp.full_tensor(mine.grad), theirs.grad)


@on_ranks(2)
def test_shapes_are_full_and_communicate_nothing(rank: int) -> None:
    """One rank asks for them alone."""
    model = sharded()
    kept = model.module[0].weight
    with fsdp.full_parameters(model):
        if rank == 0:
            assert (kept.shape, kept.size(0), kept.dim(), kept.numel(), len(kept)) == ((5, 4), 5, 2, 20, 5)
        assert kept.T.shape == (4, 5) and kept.requires_grad and kept.is_leaf
    assert local(kept).numel() < 20


@on_ranks(2)
def test_a_unit_is_gathered_once_for_all_its_parameters(rank: int) -> None:
    model, counts = sharded(), []
    with fsdp.full_parameters(model):
        for _ in range(2):
            before = len(world_log("all_gather"))
            terms = penalty(model) + penalty(model)
            counts.append(len(world_log("all_gather")) - before)
            terms.backward()
    assert counts == [3, 3]


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_a_term_that_is_recomputed_is_refused(rank: int, reentrant: bool) -> None:
    def squares(weight: Tensor, x: Tensor) -> Tensor:
        return weight.pow(2).sum() * x

    model = sharded()
    x = torch.ones((), requires_grad=True)
    with fsdp.full_parameters(model):
        term = checkpoint(squares, model.module[0].weight, x, use_reentrant=reentrant)
        with pytest.raises((fsdp.ShardingError, CheckpointError)):
            term.backward()


CHANGES: Final[dict[str, Callable[[Any], Any]]] = {
    "add_": lambda p: p.add_(1),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "init": lambda p: nn.init.ones_(p),
    "out": lambda p: torch.add(torch.zeros(5, 4), 1, out=p),
    "data": lambda p: p.data.add_(1),
    "set data": lambda p: setattr(p, "data", torch.zeros(5, 4)),
    "foreach": lambda p: torch._foreach_add_([p], 1),
    "detach": lambda p: p.detach().add_(1),
    "view": lambda p: p.T.mul_(2),
    "relu": lambda p: nn.functional.relu(p, inplace=True),
    "local": lambda p: (p.sum(), fsdp.to_local(p).add_(1), p.sum()),
}


CHANGED: Final = r"parameter '0\.weight' of unit '0' is changed inside"


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_changes_in_place_are_refused(rank: int, change: str, strategy: str) -> None:
    model = sharded(strategy)
    weight = model.module[0].weight
    before = local(weight).clone()
    with torch.no_grad(), pytest.raises(fsdp.ShardingError, match=CHANGED), fsdp.full_parameters(model):
        CHANGES[change](weight)
    assert change == "local" or torch.equal(local(weight), before)


@on_ranks(2)
def test_an_error_inside_ends_the_block(rank: int) -> None:
    model = sharded()
    with pytest.raises(KeyError), fsdp.full_parameters(model):
        raise KeyError
    assert local(model.module[0].weight).shape != (5, 4)
    term = model.module[0].weight.pow(2).sum()
    with pytest.raises(fsdp.ShardingError, match=r"fsdp.full_parameters\(model\)"):
        term.backward()


@on_ranks(2)
def test_parameters_of_other_models_stay_shards(rank: int) -> None:
    model, other = sharded(), sharded()
    with fsdp.full_parameters(model):
        assert model.module[0].weight.sum().dim() == 0 and model.module[0].weight.T.shape == (4, 5)
        with pytest.raises(fsdp.ShardingError):
            other.module[0].weight.t()
    with fsdp.full_parameters(model), fsdp.full_parameters(other):
        (penalty(model) - penalty(other)).backward()
    gradients = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(local(one.grad), -local(two.grad)) for one, two in gradients)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Rprop], ids=["plain parts", "shards"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_loop_of_steps_may_be_inside(rank: int, strategy: str, optimizer: Any) -> None:
    """The step, zero_grad and clipping work on shards there, to the bit as outside."""

    def loop(model: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
        made = optimizer(model.parameters(), lr=0.01)
        for step in range(STEPS):
            with around():
                loss = loss_after(model, X[0] + step)
                loss.backward()
            norm = fsdp.clip_grad_norm_(model, 1.0)
            assert model.module[0].weight.grad.norm() <= norm
            made.step()
            made.zero_grad()

    one, other = sharded(strategy), sharded(strategy)
    loop(one, lambda: fsdp.full_parameters(one))
    with fsdp.full_parameters(other):
        loop(other, nullcontext)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(p), local(q))


@on_ranks(2)
def test_a_forward_inside_gives_the_same_bits(rank: int) -> None:
    model = sharded()
    outside = model(X[rank])
    outside.sum().backward()
    gradients = [local(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    with fsdp.full_parameters(model):
        inside = model(X[rank])
        inside.sum().backward()
        assert all(torch.equal(local(p.grad), one) for p, one in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(inside, outside)
