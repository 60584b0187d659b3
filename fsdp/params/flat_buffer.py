"""One flat buffer of a unit: parameters of one dtype, all trainable or all frozen, laid end to end and cut over the ranks."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.comm.communicator import Communicator
from fsdp.config import OffloadPolicy
from fsdp.device.storage import Cutter, ResizableStorage, SharedStorage, shard_memory, storage_key
from fsdp.errors import ShardingError
from fsdp.params.layout import Layout, ShardExtent, make_layout, make_row_layout
from fsdp.params.param_info import ParamInfo
from fsdp.params.use_after_free import refuse_freed_reads
from fsdp.params.wire import Wire
from fsdp.shards.dtensors import DTensorLayout, DTensorMesh, local_of, replace_by_dtensor
from fsdp.shards.info import ShardInfo
from fsdp.shards.refusals import refuse_grad_dtype
from fsdp.shards.shard_parameter import become_full, become_local, become_shard, moved_data, moved_shards
from fsdp.shards.shard_tensor import as_shard, plain, quick_attributes

_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_torch: Any = torch._C
_storage_id: Final[Callable[[Tensor], int]] = _torch._storage_id
SavedShards = list[tuple[Tensor, Tensor, str]]
"""Views into shards, each with its values from before an in-place update was written back, and the name of the parameter."""


class FlatBuffer:
    """Parameters of a unit with one dtype, all trainable or all frozen, laid end to end.

    Shapes: `shard` (C,) in the parameters' own dtype, always in memory; `unsharded` (W * C,) in the compute dtype, with
    memory only between ALL_GATHER and FREE_UNSHARDED. With `replicated` the shard has all elements (W = 1), and if the
    dtypes are equal too, `unsharded` is the shard. With `offload` the shard is in host memory, and `unsharded` never is.
    """

    def __init__(
        self,
        param_infos: Sequence[ParamInfo],
        dtype: torch.dtype,
        comm: Communicator,
        replicated: bool,
        aligned: bool = True,
        plain_shards: bool = False,
        dtensor_mesh: DTensorMesh | None = None,
        former: "FlatBuffer | None" = None,
        taken: Sequence[int] | None = None,
        offload: OffloadPolicy | None = None,
    ) -> None:
        """`former`: the flat buffer whose place this one takes, without `dtensor_mesh`: cut alike, and with its DTensors.

        `taken`: the numbers of the parameters of `former` that this one takes, if they are DTensors; None: all.
        """
        self.param_infos = tuple(param_infos)
        self.is_replicated = replicated
        self.is_sparse = replicated and param_infos[0].is_sparse
        """Whether this buffer holds one parameter with sparse gradients, which are reduced as sparse tensors."""
        self.rank = comm.rank
        self.num_shards = comm.size
        originals = [info.parameter for info in param_infos]
        self.device = originals[0].device
        self.is_offloaded = offload is not None and self.device.type != "cpu"
        """Whether the shard, its gradients and its optimizer state are in host memory, while `device` computes."""
        self.pins = self.is_offloaded and offload is not None and offload.pin_memory
        of_dtensors: tuple[DTensorLayout, ...] = ()
        taken = range(len(originals)) if taken is None else taken
        if former is not None and former.dtensor_layouts is not None:
            of_dtensors = tuple([former.dtensor_layouts[number].of_dtype(originals[0].dtype) for number in taken])
        elif dtensor_mesh is not None:
            of_dtensors = tuple([dtensor_mesh.layout_of(info.parameter, info.shard_dim) for info in param_infos])
        self.dtensor_layouts: tuple[DTensorLayout, ...] | None = of_dtensors or None
        """How each shard lies on the mesh as a DTensor; None if shards are no DTensors."""
        self.is_moved = self.dtensor_layouts is not None and any(one.dim for one in self.dtensor_layouts)
        """Whether the tensors that code sees have their dimensions in another order than the buffer."""
        self.has_tensor_parallel = any(map(self.is_tensor_parallel, range(len(originals))))
        """Whether tensor parallelism has spread some unsharded parameters, which are DTensors."""
        shapes = tuple(tuple(self._stored(i, p).shape) for i, p in enumerate(originals))
        if former is not None and len(taken) == len(former.param_infos):
            self.layout: Layout = former.layout
        else:
            itemsize = min(originals[0].element_size(), dtype.itemsize)
            if not of_dtensors:
                self.layout = make_layout(shapes, itemsize, self.num_shards, aligned)
            else:
                self.layout = make_row_layout(shapes, itemsize, self.num_shards)
        self.wire = None if self.layout.is_gathered_in_place else Wire(self.layout)
        """The order in which gathered chunks and gradients travel; None if it is that of the memory."""
        self.parts: tuple[ShardExtent, ...] = tuple(self.layout.part(i, self.rank) for i in range(len(shapes)))
        self.local_params = tuple(i for i, part in enumerate(self.parts) if part.numel)
        """The parameters of which this rank holds an element."""
        self._cutter = Cutter([(slot.start, slot.numel, slot.shape) for slot in self.layout.slots], self.device)
        local_parts = [self.parts[i] for i in self.local_params]
        self._local_cutter = Cutter([(part.offset, part.numel, part.shape) for part in local_parts], self.device)
        with torch.no_grad():
            self.shard = self._own_shard = self._shard_memory(originals[0].dtype)
            self.is_shared = replicated and dtype == self.shard.dtype and not self.is_offloaded
            self.unsharded = self.shard if self.is_shared else torch.empty(self.layout.numel, dtype=dtype, device=self.device)
            self.unsharded_params = tuple(
                _unsharded_param(info.parameter, view, None if self.dtensor_layouts is None else self.dtensor_layouts[i])
                for i, (view, info) in enumerate(zip(self.views_of(self.unsharded), param_infos, strict=True))
            )
            self._local_unsharded = [p if (local := local_of(p)) is None else local for p in self.unsharded_params]
            self.key = storage_key(self.unsharded)
            self.local_unsharded = self.local_chunk(self.unsharded)
            """The place of this rank's chunk among the unsharded parameters, if they are gathered in place."""
            self.unsharded_bytes, self.local_bytes = self.unsharded.view(torch.uint8), self.local_unsharded.view(torch.uint8)
            segments = [self.unsharded_bytes.view(self.num_shards, -1)]
            self.unsharded_segments = segments if self.wire is None else self.wire.segments_of(self.unsharded_bytes)
            """The bytes (W, c) of each segment of the unsharded parameters."""
            self.memory = SharedStorage() if self.is_shared else ResizableStorage(self.unsharded, "whole")
            self.shard_infos = (None,) * len(originals) if plain_shards or of_dtensors else self._shard_infos(comm)
            for index, info in enumerate(param_infos):
                info.remember_accumulator()
                self._shard_param(index, info.parameter, None if former is None else former.sharded_params[taken[index]])
        self.sharded_params: tuple[nn.Parameter, ...] = tuple(info.parameter for info in param_infos)
        known = [bool(of_dtensors) or info is not None for info in self.shard_infos]
        self.empty_shards = tuple(
            (i, self.sharded_params[i], self.as_shown(i, self.shard_view(i).clone()))
            for i, part in enumerate(self.parts)
            if not part.numel and known[i]
        )
        """The parameters of which this rank holds no element, and whose shards know it: number, sharded parameter, gradient.

        The gradient has no elements, so one serves all steps. Its version says whether the user has zeroed it, so it is no view
        of the shard, which would share the version.
        """
        self.asks_pointers = self.shard_infos[0] is None
        """Whether only their addresses say where the sharded parameters lie. Shards know by themselves."""
        self._own_pointers = (self._own_shard.data_ptr(), self._pointers())
        """Where the own memory of the shard lies, and where each sharded parameter lies in it."""
        self.requires_grad_flags = [p.requires_grad for p in originals]
        """`requires_grad` of each parameter, as of the last forward."""
        self._nonempty = [i for i, p in enumerate(self._local_unsharded) if p.numel()]
        starts = (slot.start for slot in self.layout.slots if slot.numel)
        self._byte_offsets = [start * self.unsharded.element_size() for start in starts]
        self._inplace_updates = self.count_inplace_updates()
        """The counts when in-place updates were last written back or ignored."""

    def _shard_infos(self, comm: Communicator) -> tuple[ShardInfo | None, ...]:
        """What each shard is a part of; None where each rank holds the full parameter."""
        if self.is_replicated or self.num_shards == 1:
            return (None,) * len(self.param_infos)
        return tuple(
            ShardInfo(
                info.names[0],
                self.layout.cut(index),
                torch.Size(part.shape),
                part.first,
                slot.numel,
                slot.cut_by_element,
                comm,
            )
            for index, (info, slot, part) in enumerate(zip(self.param_infos, self.layout.slots, self.parts, strict=True))
        )

    def _shard_param(self, index: int, parameter: nn.Parameter, former: nn.Parameter | None) -> None:
        """Copy this rank's part of a full parameter into the shard and turn the parameter into it; cut its gradient too.

        `former`: a DTensor that was in the place of the parameter, and is again.
        """
        info = self.shard_infos[index]
        gradient = parameter.grad
        parameter.grad = None
        shard = self.shard_view(index)
        shard.copy_(self.local_part(index, parameter.detach()))
        if gradient is not None:
            gradient = self.local_part(index, gradient).to(shard.device, copy=True)
        if self.dtensor_layouts is not None:
            parameter = replace_by_dtensor(parameter, shard, self.dtensor_layouts[index], former)
            self.param_infos[index].replace(parameter)
        elif info is None:
            become_local(parameter, shard.data)
        else:
            become_shard(parameter, shard.data, info)
        parameter.grad = None if gradient is None else self.as_shown(index, gradient)

    def restore_param(self, index: int, full: Tensor, gradient: Tensor | None) -> None:
        """Turn the user's Parameter object back into an ordinary parameter with the values `full` and this gradient.

        Hooks that were set before wrapping are its own again. The buffer must not be used afterwards.
        """
        parameter, accumulator = self.sharded_params[index], self.param_infos[index].kept_accumulator
        parameter.grad = None
        become_full(parameter, full, None if accumulator is None else accumulator.variable)
        late, early = parameter._backward_hooks, self.unsharded_params[index]._backward_hooks
        if early:
            self.unsharded_params[index]._backward_hooks = None
            early.update(late or {})
        # torch learns of hooks when the attribute is set
        parameter._backward_hooks = early or late or None
        if parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        parameter.grad = gradient

    def replace_dtensor(self, index: int, local: Tensor) -> None:
        """Let an ordinary parameter with the values `local` take the place of DTensor `index`, for another flat buffer to cut.

        The DTensor has no gradient afterwards. The buffer must not be used but as the `former` of the other.
        """
        parameter, unsharded = self.sharded_params[index], self.unsharded_params[index]
        parameter.grad = None
        stand_in = nn.Parameter(local, parameter.requires_grad)
        stand_in.__dict__.update(parameter.__dict__)
        stand_in._backward_hooks, unsharded._backward_hooks = unsharded._backward_hooks, None
        self.param_infos[index].replace(stand_in)

    def as_shown(self, index: int, local: Tensor) -> Tensor:
        """`local`, this rank's part of a tensor that is cut like parameter `index`, as code sees it: a tensor like its shard."""
        info = self.shard_infos[index]
        if self.dtensor_layouts is not None:
            return self.dtensor_layouts[index].tensor(local)
        return local if info is None else as_shard(local, info)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The view of each parameter in an unsharded flat tensor (W * C,)."""
        views = self._cutter.views_of(flat)
        return [self._shown(i, view) for i, view in enumerate(views)] if self.is_moved else views

    def full_param(self, index: int, flat: Tensor) -> Tensor:
        """Parameter `index` in an unsharded flat tensor (W * C,), as a forward sees it: a view, or a DTensor over one."""
        slot = self.layout.slots[index]
        view = self._shown(index, flat[slot.start : slot.end].view(slot.shape))
        return view if self.dtensor_layouts is None else self.dtensor_layouts[index].unsharded(view)

    def local_views_of(self, chunk: Tensor) -> list[Tensor]:
        """The view of each of `local_params` in a tensor (C,) that is cut like the shard."""
        views = self._local_cutter.views_of(chunk)
        return [self._shown(i, view) for i, view in zip(self.local_params, views, strict=True)] if self.is_moved else views

    def shard_view(self, index: int, chunk: Tensor | None = None) -> Tensor:
        """This rank's part of parameter `index` in the shard, or in another tensor (C,) that is cut like it."""
        return self._view_of(index, self.shard if chunk is None else chunk)

    def _view_of(self, index: int, chunk: Tensor) -> Tensor:
        part = self.parts[index]
        return self._shown(index, chunk[part.offset : part.offset + part.numel].view(part.shape))

    def _shard_memory(self, dtype: torch.dtype) -> Tensor:
        """Memory (C,) where the shard belongs: on the device, or on the host."""
        with torch.inference_mode(False):  # later passes write there too
            return shard_memory(self.layout.shard_numel, dtype, self.device, self.is_offloaded, self.pins)

    def local_part(self, index: int, full: Tensor) -> Tensor:
        """This rank's part of a tensor with the shape of the unsharded parameter `index`."""
        part = self.parts[index]
        return self._shown(index, self._stored(index, full).reshape(-1)[part.first : part.first + part.numel].view(part.shape))

    def local_grad(self, index: int, gradient: Tensor) -> Tensor:
        """An unsharded gradient as an ordinary tensor. Communicates if tensor parallelism has left it in another form."""
        if self.dtensor_layouts is None or not self.is_tensor_parallel(index):
            return gradient
        return self.dtensor_layouts[index].local_grad(gradient)

    def is_tensor_parallel(self, index: int) -> bool:
        """Whether tensor parallelism has spread unsharded parameter `index`, which is a DTensor."""
        return self.dtensor_layouts is not None and self.dtensor_layouts[index].unsharded_spec is not None

    def is_row_range(self, index: int) -> bool:
        """Whether the shards of parameter `index` are ranges of its elements, in the order of its memory."""
        return self.dtensor_layouts is None or self.dtensor_layouts[index].is_plain

    def _stored(self, index: int, tensor: Tensor) -> Tensor:
        """See `DTensorLayout.stored`."""
        return tensor if self.dtensor_layouts is None else self.dtensor_layouts[index].stored(tensor)

    def _shown(self, index: int, stored: Tensor) -> Tensor:
        """See `DTensorLayout.shown`."""
        return stored if self.dtensor_layouts is None else self.dtensor_layouts[index].shown(stored)

    def own_chunk(self) -> Tensor:
        """This rank's chunk in the compute dtype as bytes (uint8), to be gathered: in its place if it is gathered in place."""
        if self.wire is not None:
            return self.on_device(self.shard).to(self.unsharded.dtype).view(torch.uint8)
        self.local_unsharded.copy_(self.shard)
        return self.local_bytes

    def wire_views_of(self, wire: Tensor) -> list[list[Tensor]]:
        """The parts of each parameter in a tensor (W * C,) whose chunks are reduced."""
        return [[view] for view in self.views_of(wire)] if self.wire is None else self.wire.views_of(wire)

    def copies_from_wire(self, wire: Tensor) -> list[Tensor]:
        """A copy of each parameter in such a tensor, in the shape of the full parameter."""
        copies = []
        for i, (slot, parts) in enumerate(zip(self.layout.slots, self.wire_views_of(wire), strict=True)):
            rows = [part.reshape(-1, *slot.shape[1:]) for part in parts]
            copies.append(self._shown(i, torch.cat(rows) if rows else wire.new_empty(slot.shape)))
        return copies

    def wire_parts_of(self, index: int, full: Tensor) -> Sequence[Tensor]:
        """The same parts of a full tensor of the shape of parameter `index`: views."""
        if self.wire is None:
            return (full,)
        return self.wire.parts_of(index, self._stored(index, full) if self.is_moved else full)

    def upload(self) -> None:
        """Copy the shard from host memory to its place in `unsharded`, on the current stream.

        Memory: with another compute dtype, C elements of the shard's dtype on the device until they are converted.
        """
        # a copy from the host to another dtype would be converted on the host
        source = self.shard if self.local_unsharded.dtype is self.shard.dtype else self.on_device(self.shard)
        self.local_unsharded.copy_(source, non_blocking=True)

    def on_device(self, part: Tensor) -> Tensor:
        """A part of the shard on the device that computes: itself, or a copy that the current stream makes."""
        return part.to(self.device, non_blocking=True) if self.is_offloaded else part

    def load_shard(self, values: Tensor) -> None:
        """Overwrite the whole shard (C,), as a change in place of each sharded parameter."""
        self.set_shard(values, self.sharded_params)
        for parameter in self.sharded_params:
            increment_version(parameter)

    def set_shard(self, values: Tensor, parameters: Sequence[Tensor]) -> None:
        """Overwrite the whole shard (C,). `parameters`: the tensors that show it, of which some may have memory of their own."""
        self.shard.copy_(values)
        if self.is_elsewhere:
            for i, parameter in enumerate(parameters):
                plain(parameter).data.copy_(self.shard_view(i))

    def local_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of a flat tensor in the order of the wire: (W * C,) -> (C,)."""
        return flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    def gather_copy(self, dtype: torch.dtype, comm: Communicator, unit: str) -> Tensor:
        """A full copy (W * C,) of this buffer, in `dtype` and in memory of its own.

        Traffic: this rank receives (W - 1) * C elements
        """
        gathered = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        self.local_chunk(gathered).copy_(self.shard)
        comm.all_gather(gathered, unit).wait()
        if self.wire is None:
            return gathered
        full = torch.empty_like(gathered)
        sizes = [segment.numel for segment in self.layout.segments]
        torch.split_with_sizes_copy(gathered.view(self.num_shards, -1), sizes, 1, out=self.wire.segments_of(full))
        return full

    @property
    def is_replaced(self) -> bool:
        """Whether a sharded parameter lies, or has lain at the last gather, in memory where the user put it (`p.data = x`)."""
        return self.is_elsewhere or not self._are_at_home()

    @property
    def is_elsewhere(self) -> bool:
        """Whether, at the last gather, a sharded parameter lay in memory where the user put it."""
        return self.shard is not self._own_shard

    @property
    def places(self) -> int:
        """Where the sharded parameters lie: another number while the user has pointed one at other memory."""
        if self.asks_pointers:
            return hash(tuple(self._pointers()))
        moved = self._moved() if moved_data else ()
        return hash(tuple(moved)) if moved else 0

    def _moved(self) -> list[int]:
        """What stands for the tensors at which the user has pointed shards."""
        return [moved_shards[p] for p in self.sharded_params if p in moved_shards]

    def _are_at_home(self) -> bool:
        if not self.asks_pointers:
            return not moved_data or not self._moved()
        if (
            self.dtensor_layouts is None and self._own_shard.data_ptr() != self._own_pointers[0]
        ):  # the memory has moved as a whole, see `fsdp.offload`
            own = [self._view_of(i, self._own_shard).data_ptr() for i in range(len(self.parts))]
            self._own_pointers = (self._own_shard.data_ptr(), own)
        return self._pointers() == self._own_pointers[1]

    def _pointers(self) -> list[int]:
        """Where this rank's part of each parameter lies; of DTensors another number after `p.data = x`."""
        if self.dtensor_layouts is not None:
            return [*map(_storage_id, self.sharded_params)]
        with quick_attributes():
            return [*map(Tensor.data_ptr, self.sharded_params)]

    def sum_of_bits(self) -> Tensor:
        """The sum of the shard's bits, taken as numbers of four bytes where they are a multiple of that: ()."""
        words = torch.int32 if self.shard.nbytes % 4 == 0 else torch.uint8
        return self.shard.view(words).sum(dtype=torch.int64)

    def check_shards(self, unit: str) -> bool:
        """Let the shard hold what the sharded parameters are, also those that the user pointed at other memory (`p.data = x`).

        Such a parameter stays where the user put it, and what it pointed at before keeps its values: the shard is then other
        memory, into which all parameters are copied here. A tensor of the full shape is cut.

        Returns whether any lies elsewhere, or has lain there until now.

        Raises:
            ShardingError: the new data has another shape, dtype or device.
        """
        if not (self.asks_pointers or moved_data or self.is_elsewhere) or not self.is_replaced:
            return False
        if self.dtensor_layouts is not None:
            self._refuse_data_of_dtensors(unit)
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

    def _refuse_data_of_dtensors(self, unit: str) -> None:
        before, now = self._own_pointers[1], self._pointers()
        self._own_pointers = (self._own_pointers[0], now)  # the values are what they were: it is said once
        name = next(info.names[0] for info, one, other in zip(self.param_infos, before, now, strict=True) if one != other)
        raise ShardingError(
            f"`.data` of parameter {name!r} of unit {unit!r} was assigned. It is a DTensor, whose values are in its local "
            "tensor: they have not changed. Change them in place, by p.copy_(x)."
        )

    def _check_replaced(self, i: int, data: Tensor, unit: str) -> None:
        """Check that the user's data for a parameter fits. Data of the full shape is cut: the parameter is a part of it then."""
        shard, parameter = self._view_of(i, self._own_shard), self.sharded_params[i]
        fits = data.dtype == shard.dtype and data.device == shard.device
        if fits and data.shape == shard.shape:
            return
        if fits and self.dtensor_layouts is None and data.shape == self.layout.slots[i].shape:
            parameter.data = self.local_part(i, data)
            return
        raise ShardingError(
            f"parameter {self.param_infos[i].names[0]!r} of unit {unit!r} was replaced from outside by a tensor of shape "
            f"{tuple(data.shape)}, {data.dtype} on {data.device}; its shard is {tuple(shard.shape)}, {shard.dtype} on "
            f"{shard.device}. Convert or move the module before wrapping it; for another compute precision give mp_policy."
        )

    def sync_requires_grad(self) -> bool:
        """Copy `requires_grad` from the sharded to the unsharded parameters; return whether any changed."""
        with quick_attributes():
            flags = [*map(_REQUIRES_GRAD, self.sharded_params)]
            if self.asks_pointers:  # a shard refuses at once
                for i, parameter in enumerate(self.sharded_params):
                    dtype = parameter.grad_dtype
                    if dtype is not parameter.dtype and dtype is not None:
                        refuse_grad_dtype(self.param_infos[i].names[0], parameter.dtype)
        return flags != self.requires_grad_flags and self._set_requires_grad(flags)

    def refuse_grads_of_other_dtype(self, gradients: Sequence[Tensor | None]) -> None:
        """Check the gradients of the unsharded parameters.

        Raises:
            ShardingError: code in a forward has set `grad_dtype` of an unsharded parameter. It is as it was before then.
        """
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
        return [p._version for p in self.unsharded_params]

    def forget_updates(self) -> list[str]:
        """Do not write back what was done to unsharded parameters so far, nor keep their gradients. Return the names of both.

        Updates stay where the unsharded parameters share the memory of the shards.
        """
        before, self._inplace_updates = self._inplace_updates, self.count_inplace_updates()
        changed = [then != now and not self.is_shared for then, now in zip(before, self._inplace_updates, strict=True)]
        for i, unsharded in enumerate(self.unsharded_params):
            changed[i] |= unsharded.grad is not None
            unsharded.grad = None
        places = [] if self.is_shared else self.views_of(self.unsharded)
        for i, (parameter, view) in enumerate(zip(self._local_unsharded, places, strict=False)):
            if parameter.data_ptr() != view.data_ptr():
                changed[i], parameter.data = True, view.data
        return [info.names[0] for info, one in zip(self.param_infos, changed, strict=True) if one]

    def write_back_inplace(self, unit: str, saved: SavedShards | None) -> int:
        """Copy this rank's part of unsharded parameters that were changed in place to the shard; return their number.

        `saved`: receives the values that the shard had before.

        Raises:
            ShardingError: the unsharded parameters have another dtype than the shard.
        """
        before, self._inplace_updates = self._inplace_updates, self.count_inplace_updates()
        is_repointed = [self._local_unsharded[i].data_ptr() for i in self._nonempty] != self._unsharded_pointers()
        if not is_repointed and before == self._inplace_updates:
            return 0
        with torch.no_grad():
            updated = {i for i, count in enumerate(self._inplace_updates) if count != before[i]}
            if is_repointed:
                updated |= self._take_repointed(unit)
            for i in sorted(updated):
                self._write_back(i, unit, saved)
        return len(updated)

    def _unsharded_pointers(self) -> list[int]:
        """Where each unsharded parameter with elements lies, unless a forward has pointed it at other memory."""
        if self.is_shared:
            pointers = self._pointers()
            return [pointers[i] for i in self._nonempty]
        start = self.unsharded.data_ptr()
        return [start + offset for offset in self._byte_offsets]

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
        shard.copy_(self.local_part(i, self.unsharded_params[i].detach()))
        increment_version(self.sharded_params[i])

    def _take_repointed(self, unit: str) -> set[int]:
        """Copy the data at which a forward pointed unsharded parameters (`p.data = x`) into the buffer; return their indices."""
        repointed = set()
        places = [plain(p) for p in self.sharded_params] if self.is_shared else self.views_of(self.unsharded)
        for i, (parameter, view) in enumerate(zip(self._local_unsharded, places, strict=True)):
            if parameter.data_ptr() == view.data_ptr():
                continue
            # a DTensor that is put into an ordinary parameter leaves it without memory
            if parameter.shape != view.shape or parameter.dtype != view.dtype or (view.numel() and not parameter.data_ptr()):
                parameter.data = view.data
                raise ShardingError(
                    f"parameter {self.param_infos[i].names[0]!r} was replaced in the forward of unit {unit!r} by a tensor of "
                    f"another shape or dtype, or by one without memory; it is {tuple(view.shape)}, {view.dtype}."
                )
            view.copy_(parameter.data)
            parameter.data = view.data
            repointed.add(i)
        return repointed


def _unsharded_param(original: nn.Parameter, view: Tensor, layout: DTensorLayout | None) -> nn.Parameter:
    """A permanent parameter over `view`. It is made from `view.data`, so that it has a version counter of its own."""
    data = view.data if layout is None else layout.unsharded(view.data)
    unsharded = nn.Parameter(data, requires_grad=original.requires_grad)
    unsharded.__dict__.update(original.__dict__)
    if original._backward_hooks:
        # hooks set before wrapping get the full gradient; the user's handles refer to this dict object
        unsharded._backward_hooks, original._backward_hooks = original._backward_hooks, None
    refuse_freed_reads(unsharded)
    return unsharded
