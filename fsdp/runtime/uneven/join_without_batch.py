"""`fsdp.join` for ranks that go different ways (`uneven_paths`): a rank that has no data left needs no batch.

It takes part in the gathers of the others, ends their backwards with zeros, and takes their steps. `joined.step` ends a step of
all ranks, as `fsdp.meet` does: a small collective, and before it what the next backward is expected to gather, in which every
rank takes part passively. A rank without data does not know whether a backward or `joined.step` comes next, so it is in these
gathers already. A backward or step that such a rank ends with the others costs one small collective more (data_left.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdp.runtime.engine import Engine
from fsdp.runtime.path_policy import PassWatcher
from fsdp.runtime.uneven.common_path import CommonPath
from fsdp.runtime.uneven.join_base import Joined, JoinRules
from state_machine.paths import Place


class UnevenJoin(Joined):
    """The ranks of one root inside a join, some of which may have no data left. Forwards and backwards are not announced."""

    def __init__(self, engine: Engine, path: CommonPath, step: Callable[[], object] | None, rules: JoinRules) -> None:
        super().__init__(engine, step, rules)
        self._path = path

    @contextmanager
    def connected(self) -> Iterator[None]:
        self._engine.watcher = self
        self._path.join = self
        try:
            yield
        finally:
            self._path.join = None
            self._engine.watcher = PassWatcher()

    def serve(self) -> None:
        while others := self._path.meet(Place.NO_DATA) - {Place.NO_DATA}:
            if Place.STEP in others:
                self._step_with_others()

    def _announce_step(self) -> None:
        self._path.meet(Place.STEP)
