"""What ranks that go different ways launch, hold and refuse, in the simulated world."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

import fsdp
from fsdp.comm.simulated import Call, current_rank
from fsdp.runtime.registry import engines_in
from state_machine.paths import PATIENCE
from tests.support.models import promised
from tests.support.paths import Branching, Hop, batch
from tests.support.ranks import on_ranks, told

ALL = tuple(Hop(layer) for layer in range(4))
EVEN = (Hop(0), Hop(2))
"""Layers that always use the same units, whatever the data."""
COLLECTIVES = "all_gather", "reduce_scatter", "all_reduce", "gather_objects"


def make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fsdp.fully_shard(Branching(), auto_wrap_policy={nn.Linear}, **options)


def log() -> list[Call]:
    rank = current_rank()
    return rank.log


def counts_of_steps(paths: Callable[[int, int], tuple[Hop, ...]], steps: int, **options: Any) -> Callable[[int], list[Any]]:
    """What one rank calls in each step."""

    def run(rank: int) -> list[Any]:
        model, found = make(**options), []
        for step in range(steps):
            before = len(log())
            model(batch(step, 0, rank), paths(rank, step)).square().mean().backward()
            kinds = Counter(call.kind for call in log()[before:])
            found.append(tuple(kinds[kind] for kind in COLLECTIVES))
        return found

    return run


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "NO_SHARD"])
def test_ranks_that_go_the_same_path_call_nothing_more_than_without_the_option(strategy: str) -> None:
    ordinary, uneven = (
        fsdp.simulate(2, counts_of_steps(lambda rank, step: EVEN, 4, sharding_strategy=strategy, **options))
        for options in ({}, {"uneven_paths": True})
    )
    assert uneven[0][2:] == uneven[1][2:] == ordinary[0][2:]


def test_ranks_whose_paths_are_known_meet_once_in_a_step() -> None:
    """One rank leaves out what the other one uses: layers of an image tower, for example."""

    def path(rank: int, step: int) -> tuple[Hop, ...]:
        return EVEN if rank == 0 else EVEN[1:]

    found = fsdp.simulate(2, counts_of_steps(path, 4, uneven_paths=True))
    alike = fsdp.simulate(2, counts_of_steps(lambda rank, step: EVEN, 4, uneven_paths=True))
    assert found[0][2:] == found[1][2:] == alike[0][2:]


def test_what_no_rank_uses_any_more_is_gathered_for_some_steps_and_then_no_more() -> None:
    def path(rank: int, step: int) -> tuple[Hop, ...]:
        return EVEN if step == 0 else EVEN[:1]

    steps = fsdp.simulate(2, counts_of_steps(path, PATIENCE + 3, uneven_paths=True))[0]
    alone = fsdp.simulate(2, counts_of_steps(lambda rank, step: EVEN[:1], 3, uneven_paths=True))[0]
    gathers = [step[0] for step in steps]
    assert gathers[1] == gathers[PATIENCE] > gathers[PATIENCE + 1] == gathers[-1] == alone[-1][0]
    # a bucket of which no rank has a gradient is not reduced
    assert {step[1] for step in steps[1:]} == {alone[-1][1]}


def test_a_passive_gather_receives_what_a_gather_receives() -> None:
    def run(rank: int) -> tuple[int, int]:
        model = make(uneven_paths=True, prefetch=0)
        (engine,) = engines_in(model, "test")
        for step in range(3):
            before = len(log())
            model(batch(step, 0, rank), ALL if rank == 0 else ()).sum().backward()
        received = sum(call.received for call in log()[before:] if call.kind == "all_gather")
        return received, engine.tracker.held.get("scratch", 0)

    (first, held), (second, left) = fsdp.simulate(2, run)
    assert first == second and held == left == 0


def test_the_memory_of_passive_gathers_is_that_of_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp.device.storage import MemoryTracker

    most: dict[int, int] = {}
    add = MemoryTracker.add

    def noted(self: MemoryTracker, kind: str, count: int) -> None:
        add(self, kind, count)
        rank = current_rank()
        if kind == "scratch" and rank is not None:
            most[rank.rank] = max(most.get(rank.rank, 0), self.held.get("scratch", 0))

    monkeypatch.setattr(MemoryTracker, "add", noted)

    def run(rank: int) -> int:
        model = make(uneven_paths=True)
        (engine,) = engines_in(model, "test")
        for step in range(3):
            model(batch(step, 0, rank), ALL if rank == 0 else ()).sum().backward()
        return max(sum(unit.gather_sizes) for unit in engine.units)

    largest = fsdp.simulate(2, run)[0]
    assert 0 < most[1] <= largest


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_backward_holds_no_passive_gather_when_it_is_over(accumulates: bool) -> None:
    """One under no_sync does not meet the others, and leaves what the next layers' gathers left in flight."""

    def run(rank: int) -> list[int]:
        model, held = make(uneven_paths=True, prefetch=2), []
        (engine,) = engines_in(model, "test")
        for step in range(3):
            for number in range(3):
                with fsdp.no_sync(model) if accumulates and number < 2 else nullcontext():
                    model(batch(step, number, rank), ALL[rank:] if number == 1 else EVEN[: 1 + rank]).sum().backward()
                held.append(engine.tracker.held.get("scratch", 0))
        return held

    for held in fsdp.simulate(2, run):
        assert not any(held), held


