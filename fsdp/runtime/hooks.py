"""Torch hooks -> events. Registers every hook, but for those on nodes (crossings, accumulators) and in units (escapes)."""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.backward_progress import Readiness
from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import graph_is_made, graph_task, in_backward, times_running
from fsdp.autograd.node_hooks import Call, Crossing, Ends, Way, inputs_of, is_batched, node_behind
from fsdp.autograd.pytree import cast_floating, modules_within, tensors_in
from fsdp.debug.guard import Guard
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.external_use import RefusedUse
from fsdp.runtime.arrivals import hear_arrivals, thawed
from fsdp.runtime.engine import Engine
from fsdp.runtime.grad_hooks import Accumulators
from fsdp.runtime.refuse_copy import Uncopied
from fsdp.runtime.side_outputs import Escapes
from state_machine import Event


class Hooks:
    """Every hook of the units of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._listeners: list[Listener] = []
        around: list[list[Listener]] = [[] for _ in engine.units]
        modules = {id(unit.module) for unit in engine.units}
        for index, inside in enumerate(engine.descendants):  # outer units come first
            self._listeners.append(Listener(engine, index, around[index], modules))
            for inner in inside:
                around[inner].append(self._listeners[index])
        outer = [listener for index, listener in enumerate(self._listeners) if engine.descendants[index]]
        for listener in self._listeners:
            listener.outer = outer
        engine.watch_outputs = lambda index: self._listeners[index].watch()
        engine.forget_arrivals = partial(self._each, Listener.backward_is_over)
        engine.forget_calls = partial(self._each, Listener.give_up_calls)
        engine.keep_edits = partial(self._each, Listener.keep_edits)

    def remove(self) -> None:
        """Take every hook away again."""
        self._each(Listener.remove)

    def run_as_forward(self, index: int, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a unit as if it were its forward."""
        return self._listeners[index].run_as_forward(method, args, kwargs)

    def on_call(self, callback: Callable[..., None]) -> RemovableHandle:
        """Before each forward of the root, call back with the module, args and kwargs."""
        return self._listeners[0].module.register_forward_pre_hook(callback, prepend=True, with_kwargs=True)

    def _each(self, do: "Callable[[Listener], None]") -> None:
        for listener in self._listeners:
            do(listener)


