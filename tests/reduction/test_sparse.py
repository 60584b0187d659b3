"""Sparse gradients of embeddings: rows that travel as rows under NO_SHARD, and densely under every other strategy."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.reduction.sparse import SparseTotal
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import gradients_of, is_at_rest, loss_of, world_log
from tests.support.ranks import on_ranks

ROWS, WIDTH = 40, 6
REPLICATED: dict[str, Any] = {"sharding_strategy": "NO_SHARD", "auto_wrap_policy": {nn.Embedding, nn.EmbeddingBag}}


class Words(nn.Module):
    """Two embeddings with sparse gradients, one of them a bag, and something dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, bagged: bool = True) -> Tensor:
        found = self.words(tokens).mean(1)
        return self.leave(torch.tanh(found + self.bag(tokens)) if bagged else found)


def make(net: type[nn.Module] = Words, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return net().to(options.get("dtype", torch.float32))


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS // 2, (3 + rank, 4), generator=generator)


class Optimizers:
    """SparseAdam takes sparse gradients only, and SGD both."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.all = [
            torch.optim.SparseAdam([named["words.weight"], named["bag.weight"]], lr=0.05),
            torch.optim.SGD([named["leave.weight"], named["leave.bias"]], lr=0.05),
        ]

    def step(self) -> None:
        for one in self.all:
            one.step()
            one.zero_grad()


def reference(size: int, batches: Callable[[int], list[list[Tensor]]]) -> dict[str, Tensor]:
    """The weights of single-process training on every rank's data. `batches`: of a rank, by step and backward."""
    model = make()
    optimizers = Optimizers(model)
    for of_ranks in zip(*(batches(rank) for rank in range(size)), strict=True):
        for of_rank in of_ranks:
            for batch in of_rank:
                (loss_of(model(batch)) / size).backward()
        optimizers.step()
    return dict(model.named_parameters())


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-6, msg=name)


def bytes_held(model: nn.Module) -> dict[str, int]:
    engine = unit_ref_of(model).engine  # type: ignore[union-attr]
    return {kind: held for kind, held in engine.tracker.held.items() if held}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, fsdp.ReductionPolicy(bucket_cap_mb=1e-4), fsdp.ReductionPolicy(deterministic=True)])
def test_sparse_adam_trains_as_on_one_process(size: int, policy: fsdp.ReductionPolicy | None) -> None:
    def batches(rank: int) -> list[list[Tensor]]:
        return [[tokens_of(rank, step)] for step in range(3)]

    def fn(rank: int) -> dict[str, Tensor]:
        model = fsdp.fully_shard(make(), reduction=policy, **REPLICATED)
        optimizers = Optimizers(model)
        for (batch,) in batches(rank):
            loss_of(model(batch)).backward()
            assert model.words.weight.grad.is_sparse and model.bag.weight.grad.is_sparse
            assert not model.leave.weight.grad.is_sparse
            optimizers.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    wanted = reference(size, batches)
    for found in fsdp.simulate(size, fn):
        assert_alike(found, wanted)


@pytest.mark.parametrize("kept", [True, False], ids=["under no_sync", "reduced each time"])
def test_accumulated_gradients_stay_sparse(kept: bool) -> None:
    def batches(rank: int) -> list[list[Tensor]]:
        return [[tokens_of(rank, 3 * step + m) for m in range(3)] for step in range(2)]

    def fn(rank: int) -> dict[str, Tensor]:
        model = fsdp.fully_shard(make(), **REPLICATED)
        optimizers = Optimizers(model)
        for of_step in batches(rank):
            for number, batch in enumerate(of_step):
                with fsdp.no_sync(model) if kept and number < 2 else nullcontext():
                    loss_of(model(batch)).backward()
            assert model.words.weight.grad.is_sparse
            optimizers.step()
        assert is_at_rest(model)
        return {name: p.detach() for name, p in model.named_parameters()}

    wanted = reference(2, batches)
    for found in fsdp.simulate(2, fn):
        assert_alike(found, wanted)


def test_what_is_kept_can_be_zeroed() -> None:
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        model = fsdp.fully_shard(make(), **REPLICATED)
        for to_none in (True, False):
            with fsdp.no_sync(model):
                loss_of(model(tokens_of(rank, 0))).backward()
            torch.optim.SGD(model.parameters(), lr=1).zero_grad(set_to_none=to_none)
        loss_of(model(tokens_of(rank, 1))).backward()
        again = fsdp.fully_shard(make(), **REPLICATED)
        loss_of(again(tokens_of(rank, 1))).backward()
        return model.words.weight.grad.to_dense(), again.words.weight.grad.to_dense()

    for found, wanted in fsdp.simulate(2, fn):
        assert torch.equal(found, wanted)