def test_a_rank_may_evaluate_alone_between_two_steps_and_before_a_save() -> None:
    def run(rank: int) -> list[float]:
        model, found = make(uneven_paths=True), []
        for step in range(3):
            if rank == step:
                model.eval()
                with torch.no_grad():
                    found += [float(model(batch(9, number, 0), ALL).sum()) for number in range(3)]
                model.train()
            model(batch(step, 0, rank), ALL).sum().backward()
        with torch.inference_mode():
            for number in range(rank):
                model(batch(9, number, 0), ALL[::-1])
        fsdp.meet(model)
        assert len(fsdp.full_state_dict(model, rank0_only=False)) == 14
        return found

    first, second = fsdp.simulate(2, run)
    assert first == second and len(first) == 3


def test_a_parameter_may_be_read_outside_its_unit_on_one_rank() -> None:
    def run(rank: int | None) -> Tensor | None:
        torch.manual_seed(0)
        model = Branching() if rank is None else make(uneven_paths=True)
        for one in range(2) if rank is None else [rank]:
            loss = model(batch(0, 0, one), ALL[:2]).square().mean() / (2 if rank is None else 1)
            if one == 1:
                weight = model.layers[3].outer.weight  # type: ignore[union-attr, index]
                weight = weight if rank is None else fsdp.full_tensor(weight)  # type: ignore[arg-type]
                loss = loss + weight.norm() / (2 if rank is None else 1)  # type: ignore[operator]
            loss.backward()
        gradient = model.layers[3].outer.weight.grad  # type: ignore[union-attr, index]
        return gradient if rank is None else fsdp.full_tensor(gradient)  # type: ignore[arg-type, return-value]

    wanted = run(None)
    for found in fsdp.simulate(2, run):
        torch.testing.assert_close(found, wanted)


def test_a_penalty_on_one_rank_reads_full_parameters_of_units_that_it_leaves_out() -> None:
    def run(rank: int | None) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model = Branching() if rank is None else make(uneven_paths=True)
        for one in range(2) if rank is None else [rank]:
            loss = model(batch(0, 0, one), ALL[: 1 + one]).square().mean()
            if one == 1:
                with nullcontext() if rank is None else fsdp.full_parameters(model):
                    loss = loss + sum(p.pow(2).sum() for p in model.parameters())
            (loss / (2 if rank is None else 1)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return gradients if rank is None else {name: fsdp.full_tensor(one) for name, one in gradients.items()}  # type: ignore[arg-type, misc]

    wanted = run(None)
    for found in fsdp.simulate(2, run):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value)


def test_a_backward_and_a_meeting_do_not_go_together() -> None:
    def run(rank: int) -> None:
        model = make(uneven_paths=True)
        loss = model(batch(0, 0, rank), ALL).sum()
        loss.backward() if rank else fsdp.meet(model)

    for text in told(2, run):
        assert "some ranks have called fsdp.meet, and others are at a backward's end" in text


