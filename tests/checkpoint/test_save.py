"""What `save` keeps besides weights: saves in the background, random states."""

import gc
import random
import threading
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint import background, dcp, save
from fsdp.commands.convert import convert
from tests.support.models import CASES, Block, Case, Net, loss_of, own_batches, train, weights_of, wrap
from tests.support.optimizers import assert_same, in_groups, trained, wrapped
from tests.support.ranks import on_ranks


class Noisy(Net):
    """Draws random numbers in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


NOISY = Case(Noisy, {Block})


class Gate:
    """Writing begins when it is opened. `failure`: and then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.failure: BaseException | None = None
        real = dcp.FileSystemWriter.write_data

        def write_data(writer: Any, plan: Any, planner: Any) -> Any:
            assert self.open.wait(30)
            if self.failure is not None:
                raise self.failure
            return real(writer, plan, planner)

        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_data)


@pytest.fixture
def gate(one_process: None, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change everything that a save has seen, in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(13)
            for kept in optimizer.state.get(p, {}).values():
                kept.fill_(13)
        for buffer in model.buffers():
            buffer.fill_(13)


def contents(path: Path, case: Case = CASES["net"]) -> tuple[Any, Any]:
    """What a world of one finds in a checkpoint."""

    def fn(rank: int) -> tuple[Any, Any]:
        model, optimizer = wrapped(case, in_groups)
        fsdp.load(path, model, optimizer)
        return fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer)

    return fsdp.simulate(1, fn)[0]


