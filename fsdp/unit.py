"""One unit: its two faces, gather and release.

Rule 1: the shard face is made of the user's original Parameter objects, the whole face of ours;
        both live as long as the unit.
Rule 2: the modules show the whole face only between SHOW and HIDE; whoever looks at any other
        time sees living shards, never freed memory.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_not

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.collectives import Collectives, Work
from fsdp.config import Config
from fsdp.errors import ShardingError
from fsdp.layout import Part, make_layout
from fsdp.storage import Ledger, Memory, size_of, storage_key
from fsdp.streams import Streams

# which unit each shard parameter belongs to; a unit refers to its parameters, so only weakly
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(parameter: Tensor) -> "Unit | None":
    """The unit that owns `parameter`, if it is sharded already."""
    owner: weakref.ref[Unit] | None = _owners.get(parameter)  # type: ignore[no-untyped-call]
    return None if owner is None else owner()


class Place:
    """One parameter of a unit and every slot of every module that shows it."""

    __slots__ = ("names", "parameter", "slots")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.names: list[str] = []
        """Plain names below the unit's root, the first being the canonical one."""
        self.slots: list[tuple[nn.Module, str]] = []


class FlatBuffer:
    """The parameters of a unit that share a dtype and are trainable alike, laid end to end.

    Shapes: `shard` (C,) in the parameters' own dtype, always in memory; `whole` (W * C,) in the
    dtype they compute in, with memory only between LAUNCH and RELEASE.
    """

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, collectives: Collectives) -> None:
        self.places = tuple(places)
        self.rank = collectives.rank
        self.world_size = collectives.size
        originals = [place.parameter for place in places]
        self.device = originals[0].device
        shapes = tuple(tuple(p.shape) for p in originals)
        self.layout = make_layout(shapes, min(originals[0].element_size(), dtype.itemsize), self.world_size)
        self.parts: tuple[Part, ...] = tuple(self.layout.part(i, self.rank) for i in range(len(shapes)))
        with torch.no_grad():
            self.shard = torch.zeros(self.layout.chunk, dtype=originals[0].dtype, device=self.device)
            self.whole = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
            self.whole_parameters = tuple(
                _like(place.parameter, self.whole[slot.start : slot.end].view(slot.shape))
                for slot, place in zip(self.layout.slots, places, strict=True)
            )
            self.key = storage_key(self.whole)
            self.own_whole = self.own_chunk(self.whole)
            self.whole_bytes = self.whole.view(torch.uint8)
            self.memory = Memory(self.whole, "whole")
            for place, part in zip(places, self.parts, strict=True):
                self._take_shard(place.parameter, part)
        self.shard_parameters: tuple[nn.Parameter, ...] = tuple(originals)
        self.segments, self.held = self._segments()
        self._shard_pointers = [p.data_ptr() for p in originals]
        self._trainable = [p.requires_grad for p in originals]

    def _take_shard(self, parameter: nn.Parameter, part: Part) -> None:
        """Copy this rank's part of a full parameter into the shard and point the parameter at it."""
        gradient = parameter.grad
        parameter.grad = None
        mine = self.shard_view(part)
        mine.copy_(parameter.detach().reshape(-1)[part.first : part.first + part.numel].view(part.shape))
        if gradient is not None:
            sharded = gradient.reshape(-1)[part.first : part.first + part.numel].view(part.shape).clone()
        parameter.data = mine.data
        if gradient is not None:
            parameter.grad = sharded

    def _segments(self) -> tuple[list[int], list[tuple[int, int, tuple[int, ...]]]]:
        """Lengths that cut a chunk (C,) into parts and padding with one split; and for each parameter of which this
        rank holds something: its number, its segment, its shape here."""
        lengths: list[int] = []
        held = []
        at = 0
        for number, part in enumerate(self.parts):
            if part.numel:
                if part.offset > at:
                    lengths.append(part.offset - at)
                held.append((number, len(lengths), part.shape))
                lengths.append(part.numel)
                at = part.offset + part.numel
        return [*lengths, self.layout.chunk - at], held

    def shard_view(self, part: Part) -> Tensor:
        """The elements of `part` in the shard."""
        return self.shard[part.offset : part.offset + part.numel].view(part.shape)

    def own_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of a whole flat tensor: (W * C,) -> (C,)."""
        return flat.narrow(0, self.rank * self.layout.chunk, self.layout.chunk)

    def check_shards(self, unit: str) -> None:
        """Take over parameters that were re-pointed from outside since the last forward (`p.data = x`, `model.to(...)`).

        Raises:
            ShardingError: the new data has another shape, dtype or device.
        """
        if [p.data_ptr() for p in self.shard_parameters] == self._shard_pointers:
            return
        for place, parameter, part in zip(self.places, self.shard_parameters, self.parts, strict=True):
            mine = self.shard_view(part)
            if parameter.shape != mine.shape or parameter.dtype != mine.dtype or parameter.device != mine.device:
                raise ShardingError(
                    f"parameter {place.names[0]!r} of unit {unit!r} was replaced from outside by a tensor of shape "
                    f"{tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}; "
                    f"its shard is {tuple(mine.shape)}, {mine.dtype} on {mine.device}. "
                    "Convert or move the module before wrapping it; for another compute precision give mp_policy."
                )
        for parameter, part in zip(self.shard_parameters, self.parts, strict=True):
            mine = self.shard_view(part)
            if parameter.data_ptr() != mine.data_ptr():
                mine.copy_(parameter.detach())
                parameter.data = mine.data
        self._shard_pointers = [p.data_ptr() for p in self.shard_parameters]

    def sync_requires_grad(self) -> bool:
        """Carry `requires_grad` from the shards to the whole parameters; return whether any changed."""
        now = [p.requires_grad for p in self.shard_parameters]
        if now == self._trainable:
            return False
        for whole, wanted in zip(self.whole_parameters, now, strict=True):
            whole.requires_grad_(wanted)
        self._trainable = now
        return True

    @property
    def trainable(self) -> list[bool]:
        """Of each parameter, as of the last forward."""
        return self._trainable


class Unit:
    """The parameters that are gathered and released together, and the modules that show them."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        places: Sequence[Place],
        config: Config,
        collectives: Collectives,
    ) -> None:
        self.module = module
        self.name = name
        self.config = config
        self.collectives = collectives
        self._streams: Streams
        self._ledger: Ledger
        self.gathered_in_pass = 0
        """The pass in which the copy in memory was gathered: one from an earlier pass may be stale."""
        self.lent: list[Tensor] = []
        self._works: list[Work] = []
        self._set_aside: list[Tensor | None] = []
        groups: dict[tuple[torch.dtype, bool], list[Place]] = {}
        for place in places:
            groups.setdefault((place.parameter.dtype, place.parameter.requires_grad), []).append(place)
        self.flats = tuple(
            FlatBuffer(members, _compute_dtype(dtype, config), collectives) for (dtype, _), members in groups.items()
        )
        self.whole_parameters = tuple(p for flat in self.flats for p in flat.whole_parameters)
        self.trainable_count = sum(map(sum, (flat.trainable for flat in self.flats)))
        self.keys = frozenset(flat.key for flat in self.flats)
        faces: dict[int, _ModuleFace] = {}
        for flat in self.flats:
            for place, whole in zip(flat.places, flat.whole_parameters, strict=True):
                _owners[place.parameter] = weakref.ref(self)
                for owner, slot in place.slots:
                    face = faces.setdefault(id(owner), _ModuleFace(owner))
                    face.shards[slot] = place.parameter
                    face.wholes[slot] = whole
        self._faces = tuple(faces.values())

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.places)} parameters)"

    def join(self, streams: Streams, ledger: Ledger) -> None:
        """Become part of a root: share its streams and its books."""
        self._streams = streams
        self._ledger = ledger
        ledger.add("shards", sum(size_of(flat.shard) for flat in self.flats))

    @property
    def device(self) -> torch.device:
        return self.flats[0].device if self.flats else torch.device("cpu")

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(place for flat in self.flats for place in flat.places)

    @property
    def shard_parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for flat in self.flats for p in flat.shard_parameters)

    @property
    def versions(self) -> int:
        """Grows with every in-place change of a shard from outside."""
        return sum([p._version for flat in self.flats for p in flat.shard_parameters])

    def sync_requires_grad(self) -> None:
        """Carry to the whole face what the user has frozen or thawed."""
        if any([flat.sync_requires_grad() for flat in self.flats]):
            self.trainable_count = sum(map(sum, (flat.trainable for flat in self.flats)))

    def check_shards(self) -> None:
        """Take over what the user did to the shards from outside, or refuse it.

        Raises:
            ShardingError: a shard was replaced by something that does not fit.
        """
        for face in self._faces:
            face.check(self.name)
        for flat in self.flats:
            flat.check_shards(self.name)

    # effects of the residency -------------------------------------------------------------

    def launch(self) -> None:
        """Allocate the whole parameters and launch their gather.

        Shapes:   shard (C,) on each of W ranks  ->  whole (W * C,), in rank order, cast on the way
        Traffic:  this rank receives (W - 1) * C elements
        """
        with self._streams.gathering():
            for flat in self.flats:
                flat.memory.allocate(self._ledger)
                flat.own_whole.copy_(flat.shard)
                self._works.append(self.collectives.all_gather(flat.whole_bytes, self.name))
            self._works += self._streams.gathered()

    def await_gather(self) -> None:
        """Wait until the whole parameters may be read."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def show(self) -> None:
        """Let the modules show the whole parameters."""
        for face in self._faces:
            face.show(face.wholes)

    def hide(self) -> None:
        """Let the modules show the shards again."""
        for face in self._faces:
            face.show(face.shards)

    def release(self) -> None:
        """Give the memory of the whole parameters back. The shards are untouched. Idempotent."""
        self._streams.released()
        for flat in self.flats:
            flat.memory.release(self._ledger)

    # the loan to the user -----------------------------------------------------------------

    @torch.no_grad()
    def lend(self) -> None:
        """Gather the parameters in their own precision and point the user's Parameter objects at them.

        Memory: W * C elements of the shards' dtype, apart from the whole face, until `reclaim`.
        """
        for flat in self.flats:
            full = torch.empty(flat.layout.numel, dtype=flat.shard.dtype, device=flat.device)
            self._ledger.add("lent", size_of(full))
            flat.own_chunk(full).copy_(flat.shard)
            self.collectives.all_gather(full.view(torch.uint8), self.name).wait()
            self.lent.append(full)
        for flat, full in zip(self.flats, self.lent, strict=True):
            for parameter, slot in zip(flat.shard_parameters, flat.layout.slots, strict=True):
                self._set_aside.append(parameter.grad)
                parameter.grad = None
                parameter.data = full[slot.start : slot.end].view(slot.shape).data

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of the lent parameters into the shards.

        Raises:
            ShardingError: a parameter was pointed at a tensor of another shape or dtype. Nothing was copied.
        """
        lent = list(self.full_parameters())
        for place, view in lent:
            given = place.parameter
            if given.shape != view.shape or given.dtype != view.dtype:
                raise ShardingError(
                    f"parameter {place.names[0]!r} became {tuple(given.shape)}, {given.dtype} inside summon_full_params; "
                    f"it is {tuple(view.shape)}, {view.dtype}. Copy into it instead."
                )
        for place, view in lent:
            if place.parameter.data_ptr() != view.data_ptr():
                view.copy_(place.parameter.detach())
        for flat, full in zip(self.flats, self.lent, strict=True):
            flat.shard.copy_(flat.own_chunk(full))

    @torch.no_grad()
    def reclaim(self) -> None:
        """Point the user's Parameter objects at the shards again. Idempotent."""
        aside = iter(self._set_aside)
        for flat, full in zip(self.flats, self.lent, strict=False):
            self._ledger.add("lent", -size_of(full))
            for parameter, part in zip(flat.shard_parameters, flat.parts, strict=True):
                parameter.grad = None
                parameter.data = flat.shard_view(part).data
                parameter.grad = next(aside, None)
        self.lent = []
        self._set_aside = []

    def full_parameters(self) -> Iterator[tuple[Place, Tensor]]:
        """While lent: every parameter in full, in its own precision."""
        for flat, full in zip(self.flats, self.lent, strict=True):
            for place, slot in zip(flat.places, flat.layout.slots, strict=True):
                yield place, full[slot.start : slot.end].view(slot.shape)


