"""Two threads that use one model at once are named, and the one that was there first goes on."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp

X = torch.ones(1, 4)


class Gate:
    """Stops one thread inside a forward or a backward until another one has done something."""

    def __init__(self) -> None:
        self.stops_in = ""
        self.reached, self.opened = threading.Event(), threading.Event()

    def stop(self, where: str) -> None:
        if where == self.stops_in and threading.current_thread().name == "loader":
            self.reached.set()
            assert self.opened.wait(20)


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gate.stop("backward")
        return gradient, None


class Gated(nn.Linear):
    def __init__(self, gate: Gate) -> None:
        super().__init__(4, 4)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        self.gate.stop("forward")
        return Stops.apply(super().forward(x), self.gate)


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def meanwhile(gate: Gate, where: str, model: nn.Module, then: Callable[[], object]) -> tuple[str, list[BaseException]]:
    """What `then` raises while another thread is in the forward or backward of the model, and what that thread raises."""
    failures: list[BaseException] = []

    def train() -> None:
        try:
            model(X).sum().backward()
        except BaseException as failure:
            failures.append(failure)

    gate.stops_in = where
    thread = threading.Thread(target=train, name="loader", daemon=True)
    thread.start()
    assert gate.reached.wait(20)
    try:
        with pytest.raises(fsdp.ShardingError) as caught:
            then()
    finally:
        gate.opened.set()
        thread.join(20)
    assert not thread.is_alive()
    return str(caught.value), failures


PLACE = rf"\({Path(__file__).name}:\d+\)"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", ["forward", "inner forward", "full_state_dict"])
def test_two_threads_in_one_model_are_named(where: str, call: str) -> None:
    gate = Gate()
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), Gated(gate), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear, Gated})
    for _ in range(2):
        model(X).sum().backward()
    wanted = [3 * one.grad / 2 for one in model.parameters() if one.grad is not None]
    calls = {
        "forward": lambda: model(X),
        "inner forward": lambda: model[2](X),
        "full_state_dict": lambda: fsdp.full_state_dict(model),
    }
    text, failures = meanwhile(gate, where, model, calls[call])
    theirs = {"forward": rf"in the forward of unit '1' {PLACE}", "backward": rf"in a backward {PLACE}"}[where]
    mine = {
        "forward": rf"in the forward of unit 'Sequential' {PLACE}",
        "inner forward": rf"in the forward of unit '2' {PLACE}",
        "full_state_dict": rf"at {PLACE[2:-2]}",
    }[call]
    assert re.fullmatch(
        rf"two threads use the model 'Sequential' at once: loader is {theirs}, and MainThread is {mine}\. "
        r"Let one thread at a time use a model: put a lock around each step, or give each thread a model of its own\.",
        text,
    ), text
    # the thread that was there first is not disturbed
    assert not failures
    assert all(map(torch.equal, wanted, (one.grad for one in model.parameters() if one.grad is not None)))


def test_a_backward_beside_a_forward_is_named() -> None:
    gate = Gate()
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), Gated(gate)), auto_wrap_policy={nn.Linear, Gated})
    loss = model(X).sum()
    text, _ = meanwhile(gate, "forward", model, loss.backward)
    assert re.search(rf"loader is in the forward of unit '1' {PLACE}, and MainThread is in a backward {PLACE}\.", text), text
    model(X).sum().backward()


def test_two_models_in_two_threads_are_fine() -> None:
    gate = Gate()
    models = [fsdp.fully_shard(nn.Sequential(Gated(gate)), auto_wrap_policy={Gated}) for _ in range(2)]
    gate.stops_in = "forward"
    thread = threading.Thread(target=lambda: models[0](X).sum().backward(), name="loader", daemon=True)
    thread.start()
    assert gate.reached.wait(20)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        models[1](torch.ones(1, 3))
    models[1](X).sum().backward()
    gate.opened.set()
    thread.join(20)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(*(m.parameters() for m in models), strict=True))
