"""Runs W ranks in one process, as threads that take turns, so that every run can be repeated.

Rule 1: exactly one rank runs at a time. Its turn ends only in `_World.switch`, or when it returns.
Rule 2: every choice comes from one seeded generator and from state that is the same on every run.
Rule 3: data moves as early or as late as a network might move it: after every rank has called, before any `wait` returns.
"""

import pickle
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdp.autograd.engine_calls import free_queued_work
from fsdp.autograd.frames import in_backward
from fsdp.comm.communicator import Communicator, ReduceOp, as_bytes
from fsdp.comm.failure.desync import RECENT
from fsdp.comm.failure.peer_monitor import ENDED, OVER_HERE_TOO, abandoned_by
from fsdp.comm.failure.pending_call import RESTART_CALL, RESTARTED, evaluated_alone, names_a_unit, remedies_for, text_of
from fsdp.comm.simulated_group import torch_groups
from fsdp.comm.simulated_ops import (
    Buffer,
    Operation,
    Side,
    describe,
    mark_written,
    move_chunks,
    move_copies,
    move_sums,
    move_total,
)
from fsdp.comm.work import Work
from fsdp.errors import FEWER_BATCHES, PeerFailed, ShardingError, WorldError, name_ranks
from fsdp.random_states import random_states, restore_random_states

T = TypeVar("T")