class _ModuleFace:
    """What one module shows, in either face."""

    __slots__ = ("_module", "shards", "show", "wholes")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.shards: dict[str, nn.Parameter] = {}
        self.wholes: dict[str, nn.Parameter] = {}
        # modules that keep a second book of their parameters (nn.LSTM) are told through their own __setattr__
        plain = type(module).__setattr__ is nn.Module.__setattr__
        self.show: Callable[[dict[str, nn.Parameter]], None] = module._parameters.update if plain else _teller(module)

    def check(self, unit: str) -> None:
        """Outside a forward the module must show the shards.

        Raises:
            ShardingError: the user has put another parameter in a slot.
        """
        shown = list(map(self._module._parameters.get, self.shards))
        if not any(map(is_not, shown, self.shards.values())):
            return
        for slot, there, shard in zip(self.shards, shown, self.shards.values(), strict=True):
            if there is not shard and there is not self.wholes[slot]:
                raise ShardingError(
                    f"{type(self._module).__name__}.{slot} in unit {unit!r} was replaced by another parameter after wrapping; "
                    "copy into the one that is there, or replace it before wrapping."
                )


def _teller(module: nn.Module) -> Callable[[dict[str, nn.Parameter]], None]:
    def tell(face: dict[str, nn.Parameter]) -> None:
        for name, parameter in face.items():
            setattr(module, name, parameter)

    return tell


def _like(original: nn.Parameter, view: Tensor) -> nn.Parameter:
    """A permanent whole parameter. Through `.data`, so that it does not share the buffer's version counter."""
    whole = nn.Parameter(view.data, requires_grad=original.requires_grad)
    whole.__dict__.update(original.__dict__)
    return whole


def _compute_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    wanted = config.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype
