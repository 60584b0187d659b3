"""What the two ways of `fsdp.join` have in common: the step, and what follows if ranks have no data left.

`EvenJoin`: a rank without data runs its last batch beside the others. `UnevenJoin`: it needs no batch (`uneven_paths=True`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fsdp.errors import InputsExhausted, ShardingError, name_ranks
from fsdp.runtime.engine import Engine
from fsdp.runtime.path_policy import PassWatcher
from fsdp.runtime.uneven.data_left import DataLeft, GradVersions, Operation


class JoinRules(NamedTuple):
    """How a join treats ranks that have finished."""

    divides_by_all_ranks: bool
    """Whether gradients are divided by the number of all ranks, finished ones included."""
    stops_at_first: bool
    """Whether all ranks raise when one of them has finished."""


class Joined(PassWatcher, ABC):
    """The object that `fsdp.join` yields. Its `step` is taken by all ranks together."""

    is_join = True

    def __init__(self, engine: Engine, step: Callable[[], object] | None, rules: JoinRules) -> None:
        self._engine = engine
        self._step = step
        self._rules = rules
        self.source = 0
        """The first rank that had data left when the ranks exchanged it last.

        Its buffers are those of all, and so are its final weights if each rank steps by itself.
        """
        self.known_grads = GradVersions(engine.reducer.shard_grads)

    def after_backward(self) -> None:
        self.known_grads.remember(self._engine.reducer.shard_grads)

    def step(self) -> None:
        """Take the step given to `join` on every rank, finished ranks included.

        Raises:
            ShardingError: the ranks with data do different things or have changed gradients, or no step was given.
        """
        if self._step is None:
            raise ShardingError(
                "joined.step() takes the step that was given to fsdp.join; give it, or step the optimizer yourself."
            )
        self._announce_step()
        self._step()
        self.known_grads.remember(self._engine.reducer.shard_grads)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """A context inside which the engine reports to this object."""
        self._engine.watcher = self
        try:
            yield
        finally:
            self._engine.watcher = PassWatcher()

    @abstractmethod
    def serve(self) -> None:
        """Do what the other ranks do, until no rank has data left."""

    @abstractmethod
    def _announce_step(self) -> None:
        """Wait until all ranks with data step, and let the finished ones step too."""

    def _step_with_others(self) -> None:
        """The others step, and this rank has finished."""
        assert self._step is not None, "the other ranks were given one too"
        self._step()

    def on_data_left(self, left: DataLeft, comes: Operation) -> None:
        """Apply the rules, and on a finished rank drop the gradients that the ranks with data do not have.

        Raises:
            InputsExhausted: a rank has finished, and all ranks stop then.
            ShardingError: a rank has finished, and others changed gradients outside the step.
        """
        if left.finished and self._rules.stops_at_first:
            raise InputsExhausted(
                f"inside join, {name_ranks(left.finished)} had no further batch while others had; all ranks stop"
            )
        if self._step is not None:  # otherwise each rank steps by itself, and the others take over its gradients
            left.refuse_changes(comes)
        self.source = left.ranks[0]
        self._engine.reducer.reductions.set_averaging_ranks(len(left.ranks), self._rules.divides_by_all_ranks)
        if self._engine.comms.world_comm.rank in left.finished:
            self._engine.reducer.drop_shard_grads(left.keeps_grads(comes))
