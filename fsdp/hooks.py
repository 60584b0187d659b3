"""Torch hooks -> events. The only file that registers a hook, but for those on nodes (crossings.py); it decides nothing.

[Note: when a unit is done with its parameters]
All its gradients having arrived is not enough: a frozen weight beside trainable ones, or a detached
use, is read by backward nodes no gradient of ours depends on. So a unit also waits until autograd
leaves it, which is when it is about to enter the nodes that made the inputs of each call. A unit
with inner units can be left through any of them, so it waits for the end of the backward.

[Note: what other ranks know]
A reduction may be launched early only at a moment every rank comes to, or a rank that waits for it
starves a peer that waits for a gather first. Which gradients arrive differs between ranks (a
parameter unused on one of them); the way autograd takes through the calls does not. When every call
of a unit has been left through nodes inside the graph, all its gradients have arrived, because
autograd runs later nodes first and accumulates at once: then the unit is ready, with zeros for what
did not come. A unit that is complete by counting alone keeps its gradients for the end of the backward.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from fsdp.crossings import Call, Crossing, Way, input_nodes, node_behind
from fsdp.engine import Engine
from fsdp.errors import ShardingError
from fsdp.nested import cast_floating, tensors_in
from fsdp.storage import storage_key
from fsdp.unit import Unit
from state_machine import Event, State


def in_backward() -> bool:
    """Whether the calling thread is inside a backward. Asked here and nowhere else."""
    return graph_task() != -1


def graph_task() -> int:
    """The backward the calling thread is inside, as autograd counts: a reentrant checkpoint runs one of its own; or -1."""
    return torch._C._current_graph_task_id()


class Hooks:
    """Every hook of the units of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._listeners = [Listener(engine, index) for index in range(len(engine.units))]
        engine.watch_outputs = lambda index: self._listeners[index].watch()
        engine.forget_arrivals = self._forget_arrivals

    def remove(self) -> None:
        """Take every hook away again."""
        for listener in self._listeners:
            listener.remove()

    def _forget_arrivals(self) -> None:
        for listener in self._listeners:
            listener.backward_begins()


