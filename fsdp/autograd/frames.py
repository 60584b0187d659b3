"""Reads the Python stack where torch has no function to ask: which forward or backward runs, and who called it."""

import os
import sys
import threading
from collections.abc import Collection, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

graph_task: Final = torch._C._current_graph_task_id
"""The number of the graph task that the calling thread runs, or -1. A reentrant checkpoint runs a graph task of its own."""

_CALL: Final = nn.Module._call_impl.__code__
GRAD: Final = torch.autograd.grad.__code__
_BACKWARD: Final = torch.autograd.backward.__code__
_RUN: Final = torch.autograd.graph._engine_run_backward.__code__
_LOAD: Final = nn.Module.load_state_dict.__code__
_SAVE: Final = nn.Module.state_dict.__code__
_LIBRARIES: Final = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
"""The folders of torch and of this package."""
_TORCH_STATE: Final = "torch.distributed.checkpoint.state_dict"
"""The module's name, because importing it takes most of a second."""


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return graph_task() != -1


def in_a_forward() -> bool:
    """Whether the forward of any module is running."""
    return any(frame.f_code is _CALL for frame in _frames())


def is_running(module: object) -> bool:
    """Whether a forward of `module` is running. Ctrl-C ends a forward and no hook is called, so hooks cannot answer this."""
    return any(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in _frames())


def times_running(modules: Collection[nn.Module], method: CodeType, runner: object) -> int:
    """How many calls of `modules` and of `method` of `runner` are running, in sum."""
    callees = (frame.f_locals.get("self") for frame in _frames() if frame.f_code in (_CALL, method))
    watched = {id(runner), *map(id, modules)}
    return sum(id(callee) in watched for callee in callees)


def self_of_call(method: CodeType) -> Any:
    """The object of which `method` runs, the innermost one; None if there is none."""
    return next((frame.f_locals["self"] for frame in _frames() if frame.f_code is method), None)


def stepping_optimizer() -> str | None:
    """The class of the optimizer whose `step` calls this, but not through the forward of a module in its closure."""
    for frame in _frames():
        if frame.f_code is _CALL:
            return None
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return type(frame.f_locals["self"]).__name__
    return None


_METHODS_OF_SHARDS: Final = ("fsdp.shards.shard_tensor", "fsdp.shards.shard_parameter")


def called_by_this_package() -> bool:
    """Whether the innermost code that is not torch's, beyond the caller's own file, is this package's."""
    own = sys._getframe(1).f_code.co_filename
    for frame in _frames():
        name = frame.f_globals.get("__name__", "")
        if name in _METHODS_OF_SHARDS:  # whoever calls them
            continue
        if name.partition(".")[0] != "torch" and frame.f_code.co_filename not in (own, __file__):
            return bool(name.partition(".")[0] == __name__.partition(".")[0])
    return False


class LoadCall(NamedTuple):
    """The arguments of a `load_state_dict`, which its hooks do not receive."""

    module: nn.Module
    state_dict: dict[str, Any]
    strict: bool
    assign: bool


def load_call() -> LoadCall | None:
    """The `load_state_dict` that runs."""
    given = next((frame.f_locals for frame in _frames() if frame.f_code is _LOAD), None)
    return None if given is None else LoadCall(given["self"], given["state_dict"], given["strict"], given["assign"])


def settle_assign(metadata: dict[str, Any]) -> bool:
    """Take out of `metadata` what torch left of an earlier load with assign=True. Return whether the load that runs has it."""
    if (call := load_call()) is not None and not call.assign:
        metadata.pop("assign_to_params_buffers", None)
    return "assign_to_params_buffers" in metadata


def modules_being_saved() -> Iterator[nn.Module]:
    """The modules whose `state_dict` runs, inner ones first."""
    return (frame.f_locals["self"] for frame in _frames() if frame.f_code is _SAVE)


class FullStateCall(NamedTuple):
    """A call of torch's functions for state dicts with full_state_dict=True, which asks for a `state_dict`."""

    loads: bool
    """Whether it loads. torch then asks for the sharded state, and puts the full tensors that it has into it."""
    offloads: bool
    """Whether the full state is wanted in host memory (cpu_offload=True)."""
    keeps: bool
    """Whether this rank gets the full state. With cpu_offload=True the first rank alone does."""