class TestInTheBackground:
    def test_it_returns_at_once_and_holds_what_was_there_at_the_call(self, gate: Gate, tmp_path: Path) -> None:
        model, optimizer = trained(CASES["net"], 0, in_groups)
        wanted = fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer)
        under_way = fsdp.save(tmp_path / "a", model, optimizer, extra={"step": 2}, async_=True)
        assert not under_way.done() and repr(under_way).endswith("under way)")
        assert not (tmp_path / "a").exists() and fsdp.latest(tmp_path) is None
        train(model, own_batches(CASES["net"], 0), lambda _: optimizer)
        spoil(model, optimizer)
        with pytest.raises(TimeoutError):
            under_way.wait(timeout=0.01)
        gate.open.set()
        assert under_way.wait() == under_way.result() == fsdp.latest(tmp_path, verify=True) == tmp_path / "a"
        assert under_way.done() and repr(under_way).endswith("done)")
        assert_same(contents(tmp_path / "a"), wanted)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_relative_path_is_that_of_the_call(self, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = trained(CASES["net"], 0, in_groups)
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path / "run")
        under_way = fsdp.save("a", model, async_=True)
        monkeypatch.chdir(tmp_path)
        gate.open.set()
        assert under_way.wait() == fsdp.latest("run", verify=True).absolute() == tmp_path / "run" / "a"

    def test_the_next_save_waits_for_the_one_before(self, gate: Gate, tmp_path: Path) -> None:
        model, _ = trained(CASES["net"], 0, in_groups)
        first = fsdp.save(tmp_path / "1", model, keep_last=2, async_=True)
        second: list[fsdp.Saving] = []
        both = threading.Thread(target=lambda: second.append(fsdp.save(tmp_path / "2", model, keep_last=2, async_=True)))
        both.start()
        both.join(0.2)
        assert both.is_alive() and not list(tmp_path.glob(".2*")), "the second began before the first was over"
        gate.open.set()
        both.join(30)
        assert first.done()
        second[0].wait()
        fsdp.save(tmp_path / "3", model, keep_last=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]

    def test_a_failure_comes_from_wait_and_not_again(self, gate: Gate, tmp_path: Path) -> None:
        model, _ = trained(CASES["net"], 0, in_groups)
        gate.failure = OSError(28, "No space left on device")
        gate.open.set()
        with pytest.warns(
            UserWarning, match=r"a was not saved: .*No space left on device.*wait\(\) raises this, or the next save"
        ):
            under_way = fsdp.save(tmp_path / "a", model, async_=True)
            for _ in range(2):
                with pytest.raises(fsdp.ShardingError, match=r"a could not be written: .*No space left.*Nothing appeared there"):
                    under_way.wait()
        assert under_way.done() and not list(tmp_path.iterdir())
        gate.failure = None
        assert fsdp.save(tmp_path / "a", model).wait() == tmp_path / "a"

    def test_a_failure_nobody_waited_for_comes_from_the_next_save(self, gate: Gate, tmp_path: Path) -> None:
        model, _ = trained(CASES["net"], 0, in_groups)
        gate.failure = MemoryError("none left")
        gate.open.set()
        with pytest.warns(UserWarning, match="was not saved"):
            fsdp.save(tmp_path / "a", model, async_=True)
            with pytest.raises(fsdp.ShardingError, match=r"the save of .*a before this one failed in the background: none left"):
                fsdp.save(tmp_path / "b", model)
        gate.failure = None
        fsdp.save(tmp_path / "b", model)
        assert [path.name for path in tmp_path.iterdir()] == ["b"]

    def test_copies_are_released_when_they_are_written(self, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = trained(CASES["net"], 0, in_groups)
        planners: list[Any] = []
        real = dcp.WritePlan.stage

        def stage(writing: Any) -> None:
            real(writing)
            planners.append(writing._planner)

        monkeypatch.setattr(dcp.WritePlan, "stage", stage)
        under_way = fsdp.save(tmp_path / "a", model, optimizer, async_=True)
        held = sum(one.nbytes for one in planners[0].staged.values() if isinstance(one, Tensor))
        state = [one for kept in optimizer.state.values() for one in kept.values()]
        assert held == sum(one.nbytes for one in (*model.state_dict().values(), *state))
        gate.open.set()
        under_way.wait()
        assert not planners[0].staged
        gate.failure = OSError("broken")
        with pytest.warns(UserWarning, match="was not saved"), pytest.raises(fsdp.ShardingError):
            fsdp.save(tmp_path / "b", model, optimizer, async_=True).wait()
        assert not planners[1].staged

    def test_what_is_refused_is_refused_at_the_call(self, one_process: None, tmp_path: Path) -> None:
        model, _ = trained(CASES["net"], 0, in_groups)
        fsdp.save(tmp_path / "a", model)
        with pytest.raises(fsdp.ShardingError, match="a exists already"):
            fsdp.save(tmp_path / "a", model, async_=True)


@given(
    size=st.integers(1, 4),
    case=st.sampled_from(sorted(CASES.keys() - {"sparse"})),  # which AdamW does not take
    strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
)
@settings(max_examples=6)
def test_property_what_is_copied_is_all_that_is_saved(
    size: int, case: str, strategy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "a"

    late: dict[int, Callable[[], None]] = {}

    def run_in_background(world_comm: Any, folder: Path, work: Callable[[], None]) -> fsdp.Saving:
        late[world_comm.rank] = work
        return background.finished(folder)

    def fn(rank: int) -> tuple[Any, Any]:
        model, optimizer = trained(CASES[case], rank, in_groups, 1, sharding_strategy=strategy)
        wanted = fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer)
        fsdp.save(path, model, optimizer, async_=True)
        spoil(model, optimizer)
        late[rank]()
        return wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "run_in_background", run_in_background)
        wanted = fsdp.simulate(size, fn)[0]
    assert_same(contents(path, CASES[case]), wanted)


def test_in_a_simulated_world_it_is_done_at_once_and_wait_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dcp.FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        if "full" in str(self.path) and current() == 1:
            raise OSError(28, "No space left on device")
        return real(self, plan, planner)

    def current() -> int:
        rank = background.current_rank()
        assert rank is not None
        return rank.rank

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_data)

    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        fine = fsdp.save(tmp_path / "fine", model, async_=True)
        assert fine.done() and fine.wait() == tmp_path / "fine" == fsdp.latest(tmp_path)
        failed = fsdp.save(tmp_path / "full", model, async_=True)
        if rank == 0:  # one rank has heard of it; the next save must not part them
            with pytest.raises(fsdp.ShardingError, match=r"rank 1: .*No space left"):
                failed.wait()
        with pytest.raises(fsdp.ShardingError, match="full before this one failed in the background"):
            fsdp.save(tmp_path / "next", model)
        fsdp.save(tmp_path / "next", model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fsdp.simulate(2, fn)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "next"]


def draws() -> list[Any]:
    return [random.random(), float(numpy.random.standard_normal()), torch.rand(3)]


@on_ranks(2)
def test_resumption_is_exact_to_the_bit_and_draws_the_same_random_numbers(rank: int, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        for draw_from in (random.seed, numpy.random.seed, torch.manual_seed):
            draw_from(seed)
        model, optimizer = wrapped(NOISY, in_groups)
        return model, optimizer, fsdp.ShardedGradScaler(model, init_scale=4.0, growth_interval=2)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, first: int, last: int) -> list[Any]:
        for step in range(first, last):
            optimizer.zero_grad()
            with fsdp.no_sync(model):
                scaler.scale(loss_of(model(NOISY.batch(rank, 2 * step)))).backward()
            scaler.scale(loss_of(model(NOISY.batch(rank, 2 * step + 1)))).backward()
            scaler.step(optimizer)
            scaler.update()
        return [weights_of(model), fsdp.full_optim_state_dict(model, optimizer), *draws()]

    model, optimizer, scaler = make(rank)
    numpy.random.standard_normal()  # it draws two and keeps one
    steps(model, optimizer, scaler, 0, 3)
    fsdp.save(tmp_path / "3", model, optimizer, extra={"scaler": scaler.state_dict()})
    wanted = steps(model, optimizer, scaler, 3, 6)

    model, optimizer, scaler = make(100 + rank)
    scaler.load_state_dict(fsdp.load(tmp_path / "3", model, optimizer)["scaler"])
    assert_same(steps(model, optimizer, scaler, 3, 6), wanted)


@pytest.mark.parametrize(("saved", "loaded", "size"), [(False, True, 2), (True, False, 2), (True, True, 3)])
def test_random_states_are_left_alone(saved: bool, loaded: bool, size: int, tmp_path: Path) -> None:
    fsdp.simulate(2, lambda rank: fsdp.save(tmp_path / "a", wrap(CASES["net"]), rng=saved))

    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        random.seed(7)
        torch.manual_seed(7)
        before = torch.get_rng_state(), random.getstate()
        fsdp.load(tmp_path / "a", model, rng=loaded)
        assert_same((torch.get_rng_state(), random.getstate()), before)

    fsdp.simulate(size, fn)


class Noted(nn.Linear):
    """Its extra state is what the test sets."""

    note: Any = 0

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def noted(value: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with `value` as extra state, and an optimizer with it as an option and in its state."""
    net = Noted(4, 4)
    net.note = value
    model = fsdp.fully_shard(net)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "milestones": value}], lr=0.1)
    return model, optimizer


VALUES = {
    "keys that are numbers": ({10: 0.5, (1, 2): torch.ones(2)}, None),
    "empty dicts": ({"scales": {}, "n": [{}, 1, ({}, {3: 1})]}, None),
    "an empty dict": ({}, None),
    "an empty list": ([], None),
    "nothing": (None, None),
    "zero": (0, None),
    "mappings of other classes": (
        {"seen": defaultdict(int), "some": OrderedDict(a=OrderedDict()), "counts": Counter([1, 1])},
        {"seen": {}, "some": {"a": {}}, "counts": {1: 2}},
    ),
    "sizes": ({"shape": torch.Size([2, 3]), 1: [torch.Size([4])]}, None),
    "dotted keys": ({"a.b": 2, "c": {"d.e": 1}}, None),
    "classes of plain data": ([{1, 2}, (1j, torch.float32), b"x", None], None),
    "scalars of numpy": (
        {"rate": numpy.float64(0.5), "many": (numpy.int64(1), [numpy.bool_(True)])},
        {"rate": 0.5, "many": (1, [True])},
    ),
}


@pytest.mark.parametrize(("value", "wanted"), VALUES.values(), ids=VALUES)
def test_values_come_back_as_they_were_saved(value: Any, wanted: Any, tmp_path: Path) -> None:
    wanted = value if wanted is None else wanted

    def fn(rank: int) -> None:
        model, optimizer = noted(value)
        optimizer.state[model.weight]["count"] = numpy.float64(3)
        fsdp.save(tmp_path / "a", model, optimizer, extra={"value": value})
        other, again = noted("another")
        assert_same(dict(fsdp.load(tmp_path / "a", other, again)), {"value": wanted})
        assert_same((other.note, again.param_groups[0]["milestones"]), (wanted, wanted))
        count = again.state[other.weight]["count"]
        assert type(count) is float and count == 3

    fsdp.simulate(2, fn)
    convert(tmp_path / "a", tmp_path / "b.pt", "torch", 10**9)
    convert(tmp_path / "b.pt", tmp_path / "c", "dcp", 10**9)

    def load(rank: int) -> tuple[Any, Any]:
        model, optimizer = noted("another")
        fsdp.load(tmp_path / "c", model, optimizer)
        return model.note, optimizer.param_groups[0]["milestones"]

    assert_same(fsdp.simulate(1, load)[0], (wanted, wanted))


@pytest.mark.parametrize(
    "value",
    [numpy.ones(2), Path("x"), {3: {"a": numpy.ones(2)}}, [deque([1])], lambda: 0],
    ids=["array", "path", "inside", "deque", "function"],
)
def test_a_value_that_no_load_would_take_is_refused_by_its_key(value: Any, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model, optimizer = noted(value if rank == 1 else 0)
        with pytest.raises(
            fsdp.ShardingError, match=r"save: model\._extra_state\S* holds something that only unpickling"
        ) as caught:
            fsdp.save(tmp_path / "a", model)
        assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 300
        model.note = 0
        with pytest.raises(fsdp.ShardingError, match=r"save: optimizer\.param_groups\.0\.milestones\S* holds something"):
            fsdp.save(tmp_path / "a", model, optimizer)
        with pytest.raises(fsdp.ShardingError, match="save: extra holds something"):
            fsdp.save(tmp_path / "a", model, extra={"value": value if rank == 1 else 0})

    fsdp.simulate(2, fn)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_tensor_inside_a_dict_is_saved_without_the_rest_of_its_storage(rank: int, tmp_path: Path) -> None:
    model, _ = noted({0: torch.zeros(10**6)[:2]})
    fsdp.save(tmp_path / "a", model, extra={"part": torch.zeros(10**6)[:2]})
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 10**5


@on_ranks(2)
def test_a_sparse_tensor_in_extra_state_is_refused_by_its_key(rank: int, tmp_path: Path) -> None:
    model, _ = noted({"edges": torch.eye(2).to_sparse()})
    with pytest.raises(fsdp.ShardingError, match=r"save: model\._extra_state\.edges is a tensor of layout torch.sparse_coo"):
        fsdp.save(tmp_path / "a", model)


def test_nothing_that_was_read_or_written_lives_on_in_a_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    for one in (dcp.ReadPlan, dcp.WritePlan):
        real = one.__init__

        def noted(self: Any, *arguments: Any, real: Any = real) -> None:
            real(self, *arguments)
            alive.append(weakref.ref(self))

        monkeypatch.setattr(one, "__init__", noted)

    def fn(rank: int) -> None:
        model, optimizer = trained(CASES["net"], rank, in_groups)
        for number, in_background in enumerate((False, True)):
            fsdp.save(tmp_path / str(number), model, optimizer, async_=in_background)
        fsdp.load(tmp_path / "0", model, optimizer, progress=lambda done, total: None)

    gc.disable()
    try:
        fsdp.simulate(2, fn)
        assert len(alive) == 8 and not any(one() for one in alive)
    finally:
        gc.enable()
