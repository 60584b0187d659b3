"""Side outputs: tensors that leave a unit's forward other than as its return value. A backward can enter through them too."""

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.pytree import Attributes, tensors_in

_CONTAINERS: Final = frozenset({list, dict})
"""The classes of attributes that are searched for tensors."""


class SideOutputs:
    """The side outputs of one unit: attributes of its modules, such as a balancing loss, and tensors that hooks capture."""

    __slots__ = ("_attributes", "_captured", "_handles", "_hooked", "_hooks", "_inner")

    def __init__(self, members: Sequence[nn.Module], own_modules: Sequence[nn.Module]) -> None:
        self._attributes = [Attributes(one) for one in own_modules]
        inner = [one for one in own_modules if all(one is not module for module in members)]
        self._inner = [*map(weakref.ref, inner)]
        self._hooks = [weakref.ref(one._forward_hooks) for one in inner]
        self._hooked: set[int] = set()
        self._captured: list[weakref.ref[Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def begin(self) -> list[weakref.ref[Tensor]]:
        """Start a forward. Return the captured tensors of the forward around it, which `end` takes."""
        captured, self._captured = self._captured, []
        hooks = [reference() for reference in self._hooks]
        if any(hooks):
            for reference, of_module in zip(self._inner, hooks, strict=True):
                module = reference()
                if of_module and module is not None and id(module) not in self._hooked:
                    self._hooked.add(id(module))
                    self._handles.append(module.register_forward_hook(self._post_inner_forward))
        return captured

    def end(self, captured: "list[weakref.ref[Tensor]]") -> None:
        """End the forward. `captured` is the return value of its `begin`."""
        self._captured = captured

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def new_attributes(self, known: Callable[[Tensor], bool]) -> list[Tensor]:
        """Return the tensors that are attributes now, without those `known` from an earlier forward."""
        values = [*chain.from_iterable(map(Attributes.values, self._attributes))]
        found = [value for value in values if isinstance(value, Tensor)]
        if not _CONTAINERS.isdisjoint(map(type, values)):
            for value in values:
                if type(value) in _CONTAINERS:
                    found += [one for one in tensors_in(value) if not isinstance(one, nn.Parameter)]
        return [one for one in found if not known(one)] if found else found

    def hook_captures(self) -> list[Tensor]:
        """Return the outputs of hooked modules in this forward that are still alive."""
        return [tensor for reference in self._captured if (tensor := reference()) is not None]

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """Add outputs of an inner unit's call, which may require a gradient later."""
        self._captured += map(weakref.ref, tensors)

    def _post_inner_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # `requires_grad` is read when the forward ends, because a reentrant checkpoint sets it on its outputs only afterwards
        self._captured += map(weakref.ref, tensors_in(output))
