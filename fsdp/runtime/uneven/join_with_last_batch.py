"""`fsdp.join` for ranks that compute the same: a rank that has no data left runs its last batch beside the others.

Each rank with data announces its forwards, backwards and steps. A finished rank computes the same with its last batch, or with
that of another rank if it never had one. Its gradients do not count.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsdp.autograd.pytree import tensors_in
from fsdp.comm.communicator import Communicator
from fsdp.errors import InputsExhausted, ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.uneven.data_left import Operation, exchange_data_left
from fsdp.runtime.uneven.join_base import Joined, JoinRules

_FORWARDS = Operation.TRAINS, Operation.EVALUATES


class EvenJoin(Joined):
    """The ranks of one root inside a join, of which the finished ones do what the others announce."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        step: Callable[[], object] | None,
        inputs: tuple[Any, ...] | None,
        rules: JoinRules,
    ) -> None:
        super().__init__(engine, step, rules)
        self._model = model
        self._args = inputs
        self._kwargs: dict[str, Any] = {}
        self._outputs: list[Tensor] = []
        self._finished = False

    @contextmanager
    def connected(self) -> Iterator[None]:
        root = self._engine.units[0].module
        handle = root.register_forward_pre_hook(self._store_inputs, prepend=True, with_kwargs=True)
        try:
            with super().connected():
                yield
        finally:
            handle.remove()

    def serve(self) -> None:
        self._finished = True
        self._engine.reducer.ignores_local_grads = True
        try:
            while (operation := self._announce(None)) is not None:
                if operation is Operation.STEPS:
                    self._step_with_others()
                elif operation in _FORWARDS:
                    self._run_forward(operation is Operation.TRAINS)
                else:
                    self._run_backward(operation is Operation.REDUCES)
        finally:
            self._engine.reducer.ignores_local_grads = False
            self._outputs.clear()

    # what a rank with data announces ------------------------------------------------------

    def before_forward(self, records_graph: bool) -> None:
        self._announce_own(Operation.TRAINS if records_graph else Operation.EVALUATES)

    def before_backward(self, reduces: bool) -> None:
        self._announce_own(Operation.REDUCES if reduces else Operation.KEEPS)

    def _announce_step(self) -> None:
        self._announce(Operation.STEPS)

    def _announce_own(self, operation: Operation) -> None:
        if not self._finished:
            self._announce(operation)

    def _announce(self, operation: Operation | None) -> Operation | None:
        """Announce the next operation of this rank, or None if it has finished; return that of the ranks with data, if any.

        Raises:
            ShardingError: the ranks with data do different things, or have changed gradients outside the step.
            InputsExhausted: a rank has finished, and all ranks stop then.
        """
        # instead of an operation, a finished rank says whether it lacks inputs
        number = int(self._args is None if operation is None else operation)
        has_data = operation is not None
        left = exchange_data_left(self._engine, has_data=has_data, known_grads=self.known_grads, operation=number)
        if not left.ranks:
            return None
        counts = Counter(left.states[rank].operation for rank in left.ranks)
        if len(counts) > 1:
            counted = ", ".join(f"{counts[one]} {one.name.lower()}" for one in Operation if counts[one])
            raise ShardingError(f"inside fsdp.join, of {len(left.ranks)} ranks that have data left {counted} at the same time.")
        (found,) = map(Operation, counts)
        try:
            self.on_data_left(left, found)
        except InputsExhausted as stop:
            if self._finished:
                self._engine.abandon_step(stop)  # the others do so in the forward that they have begun
            raise
        if found in _FORWARDS and any(left.states[rank].operation for rank in left.finished):
            comm, device = self._engine.comms.world_comm, self._engine.units[0].device
            given = _exchange_inputs((self._args, self._kwargs), comm, self.source, device)
            if self._args is None and given is not None:
                self._args, self._kwargs = given
        return found

    def _store_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._finished:
            self._args, self._kwargs = args, kwargs

    # what a finished rank computes --------------------------------------------------------

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
                "inside fsdp.join, ranks that have data left go backward a second time without a forward between, which a rank "
                "that has finished cannot do: its backward goes through all forwards since the last one. Add up the losses of "
                "these forwards, and take one backward."
            )
        leaves = [one for one in tensors_in((self._args, self._kwargs)) if one.requires_grad and one.is_leaf]
        gradients = [one.grad for one in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            with self._engine.synchronising(reduces):
                torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient


def _exchange_inputs(mine: Any, comm: Communicator, source: int, device: torch.device) -> Any:
    """The args and kwargs of the last forward of `source`, on `device`; None if they cannot be pickled. Every rank calls it."""
    sent = _pickled(mine) if comm.rank == source else None
    pickled = comm.gather_objects(sent, "inputs for ranks without a batch")[source]
    if pickled is None:
        return None
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, pickle.loads(pickled))


def _pickled(inputs: Any) -> bytes | None:
    on_host = tree_map(lambda one: one.detach().cpu() if isinstance(one, Tensor) else one, inputs)
    try:
        return pickle.dumps(on_host)
    except (pickle.PicklingError, AttributeError, TypeError):  # what pickle raises for a lambda, a local class, a lock
        return None
