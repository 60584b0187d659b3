"""`fsdp.join` for ranks that go different ways (`uneven_paths`): a rank that has no data left needs no batch.

It takes part in the gathers of the others, ends their backwards with zeros, and takes their steps. A backward that such a rank
ends with the others costs one small collective more. `joined.step` ends a step of all ranks, as `fsdp.meet` does: a small
collective, and before it what the next backward is expected to gather, in which every rank takes part passively. A rank without
data does not know whether a backward or `joined.step` comes next, so it is in these gathers already.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp.errors import InputsExhausted, name_ranks
from fsdp.uneven.data_left import DataLeft
from fsdp.uneven.uneven_engine import UnevenEngine
from state_machine.paths import Place


class UnevenJoin:
    """The ranks of one root inside a join, some of which may have no data left."""

    def __init__(self, engine: UnevenEngine, divides_by_all_ranks: bool, stops_at_first: bool) -> None:
        self._engine = engine
        self._divides_by_all_ranks = divides_by_all_ranks
        self._stops_at_first = stops_at_first
        self.source = 0
        """The first rank that had data left when some had none for the last time. Its weights are those of all."""

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Inside, the engine reports to this object which ranks have data left."""
        self._engine.set_on_data_left(self._on_data_left)
        try:
            yield
        finally:
            self._engine.set_on_data_left(None)

    def announce_step(self) -> None:
        """Wait until all ranks that have data left step, and let the others step too."""
        self._engine.meet(Place.STEP)

    def serve(self, step: Callable[[], object] | None) -> None:
        """Do what the other ranks do, until no rank has data left."""
        # gradients accumulated under `no_sync`, whose backward will not follow
        self._engine.reducer.forget_kept()
        while others := self._engine.meet(Place.NO_DATA) - {Place.NO_DATA}:
            if Place.STEP in others:
                assert step is not None, "the other ranks were given one too"
                step()

    def _on_data_left(self, left: DataLeft) -> None:
        size = self._engine.comms.size
        if self._stops_at_first:
            finished = [rank for rank in range(size) if rank not in left.ranks]
            raise InputsExhausted(f"inside join, {name_ranks(finished)} had no further batch while others had; all ranks stop")
        self.source = left.ranks[0]
        if not self._divides_by_all_ranks:
            self._engine.reducer.set_averaging_ranks(len(left.ranks))
        if left.cleared and self._engine.comms.world_comm.rank not in left.ranks:
            for unit in self._engine.units:
                for parameter in unit.sharded_params:
                    parameter.grad = None
