"""One unit: its two faces, gather and release.

Rule 1: the shard face is made of the user's original Parameter objects, the whole face of ours;
        both live as long as the unit.
Rule 2: the modules show the whole face only between SHOW and HIDE; whoever looks at any other
        time sees living shards, never freed memory.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import in_backward, is_running
from fsdp.comm.process_group import Collectives
from fsdp.comm.work import Work
from fsdp.config import Config, Grouping
from fsdp.device.storage import Ledger, size_of
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.external_use import FullUse, LocalUse
from fsdp.params.flat_buffer import Before, FlatBuffer, Place, in_pieces
from fsdp.params.module_params import ModuleFace, own


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
        self._module = weakref.ref(module)
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
        self.versions_in_forward = 0
        """Of the shards, when the last forward began."""
        self.gathered_versions = 0
        self._sums: Tensor
        """Of the shards, when the copy in memory was gathered."""
        self._open = False
        self._edits_of_replays = 0
        self._read_by_replay = False
        """A replay that is not one of the unit's whole forward has read whole parameters, and may have changed them."""
        self.announce: Callable[[], None]
        """Set by the hooks: a gradient of one parameter is about to come from a use outside the unit."""
        self.stay: Callable[[], bool]
        """Set by the hooks: have the whole parameters until the end of the backward; return whether that will do."""
        self._copies: dict[int, tuple[Tensor, int]] = {}
        """Stand-ins for the copies that were read in forwards: their version counters, without their memory."""
        replicated = config.grouping is Grouping.REPLICATED
        self.flats = tuple(
            FlatBuffer(members, _compute_dtype(members[0].parameter.dtype, config), collectives, replicated)
            for members in in_pieces(places, config)
        )
        self.whole_parameters = tuple(p for flat in self.flats for p in flat.whole_parameters)
        self.trains = any(map(any, (flat.trainable for flat in self.flats)))
        """Whether any parameter is trainable."""
        self.keys = frozenset(flat.key for flat in self.flats)
        faces: dict[int, ModuleFace] = {}
        self._numbers: dict[int, int] = {}
        """Of each parameter, by the id of its shard and of its whole."""
        for flat in self.flats:
            for place, whole in zip(flat.places, flat.whole_parameters, strict=True):
                self._numbers[id(place.parameter)] = self._numbers[id(whole)] = len(self._numbers) // 2
                own(place.parameter, self)
                own(whole, self)
                for owner, slot in place.slots:
                    face = faces.get(id(owner)) or faces.setdefault(id(owner), ModuleFace(owner))
                    face.shards[slot] = place.parameter
                    face.wholes[slot] = whole
        self._faces = tuple(faces.values())

    @property
    def module(self) -> nn.Module:
        """The module that is the unit. Whoever asks runs in it, or has it.

        The unit refers to its modules weakly: a graph refers to the unit in ways that Python's collector does not see, and a
        module may keep a graph (`self.aux = loss`).
        """
        module = self._module()
        assert module is not None
        return module

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
        """Grows with every in-place change of a shard, but for those a replay repeats."""
        return sum([p._version for flat in self.flats for p in flat.shard_parameters]) - self._edits_of_replays

    def remember_sums(self) -> None:
        """A copy is about to be gathered: note the checksums of what it will be a copy of."""
        self._sums = self._count_sums()

    def has_changed(self) -> Tensor:
        """Whether a shard was changed, also through `.data`, or replaced, since then: () bool, on the device of the shards."""
        if self.versions != self.gathered_versions or any(flat.is_replaced for flat in self.flats):
            return torch.ones((), dtype=torch.bool, device=self.device)
        return (self._count_sums() != self._sums).any()

    def _count_sums(self) -> Tensor:
        """Of each flat buffer, the sum of its bits, taken as numbers of four bytes."""
        if not self.flats:
            return torch.zeros(0, dtype=torch.int64)
        with torch.no_grad():
            return torch.stack([flat.shard.view(torch.int32).sum(dtype=torch.int64) for flat in self.flats])

    def open(self) -> None:
        """Its own forward, or a replay of it, runs on the whole parameters."""
        self._open = True
        for face in self._faces:
            face.open()

    def guard(self) -> None:
        """From now on, answer each read of the whole parameters with a fresh copy: an optimizer may step."""
        self._open = False
        for face in self._faces:
            face.guard()

    def take_edits(self, before: Before = None) -> int:
        """Keep what its forward changed in the whole parameters in place; return by how much `versions` grew.

        `before`: filled with what `forget_edits` needs, if the forward goes on and may yet fail.

        Raises:
            ShardingError: they are in another precision than the shards.
        """
        return sum([flat.take_edits(self.name, before) for flat in self.flats])

    def take_edits_of_replay(self) -> None:
        """Keep what a replay changed in place: the same once more, which is no reason to refuse the backward it is for."""
        self._read_by_replay = False
        self._edits_of_replays += self.take_edits()

    def forget_edits(self, taken: "list[tuple[Tensor, Tensor]]") -> None:
        """A forward failed: what it changed will be gathered anew, and what was `taken` of that is put back.

        Where the whole parameters are the shards, all of it stays.
        """
        for flat in self.flats:
            flat.edits = flat.count_edits()
        with torch.no_grad():
            for shard, before in reversed(taken):
                shard.copy_(before)
        self._edits_of_replays += len(taken)

    def sync_requires_grad(self) -> None:
        """Carry to the whole face what the user has frozen or thawed."""
        if any([flat.sync_requires_grad() for flat in self.flats]):
            self.trains = any(map(any, (flat.trainable for flat in self.flats)))

    def check_shards(self) -> bool:
        """Take over what the user did to the shards from outside, or refuse it; return whether anything was copied.

        Raises:
            ShardingError: a shard was replaced by something that does not fit, or a copy was edited instead of it.
        """
        self._check_copies()
        for face in self._faces:
            face.check(self.name)
        return any([flat.check_shards(self.name) for flat in self.flats])

    # uses outside the unit ----------------------------------------------------------------

    def read(self, parameter: nn.Parameter, module: nn.Module, reader: object) -> Tensor:
        """The full value of `parameter`, to compute with in a forward: the whole parameter while it may be used, or a copy.

        A copy has the dtype the unit computes in.
        """
        number = self._numbers[id(parameter)]
        whole = self.whole_parameters[number]
        # a choice that leads to a gather must not hang on what this rank holds, such as whether an optimizer changed it here
        if self.lent or (parameter is whole and self._open):
            return parameter
        if in_backward():
            own = any(face.module is reader for face in self._faces) or is_running(module)
            # a replay around the unit computes with what the unit itself may be done with before; one of a part of it
            # needs the rest of the unit soon, of which each rank may read something else
            if (own and parameter is whole) or ((own or parameter is whole) and self.stay()):
                self._read_by_replay = True
                return whole
        copy = self._use_in_full(number, whole.dtype)
        if not copy.is_inference():
            self._check_copies()
            stand_in = copy.detach()
            stand_in.data = copy.new_empty(0)
            self._copies[number] = (stand_in, copy._version)
        return copy

    def full_value(self, parameter: nn.Parameter) -> Tensor:
        """See `fsdp.full_tensor`."""
        number = self._numbers[id(parameter)]
        return parameter if self.lent else self._use_in_full(number, self.shard_parameters[number].dtype)

    def local_value(self, parameter: nn.Parameter) -> Tensor:
        """See `fsdp.to_local`."""
        number = self._numbers[id(parameter)]
        flat, i = self._find(number)
        if self.lent:
            raise ShardingError("to_local: lent parameters cannot be trained; leave summon_full_params first.")
        self.check_shards()
        self.sync_requires_grad()
        shard, announce = flat.shard_parameters[i].detach(), self._announce
        value: Tensor = LocalUse.apply(flat.whole_parameters[i], shard, flat.parts[i], flat.world_size, announce)  # type: ignore[no-untyped-call]
        return value

    def _use_in_full(self, number: int, dtype: torch.dtype) -> Tensor:
        flat, i = self._find(number)
        self.check_shards()
        self.sync_requires_grad()

        def gather() -> Tensor:
            full = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
            flat.own_chunk(full).copy_(flat.shard)
            self.collectives.all_gather(full.view(torch.uint8), self.name).wait()
            slot = flat.layout.slots[i]
            return full[slot.start : slot.end].view(slot.shape).clone()

        value: Tensor = FullUse.apply(flat.whole_parameters[i], gather, self._announce)  # type: ignore[no-untyped-call]
        if in_backward() and value.requires_grad:
            # a replay; the gradient may come in a graph task of the checkpoint's own, and the backward is not over with that
            self.announce()
        return value

    def _announce(self) -> None:
        self.announce()

    def _find(self, number: int) -> tuple[FlatBuffer, int]:
        """The buffer of a parameter of this unit, and its number there."""
        for flat in self.flats:
            if number < len(flat.places):
                return flat, number
            number -= len(flat.places)
        raise IndexError(number)

    def _check_copies(self) -> None:
        copies, self._copies = self._copies, {}
        for number, (stand_in, version) in copies.items():
            if stand_in._version != version:
                raise ShardingError(
                    f"parameter {self.places[number].names[0]!r} was read in a forward outside its unit {self.name!r} and "
                    "changed there in place, which reaches a copy only; change it in the forward of its unit, or between "
                    "forwards."
                )

    # effects of the residency -------------------------------------------------------------

    def launch(self) -> None:
        """Allocate the whole parameters and launch their gather.

        Shapes:   shard (C,) on each of W ranks  ->  whole (W * C,), in rank order, cast on the way
        Traffic:  this rank receives (W - 1) * C elements
        """
        with self._streams.gathering():
            for flat in self.flats:
                flat.memory.allocate(self._ledger)
                if flat.is_shared:
                    continue
                flat.own_whole.copy_(flat.shard)
                self._works.append(self.collectives.all_gather(flat.whole_bytes, self.name, flat.own_bytes))
            self._works += self._streams.gathered()

    def await_gather(self) -> None:
        """Wait until the whole parameters may be read."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def show(self) -> None:
        """Let the modules show the whole parameters."""
        for face in self._faces:
            face.show_wholes()

    def hide(self) -> None:
        """Let the modules show the shards again."""
        if self._read_by_replay:
            self.take_edits_of_replay()
        self._open = False
        for face in self._faces:
            face.show_shards()

    def release(self) -> None:
        """Give the memory of the whole parameters back. Idempotent."""
        if any([flat.memory.release(self._ledger) for flat in self.flats]):
            self._streams.released()

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
        self.lent, self._set_aside = [], []

    def full_parameters(self) -> Iterator[tuple[Place, Tensor]]:
        """While lent: every parameter in full, in its own precision."""
        for flat, full in zip(self.flats, self.lent, strict=True):
            for place, slot in zip(flat.places, flat.layout.slots, strict=True):
                yield place, full[slot.start : slot.end].view(slot.shape)


def _compute_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    wanted = config.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype
