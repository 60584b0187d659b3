"""What is let go of is freed: models, graphs, process groups."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.runtime.launch_gathers import Gathers
from fsdp.runtime.registry import unit_ref_of
from tests.support.jobs import run_alone
from tests.support.models import is_at_rest
from tests.support.ranks import on_ranks

AFTER_THE_GROUP = """
import torch, torch.distributed as dist, fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = fsdp.fully_shard(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
try:
    model(torch.ones(1, 2))
except fsdp.ShardingError as error:
    print(error)
"""


@pytest.mark.parametrize("guard", [False, True], ids=["", "guard"])
@on_ranks(2)
def test_a_model_is_freed_with_a_forward_that_had_no_backward(rank: int, guard: bool) -> None:
    """Also under guard, which keeps what nodes save: some of them save what they return."""

    def forward() -> weakref.ref[nn.Module]:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        model = fsdp.fully_shard(layers, auto_wrap_policy={nn.Linear}, guard=guard)
        model(torch.ones(1, 2))
        return weakref.ref(model)

    reference = forward()
    gc.collect()
    assert (reference() is None) is True


@on_ranks(1)
def test_a_model_whose_backward_failed_is_freed_with_its_last_reference(rank: int) -> None:
    """The trace function that hears the exception keeps nothing: one collection of garbage will do."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    def train() -> weakref.ref[nn.Module]:
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), auto_wrap_policy={nn.Linear})
        model[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2)).sum().backward()
        return weakref.ref(model)

    reference = train()
    gc.collect()
    assert (reference() is None) is True


def test_a_failed_backward_is_over_though_a_frame_in_which_it_began_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the traceback of an error keeps it that a prefetch has met. The final callback must not be in it."""
    frames: list[Any] = []
    monkeypatch.setattr(Gathers, "prefetch", lambda *arguments: frames.append(sys._getframe(1)))

    @on_ranks(1)
    def one_rank(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), auto_wrap_policy={nn.Linear})
        x = torch.ones(1, 2, requires_grad=True)
        x.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        assert is_at_rest(model) and any(frame.f_code.co_name == "begin_backward" for frame in frames)

    one_rank()


@pytest.mark.parametrize("trains", [True, False], ids=["after a backward", "without a backward"])
@pytest.mark.parametrize("guard", [False, True], ids=["", "guard"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["", "reentrant", "non-reentrant"])
def test_a_model_that_keeps_a_graph_is_freed_all_the_same(trains: bool, guard: bool, reentrant: bool | None) -> None:
    """On attributes of the root and of an inner unit, and by a hook; where plain torch frees it.

    (A module that keeps what came out of a non-reentrant checkpoint of itself is in a cycle of torch's own until the backward.)
    """

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(2, 2), nn.LSTM(2, 2), nn.Linear(2, 2)
            self.heard: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.lstm(self.first(x))[0]
            x = self.last(x) if reentrant is None else checkpoint(self.last, x, use_reentrant=reentrant)
            self.loss = (x * x).sum()
            self.first.kept = [x]
            return self.loss

    def freed(sharded: bool) -> list[bool]:
        def train() -> list[weakref.ref[nn.Module]]:
            model = Keeps()
            if sharded:
                fsdp.fully_shard(model, auto_wrap_policy={nn.Linear, nn.LSTM}, guard=guard)
            heard = model.heard
            model.last.register_forward_hook(lambda module, args, output: heard.append(output))
            for _ in range(2):
                loss = model(torch.ones(1, 2))
                if trains:
                    loss.backward()
            return [weakref.ref(one) for one in model.modules()]

        references = train()
        gc.collect()
        return [reference() is None for reference in references]

    plain = freed(False)
    assert fsdp.simulate(2, lambda rank: freed(True)) == [plain] * 2
    assert sum(plain) == 3 + (trains or reentrant is not False)


@on_ranks(1)
def test_the_graph_is_freed_of_two_calls_of_a_unit_in_one_checkpoint_whose_outputs_a_hook_has_carried_off(rank: int) -> None:
    """What the first call left was taken for an output of the second, so its node led back to itself."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.twice(self.twice(x)).exp(), self.first(x), use_reentrant=False).sum()

    def train() -> weakref.ref[Any]:
        model, heard = Twice(), list[Tensor]()
        model.twice[0].register_forward_hook(lambda module, args, output: heard.append(output))
        fsdp.fully_shard(model, auto_wrap_policy={nn.Sequential})
        model(torch.ones(1, 2)).backward()
        heard.clear()
        sharded = unit_ref_of(model)
        return weakref.ref(sharded.engine)

    reference = train()
    gc.collect()
    assert (reference() is None) is True


def test_a_graph_is_freed_with_the_forward_that_ctrl_c_ends() -> None:
    class Token:
        pass

    class Marks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()
            tokens.append(weakref.ref(ctx.token))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    tokens: list[weakref.ref[Token]] = []

    def interrupt() -> nn.Module:
        layers = nn.Sequential(nn.Linear(2, 2), Interrupted(2, 2))
        model = fsdp.FullyShardedDataParallel(layers, auto_wrap_policy={nn.Linear, Interrupted})
        layers[0].register_forward_hook(lambda module, args, output: Marks.apply(output))
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        return model

    def check(rank: int) -> list[bool]:
        model = interrupt()
        gc.collect()
        assert model is not None
        return [token() is None for token in tokens]

    assert fsdp.simulate(1, check) == [[True]]


def test_a_graph_outlives_its_model() -> None:
    def one_rank(rank: int) -> Tensor:
        x = torch.ones(1, 2, requires_grad=True)

        def forward() -> Tensor:
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
            return fsdp.fully_shard(layers, auto_wrap_policy={nn.Linear, nn.LSTM})(x)[0].sum()

        loss = forward()
        gc.collect()
        loss.backward()
        return x.grad

    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), torch.ones(1, 2, requires_grad=True)
    plain(x)[0].sum().backward()
    for found in fsdp.simulate(2, one_rank):
        torch.testing.assert_close(found, x.grad)


def test_a_destroyed_process_group_is_named(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(AFTER_THE_GROUP)
    ran = run_alone(script, cwd=tmp_path)
    assert ran.status == 0, ran.errors
    assert "has been destroyed" in ran.output
