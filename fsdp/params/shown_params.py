"""What a module shows of its unit: sharded or unsharded parameters; and the unit that owns a parameter.

[Note: reads in a forward]
While a module shows shards, code may still read its parameters in a forward: a parent that computes with
`self.child.weight`, a layer called without its unit, a forward hook, a function that activation checkpointing recomputes.
Such a read needs the full value. It is recognised by the Python stack: the forward of some module runs, or a backward does.
Then the unit answers the read (gathered_copies.py). Any other read (an optimizer, a print, a clamp between steps) gets the
shard. Listings such as `parameters()` do not pass through here and always give what the module shows.

[Note: gradients that are not reduced yet]
In plain torch `.grad` has the gradient as soon as autograd has accumulated it. Here it is reduced first, and `.grad` has the
gradient of an earlier backward meanwhile. A hook or a recompute that reads, changes or removes it would do so in silence. So the
parameters of a unit are of another class from its first gradient until the reduced ones are put in, whose `.grad` asks the unit.
A property at all times would cost each read by an optimizer 0.1 µs.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from itertools import repeat
from operator import is_not
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import in_a_forward, in_backward
from fsdp.errors import ShardingError
from fsdp.params.param_info import ParamInfo
from fsdp.shards.shard_parameter import Clock


class Owner(Protocol):
    """A unit, as seen by code that has only one of its parameters."""

    name: str
    has_full_params: bool

    def read(self, parameter: nn.Parameter, module: object, reader: object) -> Tensor:
        """The full value of `parameter` of `module`, for a forward. `reader`: the object whose method reads it.

        Where a function reads `module._parameters[name]`, `module` is None, or the object whose method it is.
        """

    def on_listed(self, parameter: nn.Parameter) -> None:
        """In a backward, code lists the parameters that a module shows, this one among them. It may change what is unsharded."""

    def check_modules(self) -> None:
        """Check that the modules show parameters of the unit."""

    def holder_of_grad(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that has the `.grad` which code means, in a backward. Refused if a gradient has come since."""

    def full_value(self, parameter: nn.Parameter) -> Tensor:
        """The full value of `parameter`, in its own dtype, differentiable. Communicates."""

    def local_value(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of `parameter`, differentiable."""


# the unit of each sharded and unsharded parameter; weakly, because the unit refers to its parameters
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register_owner(parameter: nn.Parameter, owner: Owner) -> None:
    """Record that `parameter`, sharded or unsharded, belongs to `owner`."""
    _owners[parameter] = weakref.ref(owner)


def forget_owner(parameter: nn.Parameter) -> None:
    """Record that `parameter` belongs to no unit any more."""
    _owners.pop(parameter, None)  # type: ignore[no-untyped-call]


def owning_unit(parameter: Tensor) -> Owner | None:
    """The unit that owns `parameter`, or None if the parameter belongs to no unit."""
    owner: weakref.ref[Owner] | None = _owners.get(parameter)  # type: ignore[no-untyped-call]
    return None if owner is None else owner()


_in_grad_hook: Final = threading.local()
"""Of this thread, whether a hook of the user on reduced gradients runs: at the end of a backward, as a part of no forward."""


@contextmanager
def reading_shards() -> Iterator[None]:
    """Inside, reads of parameters give what the modules show, also in a backward."""
    outermost = not in_grad_hook()  # a hook may run the backward of another model, which has hooks
    _in_grad_hook.__dict__["is_set"] = True
    try:
        yield
    finally:
        if outermost:
            _in_grad_hook.__dict__.clear()


def in_grad_hook() -> bool:
    """Whether a hook of the user on reduced gradients runs in this thread, see `reading_shards`."""
    return bool(_in_grad_hook.__dict__)


touches: Final = Clock()
"""How often code has put a parameter into a module that has parameters of a unit, or taken one away, in all modules."""


def _touching(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of dict that the user calls to put a parameter in, or to take one away."""

    def touching(shown: "ParamDict", *args: Any, **kwargs: Any) -> Any:
        touches.count += 1
        return method(shown, *args, **kwargs)

    return touching


class ParamDict(dict[str, nn.Parameter | None]):
    """The `_parameters` of a module that has parameters of a unit. Gives what it holds: a read costs what it costs in a dict.

    Tells the units where code in a backward lists what it holds. The units change it by `dict.update`, which counts as no touch.
    """

    __slots__ = ("shared",)

    __setitem__, __delitem__, __ior__ = _touching(dict.__setitem__), _touching(dict.__delitem__), _touching(dict.__ior__)
    clear, pop, popitem = _touching(dict.clear), _touching(dict.pop), _touching(dict.popitem)
    setdefault, update = _touching(dict.setdefault), _touching(dict.update)

    def __init__(self, slots: dict[str, nn.Parameter | None]) -> None:
        super().__init__(slots)
        self.shared = False
        """Whether parameters of several units are in this dict, so that some may be sharded and others unsharded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """An ordinary dict: the copy of a module has units of its own."""
        copied = memo[id(self)] = {name: deepcopy(parameter, memo) for name, parameter in self.items()}
        return copied

    def items(self) -> Any:
        self._tell_that_listed()
        return super().items()

    def values(self) -> Any:
        self._tell_that_listed()
        return super().values()

    def _tell_that_listed(self) -> None:
        # what is compiled lists parameters in a forward, or in a recompute of one
        if not torch.compiler.is_compiling() and in_backward() and not in_grad_hook():
            for parameter in super().values():
                if parameter is not None and (owner := owning_unit(parameter)) is not None:
                    owner.on_listed(parameter)


class InterceptingParamDict(ParamDict):
    """Asks the unit for the value of a parameter that is read in a forward.

    The dict may hold shards, unsharded parameters from before an optimizer step, or unsharded parameters that a backward
    is about to free.
    """

    __slots__ = ()

    @uncompiled
    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        owner = None if parameter is None else owning_unit(parameter)
        if parameter is None or owner is None or not ((in_backward() and not in_grad_hook()) or in_a_forward()):
            return parameter
        # frames: this one, nn.Module.__getattr__, the reader
        module, reader = sys._getframe(1).f_locals.get("self"), sys._getframe(2).f_locals.get("self")
        return cast(nn.Parameter, owner.read(parameter, module, reader))


def show_plainly(module: nn.Module) -> None:
    """Give `module` an ordinary dict of parameters again, unless some of them belong to a unit."""
    param_dict = module._parameters
    if isinstance(param_dict, ParamDict) and all(p is None or owning_unit(p) is None for p in param_dict.values()):
        module.__dict__["_parameters"] = dict(param_dict)


class ModuleParams:
    """The parameters of one unit in one module, and which of them the module shows: the sharded or the unsharded ones."""

    __slots__ = ("_module", "_param_dict", "_resting_params", "_set_params", "_sharded_params", "_unsharded_params")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # see `Unit.module`
        self._sharded_params: dict[str, nn.Parameter] = {}
        self._unsharded_params: dict[str, nn.Parameter] = {}
        self._resting_params = self._sharded_params
        """What the module shows while the unit is not in use: the shards, or full parameters in their places."""
        if isinstance(module._parameters, ParamDict):
            module._parameters.shared = True
        else:
            module.__dict__["_parameters"] = InterceptingParamDict(module._parameters)
        self._param_dict = cast(ParamDict, module._parameters)
        # a module with a second record of its parameters (nn.LSTM) updates it in its own __setattr__
        is_plain = type(module).__setattr__ is nn.Module.__setattr__
        self._set_params: Callable[[dict[str, nn.Parameter]], None] = (
            partial(dict.update, self._param_dict) if is_plain else self._set_attributes
        )

    @property
    def module(self) -> nn.Module | None:
        """The module, or None once it is gone."""
        return self._module()

    def add(self, name: str, sharded: nn.Parameter, unsharded: nn.Parameter) -> None:
        """Manage the parameter `name` of the module."""
        self._sharded_params[name], self._unsharded_params[name] = sharded, unsharded

    def use_unsharded(self) -> None:
        """Let the module show the unsharded parameters. The unit answers reads until `stop_intercepting`."""
        self._set_params(self._unsharded_params)

    def use_sharded(self, is_touched: bool) -> None:
        """Let the module show the shards, and the unit answer reads. What the user has put in stays, for the next check.

        `is_touched`: whether the user may have put in something since the last one.
        """
        known = self._resting_params
        if is_touched:
            ours = (known, self._unsharded_params)
            known = {name: p for name, p in known.items() if any(self._param_dict.get(name) is one[name] for one in ours)}
        self._set_params(known)
        self._param_dict.__class__ = InterceptingParamDict

    def rest_on(self, full: Mapping[int, nn.Parameter]) -> None:
        """Let the module show these in place of shards, by the id of the shard, while the unit is not in use, as now."""
        shards = self._sharded_params
        resting = {name: full[id(shard)] for name, shard in shards.items()} if full else shards
        if resting is not self._resting_params:  # else what the user has put in stays, for the next check
            self._resting_params = resting
            self._set_params(resting)

    def stop_intercepting(self) -> None:
        """Let reads give what the module shows: the unit's forward, or a recompute of it, begins."""
        if not self._param_dict.shared:
            self._param_dict.__class__ = ParamDict

    def intercept_reads(self) -> None:
        """Let the unit answer reads."""
        self._param_dict.__class__ = InterceptingParamDict

    def check(self, unit: str) -> None:
        """Raise ShardingError if the user has put another parameter into the module."""
        shown = list(map(self._param_dict.get, self._resting_params))
        if not all(any(map(is_not, shown, known.values())) for known in (self._resting_params, self._unsharded_params)):
            return
        for name, current, resting in zip(self._resting_params, shown, self._resting_params.values(), strict=True):
            if current is not resting and current is not self._unsharded_params[name]:
                place = f"{type(self.module).__name__}.{name} in unit {unit!r}"
                if current is None:
                    raise ShardingError(
                        f"{place} was taken away after wrapping, as torch.nn.utils.parametrize, prune and weight_norm do; do "
                        "that before wrapping."
                    )
                raise ShardingError(
                    f"{place} was replaced by another parameter after wrapping; copy into the one that is there, or replace it "
                    "before wrapping. torch.func.functional_call replaces parameters too: give it the plain module."
                )

    def _set_attributes(self, parameters: dict[str, nn.Parameter]) -> None:
        # the module's __setattr__ reads the current parameter, and that read must not be intercepted
        self._param_dict.__class__ = ParamDict
        module, count = self.module, touches.count
        for name, parameter in parameters.items():
            if module is not None:
                setattr(module, name, parameter)
        self._param_dict.__class__ = InterceptingParamDict
        touches.count = count


def module_params_of(param_infos: Sequence[ParamInfo], unsharded_params: Sequence[nn.Parameter]) -> tuple[ModuleParams, ...]:
    """One `ModuleParams` for each module that has any of these parameters."""
    found: dict[int, ModuleParams] = {}
    for info, unsharded in zip(param_infos, unsharded_params, strict=True):
        for module, slot in info.slots:
            module_params = found.get(id(module)) or found.setdefault(id(module), ModuleParams(module))
            module_params.add(slot, info.parameter, unsharded)
    return tuple(found.values())


# gradients that are not reduced yet -----------------------------------------------------------

_GRAD: Final[Any] = Tensor.grad
grad_of: Final[Callable[[Tensor], Tensor | None]] = _GRAD.__get__
"""What torch keeps as `.grad`, also of a parameter that refuses to say so."""


def _holder(parameter: nn.Parameter) -> nn.Parameter:
    owner = owning_unit(parameter)
    return parameter if owner is None else owner.holder_of_grad(parameter)


def _write(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if (holder := _holder(parameter)) is not parameter and gradient is not None:
        raise ShardingError(
            "`.grad = x` of a parameter that modules show inside a backward: it is an unsharded one there, whose gradient does "
            "not stay; set it before the backward or after it."
        )
    _GRAD.__set__(holder, gradient)


@cache
def _pending(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    def copy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        pending, parameter.__class__ = parameter.__class__, kind
        try:
            return deepcopy(parameter, memo)
        finally:
            parameter.__class__ = pending

    def add_hook(parameter: nn.Parameter, hook: Any) -> Any:
        _holder(parameter)
        return kind.register_hook(parameter, hook)  # type: ignore[no-untyped-call]

    def add_late_hook(parameter: nn.Parameter, hook: Any) -> Any:
        _holder(parameter)
        return kind.register_post_accumulate_grad_hook(parameter, hook)  # type: ignore[no-untyped-call]

    grad = property(lambda parameter: grad_of(_holder(parameter)), _write, lambda parameter: _write(parameter, None))
    hooks = {"register_hook": add_hook, "register_post_accumulate_grad_hook": add_late_hook}
    return type(kind.__name__, (kind,), {"__slots__": (), "__deepcopy__": copy, "grad": grad, **hooks})


class PendingGrads:
    """Parameters that are of another class while their unit has gradients that are not reduced."""

    __slots__ = ("_kinds", "_parameters", "_pending_kinds", "is_pending")

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kinds = [*map(type, parameters)]
        self._pending_kinds = [*map(_pending, self._kinds)]
        self.is_pending = False

    def set(self, is_pending: bool) -> None:
        """Some gradients have come, or all are where they belong."""
        if self.is_pending is not is_pending:
            self.is_pending = is_pending
            [*map(setattr, self._parameters, repeat("__class__"), self._pending_kinds if is_pending else self._kinds)]
