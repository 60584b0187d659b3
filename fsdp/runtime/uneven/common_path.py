"""The path policy of a root whose ranks may go different ways.

It differs from `PathPolicy` in three things. Gathers and prefetch follow the common order (`GatherOrder`). A backward that
reduces begins its reductions when all ranks have come to its end, where each knows what every rank has. And nothing is asked of
other ranks at the begin of a pass, which some ranks may leave out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import nn

from fsdp.errors import ShardingError, name_ranks
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.gathered_copies import backward_without_a_loss
from fsdp.reduction.used_params import UsedParams
from fsdp.runtime.engine import Engine
from fsdp.runtime.path_policy import PathPolicy
from fsdp.runtime.prefetch import PrefetchSchedule
from fsdp.runtime.registry import collective_call, engines_in, refuse_unless_resting
from fsdp.runtime.uneven.data_left import Operation, exchange_data_left
from fsdp.runtime.uneven.gather_order import GatherOrder
from fsdp.runtime.uneven.join_base import Joined
from state_machine import Event
from state_machine.paths import Phase, Place, Places


class CommonPath(PathPolicy):
    """The path of the ranks of one root: an order of gathers that all of them know."""

    same_for_all = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._order = GatherOrder(engine.units, engine.comms, engine.streams, engine.tracker, engine.reducer.used_params.combine)
        schedule = CommonSchedule(self, self._order, engine.units[0].config.prefetch)
        super().__init__(schedule, schedule)
        self._forward_phase = Phase.FORWARD
        """The phase of the forward of the root that runs, or ran last."""
        self.has_met = False
        """Whether the ranks have met before the backward that runs, which is that of a rank that has no data left."""

    @property
    def phase(self) -> Phase:
        """The part of a step that runs."""
        return Phase.BACKWARD if self._engine.root.in_backward else self._forward_phase

    def meet(self, place: Place = Place.MEETING) -> Places:
        """Take part in what other ranks gather, until all ranks are between two steps; return where they are.

        `NO_DATA`: until they end anything. If that is a backward, this rank ends it with them, with zeros for its gradients.
        """
        engine = self._engine
        self._forget_if_abandoned()
        engine.streams.pass_begins()  # an optimizer may have stepped since the last pass
        try:
            places = self._order.finish(place)
            self._exchange_data_left(places, has_data=place is not Place.NO_DATA)
        except BaseException as failure:
            engine.fail(failure, 0)
            raise
        if Place.END_OF_BACKWARD in places:
            self.has_met = True
            try:
                with engine.synchronising(True):  # as it does on the other ranks
                    self.empty_backward()
            finally:
                self.has_met = False
        return places

    def empty_backward(self) -> None:
        """Run a backward that reaches no unit."""
        self._forget_if_abandoned()
        backward_without_a_loss(partial(self._engine.on_event, 0, Event.EXTERNAL_GRAD))

    def _forget_if_abandoned(self) -> None:
        """What a forward would begin with: another model on the same communicators may have abandoned a step."""
        if self._engine.pending_backward.was_abandoned():
            self.forget()

    # what the passes ask ------------------------------------------------------------------

    def forward_begins(self, records_graph: bool) -> None:
        self._forward_phase = Phase.FORWARD if records_graph else Phase.EVALUATION
        # other ranks may run no forward now, so none is announced
        self._engine.pending_backward.expected = False
        for unit in self._engine.units:
            unit.sync_requires_grad()

    def agree_on_gather(self, index: int) -> None:
        self._order.before_gather(index, self.phase)

    def before_copy(self, flat: FlatBuffer, dtype: torch.dtype) -> None:
        if self._engine.root.at_rest:
            self._engine.streams.pass_begins()
            self._order.note_changes()
        self._order.before_copy(flat, dtype, self.phase)

    def forward_ends(self, index: int, makes_graph: bool) -> None:
        with self._failing(index):
            if makes_graph and self._forward_phase is Phase.FORWARD:
                self._order.forward_ends()
            self._order.drain()

    def exchange_used(self, used_params: UsedParams, launched: Sequence[bool]) -> None:
        if self.has_met:
            used_params.take_combined(launched)
            return
        places = self._order.finish(Place.END_OF_BACKWARD, partial(used_params.combine, launched=launched))
        self._exchange_data_left(places, has_data=True)

    def backward_ends(self, succeeds: bool) -> None:
        if not succeeds:
            self.step_failed()
            return
        # before gradients are put where the user sees them; one that reduces nothing does not meet, which would drain
        with self._failing(0):
            self._order.drain()

    def step_failed(self) -> None:
        with suppress(Exception):  # it fails with the step
            self._order.drain()

    @contextmanager
    def _failing(self, index: int) -> Iterator[None]:
        """Abandon the step if what runs inside fails."""
        try:
            yield
        except BaseException as failure:
            self._engine.fail(failure, index)
            raise

    def _exchange_data_left(self, places: Places, has_data: bool) -> None:
        """Where some ranks have no data left, and others end a backward or step: exchange which ones."""
        if Place.NO_DATA not in places or not places & {Place.END_OF_BACKWARD, Place.STEP}:
            return
        watcher = self._engine.watcher
        left = exchange_data_left(self._engine, has_data=has_data, known_grads=watcher.known_grads)
        if outside := [rank for rank, other in enumerate(left.states) if not other.is_joined]:
            raise ShardingError(
                f"a rank has no data left and waits at the end of fsdp.join, and {name_ranks(outside)} ended a backward outside "
                "of it; train inside fsdp.join on every rank."
            )
        assert isinstance(watcher, Joined), "a rank outside of fsdp.join was refused"
        watcher.on_data_left(left, Operation.REDUCES if Place.END_OF_BACKWARD in places else Operation.STEPS)


class CommonSchedule(PrefetchSchedule):
    """Prefetches what comes next in the order of all ranks."""

    __slots__ = ("_order", "_path")

    def __init__(self, path: CommonPath, order: GatherOrder, depth: int) -> None:
        super().__init__(depth)
        self._path = path
        self._order = order

    def give(self, unit: int, ahead: Sequence[int]) -> None:
        raise ShardingError("uneven_paths: the order of gathers is common to all ranks, so what is prefetched cannot be given.")

    def begin(self) -> Sequence[int]:
        self._order.pass_begins(self._path.phase)
        if self._path.has_met:
            return ()  # the ranks are at the end of this backward already
        return self._order.ahead(self._path.phase, self.depth)

    def forget(self) -> None:
        self._order.forget()

    def needed(self, unit: int) -> Sequence[int]:
        phase = self._path.phase
        self._order.needed(unit, phase)
        return self._order.ahead(phase, self.depth)


@collective_call
def empty_backward(model: nn.Module) -> None:
    """Take part in the backward of the other ranks without a batch. Communicates.

    Call it in place of forward and backward on a rank that has nothing to learn from in this step. Its gradients count as zeros,
    as those of any rank that does not use a parameter. Under `fsdp.no_sync` no rank communicates, and it does nothing.

    Raises:
        ShardingError: `model` contains no unit or is only a part of a root; it was made without `uneven_paths=True`; or a forward
            or backward runs.
        WorldError: other ranks have called `fsdp.meet`.
        PeerFailed: a rank has ended, or has abandoned the step.
    """
    for engine in engines_in(model, "empty_backward"):
        refuse_unless_resting("empty_backward", engine)
        if not isinstance(engine.path, CommonPath):
            raise ShardingError(
                "empty_backward: all ranks of this model compute the same, so none can leave a backward out; pass "
                "uneven_paths=True, or train inside fsdp.join."
            )
        if engine.synchronises:
            engine.path.empty_backward()


@collective_call
def meet(model: nn.Module) -> None:
    """Take part in what other ranks gather, until every rank has called this. Communicates.

    Ranks of a model with `uneven_paths=True` may do different things between two backwards: evaluate on some ranks only, or
    generate to different lengths. A rank that comes to the end of its next backward waits there for the others. Where no
    backward follows, before a save, a collective of your own or the end of the program, call this on every rank.

    Raises:
        ShardingError: `model` contains no unit or is only a part of a root; it was made without `uneven_paths=True`; or a forward
            or backward runs; or weights were changed between two gathers of a step, and ranks took different paths or changed
            them at different places.
        WorldError: other ranks are at the end of a backward.
        PeerFailed: a rank has ended, or has abandoned the step.
    """
    for engine in engines_in(model, "meet"):
        refuse_unless_resting("meet", engine)
        if not isinstance(engine.path, CommonPath):
            raise ShardingError("meet: ranks of this model take the same path, so they need not meet; pass uneven_paths=True.")
        engine.path.meet()