class Listener:
    """Hears torch's hooks for one unit and tells the engine."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine = engine
        self._index = index
        self._unit: Unit = engine.units[index]
        self._innermost = not engine.descendants[index]
        self._calls: list[Call] = []
        self._backward = 0
        self._ways: list[weakref.ref[Way]] = []
        """Of the calls whose graph was alive at the last call."""
        self.arrived: dict[int, int] = {}
        """Of each parameter whose gradient came: the graph task it came in last."""
        self.open_calls = 0
        self._reached_in = -1
        """The graph task that reached the unit last."""
        module = self._unit.module
        self._attributes = [vars(one) for one in self._engine.own_modules[index]]
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._forward_ends, always_call=True),
            module.register_state_dict_pre_hook(self._refuse_shards_in_a_state_dict),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._refuse_to_load_into_shards),  # type: ignore[no-untyped-call]
        ]
        for number, whole in enumerate(self._unit.whole_parameters):
            # registered for frozen ones as well: they may be thawed later
            frozen = not whole.requires_grad
            if whole.is_floating_point() or whole.is_complex():
                whole.requires_grad_(True)
                hook = _hear_arrivals(weakref.ref(self), number)
                self._handles.append(whole.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                whole.requires_grad_(not frozen)

    # a copy or a pickle of the module comes here first, by way of the hooks it carries

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be copied: copy the module before wrapping it, then wrap the copy."
        )

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"unit {self._unit.name!r} cannot be pickled, because a rank holds only its shard: save "
            "fsdp.full_state_dict(model) instead."
        )

    def remove(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()

    def backward_begins(self) -> None:
        """Nothing has arrived and nothing is open."""
        self._backward += 1
        self.arrived.clear()
        self.open_calls = 0

    # state dicts --------------------------------------------------------------------------

    def _refuse_shards_in_a_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._engine.root.lifecycles[self._index].state is not State.SUMMONED:
            raise ShardingError(
                f"state_dict() of unit {self._unit.name!r} would hold this rank's shards only: "
                "call fsdp.full_state_dict(model), or state_dict() inside fsdp.summon_full_params(model)."
            )

    def _refuse_to_load_into_shards(self, *_: Any) -> None:
        raise ShardingError(f"unit {self._unit.name!r} is sharded: call fsdp.load_full_state_dict(model, state_dict) instead.")

    # forward ------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(in_backward(), input_nodes(args, kwargs) if torch.is_grad_enabled() and self._innermost else ())
        self._calls.append(call)
        call.refused = True
        if call.replay:
            self._engine.hear(self._index, Event.REPLAY_BEGINS)
        else:
            self._engine.forward_begins(self._index)
        call.refused = False
        policy = self._unit.config.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not self._engine.whole(self._index):
            return None
        return cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:
            return None  # a pre-hook that came before ours has failed
        call = self._calls[-1]
        if call.refused:
            self._calls.pop()
            return None
        try:
            passing = sys.exc_info()[1]
            if passing is not None and passing is not call.handled:
                # a replay may be stopped early by an exception of torch's own
                if not call.replay:
                    self._engine.forward_ends(self._index, Event.FORWARD_FAILS)
                return None
            self._find_outputs(call, output)
            if call.replay:
                self._engine.hear(self._index, Event.REPLAY_ENDS)
            else:
                self._engine.forward_ends(self._index, Event.FORWARD_ENDS if call.outputs else Event.INFERENCE_ENDS)
        finally:
            self._calls.pop()
        policy = self._unit.config.mp_policy
        return None if policy.output_dtype is None else cast_floating(output, policy.output_dtype)

    def _find_outputs(self, call: Call, output: Any) -> None:
        """Note every output a backward can come back through; refuse the unit's own parameters among them."""
        keys = self._unit.keys
        for tensor in (*((output,) if isinstance(output, Tensor) else tensors_in(output)), *self._stowed()):
            if storage_key(tensor) in keys:
                if not call.replay:
                    self._engine.forward_ends(self._index, Event.FORWARD_FAILS)
                call.refused = True
                raise ShardingError(
                    f"unit {self._unit.name!r} returns one of its own parameters (or a view of one), whose memory is "
                    "given back after the forward; return a copy instead (`weight.clone()`), or compute with it inside the unit."
                )
            if tensor.requires_grad:
                call.outputs.append(tensor)

    def _stowed(self) -> list[Tensor]:
        """Tensors this forward left behind as attributes: a balancing loss, for example. A backward can come through them too."""
        found = [value for attributes in self._attributes for value in attributes.values() if isinstance(value, Tensor)]
        return [one for one in found if (node := node_behind(one)) is None or self._index not in Crossing.of(node).watched_by]

    def watch(self) -> None:
        """Put a pre-backward hook on every node behind the outputs of the call that just returned."""
        call = self._calls[-1]
        nodes = {node: None for tensor in call.outputs if (node := node_behind(tensor)) is not None}
        call.outputs = []
        way = Way(call, self._unit.versions)
        self._ways = [*(one for one in self._ways if one() is not None), weakref.ref(way)]
        for node in nodes:
            # an input that is returned as it is has nothing of the unit behind it
            if node not in call.inputs:
                crossing = Crossing.of(node)
                crossing.watched_by.add(self._index)
                crossing.reaches.append(partial(self._backward_reaches, way, call.inputs))
        for node in call.inputs:
            Crossing.of(node).leaves.append(partial(self._input_left, way))

    # backward -----------------------------------------------------------------------------

    def _backward_reaches(self, way: Way, inputs: Sequence[Node]) -> None:
        self._refuse_what_would_be_wrong(way)
        self._engine.hear(self._index, Event.BACKWARD_REACHES)
        self._reached_in = graph_task()
        if inputs and way.backward != self._backward:
            way.backward = self._backward
            # autograd.grad does not say whether it comes to a leaf: wait for it, at worst until the backward ends
            way.pending = sum(not node.next_functions or torch._C._will_engine_execute_node(node) for node in inputs)
            if way.pending:
                self.open_calls += 1

    def _refuse_what_would_be_wrong(self, way: Way) -> None:
        if torch.is_grad_enabled():
            raise ShardingError(
                f"a backward with create_graph=True goes through unit {self._unit.name!r}, whose parameters are given back "
                "before a second backward could read them; compute such gradients on the module before wrapping it."
            )
        if way.versions != self._unit.versions:
            raise ShardingError(
                f"parameters of unit {self._unit.name!r} were changed in place between its forward and its backward; "
                "step the optimizer after the backward of every forward that used them."
            )

    def _input_left(self, way: Way) -> None:
        if way.backward != self._backward or not way.pending:
            return
        way.pending -= 1
        if not way.pending:
            self.open_calls -= 1
            way.left_in = self._backward
            if not self._unit.trainable_count:
                self._engine.hear(self._index, Event.BACKWARD_LEFT)
            elif not self.open_calls and all(self._left(one) and one.through_graph for one in self._living_ways()):
                self._tell(Event.GRADIENTS_READY)
            else:
                self._tell_if_complete()

    def gradient_arrives(self, number: int) -> None:
        """A gradient of one parameter has been accumulated."""
        arrived = self.arrived
        if not arrived:
            self._engine.hear(self._index, Event.GRADIENT_ARRIVES)
        arrived[number] = graph_task()
        # one that came from a checkpoint inside the unit may not be the last: then only leaving, or the end, tells
        if len(arrived) == self._unit.trainable_count and all(task == self._reached_in for task in arrived.values()):
            self._tell_if_complete()

    def _tell_if_complete(self) -> None:
        if len(self.arrived) == self._unit.trainable_count and not self.open_calls and self._innermost:
            # the inputs of a replay are leaves for autograd, and not for the user
            taken = [way for way in self._living_ways() if way.backward == self._backward]
            early = taken and all(self._left(way) and (way.through_graph or way.replay) for way in taken)
            self._tell(Event.GRADIENTS_READY if early else Event.GRADIENTS_KEPT)

    def _left(self, way: Way) -> bool:
        return way.left_in == self._backward

    def _living_ways(self) -> list[Way]:
        return [way for reference in self._ways if (way := reference()) is not None]

    def _tell(self, complete: Event) -> None:
        self.arrived.clear()
        self._engine.hear(self._index, complete if self._engine.backward_synchronises else Event.GRADIENTS_KEPT)


def _hear_arrivals(listener: "weakref.ref[Listener]", number: int) -> Callable[[Tensor], None]:
    """The hook of one whole parameter, which runs once a parameter and backward, so it is short."""

    def arrives(whole: Tensor) -> None:
        # weakly: the collector of garbage does not see hooks of this kind, and the listener leads back to the tensor
        hearer = listener()
        if hearer is not None:
            if hearer.arrived and hearer.open_calls:
                hearer.arrived[number] = graph_task()  # neither the first nor possibly the last: nobody else needs to know
            else:
                hearer.gradient_arrives(number)

    return arrives
