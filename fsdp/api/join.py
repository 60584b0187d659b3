"""Training on uneven inputs: some ranks run out of data before others.

A rank that has finished still serves its shards. The ranks with data announce each forward, backward and step, and the finished
rank does the same with its last batch. Its gradients do not count. If no step is given, every rank steps by itself, and finished
ranks take over weights and optimizer state from a rank that was left (join_result.py). With `uneven_paths=True` a finished rank
computes nothing (uneven/uneven_join.py).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.api.join_result import InputsOfOthers, SteppedOptimizers, take_over
from fsdp.autograd.pytree import tensors_in
from fsdp.comm.buffers import broadcast_buffers
from fsdp.config import MeshKind
from fsdp.errors import InputsExhausted, ShardingError, name_ranks
from fsdp.runtime.engine import Engine
from fsdp.runtime.hook_actions import PassWatcher
from fsdp.runtime.hooks import EngineHooks
from fsdp.runtime.registry import UnitRef, engines_in, unit_ref_of
from fsdp.uneven.data_left import ShardGrads, refuse_zeroed, shard_grads_of
from fsdp.uneven.uneven_engine import UnevenEngine
from fsdp.uneven.uneven_join import UnevenJoin


class _Operation(IntEnum):
    """The next operation of the ranks with data. The value is its place in the message."""

    TRAINS = 0
    EVALUATES = 1
    REDUCES = 2
    KEEPS = 3
    STEPS = 4


_LACKING = len(_Operation)
"""The place in the message of the number of finished ranks that have never had a batch."""
_RANKS = _LACKING + 1
"""The place in the message of rank 0, behind which the other ranks follow: twice its `ShardGrads`, and 1 if it has data left."""


class JoinRules(NamedTuple):
    """How a join treats ranks that have finished."""

    divides_by_all_ranks: bool
    """Whether gradients are divided by the number of all ranks, finished ones included."""
    stops_at_first: bool
    """Whether all ranks raise when one of them has finished."""


class Joined(PassWatcher):
    """The object that `join` yields. Its `step` is taken by all ranks together."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        step: Callable[[], object] | None,
        inputs: tuple[Any, ...] | None,
        rules: JoinRules,
    ) -> None:
        self._model = model
        self._engine = engine
        self._step = step
        self._rules = rules
        self._source = 0
        self._args = inputs
        self._kwargs: dict[str, Any] = {}
        self._outputs: list[Tensor] = []
        self._finished = False
        self._uneven = UnevenJoin(engine, *rules) if isinstance(engine, UnevenEngine) else None

    @contextmanager
    def connected(self, hooks: EngineHooks) -> Iterator[None]:
        """Inside, the engine calls this object."""
        if self._uneven is not None:
            with self._uneven.connected():
                yield
            return
        handle = hooks.on_call(self._store_inputs)
        self._engine.set_watcher(self)
        try:
            yield
        finally:
            self._engine.set_watcher(None)
            handle.remove()

    def serve(self) -> None:
        """Do what the other ranks do, until no rank has data left."""
        if self._uneven is None:
            self._serve_shards()
        else:
            self._uneven.serve(self._step)

    def step(self) -> None:
        """Take the step given to `join` on every rank, finished ranks included.

        Raises:
            ShardingError: the ranks with data do different things, or no step was given.
        """
        if self._step is None:
            raise ShardingError(
                "joined.step() takes the step that was given to fsdp.join; give it, or step the optimizer yourself."
            )
        if self._uneven is None:
            self._announce(_Operation.STEPS)
        else:
            self._uneven.announce_step()
        self._step()

    @property
    def buffer_source(self) -> int:
        """The first rank that had data left at the last announcement: its buffers and final weights are those of all."""
        return self._source if self._uneven is None else self._uneven.source

    def _announce(self, operation: _Operation | None) -> _Operation | None:
        """Announce the next operation of this rank, or None if it has finished; return that of the ranks with data, if any.

        Raises:
            ShardingError: the ranks with data do different things.
        """
        comm = self._engine.comms.world_comm
        message = torch.zeros(_RANKS + comm.size, dtype=torch.int64, device=self._engine.units[0].device)
        shards = [parameter for unit in self._engine.units for parameter in unit.sharded_params]
        gradients = [parameter.grad for parameter in shards if parameter.grad is not None]
        message[_RANKS + comm.rank] = 2 * shard_grads_of(gradients) + (operation is not None)
        if operation is None:
            message[_LACKING] = self._args is None
        else:
            message[operation] = 1
        comm.all_reduce(message, "sum", "who has data left").wait()
        *counts, lacking = message[:_RANKS].tolist()
        of_ranks = message[_RANKS:].tolist()
        has_data = [bool(one % 2) for one in of_ranks]
        grads = [ShardGrads(one // 2) for one in of_ranks]
        left = sum(has_data)
        if not left:
            return None
        self._source = has_data.index(True)
        if left < comm.size and self._rules.stops_at_first:
            finished = [rank for rank, has in enumerate(has_data) if not has]
            stop = InputsExhausted(f"inside join, {name_ranks(finished)} had no further batch while others had; all ranks stop")
            if self._finished:
                self._engine.abandon_step(stop)  # the others do so in the forward that they have begun
            raise stop
        if not self._rules.divides_by_all_ranks:
            self._engine.reducer.set_averaging_ranks(left)
        if counts.count(0) != len(counts) - 1:
            counted = ", ".join(f"{count} {of.name.lower()}" for of, count in zip(_Operation, counts, strict=True) if count)
            raise ShardingError(f"inside fsdp.join, of {left} ranks that have data left {counted} at the same time.")
        found = _Operation(counts.index(left))
        if found in (_Operation.REDUCES, _Operation.KEEPS):
            refuse_zeroed(grads, has_data)
        if self._finished and all(one is ShardGrads.NONE for one, has in zip(grads, has_data, strict=True) if has):
            for parameter in shards:
                parameter.grad = None
        if lacking and found in (_Operation.TRAINS, _Operation.EVALUATES):
            given = InputsOfOthers(self._args, self._kwargs).exchange(comm, self._source, self._engine.units[0].device)
            if self._args is None and given is not None:
                self._args, self._kwargs = given
        return found

    def _store_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._finished:
            self._args, self._kwargs = args, kwargs

    def before_forward(self, records_graph: bool) -> None:
        self._announce_own(_Operation.TRAINS if records_graph else _Operation.EVALUATES)

    def before_backward(self, reduces: bool) -> None:
        self._announce_own(_Operation.REDUCES if reduces else _Operation.KEEPS)

    def _announce_own(self, operation: _Operation) -> None:
        if not self._finished:
            self._announce(operation)

    def _serve_shards(self) -> None:
        """Do what the other ranks do, until no rank has data left."""
        self._finished = True
        self._engine.reducer.set_ignores_local_grads(True)
        # gradients accumulated under `no_sync`, whose backward will not follow
        self._engine.reducer.forget_kept()
        try:
            while (operation := self._announce(None)) is not None:
                if operation is _Operation.STEPS:
                    assert self._step is not None, "the other ranks were given one too"
                    self._step()
                elif operation in (_Operation.TRAINS, _Operation.EVALUATES):
                    self._run_forward(operation is _Operation.TRAINS)
                else:
                    self._run_backward(operation is _Operation.REDUCES)
        finally:
            self._engine.reducer.set_ignores_local_grads(False)
            self._outputs.clear()

    def _run_forward(self, records_graph: bool) -> None:
        if self._args is None:
            raise ShardingError(
                "a rank had no batch at all inside fsdp.join, and the inputs of the others cannot be pickled, so it does not "
                "know what to compute beside them; give a batch as inputs=(...), whose gradients will count for nothing."
            )
        buffers = [(buffer, buffer._version, buffer.clone()) for buffer in self._model.buffers()]
        with torch.set_grad_enabled(records_graph):
            output = self._model(*self._args, **self._kwargs)
        for buffer, version, before in buffers:
            if buffer._version != version:
                # restore running statistics, which have seen this batch; by `.data`, because the backward does not read them
                buffer.data.copy_(before)
        self._outputs += [tensor for tensor in tensors_in(output) if tensor.requires_grad]

    def _run_backward(self, reduces: bool) -> None:
        outputs, self._outputs = self._outputs, []
        if not outputs:
            raise ShardingError(
                "inside fsdp.join, ranks that have data left go backward twice through one forward, which a rank that has "
                "finished cannot do beside them; take one backward for each forward."
            )
        leaves = [one for one in tensors_in((self._args, self._kwargs)) if one.requires_grad and one.is_leaf]
        gradients = [one.grad for one in leaves]
        for leaf in leaves:
            leaf.grad = None
        synchronises = self._engine.synchronises
        self._engine.set_synchronises(reduces)
        try:
            torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
        finally:
            self._engine.set_synchronises(synchronises)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient


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
            so it must be the same on all. Put collectives of your own into it. If the other ranks set gradients to None, they
            are set to None on finished ranks too; put zeroing in place (`set_to_none=False`) into this function. Default None,
            under "NO_SHARD" alone: each rank steps by itself, in a loop that needs no change. At the end all ranks take over
            weights, buffers and the state of the optimizers from a rank that was left last.
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
            buffers with which the options do not fit; or ranks with data do different things, or zero gradients in place.
        InputsExhausted: `stops_at_first`, and a rank has finished before the others.
    """
    rules = JoinRules(divides_by_all_ranks, stops_at_first)
    root = _root_to_join(model, step, rules)
    if root.unit.config.uneven_paths and inputs is not None:
        raise ShardingError("join: with uneven_paths=True a rank without a batch computes nothing, so leave inputs out.")
    engine = root.engine
    joined = Joined(model, engine, step, inputs, rules)
    with ExitStack() as stack:
        stepped = stack.enter_context(SteppedOptimizers(model)) if step is None else None
        stack.callback(engine.reducer.set_averaging_ranks, engine.comms.size)
        stack.enter_context(joined.connected(root.hooks))
        yield joined
        joined.serve()
        if stepped is not None:
            take_over(joined.buffer_source, model, stepped.all_found(), engine.comms.world_comm)
        elif root.unit.config.broadcast_buffers:
            broadcast_buffers(root.unit.modules, engine.comms.world_comm, joined.buffer_source)


def _root_to_join(model: nn.Module, step: object, rules: JoinRules) -> UnitRef:
    """The one root of `model`, whose options allow a join."""
    root = unit_ref_of(getattr(model, "module", model)) or unit_ref_of(model)
    engines = engines_in(model, "join")
    if root is None or len(engines) != 1:
        raise ShardingError(f"join takes one wrapped model; there are {len(engines)} roots in this {type(model).__name__}.")
    engine = engines[0]
    if not callable(step) and (step is not None or root.unit.config.mesh_kind is not MeshKind.REPLICATE):
        raise ShardingError(f"join takes a function that steps, such as optimizer.step, not {step!r}.")
    if engine.watcher is not None or (isinstance(engine, UnevenEngine) and engine.is_joined):
        raise ShardingError("join: this model is inside another join already.")
    if engine.reducer.hook is not None and not rules.divides_by_all_ranks:
        raise ShardingError("join: the communication hook of this model averages over all ranks, also those that have finished.")
    if engine.reducer.policy.static_graph:
        raise ShardingError("join: a rank that has finished has no gradients, so leave out reduction.static_graph.")
    return root
