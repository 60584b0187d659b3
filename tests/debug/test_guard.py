"""Guard mode names what would crash, or be lost without a word; and changes nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from tests.support.models import CASES, assert_trained_alike, is_at_rest, joined, own_batches, reference, train, wrap
from tests.support.ranks import on_ranks

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])
X = torch.linspace(-1, 1, 8).view(2, 4)


class Leaks(nn.Module):
    """Lets a tensor get away through a closure."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.how, self.away = nn.Parameter(torch.randn(4, 4)), how, set[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.away.add(self.how(x, self.weight))
        return (x @ self.weight).detach()


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda x, w: (x.requires_grad_() @ w).exp(),
    "elementwise, which reads null without the guard": lambda x, w: w * w,
    "a view of it": lambda x, w: (w.t() * x.requires_grad_().view(4, 2)[:, :1]).sum(),
}


@WORLDS
@pytest.mark.parametrize("way", WAYS)
@on_ranks("world_size")
def test_a_backward_by_an_unwatched_path_is_named(rank: int, way: str, world_size: int) -> None:
    leaks = Leaks(WAYS[way])
    model = fsdp.fully_shard(Holds(leaks), auto_wrap_policy={Leaks}, guard=True)
    model(X.clone())
    escaped = next(iter(leaks.away))
    with pytest.raises(fsdp.ShardingError, match=r"unit 'inner' by a path that no hook sees.*\(a closure, a global\)"):
        escaped.sum().backward()
    model(X.clone()).sum().backward()
    assert is_at_rest(model)


class Keeps(Holds):
    """Multiplies with a parameter that it has kept from inside a unit."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x) @ self.inner.away.pop())


@WORLDS
@on_ranks("world_size")
def test_torchs_error_about_freed_memory_is_explained_without_it(rank: int, world_size: int) -> None:
    leaks = Leaks(WAYS["a product"])
    model = fsdp.fully_shard(Holds(leaks), auto_wrap_policy={Leaks})
    loss = model(X.clone()).sum()
    with pytest.raises(RuntimeError, match="storage of size 0") as caught:
        (next(iter(leaks.away)).sum() + loss).backward()
    assert [note.rpartition("\n")[2][: len(EXPLAINED)] for note in caught.value.__notes__] == [EXPLAINED]
    model = fsdp.fully_shard(Keeps(Leaks(lambda x, weight: weight)), auto_wrap_policy={Leaks})
    with pytest.raises(RuntimeError) as caught:
        model(X.clone())
    assert [note.rpartition("\n")[2][: len(EXPLAINED)] for note in caught.value.__notes__] == [EXPLAINED]
    assert is_at_rest(model)


EXPLAINED = "It has read unsharded parameters whose memory was released"


class Edits(nn.Linear):
    """Edits its bias in a way that leaves no version behind."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias.data.mul_(0.5)
        return super().forward(x)


@WORLDS
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@on_ranks("world_size")
def test_an_update_that_leaves_no_trace_is_named(
    rank: int, grad: Callable[[], Any], dtype: torch.dtype | None, world_size: int
) -> None:
    """On every rank, also where nothing of the parameter is held."""
    torch.manual_seed(0)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype)
    model = fsdp.fully_shard(Holds(Edits(4, 4)), auto_wrap_policy={Edits}, mp_policy=policy, guard=True)
    floor = fsdp.memory_bytes(model)
    with pytest.raises(fsdp.ShardingError, match=r"parameter 'inner.bias' was changed through \.data"), grad():
        model(X)
    assert is_at_rest(model)
    assert fsdp.memory_bytes(model) == floor


class EditsUnderInference(nn.Linear):
    """Edits its bias in a way that only seems to."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.bias.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("grad", [torch.inference_mode, torch.enable_grad])
@on_ranks(2)
def test_an_update_under_inference_mode_is_kept(rank: int, grad: Callable[[], Any], guard: bool) -> None:
    torch.manual_seed(0)
    model = fsdp.fully_shard(EditsUnderInference(4, 4), guard=guard)
    with grad():
        model(X)
    found = fsdp.full_tensor(model.bias).detach()
    torch.manual_seed(0)
    wanted = nn.Linear(4, 4).bias.detach() * 0.5
    assert torch.equal(found, wanted)


@WORLDS
@pytest.mark.parametrize("case", ["net", "tied", "recurrent", "odd"])
def test_it_changes_no_number(case: str, world_size: int) -> None:
    def one_rank(rank: int) -> Any:
        return train(wrap(CASES[case], guard=True), own_batches(CASES[case], rank))

    assert_trained_alike(joined(fsdp.simulate(world_size, one_rank), CASES[case].model()), reference(CASES[case], world_size))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_and_inside_units_work_under_it(reentrant: bool) -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        x = X.clone().requires_grad_()
        y = checkpoint(model.inner, torch.tanh(x), use_reentrant=reentrant)
        (model(x) + y).square().sum().backward()
        return [x.grad]

    class Inside(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Holds(Inside(4, 4))

    wanted = run(make())
    for found in fsdp.simulate(2, lambda rank: run(fsdp.fully_shard(make(), auto_wrap_policy={Inside}, guard=True))):
        torch.testing.assert_close(found, wanted)


class EditsActivation(nn.Linear):
    """Changes an activation that the backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        y.mul_(2)
        return y


@on_ranks(2)
def test_torchs_own_check_of_versions_still_works(rank: int) -> None:
    """torch itself compares no versions of what hooks have packed: the gradients were silently wrong."""
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        fsdp.fully_shard(EditsActivation(4, 4), guard=True)(X).sum().backward()


class CallsItself(nn.Linear):
    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        return super().forward(x if depth == 2 else self(x, depth + 1))


class Interrupted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


@on_ranks(1)
def test_no_guard_is_left_behind(rank: int) -> None:
    model = fsdp.fully_shard(CallsItself(4, 4), guard=True)
    model(X).sum().backward()
    assert is_at_rest(model)
    for door in (fsdp.FullyShardedDataParallel, fsdp.fully_shard):
        interrupted = door(Holds(Interrupted(4, 4)), auto_wrap_policy={Interrupted}, guard=True)
        with pytest.raises(KeyboardInterrupt):
            interrupted(X)
        fsdp.story(interrupted)  # in place, the next call of this library cleans up
        assert is_at_rest(interrupted)


@on_ranks(2)
def test_a_refusal_leaves_no_update_behind(rank: int) -> None:
    class EditsBoth(nn.Linear):
        inplace_updates = True

        def forward(self, x: Tensor) -> Tensor:
            if self.inplace_updates:
                with torch.no_grad():
                    self.weight.mul_(1.5)
                self.bias.data.mul_(0.5)
            return super().forward(x)

    model = fsdp.fully_shard(EditsBoth(4, 4), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16), guard=True)
    with pytest.raises(fsdp.ShardingError, match="'bias' was changed through"):
        model(X)
    model.inplace_updates = False
    model(X).sum().backward()
    assert is_at_rest(model)


def test_the_environment_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(**options: Any) -> bool:
        model = fsdp.simulate(1, lambda rank: fsdp.fully_shard(nn.Linear(4, 4), **options))[0]
        return bool(model._fsdp_sharded.unit.config.guard)

    assert not guarded()
    monkeypatch.setenv("FSDP_GUARD", "1")
    assert guarded() and not guarded(guard=False)
    monkeypatch.setenv("FSDP_GUARD", "0")
    assert not guarded() and guarded(guard=True)
    with pytest.raises(fsdp.ShardingError, match="guard must be True, False or None, not 'yes'"):
        guarded(guard="yes")
