"""What an error is told on its way out: the unit and its state, once, on the very object; and the story, if it is ours."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.debug.error_notes import MARK
from fsdp.device import storage
from fsdp.runtime.registry import engines_in, unit_ref_of
from tests.support.models import Block, Net, X, is_at_rest, loss_of, make_net
from tests.support.ranks import on_ranks


class Mine(Exception):
    """What the user's code raises."""


class Stop(BaseException):
    """What no `except Exception` stops."""


def wrap(net: nn.Module | None = None, **options: Any) -> nn.Module:
    return fsdp.FullyShardedDataParallel(make_net() if net is None else net, auto_wrap_policy={Block}, **options)


def note_of(error: BaseException) -> str:
    (note,) = (note for note in error.__notes__ if note.startswith(MARK))
    return note


def fails(raise_it: Callable[[nn.Module], None], error: BaseException | type[BaseException]) -> str:
    """The note on rank 1 of 2 of what a step raises, which must be `error` itself; afterwards the model trains."""

    def one_rank(rank: int) -> str:
        tracer = sys.gettrace()
        model = wrap()
        undo = raise_it(model)
        try:
            loss_of(model(X)).backward()
        except BaseException as caught:
            if isinstance(error, type):
                assert type(caught) is error
            else:
                assert caught is error
            note = note_of(caught)
        assert is_at_rest(model)
        assert sys.gettrace() is tracer
        for handle in undo or ():
            handle.remove()
        loss_of(model(X)).backward()
        return note

    return fsdp.simulate(2, one_rank)[1] if isinstance(error, type) else fsdp.simulate(1, one_rank)[0]


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def while_lent(ask: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def asks(model: nn.Module) -> None:
        with fsdp.summon_full_params(model):
            ask(model)

    return asks


PLACES: Final[dict[str, tuple[type[BaseException], Callable[[Any], Callable[..., Any]], str]]] = {
    "the forward of an inner unit": (
        Mine,
        lambda model: model.blocks[1].up.register_forward_hook,
        "'blocks.1', FORWARD, parameters UNSHARDED, on rank 0 of 1",
    ),
    "between units": (
        Mine,
        lambda model: model.leave.register_forward_pre_hook,
        "'Net', FORWARD, parameters UNSHARDED, on rank 0 of 1",
    ),
    "what no hook sees": (
        Stop,
        lambda model: model.blocks[1].up.register_forward_hook,
        "'blocks.1', FORWARD, parameters UNSHARDED, on rank 0 of 1",
    ),
    "a node of the backward": (
        Mine,
        lambda model: model.blocks[1].up.register_full_backward_hook,
        "'blocks.1', BACKWARD_PRE, parameters UNSHARDED, on rank 0 of 1",
    ),
    # it sees the reduced gradient, at the end of the whole backward
    "a hook on a parameter": (Mine, lambda model: model.blocks[1].up.weight.register_hook, "'Net', .*"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_note_of_what_a_hook_raises_names_the_place(place: str) -> None:
    kind, registers, where = PLACES[place]
    error = kind()
    note = fails(lambda model: [registers(model)(raising(error))], error)
    assert re.fullmatch(f"{re.escape(MARK)} {where}", note, re.DOTALL)


def test_in_a_node_that_python_never_saw_fail() -> None:
    """The exception does not exist yet when the backward dies."""

    def mismatch(model: nn.Module) -> list[Any]:
        def shrink(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            other = torch.ones_like(output, requires_grad=True)
            product = output * other
            other.data = torch.ones(7)
            return product

        return [model.blocks[1].register_forward_hook(shrink, prepend=True)]

    note = fails(mismatch, RuntimeError)
    assert note.startswith(f"{MARK} 'blocks.") and note.endswith("on rank 1 of 2")


def test_in_a_recompute() -> None:
    error = Mine()

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.enter(x))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.leave(x)

    def one_rank(rank: int) -> str:
        model = wrap(Checkpointed())
        times: list[int] = []

        def second_time(module: nn.Module, args: Any) -> None:
            times.append(1)
            if len(times) == 2:
                raise error

        model.blocks[1].up.register_forward_pre_hook(second_time)
        loss = loss_of(model(X))
        with pytest.raises(Mine) as caught:
            loss.backward()
        assert caught.value is error and is_at_rest(model)
        return note_of(error)

    assert fsdp.simulate(1, one_rank) == [f"{MARK} 'blocks.1', BACKWARD_PRE, parameters UNSHARDED, on rank 0 of 1"]


def test_out_of_memory_in_a_gather_has_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("no memory")
    allocate, calls = storage.ResizableStorage.allocate, []

    def tight(memory: Any, tracker: Any) -> None:
        calls.append(memory)
        if len(calls) == 3:
            raise error
        allocate(memory, tracker)

    monkeypatch.setattr(storage.ResizableStorage, "allocate", tight)
    lines = fails(lambda model: None, error).splitlines()
    assert lines[0].startswith(f"{MARK} 'blocks.")
    assert any(line.startswith("root 'Net', rank 0 of 1") for line in lines)
    assert any(line.split()[:2] == ["Net", "FORWARD"] for line in lines)


def test_a_refusal_has_the_story() -> None:
    class Summons(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with fsdp.summon_full_params(self):
                return super().forward(x)

    def one_rank(rank: int) -> str:
        model = fsdp.fully_shard(Summons(6, 2))
        with pytest.raises(fsdp.IllegalTransition) as caught:
            model(X)
        return note_of(caught.value)

    lines = fsdp.simulate(2, one_rank)[1].splitlines()
    assert lines[0] == f"{MARK} 'Summons', FORWARD, parameters UNSHARDED, on rank 1 of 2"
    assert "  shard: gather_objects fully_shard, all_gather Summons" in lines
    assert lines[-1].split() == ["Summons", "FORWARD", "UNSHARDED", "PRE_FORWARD"]


OUTSIDE: Final[dict[str, tuple[Callable[[nn.Module], Any], str]]] = {
    "a norm of kept gradients": (lambda model: fsdp.clip_grad_norm_(model, 1.0), "IDLE"),
    "a save of kept gradients": (lambda model: fsdp.save("unused", model), "IDLE"),
    "a part of a root": (lambda model: fsdp.memory_bytes(model.blocks[1]), "IDLE"),
    "a state dict while lent": (while_lent(fsdp.full_state_dict), "SUMMONED"),
    "a hook while lent": (while_lent(lambda model: fsdp.register_comm_hook(model, None, print)), "SUMMONED"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_refusal_outside_a_step_has_it_too(name: str) -> None:
    ask, state = OUTSIDE[name]

    def one_rank(rank: int) -> str:
        model = wrap()
        with fsdp.no_sync(model):
            loss_of(model(X)).backward()
        with pytest.raises(fsdp.ShardingError) as caught:
            ask(model)
        return note_of(caught.value)

    lines = fsdp.simulate(2, one_rank)[1].splitlines()
    assert lines[0].startswith(f"{MARK} 'Net', {state}, ")
    assert lines[1].startswith("root 'Net', rank 1 of 2") and " kept" in lines[1]
    assert sum(line.startswith(("  Net ", "  blocks.")) for line in lines) == 4


def test_a_refusal_in_a_backward_hook_has_it_too() -> None:
    def one_rank(rank: int) -> str:
        model = wrap()
        loss = loss_of(model(X))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with pytest.raises(fsdp.ShardingError) as caught:
            loss.backward()
        return note_of(caught.value)

    assert "root 'Net', rank 1 of 2" in fsdp.simulate(2, one_rank)[1]


def test_the_story_of_many_units_is_short() -> None:
    def one_rank(rank: int) -> str:
        model = fsdp.fully_shard(Net(blocks=30), auto_wrap_policy={Block})
        sharded = unit_ref_of(model)
        error = fsdp.ShardingError("no")
        sharded.engine.note(error, 17)
        return note_of(error)

    lines = fsdp.simulate(2, one_rank)[0].splitlines()
    assert len(lines) <= 15 and lines[-1] == "  and 23 more units" and "blocks.16" in "".join(lines)


@on_ranks(1)
def test_what_is_caught_inside_leaves_nothing_behind(rank: int) -> None:
    """One error a step, each with one note, and the tracer of a debugger keeps tracing."""
    seen: list[str] = []
    model = wrap()
    handle = model.blocks[1].up.register_full_backward_hook(raising(Mine()))
    tracer = lambda frame, event, told: seen.append(event)  # noqa: E731
    sys.settrace(tracer)
    try:
        with pytest.raises(Mine) as caught:
            loss_of(model(X)).backward()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(None)
    note_of(caught.value)
    handle.remove()


def test_a_rank_of_several_dimensions_has_its_number_in_the_job(tmp_path: Path) -> None:
    """In notes, in traces and in answers to `python -m fsdp who`: two ranks of one data coordinate are two ranks."""

    def run(rank: int) -> tuple[str, str, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fsdp.fully_shard(model, mesh=mesh["dp"])
        with fsdp.trace(model) as trace:
            model(torch.ones(2, 4)).sum().backward()
        written = trace.save(tmp_path / "trace-{rank}.json")
        (engine,) = engines_in(model, "test")
        model[0].register_forward_hook(lambda *_: [][0])
        with pytest.raises(IndexError) as caught:
            model(torch.ones(2, 4))
        return caught.value.__notes__[0], Path(written).name, engine.snapshot().rank

    for rank, (note, written, number) in enumerate(fsdp.simulate(4, run)):
        assert f"on rank {rank} of 4" in note and written == f"trace-{rank}.json" and number == rank
