"""W ranks in one process: threads that pass a baton, so that every run can be repeated.

Rule 1: exactly one rank runs at a time; it lets go of the baton only in `_World.switch`, or at its end.
Rule 2: every choice comes from one seeded generator and from state that is the same on every run.
Rule 3: data moves as early or as late as a network might move it: after every rank called, before any `wait` returns.
"""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdp.comm.simulated_ops import (
    Buffer,
    Operation,
    ReduceOp,
    Side,
    describe,
    mark_written,
    move_chunks,
    move_copies,
    move_sums,
    move_total,
)
from fsdp.errors import PeerFailed, ShardingError, WorldError, name_ranks
from fsdp.failure.desync import RECENT

T = TypeVar("T")


def simulate(world_size: int, fn: Callable[[int], T], seed: int = 0) -> list[T]:
    """Run `fn(rank)` on every rank of a world inside this process; what each returned, by rank.

    Every collective is a point where another rank may take over; `seed` decides who, and when data moves. The same
    (world_size, fn, seed) gives the same run. Each rank has its own CPU random state (torch, `random`, and numpy's if
    `numpy.random` is imported), which starts as the caller's, and the caller's grad mode; the caller's random state is
    left as it was. All else is shared by the ranks: default dtype, number of threads, environment, CUDA random state.
    A rank builds its own model: ranks that share parameters may wait for each other inside autograd, where nobody sees it.

    Raises:
        ShardingError: the world has no rank, `fn` cannot be called, or a world is running already.
        WorldError: the ranks called different collectives, wait for each other for ever, or released a buffer in flight.
        PeerFailed: inside `fn`, where a rank waits for one that has failed.
        BaseException: what the first rank that failed raised, the very object, with a note that names the rank.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ShardingError(f"world_size is {world_size!r}; give the number of ranks, at least 1.")
    if not callable(fn):
        raise ShardingError(f"fn is {fn!r}; give a function of the rank, as in simulate(2, lambda rank: ...).")
    if not _one_world_at_a_time.acquire(blocking=False):
        raise ShardingError("A simulated world is already running in this process; worlds neither nest nor run side by side.")
    global _world
    callers = _Randomness()
    try:
        _world = _World(world_size, seed)
        return _world.run(fn)
    finally:
        _world = None
        callers.restore()
        _one_world_at_a_time.release()


def current_rank() -> "SimulatedRank | None":
    """The rank whose code this is, or None outside a simulated world."""
    rank: SimulatedRank | None = getattr(_this_thread, "rank", None)
    # backwards nested deeper than 60 run on threads of autograd's own, for the rank that has the baton
    if rank is None and _world is not None and torch._C._current_graph_task_id() != -1:
        return _world.ranks[_world.holder]
    return rank


class Call(NamedTuple):
    """One collective, as a rank called it. `received`: bytes that reach it over the wire (for all_reduce, round a ring)."""

    channel: str
    kind: str
    label: str
    received: int


class SimulatedRank:
    """One rank of a simulated world: its channels, and the log of what it called on them, in order."""

    def __init__(self, world: "_World", rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.log: list[Call] = []
        self._world = world
        self._comms: dict[str, SimulatedCommunicator] = {}

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedCommunicator":
        """The channel of that name among `ranks` (all, if None). Each one's n-th call in an era is one operation."""
        members = tuple(range(self.size) if ranks is None else ranks)
        full = name if len(members) == self.size else f"{name} of {name_ranks(members)}"
        if full not in self._comms:
            self._comms[full] = SimulatedCommunicator(self._world, self, full, members)
        return self._comms[full]

    def let_others_run(self) -> None:
        """A point where another rank may take over, as every collective is one."""
        self._world.switch(self.rank)