class Listener(Uncopied):
    """Hears torch's hooks for one unit and tells the engine."""

    def __init__(self, engine: Engine, index: int, around: "Sequence[Listener]", modules_of_units: set[int]) -> None:
        self._engine = self.engine = engine
        self._index = index
        super().__init__(engine.units[index])
        self._innermost = not engine.descendants[index]
        self._calls: list[Call] = []
        self.readiness = Readiness()
        self._tasks: set[int] = set()
        """The graph tasks of reentrant checkpoints whose end is waited for."""
        self._unit.announce = partial(engine.hear, index, Event.GRADIENT_FROM_OUTSIDE)
        self._unit.stay = self._stay
        self._around = around
        self.outer: Sequence[Listener] = ()
        """Those of all units with units inside, which autograd can leave by ways nobody watches."""
        self._handles_of_ends: dict[int, RemovableHandle] = {}
        module = self._unit.module
        self._escapes = Escapes(module, list(modules_within(module, modules_of_units)))
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._forward_ends, always_call=True),
        ]
        self._accumulators = Accumulators(self._unit)
        for number in engine.reducer.of_unit[index]:
            hear = hear_arrivals(weakref.ref(self), number if number in engine.reducer.counted else None)
            for whole in engine.reducer.buckets[number].flat.whole_parameters:
                if _can_train(whole):
                    with thawed(whole):
                        self._handles.append(whole.register_post_accumulate_grad_hook(hear))  # type: ignore[no-untyped-call]
        for place in self._unit.places:
            if _can_train(place.parameter):
                refuse = RefusedUse(place.names[0], self._unit.name)
                with thawed(place.parameter):
                    self._handles.append(place.parameter.register_hook(refuse))  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """The module of the unit."""
        return self._unit.module

    def remove(self) -> None:
        """Take the hooks away again."""
        self._escapes.remove()
        self._accumulators.remove()
        for handle in self._handles:
            handle.remove()

    def backward_is_over(self) -> None:
        """For the next one nothing has arrived and nothing is open."""
        self.readiness.reset()
        self._tasks.clear()
        for handle in self._handles_of_ends.values():
            handle.remove()
        self._handles_of_ends.clear()

    # forward ------------------------------------------------------------------------------

    def run_as_forward(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the unit between what its forward hooks hear."""
        module = self._unit.module
        args, kwargs = self._forward_begins(module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            self._forward_ends(module, args, None)
            raise
        except BaseException as failure:
            self._engine.note(failure)
            self._engine.give_up(failure)
            raise
        changed = self._forward_ends(module, args, output)
        return output if changed is None else changed

    @uncompiled
    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = inputs_of(args, kwargs) if torch.is_grad_enabled() else ()
        call = Call(in_backward(), inputs, self._innermost, self._unit.versions)
        if self._calls and not call.way.replay and self._is_nested():
            call.nest_in(self._calls[-1])
        self._calls.append(call)
        call.refused = True
        self._unit.versions_in_forward = call.way.versions
        if not call.nested:  # else a part of the call it is in
            call.carried = self._escapes.begin()
            if call.way.replay:
                self._engine.hear(self._index, Event.REPLAY_BEGINS)
            else:
                self._accumulators.check()
                self._engine.forward_begins(self._index)
        call.refused = False
        whole = self._engine.whole(self._index)
        if whole:
            self._unit.open()
            if self._unit.config.guard and not call.nested:
                call.guard = Guard(self._unit)
        policy = self._unit.config.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not whole:
            return None
        return cast_floating(args, policy.param_dtype), cast_floating(kwargs, policy.param_dtype)

    @uncompiled
    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:
            return None  # a pre-hook that came before ours has failed
        call = self._calls[-1]
        if call.refused or call.nested:
            self._calls.pop()
            return None
        replay = call.way.replay
        if call.guard is not None:
            call.guard.end()
        try:
            passing = sys.exc_info()[1]
            if passing is not None and passing is not call.handled:
                # a replay may be stopped early by an exception of torch's own
                if replay:
                    self._unit.take_edits_of_replay()
                else:
                    self._engine.note(passing, self._index)
                    self._unit.forget_edits(call.taken)
                    self._engine.forward_ends(self._index, Event.FORWARD_FAILS)
                return None
            try:
                if call.guard is not None:
                    call.guard.refuse_hidden_edits()
                if replay:
                    self._unit.take_edits_of_replay()
                else:
                    call.way.versions += self._unit.take_edits()
                self._find_outputs(call, output)
            except ShardingError as refusal:
                self._engine.note(refusal, self._index)
                self._unit.forget_edits(call.taken)
                if not replay:
                    self._engine.forward_ends(self._index, Event.FORWARD_FAILS)
                raise
            if replay:
                self._engine.hear(self._index, Event.REPLAY_ENDS)
            else:
                self._engine.forward_ends(self._index, Event.FORWARD_ENDS if call.outputs else Event.INFERENCE_ENDS)
        finally:
            self._calls.pop()
            self._escapes.end(call.carried)
            if replay:
                self._unit.guard()
        policy = self._unit.config.mp_policy
        return None if policy.output_dtype is None else cast_floating(output, policy.output_dtype)

    def give_up_calls(self) -> None:
        """The calls that run may never be heard to end."""
        for call in self._calls:
            call.give_up()

    def keep_edits(self) -> None:
        """A backward begins inside a call that runs, and what that changed in place so far may be gathered anew."""
        for call in self._calls[:1]:
            call.way.versions += self._unit.take_edits(call.taken)

    def _is_nested(self) -> bool:
        """Whether the unit is called from inside its own forward; if it only seems so, Ctrl-C has ended that one unheard."""
        if times_running(self._unit.module, Listener.run_as_forward.__code__, self) > 1:
            return True
        self.give_up_calls()
        self._calls.clear()
        self._engine.abandon_forward_of(self._index)
        return False

    def _find_outputs(self, call: Call, output: Any) -> None:
        """Note every output a backward can come back through; refuse the unit's own parameters among them."""
        keys = self._unit.keys
        left = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        left += self._escapes.left_behind(self._watches)
        for tensor in left:
            if storage_key(tensor) in keys:
                raise ShardingError(
                    f"unit {self._unit.name!r} returns one of its own parameters (or a view of one), whose memory is "
                    "given back after the forward; return a copy instead (`weight.clone()`), or compute with it inside the unit."
                )
        left += self._escapes.carried_off()
        call.outputs += [tensor for tensor in left if tensor.requires_grad]
        if not call.records:
            around = [one for one in self._around if one._calls]
            # in a reentrant checkpoint: what comes out of it requires grad when it is over
            for listener in around[-1:] if any(one._calls[-1].records for one in around) else ():
                listener._escapes.take_over([tensor for tensor in left if not tensor.requires_grad])

    def _watches(self, tensor: Tensor) -> bool:
        return (node := node_behind(tensor)) is not None and id(self) in Crossing.of(node).watched_by

    def watch(self) -> None:
        """Put a pre-backward hook on every node behind the outputs of the call that just returned."""
        call = self._calls[-1]
        way = call.way
        # an input that is returned as it is has nothing of the unit behind it
        nodes = {node: None for tensor in call.outputs if (node := node_behind(tensor)) is not None and node not in way.inputs}
        way.ends += map(weakref.ref, call.outputs)
        way.around = [(listener, listener._calls[-1].way) for listener in self._around if listener._calls]
        call.outputs = []
        self.readiness.watch(way, self._engine.last_forward.graph_is_gone)
        self._engine.last_forward.graphs += 1
        for node in nodes:
            crossing = Crossing.of(node)
            crossing.watched_by.add(id(self))
            crossing.reaches.append(partial(self._backward_reaches, way))
        for node in call.exits:
            Crossing.of(node).leave(way, self._input_left)

    # backward -----------------------------------------------------------------------------

    def _backward_reaches(self, way: Way, gradients: Sequence[Tensor | None]) -> None:
        for listener, around in way.around:
            if around.reached_in != listener.readiness.backward:
                listener.reach_from_inside(around, way.led_to)
        self._refuse_changed_parameters(way.versions)
        self._engine.hear(self._index, Event.BACKWARD_REACHES)
        self.readiness.reach(way)
        if torch.is_grad_enabled():
            # what comes in may have been made by any of these
            for listener in self.outer:
                if listener.readiness.reached:
                    listener.watch_gradients(gradients)
            for listener, around in way.around:
                listener.watch_ends(around.ends)
            self.watch_ends()

    def _stay(self) -> bool:
        if graph_is_made():
            return False  # it is gone through when the unit may be sharded again
        self._engine.hear(self._index, Event.BACKWARD_REACHES)
        self.readiness.reach_again()
        return True

    def reach_from_inside(self, way: Way, goes_on: bool) -> None:
        """A backward has come to an inner unit past this one's call, by what the inner one left behind; it may go on in here."""
        if goes_on:  # else what the inner one got from here by other ways than its inputs is not looked at
            self._refuse_changed_parameters(way.versions)
        way.reached_in = self.readiness.backward
        if not self.readiness.reached:
            self._engine.hear(self._index, Event.BACKWARD_REACHES)
            self.readiness.reach_again()

    def _input_left(self, way: Way, gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            self.watch_gradients(gradients)
        if not self.readiness.leave(way):
            return
        if not self._unit.trains:
            self._engine.hear(self._index, Event.BACKWARD_LEFT)
        elif self.readiness.is_ready():
            self._is_ready()
        elif way.replay and not way.through_graph and graph_task() not in self._tasks:
            self._tasks.add(graph_task())
            self._engine.at_the_end_of_this_task(self._checkpoint_ends)

    def _checkpoint_ends(self) -> None:
        # the backward may be over with it
        if graph_task() in self._tasks and self.readiness.is_ready_after_checkpoint():
            self._is_ready()

    def _is_ready(self) -> None:
        self.readiness.arrived = False
        self._engine.hear(self._index, Event.GRADIENTS_READY if self._engine.backward_synchronises else Event.GRADIENTS_KEPT)

    def watch_ends(self, more: Ends = ()) -> None:
        """A tensor that autograd.grad was asked for is captured, and the node behind it never entered."""
        for reference in (*more, *(end for way in self.readiness.living_ways() for end in way.ends)):
            tensor = reference()
            if tensor is not None and id(tensor) not in self._handles_of_ends:
                self._handles_of_ends[id(tensor)] = tensor.register_hook(self._captured)  # type: ignore[no-untyped-call]

    def _captured(self, gradient: Tensor) -> None:
        self.watch_gradients((gradient,))

    def watch_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """In a backward with create_graph=True: what comes out of the unit is made by nodes a second backward may enter."""
        for gradient in gradients:
            if gradient is not None and is_batched(gradient):
                raise self._refusal(
                    f"a backward with is_grads_batched=True and create_graph=True goes through unit {self._unit.name!r}, and its "
                    "graph cannot be followed; take the gradients one by one."
                )
            node = None if gradient is None else node_behind(gradient)
            if node is not None:
                # the ways are kept: of the first graph, only what the second needs may be alive
                ways = self.readiness.living_ways()
                Crossing.of(node).reaches.append(partial(self._backward_reaches_again, ways, self._unit.versions))

    def _backward_reaches_again(self, ways: Sequence[Way], versions: int, gradients: Sequence[Tensor | None]) -> None:
        self._refuse_changed_parameters(versions)
        self._engine.hear(self._index, Event.BACKWARD_REACHES)
        self.readiness.reach_again()
        if torch.is_grad_enabled():
            self.watch_gradients(gradients)
            self.watch_ends()

    def _refuse_changed_parameters(self, versions: int) -> None:
        if versions != self._unit.versions:
            raise self._refusal(
                f"parameters of unit {self._unit.name!r} were changed in place between its forward and its backward; "
                "step the optimizer after the backward of every forward that used them."
            )

    def _refusal(self, text: str) -> ShardingError:
        error = ShardingError(text)
        self._engine.note(error, self._index)
        return error

    def gradient_arrives(self) -> None:
        """A gradient of one parameter has been accumulated, the first."""
        if torch.is_grad_enabled():
            raise self._refusal(
                f"a backward with create_graph=True brings gradients to the parameters of unit {self._unit.name!r}, which are "
                "reduced over the ranks and have no graph; ask for those of inputs only: "
                "torch.autograd.grad(loss, inputs, create_graph=True)."
            )
        self._engine.gradients_come()
        self.readiness.arrived = True
        self._engine.hear(self._index, Event.GRADIENT_ARRIVES)


def _can_train(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