def test_ranks_learn_anew_after_a_step_that_was_abandoned() -> None:
    def run(rank: int) -> list[str]:
        model, said = make(uneven_paths=True), []
        for step in range(5):
            hops = ALL if rank == 0 else ALL[1:3]
            try:
                loss = model(batch(step, 0, rank), hops if (rank, step) != (0, 2) else [Hop(7)])
                loss.sum().backward()
            except (IndexError, fsdp.PeerFailed) as failure:
                said.append(f"{step}: {type(failure).__name__}")
        return said

    assert fsdp.simulate(2, run) == [["2: IndexError"], ["2: PeerFailed"]]


class Layers(nn.ModuleList):
    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        for layer in path:
            x = self[layer](x)
        return x


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_raises_once_for_a_failure_that_it_learns_at_the_end_of_its_forward(seed: int) -> None:
    """It takes part in a gather of the other rank, which ends where its own forward has returned."""

    def run(rank: int) -> list[str]:
        model = fsdp.fully_shard(Layers(nn.Linear(4, 4) for _ in range(3)), auto_wrap_policy={nn.Linear}, uneven_paths=True)
        said, path = [], [[1, 2, 0], [2]][rank]
        for step in range(6):
            try:
                for fails in (False, step == 1 and rank == 0):
                    model(torch.ones(2, 4), [1, 7] if fails else path).sum().backward()
            except (IndexError, fsdp.PeerFailed) as failure:
                said.append(f"{step}: {type(failure).__name__}")
        return said

    assert fsdp.simulate(2, run, seed=seed) == [["1: IndexError"], ["1: PeerFailed"]]


REFUSED: dict[str, dict[str, Any]] = {
    "uneven_paths must be True or False": {"uneven_paths": 1},
    "offload_policy and uneven_paths cannot be combined": {"uneven_paths": True, "offload_policy": fsdp.OffloadPolicy()},
    "uneven_paths and broadcast_buffers contradict": {"uneven_paths": True, "broadcast_buffers": True},
    "uneven_paths and reduction.static_graph contradict": {
        "uneven_paths": True,
        "reduction": fsdp.ReductionPolicy(static_graph=True),
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_options_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(fsdp.ShardingError, match=text):
        fsdp.simulate(1, lambda rank: make(**REFUSED[text]))


@on_ranks(1)
def test_what_needs_the_same_path_is_refused(rank: int) -> None:
    with pytest.raises(fsdp.ShardingError, match="ranks of this model take the same path"):
        fsdp.meet(make())
    model = make(uneven_paths=True)
    (engine,) = engines_in(model, "test")
    with pytest.raises(fsdp.ShardingError, match="what is prefetched cannot be given"):
        engine.path.forward.give(0, [1])


def test_a_comm_hook_reduces_what_some_rank_has() -> None:
    def run(rank: int) -> list[bool]:
        model = make(uneven_paths=True)
        fsdp.register_comm_hook(model, None, own_chunk)
        for step in range(2):
            model(batch(step, 0, rank), ALL[rank : rank + 1]).sum().backward()
        return [p.grad is not None for p in model.parameters()]

    first, second = fsdp.simulate(2, run)
    assert first == second and True in first and False in first


def own_chunk(state: None, bucket: Any) -> Future[Tensor]:
    """No sum, but the buckets are those of all ranks."""
    return promised(bucket.buffer().view(2, -1)[0].clone())


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_reads_outside_a_unit_are_learned_too(prefetch: int) -> None:
    def run(rank: int) -> list[int]:
        model, meetings = make(uneven_paths=True, prefetch=prefetch), []
        for step in range(4):
            before = len(log())
            loss = model(batch(step, 0, rank), EVEN).square().mean()
            if rank == 1:
                loss = loss + fsdp.full_tensor(model.layers[3].outer.weight).norm()  # type: ignore[union-attr, index, arg-type]
            (loss + model(batch(step, 1, rank), EVEN[rank:]).square().mean()).backward()
            meetings.append(sum(call.label == "which gradients came" for call in log()[before:]))
        return meetings

    first, second = fsdp.simulate(2, run)
    assert first == second and first[0] > 1 and first[2:] == [1, 1]
