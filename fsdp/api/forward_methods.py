"""Methods of a unit that compute, besides its `forward`."""

import inspect
from types import MethodType
from typing import Any

from torch import nn

from fsdp.errors import ShardingError
from fsdp.runtime.registry import unit_ref_of


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit run as its forward: with unsharded parameters, and with a backward through what it returns.

    Use it for methods that compute with the unit's own layers: `encode`, `decode`, a `generate` that does not call the module.
    A method that calls the module itself, as most `generate` methods do, does not need it.

    Args:
        module: a unit, or its FullyShardedDataParallel.
        method_name: the name of the method. It is replaced on this one object. Registering it twice changes nothing.

    Raises:
        ShardingError: `module` is not a unit, has no such method, or the method is a generator or a coroutine.
    """
    unit = module if unit_ref_of(module) is not None else getattr(module, "module", module)
    if unit_ref_of(unit) is None:
        raise ShardingError(
            f"register_forward_method: {type(module).__name__} is not a unit; wrap it first, or register a method of the "
            "unit that contains it."
        )
    method = getattr(unit, method_name, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ShardingError(f"register_forward_method: {type(unit).__name__} has no method {method_name!r}.")
    if isinstance(getattr(method, "__func__", None), _ForwardMethod):
        return
    if method_name in ("forward", "__call__"):
        raise ShardingError(f"register_forward_method: {method_name!r} is a forward already.")
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise ShardingError(
            f"register_forward_method: {method_name!r} goes on after it has returned, when the parameters are resharded; "
            "register what it calls instead."
        )
    unit.__dict__[method_name] = MethodType(_ForwardMethod(method, unit), unit)


def unregister_forward_methods(module: nn.Module) -> None:
    """Undo every `register_forward_method` of `module`."""
    for name, method in list(module.__dict__.items()):
        registered = getattr(method, "__func__", None)
        if isinstance(registered, _ForwardMethod):
            del module.__dict__[name]
            original = registered.of(module)
            if getattr(module, name, None) != original:  # it was an attribute of this one object before
                module.__dict__[name] = original


class _ForwardMethod:
    """Calls a method between the forward pre-hooks and the forward hooks of its unit. A copy of the module shares it."""

    def __init__(self, method: Any, module: nn.Module) -> None:
        self._is_bound = getattr(method, "__self__", None) is module
        self._method = method.__func__ if self._is_bound else method

    def of(self, module: nn.Module) -> Any:
        """The method itself, of `module`."""
        return MethodType(self._method, module) if self._is_bound else self._method

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = unit_ref_of(module)
        assert sharded is not None, "it was a unit when the method was registered"
        return sharded.hooks[sharded.index].run_as_forward(self.of(module), args, kwargs)