class SimulatedCommunicator:
    """One rank's end of a channel of the simulated world.

    What is to be received is overwritten with 0xFF bytes (NaN) by the call, and what is to be sent is read only when the
    data moves: reading, overwriting or releasing a buffer too early gives garbage or an error, not luck.

    Every method raises ShardingError if its arguments cannot be right, and WorldError if a buffer has no memory or other
    ranks called something else; `wait` raises WorldError if the operation cannot end.
    """

    def __init__(self, world: "_World", rank: SimulatedRank, name: str, ranks: tuple[int, ...]) -> None:
        self.rank = ranks.index(rank.rank)
        self.size = len(ranks)
        self.name = name
        self._world = world
        self._ranks = ranks
        self._log = rank.log
        self._epoch = 0
        self._called = 0

    def supports_device(self, device: torch.device) -> bool:
        """Simulated ranks compute on the CPU."""
        return device.type == "cpu"

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> "_InFlight":
        """Fill `unsharded` (W * B bytes, uint8) from every rank's chunk of B bytes."""
        if unsharded.dtype is not torch.uint8 or unsharded.numel() % self.size:
            raise ShardingError(f"all_gather({label!r}) takes {self.size} equal chunks of uint8, not {describe(unsharded)}.")
        buffer = Buffer(unsharded, label)
        chunk = unsharded.numel() // self.size
        buffer.poison(0, self.rank * chunk)
        buffer.poison((self.rank + 1) * chunk, unsharded.numel())
        mark_written(unsharded)
        side = Side(f"all_gather({label!r}, {unsharded.numel()} bytes)", label, move_chunks, (buffer,))
        return self._launch("all_gather", side, unsharded.numel() - chunk)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> "_InFlight":
        """Sum chunk `rank` of every rank's `bucket` (W * C,) into `into` (C,), in rank order, half precision in fp32."""
        if bucket.numel() != self.size * into.numel() or bucket.dtype is not into.dtype:
            raise ShardingError(f"reduce_scatter({label!r}, {self.size} ranks): {describe(bucket)} into {describe(into)}.")
        given, target = Buffer(bucket, label), Buffer(into, label)
        # `into` may be a part of the bucket
        if not given.overlaps(target):
            target.poison()
        mark_written(into)
        side = Side(f"reduce_scatter({label!r}, {describe(bucket)})", label, move_sums, (given, target))
        return self._launch("reduce_scatter", side, bucket.nbytes - into.nbytes)

    def supports_coalescing(self, device: torch.device, fixed_order: bool = False) -> bool:
        """No: tests put another answer here."""
        return False

    def reduce_scatter_coalesced(self, buckets: Sequence[Tensor], into: Sequence[Tensor], label: str) -> "_Several":
        """`reduce_scatter` of each bucket."""
        return _Several([self.reduce_scatter(bucket, chunk, label) for bucket, chunk in zip(buckets, into, strict=True)])

    def scratch_bytes(self, bucket: Tensor, fixed_order: bool = False) -> int:
        """Nothing: the sum goes straight to its place."""
        return 0

    def all_reduce_scratch_bytes(self, tensor: Tensor, fixed_order: bool) -> int:
        """Nothing either."""
        return 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> "_InFlight":
        """Combine `tensor` (any shape) over all ranks, in place, in rank order, half precision in fp32."""
        if op not in ("sum", "max"):
            raise ShardingError(f"all_reduce({label!r}) knows 'sum' and 'max', not {op!r}.")
        buffer = Buffer(tensor, label)
        buffer.keep_a_copy()
        buffer.poison()
        side = Side(f"all_reduce({label!r}, {describe(tensor)}, {op})", label, partial(move_total, op=op), (buffer,))
        return self._launch("all_reduce", side, 2 * (self.size - 1) * tensor.nbytes // self.size)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> "_InFlight":
        """Overwrite `tensor` (any shape) with that of rank `source`."""
        if not 0 <= source < self.size:
            raise ShardingError(f"broadcast({label!r}) from rank {source}: the ranks are 0 to {self.size - 1}.")
        buffer = Buffer(tensor, label)
        if self.rank != source:
            buffer.poison()

        move = partial(move_copies, source=source)
        side = Side(f"broadcast({label!r}, {describe(tensor)}, from rank {source})", label, move, (buffer,))
        return self._launch("broadcast", side, 0 if self.rank == source else tensor.nbytes)

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        """Every rank's `thing`, by rank, and waits for it. Each is pickled and unpickled, so that nothing is shared."""
        side = Side(f"gather_objects({label!r})", label, lambda sides: None, pickled=pickle.dumps(thing))
        flight = self._launch("gather_objects", side, 0)
        flight.wait()
        arrived = flight.operation.pickled
        # what the others' weigh is known only now; no other call of this rank can have come between
        self._log[-1] = self._log[-1]._replace(received=sum(map(len, arrived)) - len(side.pickled))
        return [pickle.loads(pickled) for pickled in arrived]

    def recent(self) -> list[str]:
        """The last calls, oldest first."""
        return [f"{call.kind} {call.label}" for call in self._log if call.channel == self.name][-RECENT:]

    def epoch(self) -> int:
        """It has one."""
        return 0

    def announce_restart(self, unit: str) -> PeerFailed | None:
        """The world sees it for itself."""
        return None

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """This rank calls nothing more in this era: whoever waits for it is told."""
        why = "it was ended" if failure is None else _quote(failure)
        self._world.abandon(self.name, self._ranks, self._ranks[self.rank], Abandoned(self._epoch + 1, unit, why))

    def completed(self) -> None:
        """The world needs no count."""

    def reconnect(self) -> None:
        """There is nothing to connect."""

    def _launch(self, kind: str, side: "Side", received: int) -> "_InFlight":
        self._log.append(Call(self.name, kind, side.label, received))
        rank = self._ranks[self.rank]
        epoch = self._world.epoch_of(self.name, rank)
        if epoch != self._epoch:
            self._epoch, self._called = epoch, 0
        number, self._called = self._called, self._called + 1
        return _InFlight(self._world, rank, self._world.launch(rank, Operation(self.name, self._ranks, epoch, number), side))


class Abandoned(NamedTuple):
    """The step that a rank has given up last: the era of a channel that begins with that, and what the others are told."""

    epoch: int
    unit: str
    why: str


class _InFlight:
    """A collective in flight, for one rank."""

    __slots__ = ("_rank", "_world", "operation")

    def __init__(self, world: "_World", rank: int, operation: "Operation") -> None:
        self._world = world
        self._rank = rank
        self.operation = operation

    def wait(self) -> None:
        """Return when the data has moved; other ranks run in the meantime.

        Raises:
            PeerFailed: a rank that has not called it has failed, or abandoned the step.
            WorldError: the operation cannot end, or a buffer of it was released. The rank may go on after that.
        """
        self._world.wait(self._rank, self.operation)


class _Several:
    """Collectives in flight that are waited for together."""

    __slots__ = ("_in_flight",)

    def __init__(self, flights: Sequence[_InFlight]) -> None:
        self._in_flight = flights

    def wait(self) -> None:
        for flight in self._in_flight:
            flight.wait()


class _World:
    """Who has the baton, who waits for what, and what is in flight."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]
        self.holder = 0
        self._seed = seed
        self._choices = random.Random(seed)
        # some networks are always late, some always early
        self._eagerness = self._choices.choice((0.0, 0.1, 0.5, 1.0))
        self._rank_slots = [_RankSlot() for _ in range(size)]
        self._operations: dict[tuple[str, int, int], Operation] = {}
        self._abandoned: dict[tuple[str, int], Abandoned] = {}
        self._complete: list[Operation] = []
        self._broken: dict[str, Operation] = {}
        self._spoilt: list[Operation] = []
        self._failures: dict[int, BaseException] = {}
        self._interrupted = False

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """Let every rank live its life; what each returned. Raises what the first that failed raised."""
        results: dict[int, T] = {}
        born, grad = _Randomness(), torch.is_grad_enabled()
        threads = [
            threading.Thread(target=self._live, args=(rank, fn, results, born, grad), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            self._pass_turn(self._choose())
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C, or a test's time-out: every rank hears of it at its next collective
            self._interrupted = True
            for thread in threads:
                thread.join(timeout=5)
            raise
        if self._failures:
            rank, failure = next(iter(self._failures.items()))
            failure.add_note(f"raised on rank {rank} of {self.size} by fsdp.simulate(seed={self._seed})")
            try:
                raise failure
            finally:
                # no cycle may keep alive what the frames of the failed ranks hold
                self._failures.clear()
                self._operations.clear()
                del failure
        self._settle()
        return [results[rank] for rank in range(self.size)]

    def _live(self, rank: int, fn: Callable[[int], T], results: dict[int, T], born: "_Randomness", grad: bool) -> None:
        self._rank_slots[rank].turn.acquire()
        _this_thread.rank = self.ranks[rank]
        born.restore()
        torch.set_grad_enabled(grad)
        try:
            results[rank] = fn(rank)
        except BaseException as failure:
            self._failures[rank] = failure
        self._rank_slots[rank].over = True
        self._pass_turn(self._choose())

    def epoch_of(self, channel: str, rank: int) -> int:
        """How often that rank has begun anew on the channel, after a step that it had given up."""
        abandoned = self._abandoned.get((channel, rank))
        return abandoned.epoch if abandoned is not None else 0

    def abandon(self, channel: str, ranks: tuple[int, ...], rank: int, what: Abandoned) -> None:
        """`rank` does not call what the others have called in this era, nor will."""
        self._abandoned[channel, rank] = what
        oldest = min(self.epoch_of(channel, one) for one in ranks)
        for operation in [one for one in self._operations.values() if one.channel == channel and one.epoch < oldest]:
            if not operation.complete:  # nor will it be
                del self._operations[channel, *operation.turn]

    def launch(self, rank: int, wanted: Operation, side: "Side") -> "Operation":
        """Add what `rank` called to that operation, or to what others have begun of it; then another rank may take over."""
        operation = self._operations.setdefault((wanted.channel, *wanted.turn), wanted)
        broken = self._broken.get(operation.channel)
        if broken is None or operation.turn <= broken.turn:
            operation.sides[rank] = side
            if any(other.call != side.call for other in operation.sides.values()):
                self._broken[operation.channel] = operation
            elif len(operation.sides) == len(operation.ranks):
                operation.complete = True
                self._complete.append(operation)
        mismatch = self._mismatch(operation)
        if mismatch is not None:
            raise WorldError(mismatch)
        self.switch(rank)
        return operation

    def wait(self, rank: int, operation: "Operation") -> None:
        """Give the baton away until the operation is complete; move its data if that has not happened yet."""
        rank_slot = self._rank_slots[rank]
        if not operation.complete:
            rank_slot.waits_for = operation
            try:
                self.switch(rank)
            finally:
                rank_slot.waits_for = None
                error, rank_slot.error = rank_slot.error, None
            trouble = error or self._mismatch(operation)
            if trouble is not None:
                raise WorldError(trouble)
            missing = self._missing(operation)
            if missing is not None:
                raise missing
        if not operation.moved:
            self._move_up_to(operation)
        if operation.fault is not None:
            operation.told = True
            raise WorldError(operation.fault)

    def switch(self, rank: int) -> None:
        """A scheduling point: some data may move, then some rank that can go on does."""
        if self._complete and self._choices.random() < self._eagerness:
            self._move_up_to(self._choices.choice(self._complete))
        chosen = self._choose()
        if chosen != rank:
            mine = _Randomness()
            self._pass_turn(chosen)
            self._rank_slots[rank].turn.acquire()
            mine.restore()
        if self._interrupted:
            raise WorldError("The simulated world was interrupted from outside.")

    def _pass_turn(self, chosen: int | None) -> None:
        if chosen is not None:
            self.holder = chosen
            self._rank_slots[chosen].turn.release()

    def _choose(self) -> int | None:
        """Any rank that can go on. If none can, all hear that it is a deadlock, and go on with that."""
        live = [rank for rank, rank_slot in enumerate(self._rank_slots) if not rank_slot.over]
        able = [rank for rank in live if self._interrupted or self._can_go_on(self._rank_slots[rank])]
        if live and not able:
            deadlock = self._deadlock(live)
            for rank in live:
                self._rank_slots[rank].error = deadlock
            able = live
        return self._choices.choice(able) if able else None

    def _can_go_on(self, rank_slot: "_RankSlot") -> bool:
        operation = rank_slot.waits_for
        if operation is None or operation.complete or rank_slot.error is not None:
            return True
        return self._mismatch(operation) is not None or self._missing(operation) is not None

    def _move_up_to(self, operation: "Operation") -> None:
        """Move the data of a complete operation, and of those before it on its channel."""
        for one in [one for one in self._complete if one.channel == operation.channel and one.turn <= operation.turn]:
            one.move()
            self._complete.remove(one)
            del self._operations[one.channel, *one.turn]
            if one.fault is not None:
                self._spoilt.append(one)

    def _settle(self) -> None:
        """After the last rank: move what nobody waited for, and say what no rank was told."""
        while self._complete:
            self._move_up_to(self._complete[-1])
        self._operations.clear()
        for operation in [*self._broken.values(), *self._spoilt]:
            if not operation.told:
                raise WorldError(operation.fault or self._mismatch(operation))

    def _mismatch(self, operation: "Operation") -> str | None:
        """What the ranks called instead of one and the same, if the channel broke at this operation or before."""
        broken = self._broken.get(operation.channel)
        if broken is None or broken.turn > operation.turn:
            return None
        broken.told = True
        callers: dict[str, list[int]] = {}
        for rank in sorted(broken.sides):
            callers.setdefault(broken.sides[rank].call, []).append(rank)
        first, *others = (f"{name_ranks(ranks)} called {call}" for call, ranks in callers.items())
        return f"The ranks disagree on {broken.place}: {first} where {' and '.join(others)}. Call the same in the same order."

    def _missing(self, operation: "Operation") -> PeerFailed | None:
        """Which rank will never call it: the first that failed, which is the cause, or one that has abandoned the step."""
        if operation.complete:
            return None
        absent = [rank for rank in operation.ranks if rank not in operation.sides]
        for rank, failure in self._failures.items():
            if rank in absent:
                text = f"Rank {rank} failed with {_quote(failure)}, and never called {operation.name}."
                return PeerFailed(text, rank, None, _quote(failure))
        for rank in absent:
            step = self._abandoned.get((operation.channel, rank))
            if step is not None and step.epoch > operation.epoch:
                text = f"Rank {rank} has abandoned the step in unit {step.unit!r}: {step.why}. It never called {operation.name}."
                return PeerFailed(text, rank, step.unit, step.why)
        return None

    def _deadlock(self, live: list[int]) -> str:
        stories = []
        for rank, rank_slot in enumerate(self._rank_slots):
            operation = rank_slot.waits_for
            if rank in live and operation is not None:
                absent = [other for other in operation.ranks if other not in operation.sides]
                stories.append(f"Rank {rank} waits for {operation.name}, which {name_ranks(absent)} did not call.")
            elif rank in self._failures:
                stories.append(f"Rank {rank} failed with {_quote(self._failures[rank])}.")
            else:
                stories.append(f"Rank {rank} finished.")
        return " ".join(["Deadlock: nobody can go on.", *stories])


class _RankSlot:
    """Where a rank waits for the baton. `error`: why its wait cannot end."""

    __slots__ = ("error", "over", "turn", "waits_for")

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.waits_for: Operation | None = None
        self.error: str | None = None
        self.over = False


class _Randomness:
    """The random state of the process, as it was when this was made."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        # only whoever has imported it can draw from it
        numpy: Any = sys.modules.get("numpy.random")
        self._numpy: Any = None if numpy is None else numpy.get_state(legacy=False)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _quote(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


_this_thread: Final = threading.local()
_one_world_at_a_time: Final = threading.Lock()
_world: _World | None = None
