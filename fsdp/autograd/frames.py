"""What is on the Python stack. Asked where torch tells nobody."""

import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

graph_task: Final = torch._C._current_graph_task_id
"""The backward the calling thread is inside, as autograd counts: a reentrant checkpoint runs one of its own; or -1."""

_CALL: Final = nn.Module._call_impl.__code__
_GRAD: Final = torch.autograd.grad.__code__
_BACKWARD: Final = torch.autograd.backward.__code__
_RUN: Final = torch.autograd.graph._engine_run_backward.__code__
_LOAD: Final = nn.Module.load_state_dict.__code__
_SAVE: Final = nn.Module.state_dict.__code__


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return graph_task() != -1


def in_a_forward() -> bool:
    """Whether the forward of any module is running."""
    return any(frame.f_code is _CALL for frame in _frames())


def is_running(module: nn.Module) -> bool:
    """Whether a forward of `module` is running; Ctrl-C ends one without any hook being called."""
    return any(frame.f_code is _CALL and frame.f_locals.get("self") is module for frame in _frames())


def times_running(module: nn.Module, method: CodeType, runner: object) -> int:
    """How many calls of `module` are running, and of `method` of `runner`."""
    calls = ((frame.f_code, frame.f_locals.get("self")) for frame in _frames() if frame.f_code in (_CALL, method))
    return sum(called is module or called is runner for _, called in calls)


def loading_call() -> tuple[nn.Module, dict[str, Any], bool] | None:
    """The module, the state dict and `strict` of the `load_state_dict` that runs; its hooks are not told of them."""
    for frame in _frames():
        if frame.f_code is _LOAD:
            return frame.f_locals["self"], frame.f_locals["state_dict"], frame.f_locals["strict"]
    return None


def modules_being_saved() -> Iterator[nn.Module]:
    """Those whose `state_dict` runs, inner ones first."""
    return (frame.f_locals["self"] for frame in _frames() if frame.f_code is _SAVE)


def gets_gradient(leaf: Tensor) -> bool:
    """Whether the graph task that runs brings a gradient to `leaf`. A reentrant checkpoint has a task of its own."""
    # the engine has walked the graph already
    return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)


def in_autograd_grad() -> bool:
    """Whether the backward that runs is `torch.autograd.grad`, which brings no gradient to any parameter of ours.

    A thread of autograd's own (CUDA) does not show who began the backward, so there every thread is asked; when in doubt, no.
    """
    asks = False
    for frame in _frames():
        if frame.f_code is _BACKWARD:
            return False
        asks = asks or frame.f_code is _GRAD
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return asks
    found = {frame.f_code for innermost in sys._current_frames().values() for frame in _outwards(innermost)} & {_GRAD, _BACKWARD}
    return found == {_GRAD}


def graph_is_made() -> bool:
    """Whether the backward that runs makes a graph of its own (create_graph=True); when in doubt, yes.

    Grad mode does not tell inside a replay, where it is on.
    """
    for frame in _frames():
        if frame.f_code in (_BACKWARD, _GRAD):
            return bool(frame.f_locals["create_graph"])
    # a thread of autograd's own (CUDA) does not show who began the backward
    found = [
        frame.f_locals["create_graph"]
        for innermost in sys._current_frames().values()
        for frame in _outwards(innermost)
        if frame.f_code in (_BACKWARD, _GRAD)
    ]
    return any(found) or not found


def running_backward() -> FrameType | None:
    """The frame that has called autograd's engine, on the calling thread, if there is one."""
    return next((frame for frame in _frames() if frame.f_code is _RUN), None)


def _frames() -> Iterator[FrameType]:
    """From the innermost to the outermost, of the calling thread."""
    return _outwards(sys._getframe(1))


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back
