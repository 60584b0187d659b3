"""Training on uneven inputs: some ranks run out of data before others.

A rank that has finished still serves its shards. The ranks with data announce each forward, backward and step, and the finished
rank does the same with its last batch. Its gradients do not count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.autograd.pytree import tensors_in
from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.hook_actions import PassWatcher
from fsdp.runtime.registry import engines_in, unit_ref_of


class _Operation(IntEnum):
    """The next operation of the ranks with data. The value is its place in the message."""

    TRAINS = 0
    EVALUATES = 1
    REDUCES = 2
    KEEPS = 3
    STEPS = 4


_CLEARED = len(_Operation)
"""The place in the message of the number of ranks without gradients. If it is all of them, they have set gradients to None."""


class Joined(PassWatcher):
    """The object that `join` yields. Its `step` is taken by all ranks together."""

    def __init__(self, model: nn.Module, engine: Engine, step: Callable[[], object], inputs: tuple[Any, ...] | None) -> None:
        self._model = model
        self._engine = engine
        self._step = step
        self._args = inputs
        self._kwargs: dict[str, Any] = {}
        self._outputs: list[Tensor] = []
        self._finished = False

    def step(self) -> None:
        """Take the step given to `join` on every rank, finished ranks included.

        Raises:
            ShardingError: the ranks with data do different things.
        """
        self._announce(_Operation.STEPS)
        self._step()

    def _announce(self, operation: _Operation | None) -> _Operation | None:
        """Announce the next operation of this rank, or None if it has finished; return that of the ranks with data, if any.

        Raises:
            ShardingError: the ranks with data do different things.
        """
        message = torch.zeros(_CLEARED + 1, dtype=torch.int64, device=self._engine.units[0].device)
        shards = [parameter for unit in self._engine.units for parameter in unit.sharded_params]
        if operation is not None:
            message[operation] = 1
            message[_CLEARED] = all(parameter.grad is None for parameter in shards)
        self._engine.comms.world_comm.all_reduce(message, "sum", "who has data left").wait()
        *counts, cleared = message.tolist()
        left = sum(counts)
        if not left:
            return None
        self._engine.reducer.set_averaging_ranks(left)
        if counts.count(0) != len(counts) - 1:
            counted = ", ".join(f"{count} {of.name.lower()}" for of, count in zip(_Operation, counts, strict=True) if count)
            raise ShardingError(f"inside fsdp.join, of {left} ranks that have data left {counted} at the same time.")
        if self._finished and cleared == left:
            for parameter in shards:
                parameter.grad = None
        return _Operation(counts.index(left))

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
                "a rank had no batch at all inside fsdp.join, so it does not know what to compute beside the others; give one as "
                "inputs=(...), whose gradients will count for nothing."
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
def join(model: nn.Module, step: Callable[[], object], inputs: tuple[object, ...] | None = None) -> Iterator[Joined]:
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
            are set to None on finished ranks too.
        inputs: the arguments of a forward, for a rank that may have no batch at all. Default None.

    Every rank must call the forward of `model` (not of a unit in it), the backward and `joined.step` in the same order. One
    backward goes through all forwards since the last one, and every output of `model` that requires a gradient must lead to the
    loss. Gradients that a rank keeps under `no_sync` when it leaves are dropped.

    Raises:
        ShardingError: `model` is not one root, has a communication hook, a static graph or broadcast buffers, is inside another
            join, or ranks with data do different things.
    """
    sharded = unit_ref_of(getattr(model, "module", model)) or unit_ref_of(model)
    engines = engines_in(model, "join")
    if sharded is None or len(engines) != 1:
        raise ShardingError(f"join takes one wrapped model; there are {len(engines)} roots in this {type(model).__name__}.")
    if not callable(step):
        raise ShardingError(f"join takes a function that steps, such as optimizer.step, not {step!r}.")
    engine = engines[0]
    if engine.watcher is not None:
        raise ShardingError("join: this model is inside another join already.")
    if engine.reducer.hook is not None:
        raise ShardingError("join: the communication hook of this model averages over all ranks, also those that have finished.")
    if engine.reducer.policy.static_graph:
        raise ShardingError("join: a rank that has finished has no gradients, so leave out reduction.static_graph.")
    if engine.units[0].config.broadcast_buffers:
        raise ShardingError("join: rank 0, whose buffers broadcast_buffers=True gives to all, may have finished; leave it out.")
    joined = Joined(model, engine, step, inputs)
    handle = sharded.hooks.on_call(joined._store_inputs)
    engine.set_watcher(joined)
    try:
        yield joined
        joined._serve_shards()
    finally:
        engine.set_watcher(None)
        engine.reducer.set_averaging_ranks(engine.comms.size)
        handle.remove()
