"""How tensors get out of a unit's forward other than as its output; a backward can come back through them too."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.pytree import Attributes, tensors_in


class Escapes:
    """The ways out of one unit: attributes of its modules (a balancing loss), and what the user's hooks on them carry off."""

    __slots__ = ("_attributes", "_carried", "_handles", "_heard", "_hooks", "_inner")

    def __init__(self, module: nn.Module, own_modules: Sequence[nn.Module]) -> None:
        self._attributes = [Attributes(one) for one in own_modules]
        inner = [one for one in own_modules if one is not module]
        self._inner = [*map(weakref.ref, inner)]
        self._hooks = [weakref.ref(one._forward_hooks) for one in inner]
        self._heard: set[int] = set()
        self._carried: list[weakref.ref[Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def begin(self) -> list[weakref.ref[Tensor]]:
        """A forward begins; return what was carried off in the one it is in, for `end`."""
        carried, self._carried = self._carried, []
        hooks = [reference() for reference in self._hooks]
        if any(hooks):
            for reference, of_module in zip(self._inner, hooks, strict=True):
                module = reference()
                if of_module and module is not None and id(module) not in self._heard:
                    self._heard.add(id(module))
                    self._handles.append(module.register_forward_hook(self._inner_module_ends))
        return carried

    def end(self, carried: "list[weakref.ref[Tensor]]") -> None:
        """That forward has ended."""
        self._carried = carried

    def remove(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()

    def left_behind(self, known: Callable[[Tensor], bool]) -> list[Tensor]:
        """Tensors that are attributes now, but for those `known` from an earlier forward."""
        values = [value for attributes in self._attributes for value in attributes.values()]
        found = [value for value in values if isinstance(value, Tensor)]
        for value in values:
            if value.__class__ is list or value.__class__ is dict:
                found += [one for one in tensors_in(value) if not isinstance(one, nn.Parameter)]
        return [one for one in found if not known(one)] if found else found

    def carried_off(self) -> list[Tensor]:
        """What the hooked modules returned in this forward and somebody still has."""
        return [tensor for reference in self._carried if (tensor := reference()) is not None]

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """They have come out of a call inside, and may require grad later."""
        self._carried += map(weakref.ref, tensors)

    def _inner_module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        # whether it requires grad is seen at the end: what a reentrant checkpoint returns does only afterwards
        self._carried += map(weakref.ref, tensors_in(output))
