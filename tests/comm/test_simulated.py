"""A world in one process: what it computes, that it can be repeated, and what it says of ranks that go wrong."""

import contextlib
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.comm.simulated import Call, SimulatedCommunicator, SimulatedRank, current_rank, simulate
from fsdp.errors import FEWER_BATCHES, NO_SYNC, UNEVEN_PATHS, PeerFailed, ShardingError, WorldError
from tests.support.ranks import on_ranks

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8])
SEEDS = range(12)

OTHERWISE = f"{UNEVEN_PATHS} {FEWER_BATCHES}"


def here() -> SimulatedRank:
    rank = current_rank()
    assert rank is not None
    return rank


def channel(name: str = "shard") -> SimulatedCommunicator:
    return here().comm(name)


def gate() -> None:
    """Every rank must have come here before any goes on."""
    here().comm("gate").gather_objects(None, "gate")


def message(size: int, fn: Callable[[int], object], seed: int = 0) -> str:
    with pytest.raises(WorldError) as caught:
        simulate(size, fn, seed)
    return str(caught.value)


def heard(size: int, fn: Callable[[int], object], seed: int = 0) -> list[str]:
    """What each rank was told, where every rank must be told something."""

    def listen(rank: int) -> str:
        with pytest.raises(WorldError) as caught:
            fn(rank)
        return str(caught.value)

    return simulate(size, listen, seed)


class TestEachCollective:
    @SIZES
    def test_all_gather_fills_every_chunk(self, size: int) -> None:
        def fn(rank: int) -> list[int]:
            unsharded = torch.zeros(size * 3, dtype=torch.uint8)
            unsharded[rank * 3 : rank * 3 + 3] = rank + 1
            channel().all_gather(unsharded, "a").wait()
            assert here().log == [Call("shard", "all_gather", "a", (size - 1) * 3)]
            return unsharded.tolist()

        assert simulate(size, fn) == [[rank + 1 for rank in range(size) for _ in range(3)]] * size

    @SIZES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
    def test_reduce_scatter_adds_neighbours_in_pairs(self, size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        buckets = [(torch.randn(size * 5) * 8).to(dtype) for _ in range(size)]
        left = [bucket.float() if dtype.is_floating_point and dtype.itemsize == 2 else bucket for bucket in buckets]
        while len(left) > 1:
            left = [left[i] + left[i + 1] if i + 1 < len(left) else left[i] for i in range(0, len(left), 2)]
        total = left[0]

        def fn(rank: int) -> Tensor:
            into = torch.empty(5, dtype=dtype)
            channel().reduce_scatter(buckets[rank].clone(), into, "a").wait()
            assert here().log[0].received == (size - 1) * 5 * dtype.itemsize
            return into

        assert torch.equal(torch.cat(simulate(size, fn)), total.to(dtype))

    @SIZES
    def test_reduce_scatter_into_its_own_bucket(self, size: int) -> None:
        def fn(rank: int) -> list[float]:
            bucket = torch.arange(size * 2.0)
            channel().reduce_scatter(bucket, bucket[rank * 2 : rank * 2 + 2], "a").wait()
            return bucket[rank * 2 : rank * 2 + 2].tolist()

        assert simulate(size, fn) == [[size * 2.0 * rank, size * (2.0 * rank + 1)] for rank in range(size)]

    @SIZES
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    @on_ranks("size")
    def test_all_reduce_sums_or_takes_the_largest(self, rank: int, size: int, shape: tuple[int, ...]) -> None:
        total, largest = torch.full(shape, rank + 1.0), torch.full(shape, -rank, dtype=torch.int32)
        works = [channel().all_reduce(total, "sum", "a"), channel().all_reduce(largest, "max", "b")]
        for work in works:
            work.wait()
        assert torch.equal(total, torch.full(shape, size * (size + 1) / 2))
        assert torch.equal(largest, torch.zeros(shape, dtype=torch.int32))

    @on_ranks(5)
    def test_half_precision_is_summed_in_fp32(self, rank: int) -> None:
        tensor = torch.tensor([1.0 if rank == 0 else 2.0**-9] * 1, dtype=torch.bfloat16)
        channel().all_reduce(tensor, "sum", "a").wait()
        assert tensor.item() == 1.0 + 2**-7

    @SIZES
    def test_broadcast_overwrites_any_layout(self, size: int) -> None:
        source = size - 1

        def fn(rank: int) -> Tensor:
            tensor = torch.full((2, 3, 4, 5), rank, dtype=torch.complex64).contiguous(memory_format=torch.channels_last)
            channel().broadcast(tensor, source, "a").wait()
            assert here().log[0].received == (0 if rank == source else tensor.nbytes)
            return tensor

        assert all(torch.equal(tensor, torch.full_like(tensor, source)) for tensor in simulate(size, fn))

    @SIZES
    def test_gather_objects_shares_nothing(self, size: int) -> None:
        def fn(rank: int) -> list[list[int]]:
            mine = [rank]
            things = channel().gather_objects(mine, "a")
            assert things == [[other] for other in range(size)]
            assert (here().log[0].received > 0) == (size > 1)
            things[rank].append(7)
            assert mine == [rank]
            return things

        first, *others = simulate(size, fn)
        assert all(other[0] is not first[0] for other in others)

    @on_ranks(2)
    def test_a_parameter_and_an_inference_tensor_will_do(self, rank: int) -> None:
        parameter = nn.Parameter(torch.full((2,), float(rank)))
        channel().broadcast(parameter, 1, "a").wait()
        with torch.inference_mode():
            tensor = torch.full((4,), rank, dtype=torch.uint8)
        channel().all_gather(tensor, "b").wait()
        assert parameter.tolist() == [1, 1] and tensor.tolist() == [0, 0, 1, 1]

    def test_autograd_sees_what_was_written_where_torch_distributed_lets_it(self) -> None:
        def fn(rank: int) -> None:
            unsharded, into, tensor = torch.zeros(2, dtype=torch.uint8), torch.zeros(1), torch.zeros(2)
            channel().all_gather(unsharded, "a").wait()
            channel().reduce_scatter(tensor, into, "b").wait()
            channel().all_reduce(tensor, "sum", "c").wait()
            channel().broadcast(tensor, 0, "d").wait()
            assert (unsharded._version, into._version, tensor._version) == (before + 1, before + 1, before)

        before = torch.zeros(2)._version

        simulate(2, fn)

    def test_results_come_by_rank(self) -> None:
        for seed in SEEDS:
            assert simulate(5, lambda rank: (rank, here().rank, here().size, channel().rank, channel().size), seed) == [
                (rank, rank, 5, rank, 5) for rank in range(5)
            ]

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda c: c.all_gather(torch.zeros(3), "a"), "2 equal chunks, not 3 x float32"),
            (lambda c: c.all_gather(torch.zeros(3, dtype=torch.uint8), "a"), "not 3 x uint8"),
            (lambda c: c.reduce_scatter(torch.zeros(4), torch.zeros(3), "a"), "4 x float32 into 3 x float32"),
            (lambda c: c.reduce_scatter(torch.zeros(4), torch.zeros(2).half(), "a"), "into 2 x float16"),
            (lambda c: c.all_reduce(torch.zeros(4), "mean", "a"), "'sum' and 'max', not 'mean'"),
            (lambda c: c.all_reduce(torch.zeros(4, 4)[:, :2], "sum", "a"), "holes or overlaps"),
            (lambda c: c.all_reduce(torch.zeros(4, device="meta"), "sum", "a"), "is on meta"),
            (lambda c: c.broadcast(torch.zeros(4), 2, "a"), "from rank 2: the ranks are 0 to 1"),
        ],
    )
    def test_arguments_that_cannot_be_right(self, call: Callable[[SimulatedCommunicator], object], text: str) -> None:
        with pytest.raises(ShardingError, match=text):
            simulate(2, lambda rank: call(channel()))


class TestRepeats:
    @staticmethod
    def interleaving(seed: int) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def fn(rank: int) -> None:
            for step in range(6):
                seen.append((rank, step))
                channel().all_reduce(torch.zeros(1), "sum", "a").wait()

        simulate(3, fn, seed)
        return seen

    @given(st.integers(0, 2**32))
    @settings(max_examples=20, deadline=None)
    def test_the_same_seed_gives_the_same_run(self, seed: int) -> None:
        assert self.interleaving(seed) == self.interleaving(seed)

    def test_seeds_differ(self) -> None:
        assert len({tuple(self.interleaving(seed)) for seed in SEEDS}) > len(SEEDS) / 2

    def test_only_one_rank_runs_at_a_time(self) -> None:
        inside: list[int] = []

        def fn(rank: int) -> None:
            for _ in range(50):
                inside.append(rank)
                assert inside == [rank]
                inside.remove(rank)
                channel().gather_objects(rank, "a")

        simulate(4, fn)

    def test_data_may_move_before_anybody_waits(self) -> None:
        def fn(rank: int) -> bool:
            tensor = torch.ones(2)
            work = channel().all_reduce(tensor, "sum", "a")
            gate()
            moved = not tensor.isnan().any()
            work.wait()
            return bool(moved)

        assert {all(simulate(2, fn, seed)) for seed in SEEDS} == {True, False}