def test_only_rows_travel() -> None:
    """Counts first, and then as many rows as the rank with the most has: an index and a row each."""
    few, many = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 2, 3, 4]])

    def fn(rank: int) -> tuple[list[int], int]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Embedding(1000, WIDTH, sparse=True), sharding_strategy="NO_SHARD")
        for _ in range(2):
            before = len(world_log())
            model([few, many][rank]).sum().backward()
        assert model.weight.grad.coalesce().indices().tolist() == [[0, 1, 2, 3, 4]]
        (stats,) = fsdp.reducer_stats(model)
        return [call.received for call in world_log()[before:] if call.kind == "all_gather"], stats.bytes

    row = 8 + WIDTH * 4
    assert fsdp.simulate(2, fn) == [([8, 4 * row], 2 * row), ([8, 4 * row], 4 * row)]


@pytest.mark.parametrize("rows", [(1, 3), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_may_have_any_width_and_ranks_no_row_at_all(rows: tuple[int, int], dtype: torch.dtype) -> None:
    """A row of three elements is no multiple of the eight bytes of an index."""

    def fn(rank: int) -> list[float]:
        table = nn.Embedding(5, 3, sparse=True, dtype=dtype)
        model = fsdp.fully_shard(table, sharding_strategy="NO_SHARD", sync_module_states=True)
        model(torch.arange(rows[rank])).sum().backward()
        return model.weight.grad.to_dense().sum(1).tolist()

    wanted = [3 * sum(number < count for count in rows) / 2 for number in range(5)]
    assert fsdp.simulate(2, fn) == [wanted, wanted]


def test_a_rank_may_have_no_gradient_and_nobody_either() -> None:
    def fn(rank: int) -> list[Any]:
        model = fsdp.fully_shard(make(), sharding_strategy="NO_SHARD")
        loss_of(model(tokens_of(0, 0), bagged=rank == 0)).backward()
        first = model.bag.weight.grad.to_dense()
        model.zero_grad()
        loss_of(model(tokens_of(0, 0), bagged=False)).backward()
        return [first, model.bag.weight.grad]

    alone = make()
    loss_of(alone(tokens_of(0, 0))).backward()
    for first, second in fsdp.simulate(2, fn):
        torch.testing.assert_close(first, alone.bag.weight.grad.to_dense() / 2)
        assert second is None


class Both(nn.Module):
    """An embedding whose weight is a head as well: autograd adds a sparse and a dense gradient to a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)

    def forward(self, tokens: Tensor, head: bool = True) -> Tensor:
        found = self.words(tokens)
        return found @ self.words.weight.t() if head else found


def test_dense_gradients_of_a_sparse_embedding_are_reduced_as_rows() -> None:
    def fn(rank: int) -> Tensor:
        model = fsdp.fully_shard(make(Both), sharding_strategy="NO_SHARD")
        loss_of(model(tokens_of(0, 0), head=rank == 0)).backward()
        assert model.words.weight.grad.is_sparse
        return model.words.weight.grad.to_dense()

    plain = make(Both)
    (sum(loss_of(plain(tokens_of(0, 0), head=head)) for head in (True, False)) / 2).backward()
    for found in fsdp.simulate(2, fn):
        torch.testing.assert_close(found, plain.words.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_sum_has_the_bits_of_the_dense_one(dtype: torch.dtype) -> None:
    """On three ranks, so that the order of the sum shows."""

    def fn(rank: int, sparse: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(ROWS, WIDTH, sparse=sparse).to(dtype)
        policy = fsdp.ReductionPolicy(deterministic=True)
        model = fsdp.fully_shard(table, sharding_strategy="NO_SHARD", reduction=policy)
        torch.manual_seed(rank)
        weights = torch.randn(ROWS // 2, WIDTH, dtype=dtype)
        (model(torch.randperm(ROWS)[: ROWS // 2]) * weights).sum().backward()
        return model.weight.grad.to_dense() if sparse else model.weight.grad

    rows, dense = (fsdp.simulate(3, partial(fn, sparse=sparse)) for sparse in (True, False))
    assert all(map(torch.equal, rows, dense))


@on_ranks(2)
def test_a_sparse_gradient_where_dense_was_declared_is_refused_by_name(rank: int) -> None:
    def looked_up(model: nn.Module, sparse: bool) -> Tensor:
        return nn.functional.embedding(tokens_of(0, 0), model.weight, sparse=sparse)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

        def forward(self, sparse: bool) -> Tensor:
            return looked_up(self, sparse)

    model = fsdp.fully_shard(make(Table), sharding_strategy="NO_SHARD")
    with pytest.raises(fsdp.ShardingError, match=r"gradient of 'weight' .*sparse"):
        model(True).sum().backward()
    assert model.weight.grad is None and is_at_rest(model)
    model(False).sum().backward()
    plain = make(Table)
    plain(False).sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS"])
@on_ranks(2)
def test_where_rows_are_cut_over_the_ranks_gradients_are_dense(rank: int, strategy: str) -> None:
    model = fsdp.fully_shard(make(), sharding_strategy=strategy)
    loss_of(model(tokens_of(rank, 0))).backward()
    assert not any(gradient is not None and gradient.is_sparse for gradient in gradients_of(model).values())


def test_hooks_on_the_parameter_see_the_sparse_average_and_may_change_it() -> None:
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        model = fsdp.fully_shard(make(), **REPLICATED)
        seen: list[Tensor] = []
        model.words.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        loss_of(model(tokens_of(rank, 0))).backward()
        assert seen[0].is_sparse
        return seen[0].to_dense() * 2, model.words.weight.grad.to_dense()

    for seen, found in fsdp.simulate(2, fn):
        assert torch.equal(seen, found)


def edit_in_place(gradient: Tensor) -> None:
    gradient.add_(torch.ones(gradient.shape).to_sparse(1))


HOOKS: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "dense": (lambda gradient: gradient.to_dense() + 1, 1),
    "in another precision": (lambda gradient: gradient.double(), 0),
    "of no row": (lambda gradient: torch.zeros(gradient.shape).to_sparse(1), float("nan")),
    "edited in place": (edit_in_place, 1),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_may_give_other_rows(kind: str) -> None:
    hook, more = HOOKS[kind]

    def fn(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Embedding(5, 3, sparse=True), sharding_strategy="NO_SHARD", sync_module_states=True)
        model.weight.register_hook(hook)
        model(torch.arange(2)).sum().backward()
        assert model.weight.grad.is_sparse and model.weight.grad.dtype is torch.float32
        assert bytes_held(model).keys() == {"shards"}
        return model.weight.grad.to_dense()

    wanted = torch.tensor([1.0, 1, 0, 0, 0]).view(5, 1).expand(5, 3) + more
    for found in fsdp.simulate(2, fn):
        assert torch.equal(found, torch.nan_to_num(wanted))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
def test_a_communication_hook_sees_it_in_full(hook: Any) -> None:
    """Over a group of one: torch's hooks need a real one. More ranks are in tests/equivalence/test_gloo.py."""
    model = fsdp.fully_shard(make(), **REPLICATED)
    fsdp.register_comm_hook(model, None, hook)
    loss_of(model(tokens_of(0, 0))).backward()
    found = model.words.weight.grad
    plain = make()
    loss_of(plain(tokens_of(0, 0))).backward()
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), plain.words.weight.grad.to_dense(), rtol=1e-3, atol=1e-4)


