"""Training on uneven inputs: some ranks run out of data before others.

A rank that has finished still serves its shards: `EvenJoin` and, with `uneven_paths=True`, `UnevenJoin`. If no step is given,
every rank steps by itself, and finished ranks take over weights and optimizer state from a rank that was left (join_result.py).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp.comm.exchanges import broadcast_buffers
from fsdp.config import MeshKind
from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import UnitRef, engines_in, unit_ref_of
from fsdp.runtime.uneven.common_path import CommonPath
from fsdp.runtime.uneven.join_base import Joined, JoinRules
from fsdp.runtime.uneven.join_result import stepped_optimizers, take_over
from fsdp.runtime.uneven.join_with_last_batch import EvenJoin
from state_machine.paths import Place


@contextmanager
def join(
    model: nn.Module,
    step: Callable[[], object] | None = None,
    inputs: tuple[object, ...] | None = None,
    *,
    divides_by_all_ranks: bool = False,
    stops_at_first: bool = False,
) -> Iterator[Joined]:
    """Train on ranks that have different numbers of batches.

        with fsdp.join(model, optimizer.step) as joined:
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model(batch)).backward()
                joined.step()

    Inside, gradients are averaged over the ranks that still have data. A rank that leaves the block waits there and serves the
    others: it runs its last batch together with them, and its gradients do not count. Weights, optimizer and gradients are then
    as if the other ranks had trained alone. Each forward, backward and step costs one small collective.

    Args:
        model: a root.
        step: a function that updates the weights between two batches, clipping included. All ranks call it, finished ranks too,
            so it must be the same on all. Put collectives of your own into it, and every change of gradients but setting them
            to None: finished ranks follow that, each parameter by itself. Default None, under "NO_SHARD" alone: each rank steps
            by itself, in a loop that needs no change. At the end all ranks take over weights, gradients, buffers and the state
            of the optimizers from a rank that was left last.
        inputs: the arguments of a forward, for a rank that may have no batch at all. Default None: such a rank gets those of
            another rank, which must be picklable. Refused with `uneven_paths=True`, where it needs none.
        divides_by_all_ranks: True divides gradients by the number of all ranks, finished ones included, so that every sample
            has the same weight. Default False: by the number of ranks that have data left.
        stops_at_first: True lets all ranks raise when one of them has no further batch. Default False.

    Every rank must call the forward of `model` (not of a unit in it), the backward and `joined.step` in the same order. One
    backward goes through all forwards since the last one, and every output of `model` that requires a gradient must lead to the
    loss. With `uneven_paths=True` only backwards and steps must be the same: a rank that has no data left runs nothing, and
    needs no batch. Gradients that a rank keeps under `no_sync` when it leaves are dropped.

    Raises:
        ShardingError: `model` is not one root, has a static graph, is inside another join, has a communication hook or broadcast
            buffers with which the options do not fit; or ranks with data do different things, or change gradients outside
            `step` while others have finished.
        InputsExhausted: `stops_at_first`, and a rank has finished before the others.
    """
    rules = JoinRules(divides_by_all_ranks, stops_at_first)
    root = _root_to_join(model, step, rules)
    engine = root.engine
    joined: Joined
    if isinstance(engine.path, CommonPath):
        if inputs is not None:
            raise ShardingError("join: with uneven_paths=True a rank without a batch computes nothing, so leave inputs out.")
        joined = UnevenJoin(engine, engine.path, step, rules)
    else:
        joined = EvenJoin(model, engine, step, inputs, rules)
    with ExitStack() as stack:
        stepped = stack.enter_context(stepped_optimizers(model)) if step is None else None
        stack.callback(engine.reducer.reductions.set_averaging_ranks, engine.comms.size)
        stack.enter_context(joined.connected())
        yield joined
        engine.reducer.forget_kept()  # gradients accumulated under `no_sync`, whose backward will not follow
        joined.serve()
        if stepped is not None:
            take_over(joined.source, model, stepped(), engine.comms.world_comm)
        elif root.unit.config.broadcast_buffers:
            broadcast_buffers(root.unit.modules, engine.comms.world_comm, joined.source)


def _root_to_join(model: nn.Module, step: object, rules: JoinRules) -> UnitRef:
    """The one root of `model`, whose options allow a join."""
    root = unit_ref_of(getattr(model, "module", model)) or unit_ref_of(model)
    engines = engines_in(model, "join")
    if root is None or len(engines) != 1:
        raise ShardingError(f"join takes one wrapped model; there are {len(engines)} roots in this {type(model).__name__}.")
    engine = engines[0]
    if not callable(step) and (step is not None or root.unit.config.mesh_kind is not MeshKind.REPLICATE):
        raise ShardingError(f"join takes a function that steps, such as optimizer.step, not {step!r}.")
    if engine.watcher.is_join:
        raise ShardingError("join: this model is inside another join already.")
    if engine.reducer.reductions.hook is not None and not rules.divides_by_all_ranks:
        raise ShardingError("join: the communication hook of this model averages over all ranks, also those that have finished.")
    if engine.comms.inner:
        raise ShardingError("join: some units are shared by a part of the ranks; give every rank as many batches.")
    if engine.reducer.policy.static_graph:
        raise ShardingError("join: a rank that has finished has no gradients, so leave out reduction.static_graph.")
    return root


class UnevenJoin(Joined):
    """The ranks of one root inside a join that go different ways. A rank that has no data left needs no batch.

    It takes part in the gathers of the others, ends their backwards with zeros, and takes their steps. `joined.step` ends a step
    of all ranks, as `fsdp.meet` does: a small collective, and before it what the next backward is expected to gather, in which
    every rank takes part passively. A rank without data does not know whether a backward or `joined.step` comes next, so it is in
    these gathers already. A backward or step that such a rank ends with the others costs one small collective more
    (data_left.py).
    """

    def __init__(self, engine: Engine, path: CommonPath, step: Callable[[], object] | None, rules: JoinRules) -> None:
        super().__init__(engine, step, rules)
        self._path = path

    def serve(self) -> None:
        while others := self._path.meet(Place.NO_DATA) - {Place.NO_DATA}:
            if Place.STEP in others:
                self._step_with_others()

    def _announce_step(self) -> None:
        self._path.meet(Place.STEP)
