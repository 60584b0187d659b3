"""The forward hooks of every unit, and the calls that they make to the passes. backward_hooks.py has those of a backward."""

import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from os import getpid
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.cast import Cast
from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import in_backward, times_running
from fsdp.autograd.pytree import MANAGED, modules_within, tensors_in
from fsdp.autograd.visits import ForwardCall, grad_inputs, of_this_thread, with_tangents
from fsdp.debug.guard import Guard
from fsdp.device.storage import storage_key
from fsdp.errors import ShardingError
from fsdp.params.module_tree import refuse_transforms
from fsdp.params.shown_params import in_grad_hook
from fsdp.params.unit import RefuseCopy
from fsdp.runtime.backward_hooks import AccumulateGradChecks, BackwardHooks
from fsdp.runtime.passes import Passes
from state_machine import Event

_CONTAINERS: Final = frozenset({list, dict, defaultdict, OrderedDict, deque})
"""The classes of attributes that are searched for tensors."""
_OF_TORCH: Final = frozenset((*vars(nn.Module()), *MANAGED, "__deepcopy__"))
"""The attributes of a module that torch and this library manage, of which buffers alone can be side outputs."""
_OF_ALL_MODULES: Final = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
_NO_HOOKS: Final[dict[int, Any]] = {}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a forward, by position and by name."""


def hook_units(passes: Passes) -> list["ForwardHooks"]:
    """Set the hooks of all units of one engine; return those of each unit."""
    engine, found = passes.engine, list[ForwardHooks]()
    backward = [BackwardHooks(passes, index) for index in range(len(engine.units))]
    enclosing: list[list[ForwardHooks]] = [[] for _ in engine.units]
    modules = {id(module) for unit in engine.units for module in unit.modules}
    for index, inside in enumerate(engine.descendants):  # outer units come first
        found.append(ForwardHooks(passes, index, backward[index], enclosing[index], modules))
        for inner in inside:
            enclosing[inner].append(found[index])
    outer = [hooks for hooks, inside in zip(backward, engine.descendants, strict=True) if inside]
    for hooks in backward:
        hooks.outer = outer
    return found


class ForwardHooks(RefuseCopy):
    """The forward hooks of one unit. They call the stages of the passes."""

    def __init__(
        self, passes: Passes, index: int, backward: BackwardHooks, enclosing: "Sequence[ForwardHooks]", modules_of_units: set[int]
    ) -> None:
        engine = passes.engine
        super().__init__(engine.units[index])
        self._passes = passes
        self._engine = engine
        self._index = index
        self._backward = backward
        self._enclosing = enclosing
        self._innermost = not engine.descendants[index]
        self._input_dtype = self._unit.config.mp_policy.input_dtype(is_root=index == 0)
        self._process = getpid()
        self._calls: list[ForwardCall] = []
        members = self._unit.modules
        own_modules = [one for module in members for one in modules_within(module, modules_of_units)]
        self._side_outputs = SideOutputs(members, own_modules, self._see)
        self._accumulate_grad_checks = AccumulateGradChecks(self._unit)
        self._handles = [*backward.handles, *self._accumulate_grad_checks.relayed.values()]
        for module in members:
            self._handles.append(module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._post_forward, always_call=True, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks of the unit, also those of a backward."""
        self._side_outputs.remove()
        for handle in self._handles:
            handle.remove()

    def run_as_forward(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the unit as if it were its forward, between its forward hooks."""
        module = self._unit.module
        args, kwargs = self._pre_forward(module, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
        except Exception:
            self._post_forward(module, args, kwargs, None)
            raise
        except BaseException as failure:
            self._engine.note(failure)
            self._engine.abandon_step(failure)
            raise
        changed = self._post_forward(module, args, kwargs, output)
        return output if changed is None else changed

    @uncompiled
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getpid() != self._process:
            self._unit.refuse_forked()
        inputs = grad_inputs(args, kwargs) if torch.is_grad_enabled() else ()
        recompute, versions = in_backward() and not in_grad_hook(), self._unit.versions.forward_begins()
        call, given = ForwardCall(self._index, recompute, inputs, self._innermost, versions), None
        if call.has_late_inputs and not recompute:
            args, kwargs = given = of_this_thread(args, kwargs, inputs)
            call = ForwardCall(self._index, recompute, grad_inputs(args, kwargs), self._innermost, versions)
        if self._calls and not call.path.recompute and self._is_nested(call):
            call.nest_in(self._calls[-1])
        self._calls.append(call)
        if self._engine.reducer.runs_grad_hooks:
            self._engine.refuse_in_grad_hook(f"a forward of unit {self._unit.name!r}")
        if not call.nested:  # a nested call is a part of the call around it
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(self._unit.name)
            self._side_outputs.begin()
            if call.path.recompute:
                self._passes.pre_recompute(call)
            else:
                self._accumulate_grad_checks.check()
                self._passes.pre_forward(call)
                if self._unit.has_replaced:
                    call.path.versions = self._unit.versions.forward_begins()
            if call.path.recompute or self._engine.splits_backward:
                call.gradients = [unsharded.grad for unsharded in self._unit.unsharded_params]
        call.refused = False
        unsharded = self._engine.is_unsharded(self._index)
        if unsharded:
            self._unit.stop_intercepting()
            if self._unit.config.guard and not call.nested:
                call.guard = Guard(self._unit)
        if (dtype := self._input_dtype) is None or not unsharded:
            return given
        call.cast = Cast(dtype)
        return call.cast(args), call.cast(kwargs)

    @uncompiled
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._calls:
            return None  # a pre-hook before ours has failed
        call = self._calls[-1]
        if call.cast is not None:
            call.cast.write_back()
        if call.refused or call.nested:
            self._calls.pop()
            return None
        if call.guard is not None:
            call.guard.end()
        try:
            failure = sys.exc_info()[1]
            if failure is not None and failure is not call.handled:
                self._end_failed(call, failure)
                return None
            self._end_returned(call, (args, kwargs), output)
        finally:
            self._calls.pop()
            if call.path.recompute:
                self._passes.leave_recompute(call)
        policy = self._unit.config.mp_policy
        return None if policy.output_dtype is None else Cast(policy.output_dtype)(output)

    def _end_returned(self, call: ForwardCall, given: Arguments, output: Any) -> None:
        """A call has returned: look at what it did to the parameters, then put hooks on its outputs."""
        try:
            if call.guard is not None:
                call.guard.refuse_hidden_updates()
            if call.path.recompute:
                self._unit.write_back_inplace_of_recompute()
            else:
                call.path.versions += self._unit.write_back_inplace()
                self._unit.refuse_changed()
            self._unit.refuse_lost_acts(call.gradients)
            outputs, side_outputs = self._find_outputs(call, given, output)
        except BaseException as failure:
            self._fail(call, failure)
            raise
        side = side_outputs if call.records else [one for one in side_outputs if call.has_made(one)]
        is_entered = bool(outputs or side) or any([reference() is not None for reference in call.entries])
        if call.path.recompute:
            self._engine.on_event(self._index, Event.POST_RECOMPUTE)
        else:
            self._passes.post_forward(call, Event.POST_FORWARD if is_entered else Event.POST_FORWARD_NO_GRAD)
        if call.path.recompute or is_entered:
            around = [(one._backward, one._calls[-1].path) for one in self._enclosing if one._calls]
            self._backward.hook_outputs(call, outputs, side_outputs, around)

    def _end_failed(self, call: ForwardCall, failure: BaseException) -> None:
        """An exception leaves a call. torch can stop a recompute early by one, in whose place no other can be raised."""
        if getpid() != self._process:
            return  # what the rank itself does is not over; this process was forked from it
        if not call.path.recompute:
            self._fail(call, failure)
            return
        self._unit.write_back_inplace_of_recompute()
        try:
            self._unit.refuse_lost_acts(call.gradients)
        except ShardingError as refusal:
            self._backward.visit.add_lost_act(refusal)

    def _fail(self, call: ForwardCall, failure: BaseException) -> None:
        """Undo what a call that has failed did to the unit's parameters, say so on its error, and end a forward as failed."""
        self._engine.note(failure, self._index)
        if undone := self._unit.roll_back_inplace(call.taken):
            failure.add_note(f"fsdp: undone is what this forward did to {', '.join(undone)}, or to their `.grad`.")
        if not call.path.recompute:
            self._passes.post_forward(call, Event.FORWARD_FAILED)

    def _is_nested(self, call: ForwardCall) -> bool:
        """Whether the unit is called inside its own forward. If not, Ctrl-C has ended an earlier call unnoticed: clean up.

        Raises:
            ShardingError: the earlier call runs on another thread.
        """
        if times_running(self._unit.modules, ForwardHooks.run_as_forward.__code__, self) > 1:
            return True
        try:
            self._engine.refuse_two_threads()
        except ShardingError:
            self._calls.append(call)  # the hook at the end of this call removes it
            raise
        for dead in self._calls:
            dead.discard()
        self._calls.clear()
        self._engine.clean_up_dead_forward(self._index)
        return False

    def _find_outputs(self, call: ForwardCall, given: Arguments, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """What the call returned, and what it left behind, through which a backward can enter it.

        Refuse the parameters of the unit among them.
        """
        keys = self._unit.keys
        is_one = isinstance(output, Tensor) and forward_ad._current_level < 0
        returned = [output] if is_one else with_tangents(list(tensors_in(output)))
        left = self._side_outputs.attributes()
        if call.records:  # it may have put tensors into a list that it was given, or have changed one in place
            left += [tensor for tensor in grad_inputs(*given) if call.has_made(tensor)]
        for tensor in (*returned, *left):
            if storage_key(tensor) in keys:
                raise ShardingError(
                    f"unit {self._unit.name!r} returns one of its own parameters (or a view of one), whose memory is "
                    "freed after the forward; return a copy instead (`weight.clone()`), or compute with it inside the unit."
                )
        left += [seen for reference in call.captured if (seen := reference()) is not None]
        if not call.records:
            enclosing = [one for one in self._enclosing if one._calls]
            # in a reentrant checkpoint, whose outputs require grad only when it is over
            for hooks in enclosing[-1:] if any(one._calls[-1].records for one in enclosing) else ():
                hooks._calls[-1].captured += [weakref.ref(tensor) for tensor in (*returned, *left) if not tensor.requires_grad]
        return [tensor for tensor in returned if tensor.requires_grad], [tensor for tensor in left if tensor.grad_fn is not None]

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module inside has ended its forward, and hooks of the user have seen its arguments and its output."""
        if not self._calls:
            return  # in a recompute of a part of the unit, or called by itself
        call = self._calls[-1]
        # `requires_grad` is read when the forward ends, because a reentrant checkpoint sets it on its outputs only afterwards
        call.captured += [weakref.ref(tensor) for tensor in tensors_in(output)]
        # in a compiled unit, intermediate results have no nodes, and a reference makes them outputs of the graph
        if not torch.compiler.is_compiling():
            for tensor in tensors_in((args, kwargs, output)):
                self._backward.enter_side(tensor, call)


class SideOutputs:
    """The side outputs of one unit: tensors that leave a forward other than as its return value. A backward can enter there too.

    They are attributes of its modules, such as a balancing loss, and what hooks capture, or compute from what they see.
    """

    __slots__ = ("_handles", "_hooks", "_inner", "_looked_at", "_modules", "_names", "_see")

    def __init__(self, members: Sequence[nn.Module], own_modules: Sequence[nn.Module], see: Callable[..., None]) -> None:
        """`see` is a forward hook on each module inside of which a hook of the user's sees what it is given and returns."""
        self._modules = [*map(weakref.ref, own_modules)]
        self._names: list[tuple[tuple[int, str], list[str]]] = [((0, ""), []) for _ in own_modules]
        """Of each module: how many attributes there were and the newest of them when their names were searched, and the names."""
        inner = [one for one in own_modules if all(one is not module for module in members)]
        self._inner = [*map(weakref.ref, inner)]
        self._hooks = [weakref.ref(hooks) for one in inner for hooks in (one._forward_pre_hooks, one._forward_hooks)]
        self._looked_at: list[tuple[int, int]] = []
        """How many hooks were in each of these dicts, and of all modules, and the last one, when they were looked at."""
        self._handles: list[RemovableHandle] = []
        self._see = see

    def begin(self) -> None:
        """A forward begins: see to it that modules with hooks of the user's are seen, and no others."""
        hooks = [reference() or _NO_HOOKS for reference in self._hooks]
        if any(hooks) or any(_OF_ALL_MODULES):
            looked_at = [*map(_outline, hooks), *map(_outline, _OF_ALL_MODULES)]
            if looked_at != self._looked_at:
                self._hook_inner(hooks)

    def _hook_inner(self, hooks: Sequence[Mapping[int, Any]]) -> None:
        self.remove()
        all_modules = not all(map(_keeps_nothing, chain.from_iterable(map(dict.values, _OF_ALL_MODULES))))
        for reference, before, after in zip(self._inner, hooks[::2], hooks[1::2], strict=True):
            module = reference()
            if module is not None and (all_modules or not all(map(_keeps_nothing, (*before.values(), *after.values())))):
                self._handles.append(module.register_forward_hook(self._see, with_kwargs=True))
        self._looked_at = [*map(_outline, hooks), *map(_outline, _OF_ALL_MODULES)]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def attributes(self) -> list[Tensor]:
        """Return the tensors that are attributes now: not parameters, modules and what is torch's own, but also buffers.

        Every forward calls this, so the names of a module are searched again only if a new one has come.
        """
        values: list[Any] = []
        for number, reference in enumerate(self._modules):
            if (module := reference()) is None:
                continue  # another one took its place after wrapping
            attributes, (searched, names) = vars(module), self._names[number]
            if searched != (now := (len(attributes), next(reversed(attributes)))):
                names = [name for name in attributes if name not in _OF_TORCH]
                self._names[number] = now, names
            values += map(attributes.get, names)
            if module._buffers:
                values += [buffer for buffer in module._buffers.values() if buffer is not None and buffer.requires_grad]
        found = [value for value in values if isinstance(value, Tensor)]
        if not _CONTAINERS.isdisjoint(map(type, values)):
            for value in values:
                if type(value) in _CONTAINERS:
                    found += [one for one in tensors_in(value) if not isinstance(one, nn.Parameter)]
        return found


def _outline(hooks: Mapping[int, Any]) -> tuple[int, int]:
    """The number of hooks and that of the last one, which change if hooks are set or removed."""
    return len(hooks), next(reversed(hooks), -1)


def _keeps_nothing(hook: Any) -> bool:
    """Whether a hook is torch's, such as those of tensor parallelism and of spectral norm, and calls nothing of the user's."""
    try:
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    except ValueError:
        return False  # a variable of the function around it has no value yet
    functions = [hook, *(one for one in cells if callable(one))]
    return all(str(getattr(getattr(one, "func", one), "__module__", "")).startswith("torch.") for one in functions)