def test_they_count_in_the_norm_and_are_clipped() -> None:
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        model = fsdp.fully_shard(make(), **REPLICATED)
        for step in range(2):
            loss_of(model(tokens_of(rank, step))).backward()
        norm = fsdp.clip_grad_norm_(model, 0.01)
        return norm, fsdp.clip_grad_norm_(model, 1.0)

    plain = make()
    for step in range(2):
        (sum(loss_of(plain(tokens_of(rank, step))) for rank in range(2)) / 2).backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in plain.parameters()]
    wanted = torch.stack([one.norm() for one in dense]).norm()
    for before, after in fsdp.simulate(2, fn):
        torch.testing.assert_close(before, wanted)
        torch.testing.assert_close(after, torch.tensor(0.01), rtol=1e-3, atol=0)


def test_they_are_saved_in_the_middle_of_an_accumulation(tmp_path: Any) -> None:
    def fn(rank: int) -> tuple[Tensor, Tensor]:
        model = fsdp.fully_shard(make(), **REPLICATED)
        loss_of(model(tokens_of(rank, 0))).backward()
        fsdp.save(tmp_path / "half", model, accumulated=True)
        again = fsdp.fully_shard(make(), **REPLICATED)
        fsdp.load(tmp_path / "half", again)
        assert again.words.weight.grad.is_sparse
        return model.words.weight.grad.to_dense(), again.words.weight.grad.to_dense()

    for saved, loaded in fsdp.simulate(2, fn):
        assert torch.equal(saved, loaded)


def test_a_rank_that_fails_where_rows_are_exchanged_exchanges_no_others() -> None:
    """Its peers would take them for those they wait for, instead of being told."""
    exchange, told = SparseTotal.wait, []

    def wait(total: SparseTotal) -> None:
        if current_rank().rank == 1 and total._label == "bag":  # type: ignore[union-attr]
            raise MemoryError
        exchange(total)

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(make(), **REPLICATED)
        try:
            loss_of(model(tokens_of(rank, 0))).backward()
        except fsdp.PeerFailed:
            told.append(rank)
        finally:
            assert is_at_rest(model) and model.words.weight.grad is None and bytes_held(model).keys() == {"shards"}

    with mock.patch.object(SparseTotal, "wait", wait), pytest.raises(MemoryError):
        fsdp.simulate(2, fn)
    assert told == [0]
