"""The modules and parameters below a root, so that one that is added after wrapping is noticed.

A parameter that is added later is not sharded, and no hook would reduce its gradient: each rank would train its own. torch calls
no hook where a module is put into another one's dict by hand, so the dicts are compared when a forward of the root begins.
"""

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import nn

from fsdp.errors import ShardingError
from fsdp.params.shown_params import Owner, owning_unit

_REQUIRES_GRAD: Final = attrgetter("requires_grad")
IGNORED = "_fsdp_ignored"
"""The attribute of a module that wrapping ignored, with all below it, and of a parameter that it ignored by itself."""


class ModuleTree:
    """What the dicts of modules and parameters below a root held when they were looked at last.

    It is an attribute of the root's module: it holds modules, and an engine may not (see `Unit.module`).
    """

    ATTRIBUTE: ClassVar = "_fsdp_tree"

    __slots__ = ("_borrowed", "_content", "_dicts", "_frozen", "_kept", "_roots")

    def __init__(self, roots: Sequence[nn.Module], borrowed: Sequence[str] = ()) -> None:
        self._roots = tuple(map(weakref.ref, roots))
        self._borrowed = tuple(borrowed)
        """What modules of the roots use of units that are not inside them, each as the end of a sentence."""
        self._kept = [module for _, module in self._modules() if module is not roots[0]]
        """The modules of the units, which refer to them weakly. One that is taken away must live on."""
        self._dicts: list[dict[str, Any]] = []
        self._content: list[Any] = []
        self._frozen: list[nn.Parameter] = []
        """Parameters that were added after wrapping and are not trained. Once one is, it is refused."""
        self._remember()
        roots[0].__dict__[self.ATTRIBUTE] = self

    @classmethod
    def of(cls, root: nn.Module) -> "ModuleTree":
        """The tree of a root's module."""
        tree: ModuleTree = root.__dict__[cls.ATTRIBUTE]
        return tree

    def refuse_borrowing(self, root: str) -> None:
        """Raise ShardingError if a module of the root uses a parameter of a unit that is not inside it."""
        if self._borrowed:
            raise ShardingError(f"unit {root!r} uses {self._borrowed[0]}: wrap the module that contains both, then use them.")

    def check(self, units: Sequence[Owner]) -> None:
        """Check what was added, removed or replaced since the last look. `units`: those of the root, outermost first.

        Raises:
            ShardingError: a parameter that is trained was added, a unit's was taken away or replaced, or one is borrowed.
        """
        self.refuse_borrowing(units[0].name)
        if not self.is_changed or any([unit.has_full_params for unit in units]):
            return  # inside a summon modules may show parameters of their own, as by fairscale's names
        for unit in units:
            unit.check_modules()
        for name, _ in self.added():
            raise ShardingError(
                f"parameter {name!r} was added after wrapping: it is not sharded, and each rank would train its own. Add it "
                "before wrapping, or shard the new module with fsdp.fully_shard before you put it in."
            )
        self._remember()

    @property
    def is_changed(self) -> bool:
        """Whether anything was added, removed, replaced or, if it was added before, thawed since the last look."""
        is_thawed = any(map(_REQUIRES_GRAD, self._frozen))
        # about 0.1 µs a module
        content = list(chain.from_iterable(map(dict.values, self._dicts)))
        return is_thawed or len(content) != len(self._content) or any(map(is_not, content, self._content))

    def added(self, trained: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained, or are not, and belong to no unit, with their names. Ignored ones are left out."""
        for path, module in self._modules():
            for name, parameter in module._parameters.items():
                if parameter is None or IGNORED in parameter.__dict__:
                    continue
                if parameter.requires_grad is trained and owning_unit(parameter) is None:
                    yield path + name, parameter

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        return chain.from_iterable(_modules_below(root(), "", seen) for root in self._roots)

    def _remember(self) -> None:
        modules = [module for _, module in self._modules()]
        self._dicts = [content for module in modules for content in (module._modules, module._parameters)]
        self._content = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._frozen = [parameter for _, parameter in self.added(trained=False)]


def refuse_transforms(root: str) -> NoReturn:
    """Raise the error for a transform of `torch.func` that runs."""
    raise ShardingError(
        f"a transform of torch.func (vmap, grad, vjp, jvp, jacrev, ...) goes through {root!r}, whose parameters are gathered "
        "in place, which it cannot follow; apply it to a plain module, or use torch.autograd.functional."
    )


def _modules_below(module: nn.Module | None, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """`module` and the modules below it with the prefixes of their parameters. Each occurs once.

    Ignored modules are left out, and scripted ones, whose dicts are not Python's.
    """
    if module is None or id(module) in seen or IGNORED in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        yield from _modules_below(child, f"{path}{name}.", seen)