def full_state_call() -> FullStateCall | None:
    """The call of torch's functions for state dicts that runs, if it has full_state_dict=True."""
    if _TORCH_STATE not in sys.modules:
        return None
    for frame in _frames():
        if frame.f_globals.get("__name__") == _TORCH_STATE and "info" in frame.f_locals:
            info, dist = frame.f_locals["info"], frame.f_globals["dist"]
            loads = any(outer.f_code.co_name == "_load_optim_state_dict" for outer in _outwards(frame))
            if not loads and not info.full_state_dict:
                return None
            # torch's own rule, by torch's own group
            keeps = not info.cpu_offload or not dist.is_initialized() or dist.get_rank() == 0
            return FullStateCall(loads, info.cpu_offload, keeps)
    return None


def caller_of_torch_states() -> FrameType | None:
    """The call of one of torch's functions for state dicts that runs, the outermost one."""
    return next(iter([frame for frame in _frames() if frame.f_globals.get("__name__") == _TORCH_STATE][::-1]), None)


def own_method(target: Any, name: str) -> Any:
    """The method of `target`, or that of its class where torch's functions for state dicts have put one of theirs before it.

    Theirs ask this engine, which would ask it again.
    """
    method = getattr(target, name)
    is_theirs = _TORCH_STATE in sys.modules and method in sys.modules[_TORCH_STATE]._patched_state_dict
    return partial(getattr(type(target), name), target) if is_theirs else method


def gets_gradient(leaf: Tensor) -> bool:
    """Whether the running graph task computes a gradient for `leaf`. A reentrant checkpoint has a graph task of its own."""
    # the engine already knows, because it walks the graph before the first node runs
    return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)


def backward_caller() -> CodeType | None:
    """What runs the backward: `GRAD`, where no parameter gets a gradient, or the caller of `torch.autograd.backward`.

    A thread of autograd's own (CUDA) does not show it. There the stacks of all threads are searched; None when in doubt.
    """
    caller, frame = None, sys._getframe().f_back
    while frame is not None:  # each step of a generator is a call
        if frame.f_code is _BACKWARD:
            return frame.f_back and frame.f_back.f_code
        if frame.f_code is GRAD:
            caller = GRAD
        frame = frame.f_back
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return caller
    callers = {GRAD if frame.f_code is GRAD else frame.f_back and frame.f_back.f_code for frame in _backward_calls()}
    return callers.pop() if len(callers) == 1 else None


def in_split_backward() -> bool:
    """Whether torch's pipelining computes gradients of inputs now, to compute those of weights later by itself."""
    own = isinstance(threading.current_thread(), threading._DummyThread)
    return any(frame.f_code.co_name == "stage_backward_input" for frame in (_all_frames() if own else _frames()))


def graph_is_made() -> bool:
    """Whether the running backward makes a graph (create_graph=True). True when in doubt.

    Grad mode does not show it, because grad mode is on in every recompute.
    """
    for frame in _frames():
        if frame.f_code in (_BACKWARD, GRAD):
            return bool(frame.f_locals["create_graph"])
    # a thread of autograd's own (CUDA) does not show its caller
    flags = [frame.f_locals["create_graph"] for frame in _backward_calls()]
    return any(flags) or not flags


class UnitCall(NamedTuple):
    """What a thread does with the units of a root: it runs the forward of a unit, or a backward, or neither."""

    unit: int | None
    """The id of the module of the innermost unit whose forward runs."""
    in_backward: bool
    place: str
    """The line of the user's code that runs it."""


def innermost_call(innermost: FrameType | None, units: Collection[int]) -> UnitCall:
    """What the thread with this innermost frame does with `units` (ids of modules)."""
    unit, in_backward, place = None, False, ""
    for frame in _outwards(innermost):
        file = frame.f_code.co_filename
        if frame.f_code is _CALL and id(frame.f_locals.get("self")) in units:
            unit, place = unit or id(frame.f_locals["self"]), ""
        elif frame.f_code is _RUN:
            in_backward, place = True, ""
        elif not place and not file.startswith(_LIBRARIES):
            place = f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}"
    return UnitCall(unit, in_backward, place or "no line of Python")


def running_backward() -> FrameType | None:
    """The frame on the calling thread that has called autograd's engine, if there is one."""
    return next((frame for frame in _frames() if frame.f_code is _RUN), None)


def _frames() -> Iterator[FrameType]:
    """The frames of the calling thread, innermost first."""
    return _outwards(sys._getframe(1))


def _backward_calls() -> Iterator[FrameType]:
    """The running calls of `torch.autograd.backward` and `torch.autograd.grad` on all threads."""
    return (frame for frame in _all_frames() if frame.f_code in (_BACKWARD, GRAD))


def _all_frames() -> Iterator[FrameType]:
    """The frames of all threads."""
    return (frame for innermost in sys._current_frames().values() for frame in _outwards(innermost))


def _outwards(innermost: FrameType | None) -> Iterator[FrameType]:
    frame = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back
