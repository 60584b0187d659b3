"""FlatParameter, and how modules show views of a vector in place of parameters.

Rule 1: a module whose parameters are flat has no Parameter of that name; a forward gives it a view of the vector instead.
Rule 2: the views are made anew in each forward, because a vector's memory may have moved.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.params.gathered_copies import full_tensor

Slot = tuple[str, nn.Module, str]
"""The name of a module inside the wrapped one, the module, and the name of a parameter in it."""


class FlatParameter(nn.Parameter):
    """A vector that holds the elements of several parameters, one after the other.

    Shapes: (n,) with n the number of elements of `params` together, rounded up to a multiple of `multiple`.
    """

    _param_infos: list[Slot]
    _shared_param_infos: list[tuple[Slot, Slot]]
    _param_shapes: tuple[torch.Size, ...]
    _param_numels: tuple[int, ...]

    def __new__(cls, params: Sequence[nn.Parameter], requires_grad: bool = True, multiple: int = 1) -> "FlatParameter":
        """Copy `params` into one new vector."""
        if not isinstance(params, list | tuple) or not params:
            raise ValueError("FlatParameter: give a list or tuple with at least one parameter.")
        if not all(isinstance(p, nn.Parameter) for p in params):
            raise ValueError("FlatParameter: every item of the list must be an nn.Parameter.")
        if any(isinstance(p, FlatParameter) for p in params):
            raise ValueError("FlatParameter: a parameter of the list is flat already.")
        parts = [p.detach().reshape(-1) for p in params]
        missing = -sum(p.numel() for p in params) % multiple
        data = torch.cat([*parts, parts[0].new_zeros(missing)])
        made: FlatParameter = super().__new__(cls, data, requires_grad=requires_grad)
        return made

    def __init__(self, params: Sequence[nn.Parameter], requires_grad: bool = True, multiple: int = 1) -> None:
        self._param_shapes = tuple(p.size() for p in params)
        self._param_numels = tuple(p.numel() for p in params)
        self._param_infos = []
        self._shared_param_infos = []

    def set_slots(self, slots: Sequence[Sequence[Slot]]) -> None:
        """Remember every place of each parameter."""
        self._param_infos = [found[0] for found in slots]
        self._shared_param_infos = [(found[0], other) for found in slots for other in found[1:]]

    def get_param_views(self, external_data: Tensor | None = None) -> Iterator[Tensor]:
        """Return a view of each parameter, of this vector or of another one with the same length."""
        data = self if external_data is None else external_data
        length = sum(self._param_numels)
        if data.numel() < length:
            raise ValueError(f"FlatParameter: the data has {data.numel()} elements; it needs {length}.")
        return iter(views_of(data, self._param_shapes))

    def metadata(self) -> tuple[list[str], tuple[torch.Size, ...], tuple[int, ...]]:
        """Return the names, shapes and numbers of elements of the parameters."""
        return [joined(path, name) for path, _, name in self._param_infos], self._param_shapes, self._param_numels

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the attributes refer to modules, which refer to this parameter
        return _rebuild, (self.data, self.requires_grad), dict(self.__dict__)


def _rebuild(data: Tensor, requires_grad: bool) -> FlatParameter:
    """Make a FlatParameter again from what pickle saved. Its attributes follow."""
    return torch.Tensor._make_subclass(FlatParameter, data, requires_grad)


def joined(path: str, name: str) -> str:
    """The name of what is called `name` in the module at `path`."""
    return f"{path}.{name}" if path else name


def views_of(data: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views with these shapes of a vector (n,) that may be longer than all of them together."""
    flat = data.view(-1)
    numels = [prod(shape) for shape in shapes]
    rest = flat.numel() - sum(numels)
    parts = flat.split_with_sizes([*numels, rest] if rest else numels)
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=False)]


def chunk_and_pad(tensor: Tensor, num_chunks: int) -> list[Tensor]:
    """Cut a flattened tensor into `num_chunks` chunks of one length. Zeros fill what is missing at the end."""
    flat = tensor.reshape(-1)
    length = -(-flat.numel() // num_chunks)
    parts = [flat[length * index : length * (index + 1)] for index in range(num_chunks)]
    return [torch.cat([part, part.new_zeros(length - part.numel())]) if part.numel() < length else part for part in parts]


class Flat(NamedTuple):
    """One vector of a module: under which attribute it is stored, and which parameters it holds."""

    owner: nn.Module
    attribute: str
    shapes: tuple[torch.Size, ...]
    slots: list[list[tuple[nn.Module, str]]]
    """For each parameter, every module and name that has it."""
    has_own_name: bool = False
    """Whether the vector holds one parameter and is stored under its name, in each of its modules."""

    @property
    def parameter(self) -> nn.Parameter:
        """The vector that the module shows now."""
        found = self.owner._parameters[self.attribute]
        assert found is not None, "the vector is put back before anybody reads it"
        return found


Shown = tuple[tuple[nn.Module, str, Tensor], ...]
"""Modules, names, and what each shall be. A tuple, because the engine takes tensors in a list attribute for outputs."""


class SharedParam:
    """One parameter of another instance, and the modules of this one that use it.

    Its value is gathered in each forward of this instance. Its gradient is added to that of the owner.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.dtype = dtype
        self.slots: list[tuple[nn.Module, str]] = []

    @property
    def _shape(self) -> torch.Size:
        shape: torch.Size = self.parameter._orig_size  # type: ignore[attr-defined]
        return shape

    def values(self) -> Shown:
        """The full value for each module that uses it. Communicates."""
        value = full_tensor(self.parameter)[: prod(self._shape)].view(self._shape).to(self.dtype)
        return tuple((module, name, value) for module, name in self.slots)

    def placeholders(self) -> Shown:
        """What each module shows outside a forward: a tensor with a shape and no memory."""
        placeholder = torch.empty(self._shape, dtype=self.dtype, device="meta")
        return tuple((module, name, placeholder) for module, name in self.slots)

    @contextmanager
    def shown_in_full(self) -> Generator[None, None, None]:
        """Let the modules have the parameter inside, while its owner has its full value."""
        value = full_tensor(self.parameter).detach()[: prod(self._shape)].view(self._shape)
        shown = nn.Parameter(value, self.parameter.requires_grad)
        for module, name in self.slots:
            module._parameters[name] = shown
        try:
            yield
        finally:
            for module, name in self.slots:
                del module._parameters[name]


def show(values: Shown) -> None:
    """Let each `module.name` be its value, also if the module has a Parameter of that name."""
    for module, name, value in values:
        module.__dict__[name] = value
        record(module, name, value)


def hide(values: Shown) -> None:
    """End what `show` has done."""
    for module, name, _ in values:
        module.__dict__.pop(name, None)
        record(module, name, None)


def slots_in(root: nn.Module, parameters: set[int]) -> dict[int, list[Slot]]:
    """Where each parameter is, by its id, in the order of the modules. `parameters`: ids of those that are wanted."""
    found: dict[int, list[Slot]] = {}
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in parameters:
                found.setdefault(id(parameter), []).append((path, module, name))
    return found


def record(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Tell nn.LSTM and its siblings, which have a second record of their parameters."""
    known = module.__dict__.get("_flat_weights_names", ())
    if name in known:
        module.__dict__["_flat_weights"][known.index(name)] = value
