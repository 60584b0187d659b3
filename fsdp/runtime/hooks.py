"""The torch hooks of every unit, and the events that they turn into.

Hooks on autograd nodes are in visits.py, grad_hooks.py and double_backward.py, and those inside units in side_outputs.py.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from os import getpid
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.backward_progress import BackwardProgress
from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import graph_is_made, graph_task, in_backward, times_running
from fsdp.autograd.visits import BackwardPath, ForwardCall, NodePrehook, grad_inputs, node_behind
from fsdp.autograd.pytree import cast_floating, modules_within, tensors_in
from fsdp.debug.guard import Guard
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.shown_params import in_grad_hook
from fsdp.params.unit_observer import UnitObserver
from fsdp.params.use_outside_forward import RefuseShardGrad
from fsdp.runtime.double_backward import DoubleBackward
from fsdp.runtime.engine import Engine
from fsdp.runtime.grad_hooks import AccumulateGradChecks, post_accumulate_hook, trainable
from fsdp.runtime.hook_actions import HookActions
from fsdp.runtime.refuse_copy import RefuseCopy
from fsdp.runtime.side_outputs import SideOutputs
from state_machine import Event


class EngineHooks(HookActions):
    """The hooks of all units of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._unit_hooks: list[UnitHooks] = []
        enclosing: list[list[UnitHooks]] = [[] for _ in engine.units]
        modules = {id(module) for unit in engine.units for module in unit.modules}
        for index, inside in enumerate(engine.descendants):  # outer units come first
            self._unit_hooks.append(UnitHooks(engine, index, enclosing[index], modules))
            for inner in inside:
                enclosing[inner].append(self._unit_hooks[index])
        outer = [hooks for index, hooks in enumerate(self._unit_hooks) if engine.descendants[index]]
        for hooks in self._unit_hooks:
            hooks.set_outer(outer)
        engine.attach(self)

    def remove(self) -> None:
        """Remove every hook."""
        for hooks in self._unit_hooks:
            hooks.remove()

    def hook_outputs(self, index: int) -> None:
        self._unit_hooks[index].hook_outputs()

    def reset_backward_progress(self) -> None:
        for hooks in self._unit_hooks:
            hooks.reset_backward_progress()

    def abandon_calls(self) -> None:
        for hooks in self._unit_hooks:
            hooks.abandon_calls()

    def write_back_inplace_of_forward(self) -> None:
        for hooks in self._unit_hooks:
            hooks.write_back_inplace_of_forward()

    def run_as_forward(self, index: int, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a unit as if it were its forward."""
        return self._unit_hooks[index].run_as_forward(method, args, kwargs)

    def on_call(self, callback: Callable[..., None]) -> RemovableHandle:
        """Call `callback` before each forward of the root, with the module, args and kwargs."""
        return self._unit_hooks[0].module.register_forward_pre_hook(callback, prepend=True, with_kwargs=True)


class UnitHooks(RefuseCopy, UnitObserver):
    """The torch hooks of one unit. They send events to the engine."""

    def __init__(self, engine: Engine, index: int, enclosing: "Sequence[UnitHooks]", modules_of_units: set[int]) -> None:
        self._engine = engine
        self._index = index
        super().__init__(engine.units[index])
        self._innermost = not engine.descendants[index]
        self._input_dtype = self._unit.config.mp_policy.input_dtype(is_root=index == 0)
        self._process = getpid()
        self._calls: list[ForwardCall] = []
        self.progress = BackwardProgress()
        self._lost_act: ShardingError | None = None
        """What the user did in a recompute of this backward that torch stopped early; raised at the first gradient."""
        self._tasks: set[int] = set()
        """The graph tasks of reentrant checkpoints that call `_post_checkpoint_backward` at their end."""
        self._unit.set_observer(self)
        self._enclosing = enclosing
        self._outer: Sequence[UnitHooks] = ()
        """The hooks of all units with inner units. Autograd can leave such a unit by a path without hooks."""
        self.double_backward = DoubleBackward(self._unit, self.progress, self._pre_double_backward, self._refusal)
        members = self._unit.modules
        self._side_outputs = SideOutputs(members, [one for module in members for one in modules_within(module, modules_of_units)])
        self._handles: list[RemovableHandle] = []
        for module in members:
            self._handles.append(module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._post_forward, always_call=True))
        self._accumulate_grad_checks = AccumulateGradChecks(self._unit)
        for number in engine.reducer.of_unit[index]:
            early_bucket = number if number in engine.reducer.early else None
            hook = post_accumulate_hook(weakref.ref(self), UnitHooks.on_gradient, self.progress, early_bucket, engine.streams)
            for unsharded in engine.reducer.buckets[number].flat.unsharded_params:
                if _can_train(unsharded):
                    with trainable(unsharded):
                        self._handles.append(unsharded.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for place in self._unit.param_infos:
            if _can_train(place.parameter):
                refuse = RefuseShardGrad(place.names[0], self._unit.name)
                with trainable(place.parameter):
                    self._handles.append(place.parameter.register_hook(refuse))  # type: ignore[no-untyped-call]

    def set_outer(self, outer: "Sequence[UnitHooks]") -> None:
        """Set the hooks of all units with inner units, once all are made."""
        self._outer = outer

    @property
    def module(self) -> nn.Module:
        """The module of the unit."""
        return self._unit.module

    def remove(self) -> None:
        """Remove the hooks of the unit."""
        self._side_outputs.remove()
        self._accumulate_grad_checks.remove()
        for handle in self._handles:
            handle.remove()

    def reset_backward_progress(self) -> None:
        """Reset what was recorded in a backward that is over."""
        self.progress.reset()
        self._lost_act = None
        self._tasks.clear()
        self.double_backward.remove_endpoint_hooks()

    # forward ------------------------------------------------------------------------------

    def run_as_forward(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the unit between its forward hooks."""
        module = self._unit.module
        args, kwargs = self._pre_forward(module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            self._post_forward(module, args, None)
            raise
        except BaseException as failure:
            self._engine.note(failure)
            self._engine.abandon_step(failure)
            raise
        changed = self._post_forward(module, args, output)
        return output if changed is None else changed

    @uncompiled
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getpid() != self._process:
            self._unit.refuse_forked()
        inputs = grad_inputs(args, kwargs) if torch.is_grad_enabled() else ()
        recompute = in_backward() and not in_grad_hook()
        call = ForwardCall(recompute, inputs, self._innermost, self._unit.versions.forward_begins())
        if self._calls and not call.path.recompute and self._is_nested(call):
            call.nest_in(self._calls[-1])
        self._calls.append(call)
        if self._engine.reducer.runs_grad_hooks:
            self._engine.refuse_in_grad_hook(f"a forward of unit {self._unit.name!r}")
        if not call.nested:  # a nested call is a part of the call around it
            call.carry(self._side_outputs.begin())
            if call.path.recompute:
                self._engine.on_event(self._index, Event.PRE_RECOMPUTE)
            else:
                self._accumulate_grad_checks.check()
                self._engine.pre_forward(self._index)
                if self._unit.has_replaced:
                    call.path.set_versions(self._unit.versions.forward_begins())
            if call.path.recompute or self._engine.splits_backward:
                call.keep_gradients(self._unit.unsharded_grads())
        call.accept()
        unsharded = self._engine.is_unsharded(self._index)
        if unsharded:
            self._unit.stop_intercepting()
            if self._unit.config.guard and not call.nested:
                call.set_guard(Guard(self._unit))
        if (dtype := self._input_dtype) is None or not unsharded:
            return None
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    @uncompiled
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:
            return None  # a pre-hook before ours has failed
        call = self._calls[-1]
        if call.refused or call.nested:
            self._calls.pop()
            return None
        recompute = call.path.recompute
        if call.guard is not None:
            call.guard.end()
        try:
            passing = sys.exc_info()[1]
            if passing is not None and passing is not call.handled:
                if getpid() != self._process:
                    return None  # what the rank itself does is not over; this process was forked from it
                # torch can stop a recompute early by an exception, in whose place no other can be raised
                if recompute:
                    self._unit.write_back_inplace_of_recompute()
                    try:
                        self._unit.refuse_lost_acts(call.gradients)
                    except ShardingError as refusal:
                        self._lost_act = refusal
                else:
                    self._engine.note(passing, self._index)
                    self._undo(call, passing)
                    self._engine.post_forward(self._index, Event.FORWARD_FAILED)
                return None
            try:
                if call.guard is not None:
                    call.guard.refuse_hidden_updates()
                if recompute:
                    self._unit.write_back_inplace_of_recompute()
                else:
                    call.path.add_updates(self._unit.write_back_inplace())
                    if self._engine.is_unsharded(self._index):
                        self._unit.refuse_changed()
                self._unit.refuse_lost_acts(call.gradients)
                self._find_outputs(call, output)
            except ShardingError as refusal:
                self._engine.note(refusal, self._index)
                self._undo(call, refusal)
                if not recompute:
                    self._engine.post_forward(self._index, Event.FORWARD_FAILED)
                raise
            if recompute:
                self._engine.on_event(self._index, Event.POST_RECOMPUTE)
            else:
                self._engine.post_forward(self._index, Event.POST_FORWARD if call.outputs else Event.POST_FORWARD_NO_GRAD)
        finally:
            self._calls.pop()
            self._side_outputs.end(call.carried)
            if recompute:
                self._unit.intercept_reads()
        policy = self._unit.config.mp_policy
        return None if policy.output_dtype is None else cast_floating(output, policy.output_dtype)

    def _undo(self, call: ForwardCall, failure: BaseException) -> None:
        """Undo what a forward that has failed did to the unit's parameters, and say so on its error."""
        if undone := self._unit.roll_back_inplace(call.taken):
            failure.add_note(f"fsdp: undone is what this forward did to {', '.join(undone)}, or to their `.grad`.")

    def abandon_calls(self) -> None:
        """Mark the calls that run as abandoned: no hook may see their end."""
        for call in self._calls:
            call.discard()

    def write_back_inplace_of_forward(self) -> None:
        """Write back the in-place updates of the call that runs: a backward inside it may gather again."""
        for call in self._calls[:1]:
            call.path.add_updates(self._unit.write_back_inplace(call.taken))

    def _is_nested(self, call: ForwardCall) -> bool:
        """Whether the unit is called inside its own forward. If not, Ctrl-C has ended an earlier call unnoticed: clean up.

        Raises:
            ShardingError: the earlier call runs on another thread.
        """
        if times_running(self._unit.modules, UnitHooks.run_as_forward.__code__, self) > 1:
            return True
        try:
            self._engine.refuse_two_threads()
        except ShardingError:
            self._calls.append(call)  # the hook at the end of this call removes it
            raise
        self.abandon_calls()
        self._calls.clear()
        self._engine.clean_up_dead_forward(self._index)
        return False

    def _find_outputs(self, call: ForwardCall, output: Any) -> None:
        """Record every output through which a backward can enter; refuse the parameters of the unit among them."""
        keys = self._unit.keys
        left = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        left += self._side_outputs.new_attributes(self._watches)
        for tensor in left:
            if storage_key(tensor) in keys:
                raise ShardingError(
                    f"unit {self._unit.name!r} returns one of its own parameters (or a view of one), whose memory is "
                    "freed after the forward; return a copy instead (`weight.clone()`), or compute with it inside the unit."
                )
        left += self._side_outputs.hook_captures()
        call.add_outputs([tensor for tensor in left if tensor.requires_grad])
        if not call.records:
            enclosing = [one for one in self._enclosing if one._calls]
            # in a reentrant checkpoint, whose outputs require grad only when it is over
            for hooks in enclosing[-1:] if any(one._calls[-1].records for one in enclosing) else ():
                hooks._side_outputs.adopt([tensor for tensor in left if not tensor.requires_grad])

    def _watches(self, tensor: Tensor) -> bool:
        return (node := node_behind(tensor)) is not None and id(self) in NodePrehook.of(node).watched_by

    def hook_outputs(self) -> None:
        """Put a pre-backward hook on every node behind the outputs of the call that has just returned."""
        call = self._calls[-1]
        path = call.path
        # an input that is returned unchanged has no node of the unit behind it
        outputs = call.take_outputs()
        nodes = {node: None for node in map(node_behind, outputs) if node is not None and node not in path.input_nodes}
        path.add_endpoints([*map(weakref.ref, outputs)])
        path.set_enclosing([(hooks, hooks._calls[-1].path) for hooks in self._enclosing if hooks._calls])
        self.progress.add_path(path, self._engine.pending_backward.add_graph())
        for node in nodes:
            prehook = NodePrehook.of(node)
            prehook.watched_by.add(id(self))
            prehook.reaches.append(partial(self._pre_backward, path))
        for node in call.input_nodes:
            NodePrehook.of(node).leave(path, self._on_input_grad)

    # backward -----------------------------------------------------------------------------

    def _pre_backward(self, path: BackwardPath, gradients: Sequence[Tensor | None]) -> None:
        for hooks, enclosing in path.enclosing:
            if enclosing.entered_in != hooks.progress.backward:
                hooks.enter_from_inner_unit(enclosing, path.has_grad_inputs)
        self._refuse_changed_parameters(path.versions)
        self._engine.on_event(self._index, Event.PRE_BACKWARD)
        self.progress.reach(path)
        if torch.is_grad_enabled():
            # any of these units may have made the gradients
            for hooks in self._outer:
                if hooks.progress.entered:
                    hooks.double_backward.hook_gradients(gradients)
            for hooks, enclosing in path.enclosing:
                hooks.double_backward.hook_endpoints(enclosing.endpoints)
            self.double_backward.hook_endpoints()

    def on_used_outside(self) -> None:
        self._engine.reducer.used_outside(self._index)

    def on_external_grad(self) -> None:
        self._engine.on_event(self._index, Event.EXTERNAL_GRAD)

    def unshard_for_backward(self) -> bool:
        if graph_is_made():
            return False  # a second backward goes through it when the unit may be sharded again
        self._engine.on_event(self._index, Event.PRE_BACKWARD)
        self.progress.reach_again()
        return True

    def enter_from_inner_unit(self, path: BackwardPath, goes_on: bool) -> None:
        """Enter a call of this unit through a side output of an inner unit. `goes_on`: the backward may continue here."""
        if goes_on:  # else it can continue only through a side input, which is not checked
            self._refuse_changed_parameters(path.versions)
        path.enter_from_inner_unit(self.progress.backward)
        if not self.progress.entered:
            self._engine.on_event(self._index, Event.PRE_BACKWARD)
            self.progress.reach_again()

    def _on_input_grad(self, path: BackwardPath, gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            self.double_backward.hook_gradients(gradients)
        if not self.progress.leave(path):
            return
        if not self._unit.trains:
            self._engine.on_event(self._index, Event.INPUT_GRADS_DONE)
        elif self.progress.is_ready():
            self._post_backward()
        elif path.recompute and not path.inputs_are_interior and graph_task() not in self._tasks:
            self._tasks.add(graph_task())
            self._engine.call_at_end_of_graph_task(self._post_checkpoint_backward)

    def _post_checkpoint_backward(self) -> None:
        # the backward may have ended with the checkpoint
        if graph_task() in self._tasks and self.progress.is_ready_after_checkpoint():
            self._post_backward()

    def _post_backward(self) -> None:
        self.progress.take_grads()
        self._engine.on_event(self._index, self._engine.root.post_backward_event())

    def _pre_double_backward(self, versions: int, gradients: Sequence[Tensor | None]) -> None:
        self._refuse_changed_parameters(versions)
        self._engine.on_event(self._index, Event.PRE_BACKWARD)
        self.progress.reach_again()
        if torch.is_grad_enabled():
            self.double_backward.hook_gradients(gradients)
            self.double_backward.hook_endpoints()

    def _refuse_changed_parameters(self, versions: int) -> None:
        if versions != self._unit.versions.now():
            raise self._refusal(
                f"parameters of unit {self._unit.name!r} were changed in place between its forward and its backward; "
                "step the optimizer after the backward of every forward that used them."
            )

    def _refusal(self, text: str) -> ShardingError:
        error = ShardingError(text)
        self._engine.note(error, self._index)
        return error

    def on_gradient(self, early_bucket: int | None) -> None:
        """Handle an accumulated gradient of one parameter. `early_bucket` is its bucket, if that is an early one."""
        if not self.progress.has_grad:
            self._on_first_grad()
        if early_bucket is not None:
            self._engine.on_early_grad(early_bucket)

    def _on_first_grad(self) -> None:
        if self._lost_act is not None:
            lost_act, self._lost_act = self._lost_act, None
            self._engine.note(lost_act, self._index)
            raise lost_act
        if torch.is_grad_enabled():
            raise self._refusal(
                f"a backward with create_graph=True brings gradients to the parameters of unit {self._unit.name!r}, which are "
                "reduced over the ranks and have no graph; ask for those of inputs only: "
                "torch.autograd.grad(loss, inputs, create_graph=True)."
            )
        self.progress.add_grad()
        self._engine.on_event(self._index, Event.GRAD_ACCUMULATED)


def _can_train(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
