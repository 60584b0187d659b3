"""Shows the calls of autograd's engine that name their inputs to a function, and refuses compiled autograd of units.

A loss leads to unsharded parameters, never to shards. For `torch.autograd.grad` and `backward(inputs=...)` of shards the engine
finds no path, runs no node and returns None, so no hook of torch can notice such a call.
"""

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.visits import leads_to_a_unit

_ENGINE: Final = "_engine_run_backward"
"""The function in `torch.autograd` through which both `grad` and `backward` call the engine. Tracing replaces it too."""
_COMPILED_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"
_MARK: Final = "_fsdp_intercepts"
_in_this_thread: Final = threading.local()


class EngineCall(NamedTuple):
    """A call of the engine for chosen inputs."""

    outputs: tuple[Any, ...]
    output_grads: tuple[Tensor | None, ...]
    retain_graph: bool
    create_graph: bool
    inputs: tuple[Any, ...]
    accumulates: bool
    """Whether the gradients are added to `.grad` of the inputs. If not, they are returned."""
    allow_unused: bool


def intercept_engine_calls(translate: Callable[[EngineCall], tuple[Any, Any]], refuse: Callable[[], NoReturn]) -> None:
    """From now on, let `translate` choose the inputs of each call that names inputs, or give the result of the call besides.

    A call without inputs costs one call of Python more. `refuse` raises an error: a graph with units is run by compiled
    autograd. Idempotent.
    """
    run: Callable[..., Any] = getattr(torch.autograd, _ENGINE)
    if hasattr(run, _MARK):
        return

    @uncompiled  # a compiled function that calls `backward` would trace the hooks of the engine
    @wraps(run)
    def run_translated(
        outputs: Any,
        output_grads: Any,
        retain_graph: Any,
        create_graph: Any,
        inputs: Any,
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        # while a thread imports the compiler, its module has no such attribute
        if getattr(sys.modules.get(_COMPILED_AUTOGRAD), "compiled_autograd_enabled", False) and leads_to_a_unit(outputs):
            refuse()
        if inputs:
            call = EngineCall(outputs, output_grads, retain_graph, create_graph, inputs, accumulate_grad, allow_unreachable)
            inputs, answer = translate(call)
            if answer is not None:
                return answer
        try:
            return run(
                outputs, output_grads, retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad=accumulate_grad
            )
        except BaseException:
            _in_this_thread.has_left_work = True
            raise

    setattr(run_translated, _MARK, True)
    setattr(torch.autograd, _ENGINE, run_translated)


def free_queued_work() -> None:
    """If a backward has failed in this thread, free what it has left in autograd's queue, as any later backward does.

    Otherwise the thread frees it after its last line of Python. If the program ends meanwhile, the process aborts. If none has
    failed, nothing may run: where torch is built for CUDA, a process in which a backward has run can fork none that runs one.
    """
    if hasattr(_in_this_thread, "has_left_work"):
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