class TestTooEarly:
    """A buffer in flight belongs to the collective."""

    @given(st.integers(0, 2**32))
    @settings(max_examples=20, deadline=None)
    def test_what_is_read_before_wait_is_poison(self, seed: int) -> None:
        def fn(rank: int) -> None:
            if rank == 1:
                gate()
            c = channel()
            unsharded, into = torch.full((6,), 5, dtype=torch.uint8), torch.zeros(3)
            tensor, copy = torch.zeros(2, 2), torch.zeros((), dtype=torch.bfloat16)
            works = [
                c.all_gather(unsharded, "a"),
                c.reduce_scatter(torch.zeros(6), into, "b"),
                c.all_reduce(tensor, "sum", "c"),
                c.broadcast(copy, 1, "d"),
            ]
            if rank == 0:
                assert unsharded.tolist() == [5, 5, 5, 255, 255, 255]
                assert into.isnan().all() and tensor.isnan().all() and copy.isnan()
                gate()
            for work in works:
                work.wait()
            assert unsharded.tolist() == [5] * 6
            assert not into.any() and not tensor.any() and not copy

        simulate(2, fn, seed)

    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
    @pytest.mark.parametrize("overwritten", [False, True])
    def test_an_overwritten_input_is_noticed_in_the_result(self, kind: str, overwritten: bool) -> None:
        def fn(rank: int) -> list[float]:
            if rank == 1:
                gate()
            c = channel()
            tensor = torch.ones(2, dtype=torch.uint8 if kind == "all_gather" else torch.float32)
            into = torch.zeros(1)
            work = {
                "all_gather": lambda: c.all_gather(tensor, "a"),
                "reduce_scatter": lambda: c.reduce_scatter(tensor, into, "a"),
                "all_reduce": lambda: c.all_reduce(tensor, "sum", "a"),
                "broadcast": lambda: c.broadcast(tensor, 0, "a"),
            }[kind]()
            if rank == 0:
                if overwritten:
                    tensor.fill_(99)
                gate()
            work.wait()
            return (into if kind == "reduce_scatter" else tensor).tolist()

        right = {"all_gather": [1, 1], "reduce_scatter": [2], "all_reduce": [2, 2], "broadcast": [1, 1]}[kind]
        for seed in SEEDS:
            assert (simulate(2, fn, seed)[1] == right) is not overwritten

    @pytest.mark.parametrize("which", ["bucket", "into"])
    @pytest.mark.parametrize("again", [0, 1, 256])
    def test_a_released_buffer_is_reported_to_all_and_the_communicator_goes_on(self, which: str, again: int) -> None:
        def fn(rank: int) -> str:
            if rank == 1:
                gate()
            buffers = {"bucket": torch.ones(64), "into": torch.ones(32)}
            work = channel().reduce_scatter(buffers["bucket"], buffers["into"], "layers.0")
            if rank == 0:
                storage = buffers[which].untyped_storage()
                storage.resize_(0)
                # something else takes its place in memory before it is allocated again
                others = [torch.ones(size) for size in (64, 32) for _ in range(32)]
                storage.resize_(again)
                gate()
                del others
            with pytest.raises(WorldError) as caught:
                work.wait()
            assert channel().gather_objects(rank, "after") == [0, 1]
            return str(caught.value)

        text = (
            "buffer of 'layers.0' was released while the collective was in flight: rank 0 let go of it before "
            "reduce_scatter('layers.0', 64 x float32), operation 0 of communicator 'shard' was over."
        )
        for seed in SEEDS:
            assert simulate(2, fn, seed) == [text] * 2

    def test_a_release_that_nobody_waited_for_is_reported_at_the_end(self) -> None:
        def fn(rank: int) -> None:
            tensor = torch.ones(4)
            if rank == 1:
                gate()
            channel().all_reduce(tensor, "sum", "a")
            if rank == 0:
                tensor.untyped_storage().resize_(0)
                gate()

        for seed in SEEDS:
            assert "buffer of 'a' was released while the collective was in flight" in message(2, fn, seed)

    def test_a_buffer_without_memory_is_refused(self) -> None:
        def fn(rank: int) -> None:
            tensor = torch.ones(4)
            tensor.untyped_storage().resize_(0)
            channel().all_reduce(tensor, "sum", "a")

        assert "buffer of 'a' was released before the collective was called" in message(2, fn)


