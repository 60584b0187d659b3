"""Keeps torch.compile out of functions of the engine."""

from collections.abc import Callable
from inspect import getclosurevars
from types import FunctionType
from typing import Any, Final, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_FRAMES: Final = torch._C._dynamo.eval_frame
_SKIP: Final = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.SKIP)


def uncompiled(function: Function) -> Function:
    """Never compile `function` and the functions it calls: a compiled model breaks its graph here.

    `torch.compiler.disable` does the same, but it imports the compiler and adds a layer to each call. This function costs
    nothing in programs that do not compile.
    """
    function.__dict__["_torchdynamo_disable"] = True
    function.__dict__["_torchdynamo_disable_msg"] = "fsdp gathers and releases parameters here"
    _FRAMES.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def is_compiled(function: object) -> bool:
    """Whether torch.compile made `function`."""
    return isinstance(function, FunctionType) and hasattr(function, "_torchdynamo_orig_callable")


def is_full_graph(function: Any) -> bool:
    """Whether torch.compile made `function` with fullgraph=True. It fails where another would run without being compiled."""
    return is_compiled(function) and bool(getattr(getclosurevars(function).nonlocals.get("self"), "fullgraph", False))
