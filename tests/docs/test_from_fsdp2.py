"""What docs/migration/from-fsdp2.md says under "What behaves differently": a test for each sentence."""

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.docs.test_pages import DOCS
from tests.support.ranks import on_ranks


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    model(batch).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return float(norm)


def test_the_page_has_these_sentences_and_no_other_points() -> None:
    text = (DOCS / "migration" / "from-fsdp2.md").read_text(encoding="utf-8")
    part = text.partition("## What behaves differently")[2].partition("###")[0]
    points = [line.partition("**")[2].partition("**")[0] for line in part.splitlines() if line.startswith("- **")]
    assert points == ["Optimizer.", "Parameters", "Clipping.", "Outputs.", "Gradients", "Meta device.", "Tied parameters"]


@pytest.mark.parametrize("wrapped_at", [0, 2])
def test_an_optimizer_may_be_made_and_may_step_before_wrapping(wrapped_at: int) -> None:
    batch = torch.ones(2, 8)

    def train(wraps: bool) -> tuple[list[float], list[Tensor]]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        norms = []
        for number in range(4):
            if wraps and number == wrapped_at:
                before = [*model.parameters()]
                fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
                assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
            norms.append(step(model, optimizer, batch))
            optimizer.zero_grad()
        return norms, [fsdp.full_tensor(one).detach() if wraps else one.detach() for one in model.parameters()]

    norms, weights = train(False)
    for found, others in fsdp.simulate(2, lambda rank: train(True)):
        # torch's clipping saw the norm of all parts, in every step
        assert found == pytest.approx(norms, rel=1e-5)
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(weights, others, strict=True))


def test_a_rank_that_holds_nothing_of_a_parameter_has_no_state_of_it() -> None:
    def train(rank: int) -> list[tuple[int, int, int]]:
        model = fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, torch.ones(2, 8))
        found = []
        for parameter in model.parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
            sizes = [fsdp.to_local(one).numel() for one in (parameter, parameter.grad)]
            found.append((*sizes, len(optimizer.state[parameter])))
        return found

    ranks = fsdp.simulate(2, train)
    assert all(local == grad and (state == 0) == (local == 0) for found in ranks for local, grad, state in found)
    assert any(local == 0 for found in ranks for local, _, _ in found)


@on_ranks(2)
def test_elementwise_operations_do_not_communicate_and_norms_sums_and_extrema_do(rank: int) -> None:
    model = fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})
    weight, whole = model[0].weight, make()[0].weight
    changed = weight.detach().abs() * 2  # on one rank at a time, the other would wait otherwise
    assert [
        fsdp.to_local(changed).numel() < whole.numel(),
        torch.allclose(weight.detach().norm(), whole.detach().norm()),
        torch.allclose(weight.detach().sum(), whole.detach().sum(), atol=1e-5),
        bool(weight.detach().max() == whole.detach().max()),
    ] == [True] * 4


class Answer:
    def __init__(self, value: Tensor) -> None:
        self.inner = {"value": [value]}


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.linear(x))


@on_ranks(2)
def test_a_backward_enters_through_any_object(rank: int) -> None:
    model = fsdp.fully_shard(Wraps())
    model(torch.ones(2, 8)).inner["value"][0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters()) is True


@on_ranks(2)
def test_gradients_come_at_the_end_and_a_backward_that_fails_leaves_them(rank: int) -> None:
    model = fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})
    seen: list[bool] = []
    model[0].register_full_backward_hook(lambda *_: seen.append(model[2].weight.grad is None))
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    kept = [fsdp.to_local(one.grad).clone() for one in model.parameters() if one.grad is not None]
    x = torch.ones(2, 8, requires_grad=True)
    loss = model(x).sum()
    model[0].weight.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("here")))
    with pytest.raises(ValueError, match="here"):
        loss.backward()
    same = [torch.equal(fsdp.to_local(one.grad), old) for one, old in zip(model.parameters(), kept, strict=True)]
    assert [seen[0], *same] == [True] * 5


@on_ranks(2)
def test_a_unit_of_a_meta_model_gets_its_memory_when_it_is_wrapped(rank: int) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.empty(8)), nn.Linear(8, 8)

    with torch.device("meta"):
        model, bare = make(), Bare()
    fsdp.fully_shard(model, auto_wrap_policy={nn.Linear})
    with pytest.raises(fsdp.ShardingError, match=r"no reset_parameters\(\) to give it values; give param_init_fn"):
        fsdp.fully_shard(bare)
    assert (not any(parameter.is_meta for parameter in model.parameters())) is True


def test_a_tied_parameter_belongs_to_the_unit_around_its_uses() -> None:
    def wrap(rank: int) -> list[str]:
        model = make()
        model[2] = nn.Linear(8, 8)
        model[2].weight = model[0].weight
        fsdp.fully_shard(model[0])
        fsdp.fully_shard(model[2])
        with pytest.raises(fsdp.ShardingError):
            model[2](torch.ones(1, 8))
        fsdp.fully_shard(model)
        model(torch.ones(1, 8)).sum().backward()
        return [line.split()[0] for line in fsdp.story(model).splitlines() if "weight" in line or "IDLE" in line]

    assert len(fsdp.simulate(2, wrap)[0]) == 3
