"""One unit: its two faces, gather and release.

Rule 1: the shard face is made of the user's original Parameter objects, the whole face of ours;
        both live as long as the unit.
Rule 2: the modules show the whole face only between USE_UNSHARDED and USE_SHARDED; whoever looks at any other
        time sees living shards, never freed memory.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fsdp.autograd.frames import in_backward, is_running
from fsdp.comm.process_group import Communicator
from fsdp.comm.work import Work
from fsdp.config import Config, MeshKind
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.external_use import GatherParam, LocalShard
from fsdp.params.flat_buffer import Before, FlatBuffer, ParamInfo, in_pieces
from fsdp.params.module_params import ModuleParams, own
from fsdp.params.unit_observer import UnitObserver
from fsdp.params.versions import Versions


class Unit:
    """The parameters that are gathered and released together, and the modules that show them."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        param_infos: Sequence[ParamInfo],
        config: Config,
        comm: Communicator,
    ) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.config = config
        self.comm = comm
        self._streams: Streams
        self._tracker: MemoryTracker
        self.full_params: list[Tensor] = []
        self._works: list[Work] = []
        self._set_aside: list[Tensor | None] = []
        self._open = False
        self._read_by_recompute = False
        """A replay that is not one of the unit's whole forward has read whole parameters, and may have changed them."""
        self.observer: UnitObserver
        self._copies: dict[int, tuple[Tensor, int]] = {}
        """Stand-ins for the copies that were read in forwards: their version counters, without their memory."""
        replicated = config.mesh_kind is MeshKind.REPLICATE
        self.flats = tuple(
            FlatBuffer(members, _compute_dtype(members[0].parameter.dtype, config), comm, replicated)
            for members in in_pieces(param_infos, config)
        )
        self.versions = Versions(self.flats)
        self.unsharded_params = tuple(p for flat in self.flats for p in flat.unsharded_params)
        self.trains = any(map(any, (flat.requires_grad_flags for flat in self.flats)))
        """Whether any parameter is trainable."""
        self.keys = frozenset(flat.key for flat in self.flats)
        by_module: dict[int, ModuleParams] = {}
        self._numbers: dict[int, int] = {}
        """Of each parameter, by the id of its shard and of its whole."""
        for flat in self.flats:
            for place, unsharded in zip(flat.param_infos, flat.unsharded_params, strict=True):
                self._numbers[id(place.parameter)] = self._numbers[id(unsharded)] = len(self._numbers) // 2
                own(place.parameter, self)
                own(unsharded, self)
                for owner, slot in place.slots:
                    shown = by_module.get(id(owner)) or by_module.setdefault(id(owner), ModuleParams(owner))
                    shown.shards[slot] = place.parameter
                    shown.unsharded_params[slot] = unsharded
        self._module_params = tuple(by_module.values())

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
        return f"Unit({self.name!r}, {len(self.param_infos)} parameters)"

    def join(self, streams: Streams, tracker: MemoryTracker) -> None:
        """Become part of a root: share its streams and its books."""
        self._streams = streams
        self._tracker = tracker
        tracker.add("shards", sum(size_of(flat.shard) for flat in self.flats))

    @property
    def device(self) -> torch.device:
        return self.flats[0].device if self.flats else torch.device("cpu")

    @property
    def param_infos(self) -> tuple[ParamInfo, ...]:
        return tuple(place for flat in self.flats for place in flat.param_infos)

    @property
    def sharded_params(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for flat in self.flats for p in flat.sharded_params)

    def stop_intercepting(self) -> None:
        """Its own forward, or a replay of it, runs on the whole parameters."""
        self._open = True
        for shown in self._module_params:
            shown.stop_intercepting()

    def intercept_reads(self) -> None:
        """From now on, answer each read of the whole parameters with a fresh copy: an optimizer may step."""
        self._open = False
        for shown in self._module_params:
            shown.intercept_reads()

    def write_back_inplace(self, before: Before = None) -> int:
        """Keep what its forward changed in the whole parameters in place; return how many parameters it changed.

        `before`: filled with what `roll_back_inplace` needs, if the forward goes on and may yet fail.

        Raises:
            ShardingError: they are in another precision than the shards.
        """
        return sum([flat.write_back_inplace(self.name, before) for flat in self.flats])

    def write_back_inplace_of_recompute(self) -> None:
        """Keep what a replay changed in place: the same once more, which is no reason to refuse the backward it is for."""
        self._read_by_recompute = False
        self.versions.repeat(self.write_back_inplace())

    def roll_back_inplace(self, taken: "list[tuple[Tensor, Tensor]]") -> None:
        """A forward failed: what it changed will be gathered anew, and what was `taken` of that is put back.

        Where the whole parameters are the shards, all of it stays.
        """
        for flat in self.flats:
            flat.inplace_updates = flat.count_inplace_updates()
        with torch.no_grad():
            for shard, before in reversed(taken):
                shard.copy_(before)
        self.versions.repeat(len(taken))

    def sync_requires_grad(self) -> None:
        """Carry to the whole face what the user has frozen or thawed."""
        if any([flat.sync_requires_grad() for flat in self.flats]):
            self.trains = any(map(any, (flat.requires_grad_flags for flat in self.flats)))

    def check_shards(self) -> bool:
        """Take over what the user did to the shards from outside, or refuse it; return whether anything was copied.

        Raises:
            ShardingError: a shard was replaced by something that does not fit, or a copy was edited instead of it.
        """
        self._check_copies()
        for shown in self._module_params:
            shown.check(self.name)
        return any([flat.check_shards(self.name) for flat in self.flats])

    # uses outside the unit ----------------------------------------------------------------

    def read(self, parameter: nn.Parameter, module: nn.Module, reader: object) -> Tensor:
        """The full value of `parameter`, to compute with in a forward: the whole parameter while it may be used, or a copy.

        A copy has the dtype the unit computes in.
        """
        number = self._numbers[id(parameter)]
        unsharded = self.unsharded_params[number]
        # a choice that leads to a gather must not hang on what this rank holds, such as whether an optimizer changed it here
        if self.full_params or (parameter is unsharded and self._open):
            return parameter
        if in_backward():
            own = any(shown.module is reader for shown in self._module_params) or is_running(module)
            # a replay around the unit computes with what the unit itself may be done with before; one of a part of it
            # needs the rest of the unit soon, of which each rank may read something else
            if (own and parameter is unsharded) or ((own or parameter is unsharded) and self.observer.unshard_for_backward()):
                self._read_by_recompute = True
                return unsharded
        copy = self._use_in_full(number, unsharded.dtype)
        if not copy.is_inference():
            self._check_copies()
            stand_in = copy.detach()
            stand_in.data = copy.new_empty(0)
            self._copies[number] = (stand_in, copy._version)
        return copy

    def full_value(self, parameter: nn.Parameter) -> Tensor:
        """See `fsdp.full_tensor`."""
        number = self._numbers[id(parameter)]
        return parameter if self.full_params else self._use_in_full(number, self.sharded_params[number].dtype)

    def local_value(self, parameter: nn.Parameter) -> Tensor:
        """See `fsdp.to_local`."""
        number = self._numbers[id(parameter)]
        flat, i = self._find(number)
        if self.full_params:
            raise ShardingError("to_local: lent parameters cannot be trained; leave summon_full_params first.")
        self.check_shards()
        self.sync_requires_grad()
        shard, on_external_grad = flat.sharded_params[i].detach(), self._on_external_grad
        value: Tensor = LocalShard.apply(flat.unsharded_params[i], shard, flat.parts[i], flat.num_shards, on_external_grad)  # type: ignore[no-untyped-call]
        return value

    def _use_in_full(self, number: int, dtype: torch.dtype) -> Tensor:
        flat, i = self._find(number)
        self.check_shards()
        self.sync_requires_grad()

        def gather() -> Tensor:
            full = torch.empty(flat.layout.numel, dtype=dtype, device=flat.device)
            flat.local_chunk(full).copy_(flat.shard)
            self.comm.all_gather(full.view(torch.uint8), self.name).wait()
            slot = flat.layout.slots[i]
            return full[slot.start : slot.end].view(slot.shape).clone()

        value: Tensor = GatherParam.apply(flat.unsharded_params[i], gather, self._on_external_grad)  # type: ignore[no-untyped-call]
        if in_backward() and value.requires_grad:
            # a replay; the gradient may come in a graph task of the checkpoint's own, and the backward is not over with that
            self._on_external_grad()
        return value

    def _on_external_grad(self) -> None:
        self.observer.on_external_grad()

    def _find(self, number: int) -> tuple[FlatBuffer, int]:
        """The buffer of a parameter of this unit, and its number there."""
        for flat in self.flats:
            if number < len(flat.param_infos):
                return flat, number
            number -= len(flat.param_infos)
        raise IndexError(number)

    def _check_copies(self) -> None:
        copies, self._copies = self._copies, {}
        for number, (stand_in, version) in copies.items():
            if stand_in._version != version:
                raise ShardingError(
                    f"parameter {self.param_infos[number].names[0]!r} was read in a forward outside its unit {self.name!r} and "
                    "changed there in place, which reaches a copy only; change it in the forward of its unit, or between "
                    "forwards."
                )

    # effects of the residency -------------------------------------------------------------

    def all_gather(self) -> None:
        """Allocate the whole parameters and launch their gather.

        Shapes:   shard (C,) on each of W ranks  ->  whole (W * C,), in rank order, cast on the way
        Traffic:  this rank receives (W - 1) * C elements
        """
        with self._streams.gathering():
            for flat in self.flats:
                flat.memory.allocate(self._tracker)
                if flat.is_shared:
                    continue
                flat.local_unsharded.copy_(flat.shard)
                self._works.append(self.comm.all_gather(flat.unsharded_bytes, self.name, flat.local_bytes))
            self._works += self._streams.gathered()

    def wait_all_gather(self) -> None:
        """Wait until the whole parameters may be read."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def use_unsharded(self) -> None:
        """Let the modules show the whole parameters."""
        for shown in self._module_params:
            shown.use_unsharded()

    def use_sharded(self) -> None:
        """Let the modules show the shards again."""
        if self._read_by_recompute:
            self.write_back_inplace_of_recompute()
        self._open = False
        for shown in self._module_params:
            shown.use_sharded()

    def free_unsharded(self) -> None:
        """Give the memory of the whole parameters back. Idempotent."""
        if any([flat.memory.release(self._tracker) for flat in self.flats]):
            self._streams.released()

    # the loan to the user -----------------------------------------------------------------

    @torch.no_grad()
    def gather_full(self) -> None:
        """Gather the parameters in their own precision and point the user's Parameter objects at them.

        Memory: W * C elements of the shards' dtype, apart from the whole face, until `free_full`.
        """
        for flat in self.flats:
            full = torch.empty(flat.layout.numel, dtype=flat.shard.dtype, device=flat.device)
            self._tracker.add("lent", size_of(full))
            flat.local_chunk(full).copy_(flat.shard)
            self.comm.all_gather(full.view(torch.uint8), self.name).wait()
            self.full_params.append(full)
        for flat, full in zip(self.flats, self.full_params, strict=True):
            for parameter, slot in zip(flat.sharded_params, flat.layout.slots, strict=True):
                self._set_aside.append(parameter.grad)
                parameter.grad = None
                parameter.data = full[slot.start : slot.end].view(slot.shape).data

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of the lent parameters into the shards.

        Raises:
            ShardingError: a parameter was pointed at a tensor of another shape or dtype. Nothing was copied.
        """
        full_params = list(self.full_parameters())
        for place, view in full_params:
            given = place.parameter
            if given.shape != view.shape or given.dtype != view.dtype:
                raise ShardingError(
                    f"parameter {place.names[0]!r} became {tuple(given.shape)}, {given.dtype} inside summon_full_params; "
                    f"it is {tuple(view.shape)}, {view.dtype}. Copy into it instead."
                )
        for place, view in full_params:
            if place.parameter.data_ptr() != view.data_ptr():
                view.copy_(place.parameter.detach())
        for flat, full in zip(self.flats, self.full_params, strict=True):
            flat.shard.copy_(flat.local_chunk(full))

    @torch.no_grad()
    def free_full(self) -> None:
        """Point the user's Parameter objects at the shards again. Idempotent."""
        aside = iter(self._set_aside)
        for flat, full in zip(self.flats, self.full_params, strict=False):
            self._tracker.add("lent", -size_of(full))
            for parameter, part in zip(flat.sharded_params, flat.parts, strict=True):
                parameter.grad = None
                parameter.data = flat.shard_view(part).data
                parameter.grad = next(aside, None)
        self.full_params, self._set_aside = [], []

    def full_parameters(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """While lent: every parameter in full, in its own precision."""
        for flat, full in zip(self.flats, self.full_params, strict=True):
            for place, slot in zip(flat.param_infos, flat.layout.slots, strict=True):
                yield place, full[slot.start : slot.end].view(slot.shape)


def _compute_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    wanted = config.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype
