"""One flat buffer of a unit: parameters of one dtype, all trainable or all frozen, laid end to end and cut over the ranks."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.comm.context import CommContext
from fsdp.comm.work import Work
from fsdp.config import OffloadPolicy
from fsdp.device.home import home_of
from fsdp.device.storage import Cutter, MemoryTracker, ResizableStorage, storage_key
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.layout import Layout, ShardExtent
from fsdp.params.param_info import ParamInfo, kept_accumulator
from fsdp.params.placement import Placement
from fsdp.params.use_after_free import refuse_freed_reads
from fsdp.params.wire import Wire, WireOfSegments
from fsdp.shards.dtensors import here_of, local_shapes, refuse_changed_locals
from fsdp.shards.refusals import refuse_grad_dtype
from fsdp.shards.shard_parameter import hooks_of, moved_shards, shard_changes
from fsdp.shards.shard_tensor import plain, quick_attributes

_BACKWARD_HOOKS: Final = attrgetter("_backward_hooks")
_GRAD_DTYPE: Final = attrgetter("grad_dtype")
_POST_HOOKS: Final = attrgetter("_post_accumulate_grad_hooks")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_VERSION: Final = attrgetter("_version")
_ADDRESS: Final = Tensor.data_ptr
SavedShards = list[tuple[Tensor, Tensor, str]]
"""Views into shards, each with its values from before an in-place update was written back, and the name of the parameter."""


def copy_label(unit: str) -> str:
    """The label of a gather of a copy, which is no gather of the unit."""
    return f"full parameters of {unit}"


class FlatBuffer:
    """Parameters of a unit with one dtype, all trainable or all frozen, laid end to end.

    Shapes: `shard` (C,) in the parameters' own dtype, always in memory; `unsharded` (W * C,) in the compute dtype, with
    memory only between ALL_GATHER and FREE_UNSHARDED. With `replicated` the shard has all elements (W = 1), and if the
    dtypes are equal too, `unsharded` is the shard. `home` says where the shard is; `unsharded` is on the device that computes.
    """

    def __init__(
        self,
        param_infos: Sequence[ParamInfo],
        placements: Sequence[Placement],
        comms: CommContext,
        dtype: torch.dtype,
        offload: OffloadPolicy | None = None,
    ) -> None:
        """`placements`: those of the parameters, all of one class and in one layout. `dtype`: in which they compute.

        `comms`: of the ranks among which they are cut.
        """
        self.comms = comms
        self.comm = comms.shard_comm
        self.param_infos = tuple(param_infos)
        self.placements = tuple(placements)
        kind = self.placements[0]
        self.layout: Layout = kind.layout
        self.rank, self.num_shards = kind.rank, self.layout.num_shards
        self.is_replicated = kind.is_complete
        """Whether each rank has the full parameters."""
        self.is_sparse = self.is_replicated and param_infos[0].is_sparse
        """Whether this buffer holds one parameter with sparse gradients, which are reduced as sparse tensors."""
        originals = [info.parameter for info in param_infos]
        self.device = originals[0].device
        self.home = home_of(self.device, offload)
        """Where the shard, its gradients and its optimizer state are."""
        self.tensor_parallel = tuple(i for i, placement in enumerate(self.placements) if placement.is_tensor_parallel)
        """The parameters that are DTensors when they are unsharded: tensor parallelism has cut them."""
        self.parts: tuple[ShardExtent, ...] = tuple(placement.part for placement in self.placements)
        self.local_params = tuple(i for i, part in enumerate(self.parts) if part.numel)
        """The parameters of which this rank holds an element."""
        dims = [placement.dim for placement in self.placements]
        slots = zip(self.layout.slots, dims, strict=True)
        cutter = Cutter([(slot.start, slot.numel, slot.shape, dim) for slot, dim in slots], self.device)
        self.gathers_in_place = self.layout.is_gathered_in_place
        self.wire = (Wire if self.gathers_in_place else WireOfSegments)(self.layout, self.placements, cutter)
        """The order in which gathered chunks and gradients travel."""
        here = [(self.parts[i], dims[i]) for i in self.local_params]
        self.local_cutter = Cutter([(part.offset, part.numel, part.shape, dim) for part, dim in here], self.device)
        """Makes the view of each of `local_params` in a tensor (C,) that is cut like the shard."""
        with torch.no_grad():
            self.shard = self._own_shard = self._shard_memory(originals[0].dtype)
            self.is_shared = self.is_replicated and dtype == self.shard.dtype and not self.home.copies
            self.unsharded = self.shard if self.is_shared else torch.empty(self.layout.numel, dtype=dtype, device=self.device)
            self._views = cutter.views_of(self.unsharded)
            """Where the unsharded parameters lie, also while there is no memory: no view can be made then."""
            self.unsharded_params = tuple(
                _unsharded_param(info.parameter, placement.unsharded(view.data))
                for info, placement, view in zip(param_infos, self.placements, self._views, strict=True)
            )
            self._local_unsharded = [*map(here_of, self.unsharded_params)]
            self.key = storage_key(self.unsharded)
            self.local_unsharded = self.local_chunk(self.unsharded)
            """The place of this rank's chunk among the unsharded parameters, if they are gathered in place."""
            self.unsharded_bytes, self.local_bytes = self.unsharded.view(torch.uint8), self.local_unsharded.view(torch.uint8)
            self.unsharded_segments = self.wire.segments_of(self.unsharded_bytes)
            """The bytes (W, c) of each segment of the unsharded parameters."""
            if not self.is_shared:
                self.memory = ResizableStorage(self.unsharded, "whole")
            for placement, info in zip(self.placements, param_infos, strict=True):
                info.kept_accumulator = kept_accumulator(info.parameter)
                self._shard_param(placement, info)
        self.sharded_params: tuple[nn.Parameter, ...] = tuple(info.parameter for info in param_infos)
        self._local_shapes = local_shapes(self.sharded_params) if kind.replaces_param else []
        """Of the parts of DTensors. Torch may resize one, over the parts behind it."""
        self.empty_shards = tuple(
            (i, self.sharded_params[i], placement.as_shard(placement.shard_in(self.shard).clone()))
            for i, placement in enumerate(self.placements)
            if placement.has_empty_grad and not placement.part.numel
        )
        """The parameters of which this rank holds no element, but has a gradient: number, sharded parameter, gradient.

        The gradient has no elements, so one serves all steps. Its version says whether the user has zeroed it, so it is no view
        of the shard, which would share the version.
        """
        self.asks_addresses = kind.asks_address
        """See `Placement.asks_address`."""
        self._own_addresses = (self._own_shard.data_ptr(), self._addresses())
        """Where the own memory of the shard lies, and where each sharded parameter lies in it."""
        self.requires_grad_flags = [p.requires_grad for p in originals]
        """`requires_grad` of each parameter, as it was applied last."""
        self.unhooked_at = -1
        """`shard_changes` when no shard was last found to have a hook of the user."""
        self._hooks: list[set[int]] = []
        """The numbers of the hooks that each parameter had when gradients of this backward came, if there were any."""
        self._nonempty = [i for i, p in enumerate(self._local_unsharded) if p.numel()]
        self._with_memory = [self._local_unsharded[i] for i in self._nonempty]
        starts = (slot.start for slot in self.layout.slots if slot.numel)
        self._byte_offsets = [start * self.unsharded.element_size() for start in starts]
        self._inplace_updates = self.count_inplace_updates()
        """The counts when in-place updates were last written back or ignored."""

    def _shard_param(self, placement: Placement, info: ParamInfo) -> None:
        """Copy this rank's part of a full parameter into the shard and turn the parameter into it; cut its gradient too."""
        gradient, info.parameter.grad = info.parameter.grad, None
        shard = placement.shard_in(self.shard)
        shard.copy_(placement.local_part(info.parameter.detach()))
        if gradient is not None:
            gradient = placement.local_part(gradient).to(shard.device, copy=True)
        placement.make_shard(info, shard)
        info.parameter.grad = None if gradient is None else placement.as_shard(gradient)

    def join(self, comms: CommContext) -> None:
        """Become part of a root: use its communicators, if they connect the same ranks."""
        if self.comms.same_ranks_as(comms):
            self.comms = comms

    def shard_view(self, index: int, chunk: Tensor | None = None) -> Tensor:
        """This rank's part of parameter `index` in the shard, or in another tensor (C,) that is cut like it."""
        return self.placements[index].shard_in(self.shard if chunk is None else chunk)

    def _shard_memory(self, dtype: torch.dtype) -> Tensor:
        """Memory (C,) where the shard belongs: on the device, or on the host."""
        with torch.inference_mode(False):  # later passes write there too
            return self.home.memory(self.layout.shard_numel, dtype)

    def begin_gather(self, tracker: MemoryTracker, streams: Streams) -> Tensor:
        """This rank's chunk in the compute dtype as bytes (uint8), to be gathered.

        If the chunks are gathered in place, it allocates the unsharded parameters, and the chunk is in its place there.
        """
        if not self.gathers_in_place:
            chunk = self.home.on_device(self.shard).to(self.unsharded.dtype)
            self.home.copied(streams)
            return chunk.view(torch.uint8)
        self.home.upload(self.shard, self.memory, self.local_unsharded, streams, tracker)
        return self.local_bytes

    def load_shard(self, values: Tensor) -> None:
        """Overwrite the whole shard (C,), as a change in place of each sharded parameter."""
        self.set_shard(values, self.sharded_params)
        increment_version(self.sharded_params)

    def set_shard(self, values: Tensor, parameters: Sequence[Tensor]) -> None:
        """Overwrite the whole shard (C,). `parameters`: the tensors that show it, of which some may have memory of their own."""
        self.shard.copy_(values)
        if self.is_elsewhere:
            for i, parameter in enumerate(parameters):
                plain(parameter).data.copy_(self.shard_view(i))

    def local_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of a flat tensor in the order of the wire: (W * C,) -> (C,)."""
        return flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def own_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of an unsharded tensor in the order of the memory: (W * C,) -> (C,), a copy."""
        return torch.cat([segment[self.rank] for segment in self.wire.segments_of(flat)])

    def launch_copy(self, chunk: Tensor, dtype: torch.dtype, label: str) -> tuple[Tensor, Work]:
        """Launch the gather of a full copy (W * C,) of a chunk (C,), such as the shard, in `dtype` and the order of the wire.

        Traffic: this rank receives (W - 1) * C elements
        """
        full = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        self.local_chunk(full).copy_(chunk)
        return full, self.comm.all_gather(full, label)

    def gather_copy(self, dtype: torch.dtype, unit: str) -> Tensor:
        """A full copy (W * C,) of this buffer in the order of the memory, see `launch_copy`."""
        full, work = self.launch_copy(self.shard, dtype, copy_label(unit))
        work.wait()
        return self.wire.to_memory(full)

    @property
    def is_replaced(self) -> bool:
        """Whether a sharded parameter lies, or has lain at the last gather, in memory where the user put it (`p.data = x`)."""
        may_be_moved = self.asks_addresses or moved_shards.data
        return self.shard is not self._own_shard or bool(may_be_moved and not self._are_at_home())

    @property
    def is_elsewhere(self) -> bool:
        """Whether, at the last gather, a sharded parameter lay in memory where the user put it."""
        return self.shard is not self._own_shard

    @property
    def places(self) -> int:
        """Where the sharded parameters lie: another number while the user has pointed one at other memory."""
        addresses = self._addresses()
        return hash(tuple(addresses)) if any(addresses) else 0

    def _are_at_home(self) -> bool:
        if (now := self._own_shard.data_ptr()) != self._own_addresses[0] and self.placements[0].address is _ADDRESS:
            # all memory has moved, see `fsdp.offload`
            self._own_addresses = now, [placement.shard_in(self._own_shard).data_ptr() for placement in self.placements]
        return self._addresses() == self._own_addresses[1]

    def _addresses(self) -> list[int]:
        """See `Placement.address`."""
        with quick_attributes():
            return [*map(self.placements[0].address, self.sharded_params)]

    def check_shards(self, unit: str) -> bool:
        """Let the shard hold what the sharded parameters are, also those that the user pointed at other memory (`p.data = x`).

        Such a parameter stays where the user put it, and what it pointed at before keeps its values: the shard is then other
        memory, into which all parameters are copied here. A tensor of the full shape is cut.

        Returns whether any lies elsewhere, or has lain there until now.

        Raises:
            ShardingError: the new data has another shape, dtype or device.
        """
        if self.placements[0].replaces_param:
            refuse_changed_locals(self.sharded_params, self._local_shapes, unit)
        if not self.is_replaced:
            return False
        if self.placements[0].refuses_data:
            self._refuse_data(unit)
        if self._are_at_home():
            self.shard = self._own_shard
        else:
            for i, parameter in enumerate(self.sharded_params):
                self._check_replaced(i, plain(parameter), unit)
            if not self.is_elsewhere:
                self.shard = self._shard_memory(self.shard.dtype)
            with torch.no_grad():
                for i, parameter in enumerate(self.sharded_params):
                    self.shard_view(i).copy_(plain(parameter))
        if self.is_shared:
            for unsharded, parameter in zip(self.unsharded_params, self.sharded_params, strict=True):
                unsharded.data = parameter.data
        return True

    def _refuse_data(self, unit: str) -> None:
        before, now = self._own_addresses[1], self._addresses()
        self._own_addresses = (self._own_addresses[0], now)  # the values are what they were: it is said once
        name = next(info.names[0] for info, one, other in zip(self.param_infos, before, now, strict=True) if one != other)
        raise ShardingError(
            f"`.data` of parameter {name!r} of unit {unit!r} was assigned. It is a DTensor, whose values are in its local "
            "tensor: they have not changed. Change them in place, by p.copy_(x)."
        )

    def _check_replaced(self, i: int, data: Tensor, unit: str) -> None:
        """Check that the user's data for a parameter fits. Data of the full shape is cut: the parameter is a part of it then."""
        placement, parameter = self.placements[i], self.sharded_params[i]
        shard = placement.shard_in(self._own_shard)
        fits = data.dtype == shard.dtype and data.device == shard.device
        if fits and data.shape == shard.shape:
            return
        if fits and data.shape == placement.shape:
            parameter.data = placement.local_part(data)
            return
        raise ShardingError(
            f"parameter {self.param_infos[i].names[0]!r} of unit {unit!r} was replaced from outside by a tensor of shape "
            f"{tuple(data.shape)}, {data.dtype} on {data.device}; its shard is {tuple(shard.shape)}, {shard.dtype} on "
            f"{shard.device}. Convert or move the module before wrapping it; for another compute precision give mp_policy."
        )

    def sync_requires_grad(self) -> bool:
        """Copy `requires_grad` from the sharded to the unsharded parameters; return whether any changed."""
        if self.asks_addresses:  # a shard refuses at once
            self.refuse_grad_dtypes()
        with quick_attributes():
            flags = [*map(_REQUIRES_GRAD, self.sharded_params)]
        return flags != self.requires_grad_flags and self._set_requires_grad(flags)

    def may_be_hooked(self) -> bool:
        """Whether a sharded parameter may have a hook of the user, or had one when gradients of this backward came."""
        if self._hooks or self.unhooked_at == shard_changes.count:
            return bool(self._hooks)
        with quick_attributes():
            hooks = [*map(_BACKWARD_HOOKS, self.sharded_params)]
            found = max(map(len, filter(None, hooks)), default=0) > 1  # one hook is the engine's own
            found = found or any(map(_POST_HOOKS, self.sharded_params))
        if not found and not self.asks_addresses:
            self.unhooked_at = shard_changes.count
        return found

    def see_hooks(self) -> None:
        """Gradients of this backward come: the hooks that the sharded parameters have now will run."""
        self._hooks = []
        if self.may_be_hooked():
            self._hooks = [*map(hooks_of, self.sharded_params)]

    def refuse_removed_hook(self, i: int) -> None:
        """Raise ShardingError if a hook of a parameter was removed between its gradient and its turn."""
        if self._hooks and not self._hooks[i] <= hooks_of(self.sharded_params[i]):
            raise ShardingError(
                f"a hook of {self.param_infos[i].names[0]!r} was removed inside a backward, where its gradient has come and the "
                "hook has not run yet: remove it after the backward, or in the hook itself."
            )

    def refuse_grad_dtypes(self) -> None:
        """Raise ShardingError if the user has set `grad_dtype` of a sharded parameter to another dtype than its own."""
        with quick_attributes():
            if {self.shard.dtype, None}.issuperset(map(_GRAD_DTYPE, self.sharded_params)):
                return
        for i, parameter in enumerate(self.sharded_params):
            dtype = parameter.grad_dtype
            if dtype is not parameter.dtype and dtype is not None:
                refuse_grad_dtype(self.param_infos[i].names[0], parameter.dtype)

    def refuse_grads_of_other_dtype(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise ShardingError, and set it back, if code in a forward has set `grad_dtype` of an unsharded parameter."""
        dtype = self.unsharded.dtype
        for info, unsharded, gradient in zip(self.param_infos, self.unsharded_params, gradients, strict=True):
            if gradient is not None and gradient.dtype is not dtype:
                unsharded.grad = None
                unsharded.grad_dtype = dtype
                refuse_grad_dtype(info.names[0], self.shard.dtype)

    def take_requires_grad(self) -> bool:
        """Copy `requires_grad` from the unsharded to the sharded parameters, where code in a forward has changed it.

        Returns whether any changed.
        """
        flags = [*map(_REQUIRES_GRAD, self.unsharded_params)]
        return flags != self.requires_grad_flags and self._set_requires_grad(flags)

    def _set_requires_grad(self, flags: list[bool]) -> bool:
        for one, other, requires_grad in zip(self.sharded_params, self.unsharded_params, flags, strict=True):
            one.requires_grad_(requires_grad)
            other.requires_grad_(requires_grad)
        self.requires_grad_flags = flags
        return True

    def count_inplace_updates(self) -> list[int]:
        """For each unsharded parameter, how often it was changed in place."""
        return [*map(_VERSION, self.unsharded_params)]

    def forget_updates(self) -> list[str]:
        """Do not write back what was done to unsharded parameters so far, nor keep their gradients. Return the names of both.

        Updates stay where the unsharded parameters share the memory of the shards.
        """
        before, self._inplace_updates = self._inplace_updates, self.count_inplace_updates()
        changed = [then != now and not self.is_shared for then, now in zip(before, self._inplace_updates, strict=True)]
        for i, unsharded in enumerate(self.unsharded_params):
            changed[i] |= unsharded.grad is not None
            unsharded.grad = None
        # not by address: an inner forward that failed has freed the memory already
        for i, (parameter, view) in enumerate(zip(self._local_unsharded, self._places(), strict=True)):
            if storage_key(parameter) != storage_key(view) or parameter.storage_offset() != view.storage_offset():
                changed[i], parameter.data = True, view.data
        return [info.names[0] for info, one in zip(self.param_infos, changed, strict=True) if one]

    def write_back_inplace(self, unit: str, saved: SavedShards | None) -> int:
        """Copy this rank's part of unsharded parameters that were changed in place to the shard; return their number.

        `saved`: receives the values that the shard had before. Refused if the shard has another dtype.
        """
        before, self._inplace_updates = self._inplace_updates, self.count_inplace_updates()
        is_repointed = self.is_repointed
        if not is_repointed and before == self._inplace_updates:
            return 0
        with torch.no_grad():
            updated = {i for i, count in enumerate(self._inplace_updates) if count != before[i]}
            if is_repointed:
                updated |= self._take_repointed(unit)
            for i in sorted(updated):
                self._write_back(i, unit, saved)
        return len(updated)

    @property
    def is_repointed(self) -> bool:
        """Whether an unsharded parameter was pointed at other memory (`p.data = x`), which is not written back yet."""
        if self.is_shared:
            addresses = self._addresses()
            return [*map(_ADDRESS, self._with_memory)] != [addresses[i] for i in self._nonempty]
        base = self.unsharded.data_ptr()
        return [address - base for address in map(_ADDRESS, self._with_memory)] != self._byte_offsets

    def _places(self) -> list[Tensor]:
        """Where each unsharded parameter lies, unless a forward has pointed it at other memory."""
        return [plain(p) for p in self.sharded_params] if self.is_shared else self._views

    def _write_back(self, i: int, unit: str, saved: SavedShards | None) -> None:
        """Copy this rank's part of unsharded parameter `i` to the shard."""
        if self.unsharded.dtype != self.shard.dtype:
            raise ShardingError(
                f"parameter {self.param_infos[i].names[0]!r} was changed in place in the forward of unit {unit!r}, where it "
                f"is {self.unsharded.dtype}; its shard is {self.shard.dtype} and would lose precision. Change it between "
                "forwards."
            )
        # through `.data`, which does not count the change: it is counted once, below
        shard = plain(self.sharded_params[i]).data if self.is_elsewhere else self.shard_view(i)
        if saved is not None:
            saved.append((shard, shard.clone(), self.param_infos[i].names[0]))
        shard.copy_(self.placements[i].local_part(self.unsharded_params[i].detach()))
        increment_version(self.sharded_params[i])

    def _take_repointed(self, unit: str) -> set[int]:
        """Copy the data at which a forward pointed unsharded parameters (`p.data = x`) into the buffer; return their indices."""
        repointed = set()
        for i, (parameter, view) in enumerate(zip(self._local_unsharded, self._places(), strict=True)):
            if parameter.data_ptr() == view.data_ptr():
                continue
            # a DTensor that is put into an ordinary parameter leaves it without memory
            if parameter.shape != view.shape or parameter.dtype != view.dtype or (view.numel() and not parameter.data_ptr()):
                for one, its_place in zip(self._local_unsharded, self._places(), strict=True):
                    one.data = its_place.data
                raise ShardingError(
                    f"parameter {self.param_infos[i].names[0]!r} was replaced in the forward of unit {unit!r} by a tensor of "
                    f"another shape or dtype, or by one without memory; it is {tuple(view.shape)}, {view.dtype}."
                )
            view.copy_(parameter.data)
            parameter.data = view.data
            repointed.add(i)
        return repointed


def _unsharded_param(original: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A permanent parameter over `data`, which has a version counter of its own."""
    unsharded = nn.Parameter(data, requires_grad=original.requires_grad)
    unsharded.__dict__.update(original.__dict__)
    if original._backward_hooks:
        # hooks set before wrapping get the full gradient; the user's handles refer to this dict object
        unsharded._backward_hooks, original._backward_hooks = original._backward_hooks, None
    refuse_freed_reads(unsharded)
    return unsharded


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, taken as numbers of four bytes where they are a multiple of that: ()."""
    bits = tensor.reshape(-1)
    return bits.view(torch.int32 if bits.nbytes % 4 == 0 else torch.uint8).sum(dtype=torch.int64)
