"""Ranks with data left change gradients outside the step of `fsdp.join`. Ranks without data drop what was set to None."""

import contextlib
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.runtime.uneven.data_left import GradVersions
from tests.runtime.uneven.test_uneven_paths import EVEN, log, make
from tests.support.paths import Branching, batch
from tests.support.ranks import told
from tests.support.states import assert_near

JOINS = pytest.mark.parametrize("options", [{}, {"uneven_paths": True}], ids=["even", "uneven"])
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
}
EVERY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
COUNTS = (2, 6, 4, 6)


def trained(rank: int | None, where: str, accumulates: bool = False, **options: Any) -> dict[str, Tensor]:
    """Train with two optimizers: the second one steps after every third batch. Outside the step, gradients are set to None.

    `where`: "zero_grad" of each optimizer after its step; "before the step" those of one parameter too, in every second batch.
    """
    torch.manual_seed(0)
    model: nn.Module = Branching() if rank is None else make(**options)
    head, others = [*model.head.parameters()], [*model.layers.parameters()]  # type: ignore[union-attr, operator]
    first = torch.optim.SGD(head, lr=0.05, momentum=0.9)
    second = torch.optim.SGD(others, lr=0.05, momentum=0.9)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        first.step()
        if steps % 3 == 0:
            second.step()

    with contextlib.nullcontext() if rank is None else fsdp.join(model, step) as joined:
        for number in range(max(COUNTS) if rank is None else COUNTS[rank]):
            for one in [rank] if rank is not None else [r for r, count in enumerate(COUNTS) if count > number]:
                divisor = 1 if rank is not None else sum(count > number for count in COUNTS)
                if accumulates:
                    with contextlib.nullcontext() if rank is None else fsdp.no_sync(model):
                        (model(batch(number, 1, one), EVEN).square().mean() / divisor).backward()
                (model(batch(number, 0, one), EVEN).square().mean() / divisor).backward()
            if where == "before the step" and number % 2:
                head[0].grad = None
            step() if rank is None else joined.step()
            first.zero_grad()
            if number % 3 == 2:
                second.zero_grad()
    return dict(model.state_dict()) if rank is None else fsdp.full_state_dict(model, rank0_only=False)


@cache
def alone(where: str, accumulates: bool = False) -> dict[str, Tensor]:
    return trained(None, where, accumulates)


@JOINS
@EVERY
@pytest.mark.parametrize("where", ["zero_grad", "before the step"])
def test_gradients_of_some_parameters_may_be_set_to_none_outside_the_step(
    where: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    wanted = alone(where)
    for found in fsdp.simulate(len(COUNTS), lambda rank: trained(rank, where, **strategy, **options)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@JOINS
def test_beside_gradients_that_are_accumulated_under_no_sync(options: dict[str, Any]) -> None:
    wanted = alone("zero_grad", accumulates=True)
    for found in fsdp.simulate(len(COUNTS), lambda rank: trained(rank, "zero_grad", accumulates=True, **options)):
        assert_near(found, wanted)


@JOINS
@pytest.mark.parametrize("zeroes", [True, False])
def test_a_plain_shard_without_elements_says_nothing(zeroes: bool, options: dict[str, Any]) -> None:
    """Rank 0, which finishes first, alone holds the bias of this unit. It keeps or drops what the others keep or drop."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(7))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum() + self.bias

    def run(rank: int | None) -> Tensor:
        model: nn.Module = Small()
        if rank is not None:
            fsdp.fully_shard(model, plain_shards=True, **options)
            assert (model.bias.numel() == 0) == bool(rank)  # type: ignore[union-attr, operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.nullcontext() if rank is None else fsdp.join(model, optimizer.step) as joined:
            for _ in range(3 if rank is None else 1 + 2 * rank):
                model(torch.ones(7)).sum().backward()
                optimizer.step() if rank is None else joined.step()
                if zeroes:
                    optimizer.zero_grad()
        state = dict(model.state_dict()) if rank is None else fsdp.full_state_dict(model, rank0_only=False)
        return torch.cat([state["bias"], state["weight"]])

    wanted = run(None)
    for found in fsdp.simulate(2, run):
        torch.testing.assert_close(found, wanted)


class Probe(nn.Module):
    """A frozen layer, and a small one that is trained: of four ranks the last one holds no element of it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x)))  # type: ignore[no-any-return]


def probed(rank: int | None, zeroes: str, **options: Any) -> Tensor:
    """Train where the last rank alone has data after the first step. `zeroes`: where gradients are set to None."""
    torch.manual_seed(0)
    counts = (1, 1, 1, 3)
    model: nn.Module = Probe()
    if rank is not None:
        fsdp.fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)  # type: ignore[union-attr]

    def step() -> None:
        optimizer.step()
        if zeroes == "in the step":
            optimizer.zero_grad()

    with contextlib.nullcontext() if rank is None else fsdp.join(model, step) as joined:
        for number in range(3 if rank is None else counts[rank]):
            for one in [rank] if rank is not None else [r for r, count in enumerate(counts) if count > number]:
                divisor = 1 if rank is not None else sum(count > number for count in counts)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + one))
                (model(x).square().mean() / divisor).backward()
            step() if rank is None else joined.step()
            if zeroes == "after the step":
                optimizer.zero_grad()
    state = dict(model.state_dict()) if rank is None else fsdp.full_state_dict(model, rank0_only=False)
    return torch.cat([state["head.weight"].flatten(), state["head.bias"]])


@JOINS
@pytest.mark.parametrize("zeroes", ["in the step", "after the step"])
def test_plain_shards_of_ranks_without_data_alone_are_trained(zeroes: str, options: dict[str, Any]) -> None:
    """The ranks with data hold no element of a parameter that is trained, so they have no gradient at a step either."""
    wanted = probed(None, zeroes)
    for found in fsdp.simulate(4, lambda rank: probed(rank, zeroes, plain_shards=True, **options)):
        torch.testing.assert_close(found, wanted)


@JOINS
def test_gradients_without_elements_are_no_zeros(options: dict[str, Any]) -> None:
    """Gradients are added up over all steps, and the rank with data holds no element of one."""
    wanted = probed(None, "never")
    for found in fsdp.simulate(4, lambda rank: probed(rank, "never", **options)):
        torch.testing.assert_close(found, wanted)


@JOINS
def test_a_step_that_is_left_out_leaves_out_plain_shards_of_ranks_without_data(options: dict[str, Any]) -> None:
    """Rank 0, which finishes first, alone holds the bias. Rank 1 sets all gradients to None before a step."""

    def run(rank: int) -> Tensor:
        model = nn.Linear(7, 1)
        nn.init.ones_(model.bias)
        fsdp.fully_shard(model, plain_shards=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.join(model, optimizer.step) as joined:
            for _ in range(2 * rank):
                model(torch.ones(2, 7)).sum().backward()
                optimizer.zero_grad()
                joined.step()
        return fsdp.full_state_dict(model, rank0_only=False)["bias"]

    for found in fsdp.simulate(2, run):
        assert torch.equal(found, torch.ones(1))


def test_another_gradient_in_the_memory_of_a_removed_one_is_a_change() -> None:
    """Python gives it the id of the removed one, and torch counts its changes anew."""
    gradient: Tensor | None = torch.zeros(1)
    removed, known = id(gradient), GradVersions([gradient])
    assert not known.have_changed([gradient])
    gradient = None
    others = [torch.zeros(1) for _ in range(100)]
    (other,) = [one for one in others if id(one) == removed]
    assert known.have_changed([other])


@JOINS
def test_gradients_that_are_zeros_on_all_ranks_are_not_refused(options: dict[str, Any]) -> None:
    """Rank 0 has one batch less, and has zeroed its gradients in place after its last step too."""

    def run(rank: int | None) -> Tensor:
        model: nn.Module = Branching() if rank is None else make(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with contextlib.nullcontext() if rank is None else fsdp.join(model, optimizer.step) as joined:
            for number in range(2 if rank is None else 1 + rank):
                for one in [rank] if rank is not None else [0, 1][number:]:
                    divisor = 1 if rank is not None else 2 - number
                    (model(batch(number, 0, one), EVEN).square().mean() / divisor).backward()
                optimizer.step() if rank is None else joined.step()
                optimizer.zero_grad(set_to_none=False)
        state = dict(model.state_dict()) if rank is None else fsdp.full_state_dict(model, rank0_only=False)
        return state["head.weight"]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    wanted = run(None)
    for found in fsdp.simulate(2, run):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@JOINS
def test_a_hook_of_the_user_that_raises_changes_nothing_outside_the_step(options: dict[str, Any]) -> None:
    """The gradients of that backward are reduced. Rank 0 has no data left, so a change outside the step would be refused."""

    def run(rank: int, raises: bool) -> Tensor:
        model = make(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def hook(parameter: Tensor) -> None:
            if raises and number == 1:
                raise KeyError("of the user")

        next(model.parameters()).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        with fsdp.join(model, optimizer.step) as joined:
            for number in range(1 + rank):
                with pytest.raises(KeyError) if raises and number == 1 else contextlib.nullcontext():
                    model(batch(number, 0, rank), EVEN).square().mean().backward()
                joined.step()
        return fsdp.full_state_dict(model, rank0_only=False)["head.weight"]

    wanted, found = (fsdp.simulate(2, partial(run, raises=raises)) for raises in (False, True))
    assert all(map(torch.equal, found, wanted))


def changing(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    gradient = model.head.weight.grad  # type: ignore[union-attr]
    if kind == "zeros":
        optimizer.zero_grad(set_to_none=False)
    elif isinstance(gradient, Tensor):
        if kind == "zeros of one parameter":
            gradient.zero_()
        elif kind == "scaled":
            gradient.mul_(0.5)
        else:
            model.head.weight.grad = gradient * 0.5  # type: ignore[union-attr]


@JOINS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("place", ["before the step", "after the step"])
@pytest.mark.parametrize("kind", ["zeros", "zeros of one parameter", "scaled", "another tensor"])
def test_other_changes_outside_the_step_are_refused_where_a_rank_has_no_data_left(
    kind: str, place: str, strategy: str, options: dict[str, Any]
) -> None:
    """They are allowed inside it, and as long as all ranks have data."""

    def run(rank: int, inside: bool, counts: tuple[int, int]) -> None:
        model = make(sharding_strategy=strategy, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        change = partial(changing, model, optimizer, kind)

        def step() -> None:
            if inside and place == "before the step":
                change()
            optimizer.step()
            if inside and place == "after the step":
                change()

        with fsdp.join(model, step) as joined:
            for number in range(counts[rank]):
                model(batch(number, 0, rank), EVEN).square().mean().backward()
                if not inside and place == "before the step":
                    change()
                joined.step()
                if not inside and place == "after the step":
                    change()

    fsdp.simulate(2, partial(run, inside=True, counts=(1, 3)))
    fsdp.simulate(2, partial(run, inside=False, counts=(2, 2)))
    for text in told(2, partial(run, inside=False, counts=(1, 3))):
        assert text.startswith(
            "ShardingError: inside fsdp.join, gradients were changed outside the function that steps on rank 1, and so not on "
            "rank 0, where no data is left"
        )


@JOINS
def test_gradients_that_are_all_zeroed_without_a_trace_are_refused_too(options: dict[str, Any]) -> None:
    """Torch counts no change through `.data`."""

    def run(rank: int) -> None:
        model = make(**options)
        with fsdp.join(model, lambda: None) as joined:
            for number in range(1 + 2 * rank):
                model(batch(number, 0, rank), EVEN).square().mean().backward()
                joined.step()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.data.zero_()

    for text in told(2, run):
        assert "gradients are zeros on the ranks that have data left, and not on rank 0" in text


@JOINS
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_without_a_step_all_ranks_take_over_gradients_too(sparse: bool, options: dict[str, Any]) -> None:
    """Each rank clips its own, and zeroes those of one parameter in place."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out, self.unused = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1), nn.Linear(2, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.out(self.embedding(words))  # type: ignore[no-any-return]

    def run(rank: int) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(Words(), sharding_strategy="NO_SHARD", plain_shards=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with fsdp.join(model):
            for number in range(1 + rank):
                if number:
                    model.out.weight.grad.zero_()  # type: ignore[union-attr]
                model(torch.tensor([number, 2 * rank + 5])).sum().backward()
                nn.utils.clip_grad_norm_(model.out.parameters(), 0.1)  # type: ignore[union-attr]
                optimizer.step()
        return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]

    first, second = fsdp.simulate(2, run)
    assert sum(one is None for one in second) == 2
    for mine, other in zip(first, second, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert torch.equal(mine, other) and bool(other.any())


@JOINS
def test_changes_do_not_hide_that_all_ranks_stop(options: dict[str, Any]) -> None:
    def run(rank: int) -> None:
        model = make(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with fsdp.join(model, optimizer.step, stops_at_first=True) as joined:
            for number in range(1 + rank):
                optimizer.zero_grad(set_to_none=False)
                model(batch(number, 0, rank), EVEN).square().mean().backward()
                joined.step()

    with pytest.raises(fsdp.InputsExhausted, match="rank 0 had no further batch"):
        fsdp.simulate(2, run)


@JOINS
def test_a_message_has_five_bytes_a_rank_and_one_a_parameter(options: dict[str, Any]) -> None:
    """The even join sends one with each operation; the uneven one where a rank without data ends a backward or a step."""

    def run(rank: int) -> tuple[int, list[list[int]]]:
        model, found = make(**options), []
        with fsdp.join(model, lambda: None) as joined:
            for number in range(2 + rank):
                before = len(log())
                model(batch(number, 0, rank), EVEN).square().mean().backward()
                joined.step()
                found.append([call.received for call in log()[before:] if call.label == "who has data left"])
        return len([*model.parameters()]), found

    _, (params, found) = fsdp.simulate(2, run)
    size = 2 * 5 + params  # what an all-reduce of two ranks receives
    assert found == ([[], [], [size] * 2] if options else [[size] * 3] * 3)