class TestDisagreement:
    def test_every_rank_gets_an_error_that_names_what_each_called(self) -> None:
        def fn(rank: int) -> None:
            c = channel()
            c.gather_objects(None, "start")
            if rank == 0:
                c.all_gather(torch.zeros(4096, dtype=torch.uint8), "layers.1").wait()
            else:
                c.reduce_scatter(torch.zeros(6), torch.zeros(3), "layers.0").wait()

        text = (
            "The ranks disagree on operation 1 of communicator 'shard': rank 0 called all_gather('layers.1', 4096 bytes) "
            "where rank 1 called reduce_scatter('layers.0', 6 x float32). Call the same in the same order. "
            f"{NO_SYNC} {OTHERWISE}"
        )
        for seed in SEEDS:
            assert heard(2, fn, seed) == [text] * 2
            assert message(2, fn, seed) == text

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (lambda c: c.all_reduce(torch.zeros(2), "sum", "a"), "all_reduce('a', 2 x float32, sum)"),
            (lambda c: c.all_reduce(torch.zeros(2), "max", "a"), "all_reduce('a', 2 x float32, max)"),
            (lambda c: c.all_reduce(torch.zeros(3), "sum", "a"), "all_reduce('a', 3 x float32, sum)"),
            (lambda c: c.all_reduce(torch.zeros(2).double(), "sum", "a"), "all_reduce('a', 2 x float64, sum)"),
            (lambda c: c.all_reduce(torch.zeros(2), "sum", "b"), "all_reduce('b', 2 x float32, sum)"),
            (lambda c: c.broadcast(torch.zeros(2), 0, "a"), "broadcast('a', 2 x float32, from rank 0)"),
            (lambda c: c.broadcast(torch.zeros(2), 1, "a"), "broadcast('a', 2 x float32, from rank 1)"),
            (lambda c: c.gather_objects(None, "a"), "gather_objects('a')"),
        ],
    )
    def test_anything_that_differs_is_a_mismatch(self, one: Callable[[SimulatedCommunicator], object], other: str) -> None:
        def fn(rank: int) -> None:
            if rank == 1:
                one(channel())
            else:
                channel().all_gather(torch.zeros(6, dtype=torch.uint8), "x").wait()

        text = f"ranks 0, 2 called all_gather('x', 6 bytes) where rank 1 called {other}."
        assert any(text in message(3, fn, seed) for seed in SEEDS)

    def test_it_is_reported_even_if_nobody_waits(self) -> None:
        def fn(rank: int) -> None:
            with contextlib.suppress(WorldError):
                channel().all_reduce(torch.zeros(1), "sum", str(rank))

        def waits_for_nothing(rank: int) -> None:
            channel().all_reduce(torch.zeros(1), "sum", str(rank))

        simulate(2, fn)
        assert "disagree" in message(2, waits_for_nothing)

    def test_what_came_before_on_the_communicator_still_ends(self) -> None:
        def meet(rank: int) -> None:
            for other in {0, 1} if rank == 2 else {rank}:  # these ranks alone, because all three together are done by now
                here().comm("gate", [other, 2]).gather_objects(None, "gate")

        def fn(rank: int) -> float:
            tensor = torch.ones(1)
            if rank == 2:
                meet(rank)
            good = channel().all_reduce(tensor, "sum", "good")
            with pytest.raises(WorldError, match="disagree on operation 1"):
                channel().all_reduce(torch.zeros(1), "sum", f"bad {rank}").wait()
            if rank != 2:
                meet(rank)
            good.wait()
            with pytest.raises(WorldError, match="disagree on operation 1"):
                channel().gather_objects(None, "later")
            with pytest.raises(WorldError, match="disagree on operation 1"):
                channel("another").gather_objects(rank, "as over processes, these ranks are done")
            if rank < 2:
                assert here().comm("another", [0, 1]).gather_objects(rank, "a") == [0, 1]
            return tensor.item()

        for seed in SEEDS:
            assert simulate(3, fn, seed) == [3, 3, 3]