def simulate(world_size: int, fn: Callable[[int], T], seed: int = 0) -> list[T]:
    """Run `fn(rank)` on every rank of a simulated world inside this process, and return the results, by rank.

    At every collective another rank may take over; `seed` decides which one, and when data moves. The same
    (world_size, fn, seed) gives the same run. Each rank has its own CPU random state (torch, `random`, and numpy's if
    `numpy.random` is imported), which starts as the caller's, and the caller's grad mode. The caller's random state is
    restored at the end. The ranks share everything else: default dtype, number of threads, environment, CUDA random state.
    `torch.distributed` is that of the simulated world: ranks, groups, device meshes and DTensors.
    Each rank must build its own model: ranks that share parameters may wait for each other inside autograd, which no check sees.

    Raises:
        ShardingError: the world has no rank, `seed` is no number, `fn` cannot be called, or a world is running already.
        WorldError: the ranks called different collectives, wait for each other for ever, or released a buffer in flight.
        PeerFailed: inside `fn`, where a rank waits for one that has failed.
        BaseException: the exception of the first rank that failed, the same object, with a note that names the rank.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ShardingError(f"world_size is {world_size!r}; give the number of ranks, at least 1.")
    if not callable(fn):
        raise ShardingError(f"fn is {fn!r}; give a function of the rank, as in simulate(2, lambda rank: ...).")
    if not isinstance(seed, int | float | str | bytes):
        raise ShardingError(f"seed is {seed!r}; give a number, by which the run can be repeated.")
    if not _one_world_at_a_time.acquire(blocking=False):
        raise ShardingError("A simulated world is already running in this process; worlds neither nest nor run side by side.")
    global _world
    restore_random_state = _keep_random_state()
    try:
        _world = _World(world_size, seed)
        with torch_groups(current_rank):
            return _world.run(fn)
    finally:
        _world = None
        restore_random_state()
        _one_world_at_a_time.release()


def current_rank() -> "SimulatedRank | None":
    """Return the rank that runs this code, or None outside a simulated world."""
    rank: SimulatedRank | None = getattr(_this_thread, "rank", None)
    # backwards nested deeper than 60 run on threads of autograd's own, for the rank whose turn it is
    if rank is None and _world is not None and torch._C._current_graph_task_id() != -1:
        return _world.ranks[_world.running]
    return rank


@contextmanager
def play(rank: "SimulatedRank") -> Iterator[None]:
    """Run the code inside as this rank, alone on this thread: its communicators need no other rank."""
    if current_rank() is not None:
        raise ShardingError("this code runs inside fsdp.simulate, and cannot play another rank there; call it outside.")
    _this_thread.rank = rank
    try:
        yield
    finally:
        _this_thread.rank = None


class Call(NamedTuple):
    """A collective that a rank has called."""

    comm: str
    """The name of the communicator."""
    kind: str
    label: str
    received: int
    """Bytes that reach this rank over the wire. For all_reduce: in a ring."""


class SimulatedRank:
    """One rank of a simulated world: its communicators, and the log of its calls, in order."""

    def __init__(self, world: "_World", rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.log: list[Call] = []
        self._world = world
        self.comms: dict[str, SimulatedCommunicator] = {}
        self.turn = threading.Lock()
        """Released when it is this rank's turn."""
        self.turn.acquire()
        self.waits_for: Operation | None = None
        self.over = False
        """Whether the rank has returned or failed."""

    def comm(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedCommunicator":
        """Return the communicator of that name among `ranks` (None: all), sorted. The n-th calls in an epoch meet."""
        members = tuple(range(self.size) if ranks is None else sorted(ranks))
        full = name if len(members) == self.size else f"{name} of {name_ranks(members)}"
        if full not in self.comms:
            self.comms[full] = SimulatedCommunicator(self._world, self, full, members)
        return self.comms[full]

    def let_others_run(self) -> None:
        """Let another rank take over, as at a collective."""
        self._world.switch(self.rank)


class SimulatedCommunicator(Communicator):
    """One rank's end of a communicator in the simulated world.

    Outputs are overwritten with 0xFF bytes (NaN) by the call, and inputs are read only when the data moves. So a buffer that is
    read, overwritten or released too early gives garbage or an error on every run.

    Every method raises ShardingError if its arguments cannot be right, and WorldError if a buffer has no memory or other ranks
    called another collective; `wait` raises WorldError if the operation cannot end.
    """

    def __init__(self, world: "_World", rank: SimulatedRank, name: str, ranks: tuple[int, ...]) -> None:
        self._here = rank
        self._family = name
        self.rank = ranks.index(rank.rank)
        self.size = len(ranks)
        self.name = name
        self._world = world
        self.ranks = ranks
        self._log = rank.log
        self._epoch = 0
        self._called = 0
        self._completed = 0
        """The number of backwards when the epoch began."""

    def supports_device(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def all_gather(self, unsharded: Tensor, label: str, own: Tensor | None = None) -> Work:
        if unsharded.numel() % self.size:
            raise ShardingError(f"all_gather({label!r}) takes {self.size} equal chunks, not {describe(unsharded)}.")
        if not torch.is_grad_enabled() and not in_backward() and names_a_unit(label):
            self._world.evaluated[self.name, self.ranks[self.rank]] += 1
        unsharded = as_bytes(unsharded)
        buffer = Buffer(unsharded, label)
        chunk = unsharded.numel() // self.size
        buffer.poison(0, self.rank * chunk)
        buffer.poison((self.rank + 1) * chunk, unsharded.numel())
        mark_written(unsharded)
        side = Side(f"all_gather({label!r}, {unsharded.numel()} bytes)", label, move_chunks, (buffer,))
        return self._launch("all_gather", side, unsharded.numel() - chunk)

    def reduce_scatter(self, bucket: Tensor, into: Tensor, label: str, fixed_order: bool = False) -> Work:
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

    def all_reduce(self, tensor: Tensor, op: ReduceOp, label: str, fixed_order: bool = False) -> Work:
        """Combine `tensor` (any shape) over all ranks, in place, in rank order, half precision in fp32."""
        if op not in ("sum", "max"):
            raise ShardingError(f"all_reduce({label!r}) knows 'sum' and 'max', not {op!r}.")
        buffer = Buffer(tensor, label)
        buffer.keep_a_copy()
        buffer.poison()
        side = Side(f"all_reduce({label!r}, {describe(tensor)}, {op})", label, partial(move_total, op=op), (buffer,))
        return self._launch("all_reduce", side, 2 * (self.size - 1) * tensor.nbytes // self.size)

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Work:
        if not 0 <= source < self.size:
            raise ShardingError(f"broadcast({label!r}) from rank {source}: the ranks are 0 to {self.size - 1}.")
        buffer = Buffer(tensor, label)
        if self.rank != source:
            buffer.poison()
        move = partial(move_copies, source=source)
        side = Side(f"broadcast({label!r}, {describe(tensor)}, from rank {source})", label, move, (buffer,))
        return self._launch("broadcast", side, 0 if self.rank == source else tensor.nbytes)

    def message(self, tensor: Tensor, source: int, target: int, tag: int) -> Work:
        """Send `tensor` (any shape) from rank `source` to rank `target`, which both call this, in the order of their messages."""
        ranks = sorted((self.ranks[source], self.ranks[target]))
        pair = self._here.comm(f"{self.name}, messages {tag} from {source} to {target}", ranks)
        pair._family = self._family
        return pair.broadcast(tensor, ranks.index(self.ranks[source]), "message")

    def gather_objects(self, thing: Any, label: str) -> list[Any]:
        """Wait for the `thing` of every rank, and return all, by rank. They are pickled, so that ranks share no object."""
        side = Side(f"gather_objects({label!r})", label, lambda sides: None, pickled=pickle.dumps(thing))
        self._log.append(Call(self.name, "gather_objects", label, 0))
        operation = self._meet(side)
        self._world.wait(self._here.rank, operation)
        arrived = operation.pickled
        # the sizes are known only now; this rank has called nothing since
        self._log[-1] = self._log[-1]._replace(received=sum(map(len, arrived)) - len(side.pickled))
        return [pickle.loads(pickled) for pickled in arrived]

    def epoch(self) -> int:
        return self._world.epoch_of(self._family, self.ranks[self.rank])

    def announce_restart(self, unit: str) -> PeerFailed | None:
        if self.epoch() != self._epoch:
            return None  # this rank has abandoned the step already
        try:
            restart = self._meet(Side(text_of((RESTART_CALL, unit, 0)), unit, lambda sides: None, is_restart=True))
            self._world.wait(self._here.rank, restart)
        except PeerFailed as failure:
            return failure
        return None

    def recent(self) -> list[str]:
        return [f"{call.kind} {call.label}" for call in self._log if call.comm == self.name][-RECENT:]

    def abandon(self, unit: str, failure: BaseException | None) -> None:
        """This rank makes no more calls in this epoch. Ranks that wait for it raise PeerFailed."""
        rank, epoch = self.ranks[self.rank], self._epoch + 1
        what = Abandoned(epoch, rank, unit, "an error" if failure is None else _quote(failure))
        if isinstance(failure, PeerFailed):  # the first cause, for ranks that wait for this one
            what = Abandoned(epoch, failure.rank, failure.unit, failure.reason)
        elif isinstance(failure, WorldError):
            self._world.declare_fatal(Operation(self.name, self._family, self.ranks, epoch, 0), str(failure))
        self._world.abandon(self._family, self.ranks, rank, what)

    def completed(self) -> None:
        self._world.completed[self._family, self.ranks[self.rank]] += 1

    def reconnect(self) -> None:
        if self.epoch() != self._epoch:
            self.gather_objects(None, "the next step")

    def _launch(self, kind: str, side: Side, received: int) -> Work:
        if self.recorder is None:
            return self._launch_unrecorded(kind, side, received)
        return self.recorder(kind, side.label, received, lambda: self._launch_unrecorded(kind, side, received))

    def _launch_unrecorded(self, kind: str, side: Side, received: int) -> Work:
        self._log.append(Call(self.name, kind, side.label, received))
        return _PendingWork(self._world, self._here.rank, self._meet(side))

    def _meet(self, side: Side) -> Operation:
        """Make the next call on this communicator."""
        self._follow_epoch()
        number, self._called = self._called, self._called + 1
        operation = Operation(self.name, self._family, self.ranks, self._epoch, number)
        return self._world.launch(self._here.rank, operation, side._replace(completed=self._completed))

    def _follow_epoch(self) -> None:
        """A call begins the epoch that follows an abandoned step: on all communicators, on which another one may be abandoned."""
        rank = self._here.rank
        if self._world.epoch_of(self._family, rank) == self._epoch:
            return
        for comm in self._here.comms.values():
            epoch = self._world.epoch_of(comm._family, rank)
            if epoch != comm._epoch:
                comm._epoch, comm._called, comm._completed = epoch, 0, self._world.completed[comm._family, rank]


class Abandoned(NamedTuple):
    """A step that a rank has abandoned on a communicator."""

    epoch: int
    """The epoch that begins after it."""
    rank: int
    """The rank that is the reason."""
    unit: str | None
    why: str


class _PendingWork(NamedTuple):
    """A collective in flight, for one rank."""

    world: "_World"
    rank: int
    operation: Operation

    def wait(self) -> None:
        """See `_World.wait`."""
        self.world.wait(self.rank, self.operation)


class _World:
    """The scheduler of a simulated world: which rank runs, which rank waits for which operation, and what is in flight."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.ranks = [SimulatedRank(self, rank) for rank in range(size)]
        self.running = 0
        """The rank whose turn it is."""
        self._seed = seed
        self._choices = random.Random(seed)
        # some networks are always late, some always early
        self._eagerness = self._choices.choice((0.0, 0.1, 0.5, 1.0))
        self._operations: dict[tuple[str, int, int], Operation] = {}
        """The operations whose data has not moved."""
        self._abandoned = defaultdict[tuple[str, int], list[Abandoned]](list)
        """By family of communicators and rank: one for each epoch that is over."""
        self.completed = Counter[tuple[str, int]]()
        """The backwards that each rank has completed, by family of communicators."""
        self.evaluated = Counter[tuple[str, int]]()
        """The number of gathers in forwards without gradients, by communicator and rank."""
        self._complete: list[Operation] = []
        self._fatal: dict[tuple[int, ...], Operation] = {}
        """For each group of ranks that can go on no more, on any communicator: the operation that is the reason."""
        self._spoilt: list[Operation] = []
        """The operations of which a buffer was released."""
        self._failures: dict[int, BaseException] = {}
        self._interrupted = False

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """Run `fn` on every rank and return the results. Raises the exception of the first rank that failed."""
        results: dict[int, T] = {}
        restore, grad = _keep_random_state(), torch.is_grad_enabled()
        _keep_device_guard()
        threads = [
            threading.Thread(target=self._run_rank, args=(rank, fn, results, restore, grad), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            self._pass_turn(self._choose())
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C, or a test's time-out: every rank raises at its next collective
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
                # no cycle may keep the frames of the failed ranks alive, and with them their tensors
                self._failures.clear()
                self._operations.clear()
                del failure
        self._settle()
        return [results[rank] for rank in range(self.size)]

    def _run_rank(
        self, rank: int, fn: Callable[[int], T], results: dict[int, T], restore_random_state: Callable[[], None], grad: bool
    ) -> None:
        self.ranks[rank].turn.acquire()
        _this_thread.rank = self.ranks[rank]
        restore_random_state()
        torch.set_grad_enabled(grad)
        try:
            results[rank] = fn(rank)
        except BaseException as failure:
            self._failures[rank] = failure
        try:
            free_queued_work()
        finally:
            self.ranks[rank].over = True
            self._pass_turn(self._choose())

    def epoch_of(self, family: str, rank: int) -> int:
        """The number of steps that a rank has abandoned on a family of communicators."""
        return len(self._abandoned[family, rank])

    def abandon(self, family: str, ranks: tuple[int, ...], rank: int, what: Abandoned) -> None:
        """End the epoch of `rank`: it will make no call that others have made in it."""
        if what.epoch > self.epoch_of(family, rank):  # else it has said why already
            self._abandoned[family, rank].append(what)
        oldest = min(self.epoch_of(family, one) for one in ranks)
        for operation in [one for one in self._operations.values() if one.family == family and one.epoch < oldest]:
            if not operation.complete:  # it never will be: all its ranks are in later epochs
                del self._operations[operation.comm, *operation.order]

    def launch(self, rank: int, new: Operation, side: Side) -> Operation:
        """Add the call of `rank` to the operation that other ranks have begun there, or to `new`. Another rank may take over."""
        if self.ranks[rank].over:
            raise WorldError(
                f"operation {new.number} of communicator {new.comm!r} was called after the simulated ranks have returned. "
                "Compute with shards inside the function given to simulate."
            )
        operation = self._operations.setdefault((new.comm, *new.order), new)
        if self._reason(operation) in (None, operation) and operation.fault is None:
            operation.join(rank, side)
            if operation.complete:
                self._complete.append(operation)
            elif operation.is_mismatch:
                self._differ(operation)
        self._raise_fatal(operation)
        self.switch(rank)
        return operation

    def wait(self, rank: int, operation: Operation) -> None:
        """Let other ranks run until the operation is complete. Move its data if that has not happened yet.

        Raises:
            PeerFailed: a rank that has not called it has failed, or abandoned the step.
            WorldError: the ranks can go on no more, or one of its buffers was released.
        """
        if not operation.complete:
            here = self.ranks[rank]
            here.waits_for = operation
            try:
                self.switch(rank)
            finally:
                here.waits_for = None
            if not operation.complete:
                self._raise_fatal(operation)
                failure = self._missing(operation)
                try:
                    raise failure or AssertionError("it waits in vain")
                finally:
                    del failure  # a cycle would keep the frames of the caller alive, and with them its graphs
        if not operation.moved:
            self._move_up_to(operation)
        if operation.fault is not None:
            operation.reported = True
            raise WorldError(operation.fault)

    def switch(self, rank: int) -> None:
        """A scheduling point: some data may move, then a rank that can go on takes over."""
        if self._complete and self._choices.random() < self._eagerness:
            self._move_up_to(self._choices.choice(self._complete))
        chosen = self._choose()
        if chosen != rank:
            restore_random_state = _keep_random_state()
            self._pass_turn(chosen)
            self.ranks[rank].turn.acquire()
            restore_random_state()
        if self._interrupted:
            raise WorldError("The simulated world was interrupted from outside.")

    def _pass_turn(self, chosen: int | None) -> None:
        if chosen is not None:
            self.running = chosen
            self.ranks[chosen].turn.release()

    def _choose(self) -> int | None:
        """Choose a rank that can go on. If none can, every wait raises the deadlock."""
        live = [one for one in self.ranks if not one.over]
        able = [one for one in live if self._interrupted or self._can_go_on(one)]
        if live and not able:
            self._end_waits(live)
            able = [one for one in live if self._can_go_on(one)]
        return self._choices.choice(able).rank if able else None

    def _can_go_on(self, one: SimulatedRank) -> bool:
        operation = one.waits_for
        if operation is None or operation.complete:
            return True
        return self._reason(operation) is not None or self._missing(operation) is not None

    def _end_waits(self, live: Sequence[SimulatedRank]) -> None:
        """Every rank waits: who waits for one that has returned or begun another forward gets an error. Else nobody can go on."""
        deadlock = self._deadlock()
        waits = [one.waits_for for one in live if one.waits_for is not None]
        for operation in waits:
            ended = [rank for rank in operation.ranks if self.ranks[rank].over]
            if ended:
                operation.ends_by = partial(PeerFailed, deadlock, ended[0], None, ENDED)
            elif operation.restarted_by is not None:
                operation.ends_by = partial(abandoned_by, operation.restarted_by, None, RESTARTED)
        if not any(operation.ends_by for operation in waits):
            for operation in waits:
                self.declare_fatal(operation, deadlock)

    def _differ(self, operation: Operation) -> None:
        """Ranks have made different calls. Begun another forward: that step is over. Else they can go on no more."""
        if operation.restarted_by is not None:
            operation.ends_by = partial(abandoned_by, operation.restarted_by, None, RESTARTED)
        else:
            self._fatal.setdefault(operation.ranks, operation)

    def declare_fatal(self, operation: Operation, why: str) -> None:
        """The ranks of an operation can go on no more."""
        if operation.ranks not in self._fatal:
            self._fatal[operation.ranks] = operation
            operation.fault, operation.reported = why, True

    def _move_up_to(self, operation: Operation) -> None:
        """Move the data of a complete operation, and of those before it on its communicator."""
        for one in [one for one in self._complete if one.comm == operation.comm and one.order <= operation.order]:
            one.move()
            self._complete.remove(one)
            del self._operations[one.comm, *one.order]
            if one.fault is not None:
                self._spoilt.append(one)

    def _settle(self) -> None:
        """After the last rank: move the data that no rank waited for, and raise the first error that no rank has raised."""
        while self._complete:
            self._move_up_to(self._complete[-1])
        self._operations.clear()
        for operation in [*self._fatal.values(), *self._spoilt]:
            if not operation.reported:
                raise WorldError(operation.fault or operation.report_mismatch(self._evaluated_alone(operation)))

    def _reason(self, operation: Operation) -> Operation | None:
        """The operation because of which the ranks of this one can go on no more: they made different calls, or all of them wait.

        What came before different calls on their communicator still ends.
        """
        reason = self._fatal.get(operation.ranks)
        if reason is None or (reason.fault is None and reason.comm == operation.comm and reason.order > operation.order):
            return None
        return reason

    def _raise_fatal(self, operation: Operation) -> None:
        """Raise WorldError if the ranks of an operation can go on no more."""
        if (reason := self._reason(operation)) is not None:
            raise WorldError(reason.fault or reason.report_mismatch(self._evaluated_alone(reason)))

    def _evaluated_alone(self, operation: Operation) -> list[int]:
        """The ranks of an operation that have made forwards without gradients which others have not made."""
        return evaluated_alone({rank: self.evaluated[operation.comm, rank] for rank in operation.ranks})

    def _missing(self, operation: Operation) -> PeerFailed | None:
        """The error if a rank will never call it: about the first rank that failed, else one that has abandoned the step."""
        if operation.complete:
            return None
        absent = [rank for rank in operation.ranks if rank not in operation.sides]
        for rank, failure in self._failures.items():
            if rank in absent:
                text = f"Rank {rank} failed with {_quote(failure)}, and never called {operation.name}."
                return PeerFailed(text, rank, None, _quote(failure))
        for rank in absent:
            for step in self._abandoned[operation.family, rank][operation.epoch :][:1]:
                return abandoned_by(step.rank, step.unit, step.why, f"{OVER_HERE_TOO} Rank {rank} never called {operation.name}.")
        return None if operation.ends_by is None else operation.ends_by()

    def _deadlock(self) -> str:
        """The error where each rank that is not over waits in vain."""
        parts, waiting = [], []
        for rank, one in enumerate(self.ranks):
            if (operation := one.waits_for) is not None:
                waiting.append(operation)
                absent = [other for other in operation.ranks if other not in operation.sides]
                parts.append(f"Rank {rank} waits for {operation.name}, which {name_ranks(absent)} did not call.")
            elif rank in self._failures:
                parts.append(f"Rank {rank} failed with {_quote(self._failures[rank])}.")
            else:
                parts.append(f"Rank {rank} finished.")
        alone = [] if self._failures else self._evaluated_alone(waiting[0])
        remedy = remedies_for([operation.call for operation in waiting], alone)
        if not alone and len(waiting) < self.size - len(self._failures) and FEWER_BATCHES not in remedy:
            remedy.append(FEWER_BATCHES)
        return " ".join(["Deadlock: nobody can go on.", *parts, *remedy])


def _keep_device_guard() -> None:
    """Let ranks use torch.compile where torch is built for CUDA and there is no GPU.

    There the compiler of torch 2.11 replaces the CUDA device guard by an object that ends with the thread that compiles, and a
    compilation in the next thread crashes the process (measured without fsdp: two threads that compile one after the other).
    The thread that calls `simulate` outlives the ranks, so it makes that object.
    """
    if torch.version.cuda is not None and not torch.accelerator.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def _keep_random_state() -> Callable[[], None]:
    """Return a function that restores the random state which this process has now."""
    host = torch.device("cpu")
    return partial(restore_random_states, random_states(host), host)


def _quote(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


_this_thread: Final = threading.local()
_one_world_at_a_time: Final = threading.Lock()
_world: _World | None = None
