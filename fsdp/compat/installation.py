"""install and uninstall: the names of a drop-in module in place of those of the library that it stands for.

Rule 1: what is replaced inside the library follows from DOORS alone.
Rule 2: outside the library a name is replaced if it is bound to the library's own object, in the globals of any module.
Rule 3: everything is looked up before the first name is replaced.
"""

import inspect
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from itertools import accumulate
from types import ModuleType, TracebackType
from typing import Any, Final

from fsdp.compat.doors import DOORS, Replacement, replacements
from fsdp.errors import ShardingError

_OWN: Final = ("fsdp", "state_machine")
"""The packages whose globals are never replaced."""


class Installed:
    """What `install` returns: a context whose end takes out what this call has put in."""

    def __init__(self, doors: tuple[str, ...]) -> None:
        self.doors = doors
        """The doors that this call has installed. Those that were installed before are not among them."""

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left = [door for door in self.doors if door in _installed]
        if left:  # without names it would take out all
            uninstall(*left)


class _Installation:
    """The names of one door while they are in the library."""

    def __init__(self, door_module: str, replaced: Collection[Replacement]) -> None:
        self._door_module = door_module
        self._swapped: set[tuple[str, str]] = set()
        self._replaced = [one for one in replaced if one.ours is not one.theirs]
        self._skipped = {*_OWN, *(one.place.partition(".")[0] for one in replaced)}
        self._bound_to_ours = {(place, name) for place, name, _ in self._bindings([one.ours for one in self._replaced])}
        self._stand_ins = _stand_ins(one for one in replaced if one.ours is one.theirs)

    def put_in(self) -> None:
        """Replace the names."""
        sys.modules.update(self._stand_ins)
        ours = {id(one.theirs): one.ours for one in self._replaced}
        for one in self._replaced:
            setattr(sys.modules[one.place], one.name, one.ours)
        for place, name, theirs in self._bindings([one.theirs for one in self._replaced]):
            setattr(sys.modules[place], name, ours[id(theirs)])
            self._swapped.add((place, name))

    def take_out(self) -> None:
        """Put the library's names back, wherever ours were bound in the meantime."""
        theirs = {id(one.ours): one.theirs for one in self._replaced}
        for one in self._replaced:
            if vars(sys.modules[one.place])[one.name] is one.ours:
                setattr(sys.modules[one.place], one.name, one.theirs)
        for place, name, ours in self._bindings([one.ours for one in self._replaced]):
            if (place, name) in self._swapped or not ((place, name) in self._bound_to_ours or self._is_imported_by(place)):
                setattr(sys.modules[place], name, theirs[id(ours)])
        for name, stand_in in self._stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]

    def _is_imported_by(self, place: str) -> bool:
        """Whether the source of a module names the door, so that it has our names from there."""
        try:
            return self._door_module in inspect.getsource(sys.modules[place])
        except (OSError, TypeError):
            return False

    def _bindings(self, values: Iterable[Any]) -> list[tuple[str, str, Any]]:
        """The globals that are bound to one of `values`: module, name, value. The library and this engine are left out."""
        wanted = {id(value) for value in values}
        return [
            (place, name, value)
            for place, module in list(sys.modules.items())
            if isinstance(module, ModuleType) and place.partition(".")[0] not in self._skipped
            for name, value in list(vars(module).items())
            if id(value) in wanted
        ]


_installed: Final[dict[str, _Installation]] = {}
"""By door, in the order in which they were installed."""


def install(*doors: str) -> Installed:
    """Let code that imports another library's names get those of this engine.

        fsdp.compat.install("ddp")                  # until fsdp.compat.uninstall()
        with fsdp.compat.install("ddp"): ...        # inside the block

    The attributes of the library's modules are replaced, and the globals of all other modules that were bound to them before. The
    page "Install" lists each attribute. Doors that are installed stay as they are. If the library is absent, modules of its
    names with ours in them stand in for it.

    Raises:
        ShardingError: a door is not known, or two doors replace the same attribute. Nothing was replaced.
    """
    if not doors:
        raise ShardingError(f"install takes the names of doors: {', '.join(DOORS)}.")
    _check_known(doors)
    new = [door for door in dict.fromkeys(doors) if door not in _installed]
    found = {door: replacements(DOORS[door]) for door in new}
    _check_apart(found)
    for door, replaced in found.items():
        _installed[door] = _Installation(DOORS[door].module, replaced)
        _installed[door].put_in()
    return Installed(tuple(new))


def installed() -> tuple[str, ...]:
    """The doors that are installed, in the order in which they were."""
    return tuple(_installed)


def uninstall(*doors: str) -> None:
    """Put the library's names back: of the given doors, or of all that are installed.

    Modules that were imported in the meantime get the library's names too, unless they import from the drop-in module themselves.
    Models that were wrapped keep our class.

    Raises:
        ShardingError: a door is not installed. Nothing was put back.
    """
    _check_known(doors)
    absent = [door for door in doors if door not in _installed]
    if absent:
        raise ShardingError(f"uninstall: {', '.join(absent)} is not installed; installed are {', '.join(_installed) or 'none'}.")
    for door in reversed([*_installed]):
        if not doors or door in doors:
            _installed.pop(door).take_out()


def _check_known(doors: Collection[str]) -> None:
    for door in doors:
        if door not in DOORS:
            raise ShardingError(f"there is no door {door!r}; the doors are {', '.join(DOORS)}.")


def _check_apart(found: dict[str, list[Replacement]]) -> None:
    """Refuse a name that two doors would replace: the second would take the first one's class for the library's."""
    owner = {(one.place, one.name): door for door, state in _installed.items() for one in state._replaced}
    for door, replaced in found.items():
        for one in replaced:
            other = owner.setdefault((one.place, one.name), door)
            if other != door:
                raise ShardingError(f"doors {other!r} and {door!r} both replace {one.place}.{one.name}; install one of them.")


def _stand_ins(names: Iterable[Replacement]) -> dict[str, ModuleType]:
    """Modules for the places of a library that is absent, outer ones first."""
    modules: dict[str, ModuleType] = {}
    for one in names:
        for name in accumulate(one.place.split("."), "{}.{}".format):
            if name not in modules:
                modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
                parent, _, child = name.rpartition(".")
                if parent:
                    vars(modules[parent]).setdefault(child, modules[name])
        # a function of fairscale has the name of a module beside it, and covers it
        setattr(modules[one.place], one.name, one.ours)
    return modules