class TestDeadlock:
    def test_a_rank_finished_early(self) -> None:
        def fn(rank: int) -> None:
            if rank != 1:
                channel().all_gather(torch.zeros(6, dtype=torch.uint8), "layers.1").wait()

        waits = "waits for all_gather('layers.1', 6 bytes), operation 0 of communicator 'shard', which rank 1 did not call."
        for seed in SEEDS:
            text = message(3, fn, seed)
            assert text == f"Deadlock: nobody can go on. Rank 0 {waits} Rank 1 finished. Rank 2 {waits} {OTHERWISE}"

    def test_two_communicators_in_two_orders(self) -> None:
        def fn(rank: int) -> None:
            for name in ("shard", "reduce") if rank == 0 else ("reduce", "shard"):
                channel(name).all_reduce(torch.zeros(1), "sum", name[0]).wait()

        text = (
            "Deadlock: nobody can go on. "
            "Rank 0 waits for all_reduce('s', 1 x float32, sum), operation 0 of communicator 'shard', which rank 1 did not call. "
            "Rank 1 waits for all_reduce('r', 1 x float32, sum), operation 0 of communicator 'reduce', which rank 0 did not call."
        )
        for seed in SEEDS:
            assert heard(2, fn, seed) == [text] * 2

    def test_two_orders_of_launching_are_fine_if_nobody_waits_in_between(self) -> None:
        def fn(rank: int) -> None:
            names = ("shard", "reduce") if rank == 0 else ("reduce", "shard")
            for work in [channel(name).all_reduce(torch.zeros(1), "sum", "a") for name in names]:
                work.wait()

        for seed in SEEDS:
            simulate(2, fn, seed)

    @on_ranks(2)
    def test_no_rank_goes_on_after_it(self, rank: int) -> None:
        """As over processes, where one rank may have the step that the other has not."""
        if rank == 0:
            work = channel().all_reduce(torch.zeros(1), "sum", "a")
            with pytest.raises(WorldError, match="Deadlock"):
                work.wait()
        else:
            with pytest.raises(WorldError, match="Deadlock"):
                channel("c").gather_objects(rank, "c")
        for name in ("b", "c", "shard"):
            with pytest.raises(WorldError, match="Deadlock"):
                channel(name).gather_objects(rank, name)

    def test_ranks_that_wait_for_one_that_has_returned_get_an_error_which_says_so(self) -> None:
        def fn(rank: int) -> tuple[int, str] | None:
            if rank == 1:
                return None
            with pytest.raises(PeerFailed, match="Rank 1 finished") as caught:
                channel("shard").gather_objects(rank, "save")
            return caught.value.rank, caught.value.reason

        said = (1, "has ended, while this rank waited for it")
        assert simulate(3, fn) == [said, None, said]

    def test_what_nobody_waits_for_is_no_deadlock(self) -> None:
        def fn(rank: int) -> None:
            if rank == 0:
                channel().all_reduce(torch.zeros(1), "sum", "a")

        for seed in SEEDS:
            simulate(2, fn, seed)


class TestFailure:
    def test_a_rank_that_waits_for_one_that_has_abandoned_the_step_is_notified_and_all_begin_anew(self) -> None:
        """What was called in that step is over, and to say twice that it is abandoned is to say it once."""

        def fn(rank: int) -> str:
            channel().gather_objects(rank, "before")
            told = ""
            if rank == 0:
                works = [channel().broadcast(torch.ones(2), 0, label) for label in ("layers.0", "layers.1")]
                with pytest.raises(PeerFailed) as caught:
                    works[0].wait()
                told = str(caught.value)
            for _ in range(2):
                channel().abandon("layers.0", ValueError("no such row"))
            total = torch.ones(2)
            channel().all_reduce(total, "sum", "another").wait()
            assert total.tolist() == [2.0, 2.0]
            return told

        call = "broadcast('layers.0', 2 x float32, from rank 0), operation 1 of communicator 'shard'"
        for seed in SEEDS:
            told = simulate(2, fn, seed)[0]
            over = "This step is over here too; start it again on all ranks, or end."
            why = "rank 1 has abandoned the step, in unit 'layers.0', with ValueError: no such row."
            assert told == f"{why} {over} Rank 1 never called {call}."

    def test_a_rank_that_waits_gets_the_first_failure_also_if_there_was_another_since(self) -> None:
        def fn(rank: int) -> str | None:
            channel().gather_objects(rank, "before")
            if rank == 2:
                work = channel().broadcast(torch.ones(2), 0, "layers.0")
                gate()
                with pytest.raises(PeerFailed) as caught:
                    work.wait()
                return caught.value.reason
            for why in ("first", "second"):
                channel().abandon("layers.0", ValueError(f"{why} of {rank}"))
                here().comm("shard", [0, 1]).gather_objects(None, "another")
                channel()._follow_epoch()
            gate()
            return None

        for seed in SEEDS:
            assert simulate(3, fn, seed)[2] == "ValueError: first of 0"

    def test_the_original_exception_is_raised_with_a_note(self) -> None:
        failure = KeyError("boom")

        def fn(rank: int) -> None:
            if rank == 1:
                raise failure
            channel().gather_objects(rank, "a")

        for seed in SEEDS:
            with pytest.raises(KeyError) as caught:
                simulate(3, fn, seed)
            assert caught.value is failure
            assert failure.__notes__[-1] == f"raised on rank 1 of 3 by fsdp.simulate(seed={seed})"

    def test_each_rank_that_waits_for_it_gets_the_reason(self) -> None:
        texts: dict[int, str] = {}

        def fn(rank: int) -> None:
            if rank == 1:
                raise ValueError("boom")
            with pytest.raises(WorldError) as caught:
                channel().gather_objects(rank, "a")
            texts[rank] = str(caught.value)

        with pytest.raises(ValueError, match="boom"):
            simulate(3, fn)
        text = "Rank 1 failed with ValueError: boom, and never called gather_objects('a'), operation 0 of communicator 'shard'."
        assert texts == {0: text, 2: text}

    def test_what_it_called_before_it_failed_still_ends(self) -> None:
        totals: list[float] = []

        def fn(rank: int) -> None:
            tensor = torch.ones(1)
            work = channel().all_reduce(tensor, "sum", "a")
            if rank == 0:
                raise ValueError("boom")
            work.wait()
            totals.append(tensor.item())

        for seed in SEEDS:
            with pytest.raises(ValueError, match="boom"):
                simulate(2, fn, seed)
        assert totals == [2] * len(SEEDS)

    @on_ranks(3)
    def test_a_rank_that_catches_its_own_exception_goes_on(self, rank: int) -> None:
        if rank == 1:
            with contextlib.suppress(ValueError):
                raise ValueError("boom")
        assert channel().gather_objects(rank, "a") == [0, 1, 2]

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
    def test_exceptions_that_are_no_errors_come_out_too(self, kind: type[BaseException]) -> None:
        def fn(rank: int) -> None:
            raise kind

        with pytest.raises(kind):
            simulate(2, fn)

    def test_an_interruption_from_outside_ends_every_rank(self) -> None:
        heard: list[str] = []

        class Interrupted(BaseException):
            pass

        def fn(rank: int) -> None:
            try:
                while True:
                    channel().gather_objects(None, "for ever")
            except WorldError as error:
                heard.append(str(error))

        class Thread(threading.Thread):
            def join(self, timeout: float | None = None) -> None:
                if timeout is None:
                    raise Interrupted
                super().join(timeout)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(threading, "Thread", Thread)
            simulate(3, fn)
        assert len(heard) == 3 and set(heard) == {"The simulated world was interrupted from outside."}

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            *(((size, lambda rank: None), "give the number of ranks") for size in (0, -1, 1.0, "2")),
            ((1, lambda rank: None, None), "seed is None; give a number, by which the run can be repeated"),
            ((2, 3), "give a function of the rank"),
        ],
    )
    def test_a_world_needs_ranks_a_function_and_a_seed(self, given: tuple[Any, ...], text: str) -> None:
        with pytest.raises(ShardingError, match=text):
            simulate(*given)

    def test_worlds_do_not_nest(self) -> None:
        with pytest.raises(ShardingError, match="worlds neither nest"):
            simulate(2, lambda rank: simulate(1, lambda inner: None))
        assert simulate(1, lambda rank: rank) == [0]


