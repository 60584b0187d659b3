"""What a module shows of its unit: the shards or the whole parameters, and who owns each of them.

[Note: reads in a forward]
A parent that computes with `self.child.weight`, a layer called without its unit, a forward hook, a
function that a checkpoint replays: each reads an attribute of a module while the shards are what it
shows. Any module's forward being on the Python stack, or a backward running, says that a value to
compute with is wanted; then the read answers with the full value (external_use.py). Otherwise (an
optimizer, a print, a clamp between steps) it is the shard. Listings such as `parameters()` do not
come by here and always give what is shown.
"""

import sys
import weakref
from collections.abc import Callable
from operator import is_not
from typing import Protocol, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.autograd.frames import in_a_forward, in_backward
from fsdp.errors import ShardingError


class Owner(Protocol):
    """The unit behind a parameter, as far as those who only hold the parameter need to know it."""

    name: str

    def read(self, parameter: nn.Parameter, module: nn.Module, reader: object) -> Tensor:
        """The full value of `parameter` of `module`, to compute with in a forward. `reader`: the object whose method reads it."""

    def full_value(self, parameter: nn.Parameter) -> Tensor:
        """The full value of `parameter`, in its own dtype, differentiable. Communicates."""

    def local_value(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of `parameter`, differentiable."""


# which unit each parameter belongs to, shard or whole; a unit refers to its parameters, so only weakly
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Note that `parameter`, a shard or a whole one, belongs to `owner`."""
    _owners[parameter] = weakref.ref(owner)


def owner_of(parameter: Tensor) -> Owner | None:
    """The unit that owns `parameter`, if it is sharded already."""
    owner: weakref.ref[Owner] | None = _owners.get(parameter)  # type: ignore[no-untyped-call]
    return None if owner is None else owner()


class Slots(dict[str, nn.Parameter | None]):
    """The `_parameters` of a module of some unit."""

    __slots__ = ("shared",)

    def __init__(self, slots: dict[str, nn.Parameter | None]) -> None:
        super().__init__(slots)
        self.shared = False
        """Several units have parameters here, so that some may be shards while others are whole."""


class OpenSlots(Slots):
    """All of them whole: a read costs what it does on a plain module."""

    __slots__ = ()


class GuardedSlots(Slots):
    """Some may be shards, whole ones from before an optimizer step, or whole for a backward that frees them soon: a read in a
    forward is answered by the unit."""

    __slots__ = ()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        found = super().__getitem__(name)
        owner = None if found is None else owner_of(found)
        if found is None or owner is None or not (in_backward() or in_a_forward()):
            return found
        # frames: this one, nn.Module.__getattr__, the reader
        module, reader = sys._getframe(1).f_locals["self"], sys._getframe(2).f_locals.get("self")
        return cast(nn.Parameter, owner.read(found, module, reader))


class ModuleFace:
    """What one module shows of one unit, in either face."""

    __slots__ = ("_module", "_slots", "_teller", "shards", "wholes")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # see `Unit.module`
        self.shards: dict[str, nn.Parameter] = {}
        self.wholes: dict[str, nn.Parameter] = {}
        if isinstance(module._parameters, Slots):
            module._parameters.shared = True
        else:
            module.__dict__["_parameters"] = GuardedSlots(module._parameters)
        self._slots = cast(Slots, module._parameters)
        # modules that keep a second book of their parameters (nn.LSTM) are told through their own __setattr__
        plain = type(module).__setattr__ is nn.Module.__setattr__
        self._teller: Callable[[dict[str, nn.Parameter]], None] = self._slots.update if plain else self._tell

    @property
    def module(self) -> nn.Module | None:
        """The module, as long as it is there."""
        return self._module()

    def show_wholes(self) -> None:
        """Let the module show the whole parameters. The unit still answers reads, until it opens."""
        self._teller(self.wholes)

    def show_shards(self) -> None:
        """Let the module show the shards."""
        self._teller(self.shards)
        self._slots.__class__ = GuardedSlots

    def open(self) -> None:
        """The unit's own forward or a replay of it begins: reads need no answer from now on."""
        if not self._slots.shared:
            self._slots.__class__ = OpenSlots

    def guard(self) -> None:
        """Let the unit answer reads of the whole parameters from now on."""
        self._slots.__class__ = GuardedSlots

    def check(self, unit: str) -> None:
        """Outside a forward the module must show the shards.

        Raises:
            ShardingError: the user has put another parameter in a slot.
        """
        shown = list(map(self._slots.get, self.shards))
        if not any(map(is_not, shown, self.shards.values())):
            return
        for slot, there, shard in zip(self.shards, shown, self.shards.values(), strict=True):
            if there is not shard and there is not self.wholes[slot]:
                raise ShardingError(
                    f"{type(self.module).__name__}.{slot} in unit {unit!r} was replaced by another parameter after wrapping; "
                    "copy into the one that is there, or replace it before wrapping."
                )

    def _tell(self, face: dict[str, nn.Parameter]) -> None:
        # a module's __setattr__ looks at what is there, which is no read to answer
        self._slots.__class__ = OpenSlots
        module = self.module
        for name, parameter in face.items():
            if module is not None:
                setattr(module, name, parameter)
        self._slots.__class__ = GuardedSlots
