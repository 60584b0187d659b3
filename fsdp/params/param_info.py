"""One parameter as the units see it: its names, and the modules that hold it."""

import weakref

from torch import nn


class ParamInfo:
    """One parameter of a unit, its names, and every module attribute that holds it."""

    __slots__ = ("_slots", "names", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.names: list[str] = []
        """Names below the outermost unit. The first is the one used in errors and state dicts."""
        self._slots: list[tuple[weakref.ref[nn.Module], str]] = []

    def add(self, name: str, module: nn.Module, slot: str) -> None:
        """Record that the parameter is `module.slot` and has this name."""
        self.names.append(name)
        self._slots.append((weakref.ref(module), slot))

    @property
    def slots(self) -> list[tuple[nn.Module, str]]:
        """Every living module that holds the parameter, with the attribute. Modules are held weakly, see `Unit.module`."""
        return [(module, slot) for reference, slot in self._slots if (module := reference()) is not None]

    @property
    def is_sparse(self) -> bool:
        """Whether a module declares that the gradients of the parameter are sparse."""
        return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module, _ in self.slots)