class TestNothingLeaks:
    def test_no_thread_and_no_rank_outlive_the_world(self) -> None:
        before = threading.active_count()
        with contextlib.suppress(WorldError):
            simulate(4, lambda rank: channel(str(rank)).gather_objects(rank, "a"))
        assert threading.active_count() == before
        assert current_rank() is None

    @on_ranks(2)
    def test_nothing_holds_on_to_a_buffer_whose_collective_is_over(self, rank: int) -> None:
        def holders(tensor: Tensor) -> int:
            return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

        tensor = torch.ones(3)
        before = holders(tensor)
        work = channel().all_reduce(tensor, "sum", "a")
        work.wait()
        assert holders(tensor) == before

    def test_each_rank_draws_as_a_process_of_its_own(self) -> None:
        def draw() -> tuple[float, float, float]:
            return torch.rand(()).item(), random.random(), np.random.randn()

        def alone() -> list[tuple[float, float, float]]:
            return [draw() for _ in range(5)]

        def fn(rank: int) -> list[tuple[float, float, float]]:
            drawn = []
            for _ in range(5):
                drawn.append(draw())
                channel().gather_objects(None, "a")
            return drawn

        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        start = torch.get_rng_state(), random.getstate(), np.random.get_state()
        expected = alone()
        torch.set_rng_state(start[0])
        random.setstate(start[1])
        np.random.set_state(start[2])
        for seed in SEEDS:
            assert simulate(3, fn, seed) == [expected] * 3
        assert alone() == expected

    def test_a_rank_that_seeds_itself_seeds_nobody_else(self) -> None:
        def fn(rank: int) -> list[float]:
            torch.manual_seed(rank)
            drawn = []
            for _ in range(4):
                channel().gather_objects(None, "a")
                drawn.append(torch.rand(()).item())
            return drawn

        for seed in SEEDS:
            for rank, drawn in enumerate(simulate(3, fn, seed)):
                assert drawn == torch.rand(4, generator=torch.Generator().manual_seed(rank)).tolist()

    @pytest.mark.parametrize("grad", [True, False])
    def test_grad_mode_is_the_callers_at_first_and_then_the_ranks_own(self, grad: bool) -> None:
        def fn(rank: int) -> None:
            assert torch.is_grad_enabled() is grad
            torch.set_grad_enabled(rank == 0)
            channel().gather_objects(None, "a")
            assert torch.is_grad_enabled() is (rank == 0)

        with torch.set_grad_enabled(grad):
            simulate(2, fn)
            assert torch.is_grad_enabled() is grad


class Nest(torch.autograd.Function):
    """A backward in a backward in a backward, and a collective in each."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        assert channel().gather_objects(here().rank, "a") == [0, 1]
        depth = ctx.depth  # type: ignore[attr-defined]
        if depth:
            with torch.enable_grad():
                Nest.apply(torch.ones(1, requires_grad=True), depth - 1).sum().backward()
        return grad, None


def test_collectives_in_a_deeply_nested_backward() -> None:
    # deeper than 60, autograd goes on in threads of its own
    simulate(2, lambda rank: Nest.apply(torch.ones(1, requires_grad=True), 130).sum().backward())


@on_ranks(2)
def test_a_mode_of_the_program_does_not_see_the_memory_of_collectives(rank: int) -> None:
    class Versions(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(one.is_inference() for one in args if isinstance(one, Tensor))
            return func(*args, **(kwargs or {}))

    model = fsdp.fully_shard(nn.Linear(4, 4))
    with Versions():
        model(torch.ones(2, 4)).sum().backward()


def test_what_a_failed_backward_leaves_is_freed_by_the_rank_and_not_at_the_end_of_its_thread() -> None:
    freed_by: list[str] = []

    def fn(rank: int) -> None:
        x = fsdp.fully_shard(nn.Linear(3, 3))(torch.ones(3))
        queued, fails = 2 * x, 3 * x
        fails.register_hook(lambda gradient: gradient.view(7))
        (sums := queued + fails).register_hook(
            lambda gradient: weakref.finalize(gradient, lambda: freed_by.append(threading.current_thread().name)) and None
        )
        with pytest.raises(RuntimeError, match="invalid for input of size 3"):
            sums.sum().backward()

    simulate(2, fn)
    assert sorted(freed_by) == ["rank 0", "rank 1"]
