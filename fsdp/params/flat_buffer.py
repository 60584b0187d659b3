"""One flat buffer of a unit: parameters of one dtype, trainable alike, laid end to end and cut over the ranks."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.comm.communicator import Communicator
from fsdp.config import Config, MeshKind
from fsdp.device.storage import ResizableStorage, SharedStorage, size_of, storage_key
from fsdp.errors import ShardingError
from fsdp.params.layout import Layout, ShardExtent, make_layout, next_bucket_limit
from fsdp.params.use_after_free import refuse_freed_reads


class ParamInfo:
    """One parameter of a unit and every slot of every module that shows it."""

    __slots__ = ("_slots", "names", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.names: list[str] = []
        """Plain names below the unit's root, the first being the canonical one."""
        self._slots: list[tuple[weakref.ref[nn.Module], str]] = []

    def add(self, name: str, module: nn.Module, slot: str) -> None:
        """It is `module.slot`, and has this name."""
        self.names.append(name)
        self._slots.append((weakref.ref(module), slot))

    @property
    def slots(self) -> list[tuple[nn.Module, str]]:
        """Every module that shows it, and as what. Weakly, see `Unit.module`."""
        return [(module, slot) for reference, slot in self._slots if (module := reference()) is not None]

    @property
    def is_sparse(self) -> bool:
        """Whether a module says that its gradients are sparse."""
        return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module, _ in self.slots)


Before = list[tuple[Tensor, Tensor]] | None
"""Parts of shards, and their values before an edit was taken, if anybody wants to know."""


class FlatBuffer:
    """The parameters of a unit that share a dtype and are trainable alike, laid end to end.

    Shapes: `shard` (C,) in the parameters' own dtype, always in memory; `unsharded` (W * C,) in the
    dtype they compute in, with memory only between ALL_GATHER and FREE_UNSHARDED. With `replicated`, where the
    shard is all there is, both are the same memory if they are of the same dtype.
    """

    def __init__(self, param_infos: Sequence[ParamInfo], dtype: torch.dtype, comm: Communicator, replicated: bool) -> None:
        self.param_infos = tuple(param_infos)
        self.is_replicated = replicated
        self.is_sparse = replicated and param_infos[0].is_sparse
        """Its one parameter has sparse gradients, which stay so."""
        self.rank = comm.rank
        self.num_shards = comm.size
        originals = [place.parameter for place in param_infos]
        self.device = originals[0].device
        self._templates: list[Tensor] = []
        """Of the parameters and the gaps between them: their shapes, with the memory of one element."""
        self._slots: list[int] = []
        """Which of them are the parameters."""
        shapes = tuple(tuple(p.shape) for p in originals)
        self.layout = make_layout(shapes, min(originals[0].element_size(), dtype.itemsize), self.num_shards)
        self.parts: tuple[ShardExtent, ...] = tuple(self.layout.part(i, self.rank) for i in range(len(shapes)))
        with torch.no_grad():
            self.shard = torch.zeros(self.layout.shard_numel, dtype=originals[0].dtype, device=self.device)
            self.is_shared = replicated and dtype == self.shard.dtype
            self.unsharded = self.shard if self.is_shared else torch.empty(self.layout.numel, dtype=dtype, device=self.device)
            self.unsharded_params = tuple(
                _like(place.parameter, view) for view, place in zip(self.views_of(self.unsharded), param_infos, strict=True)
            )
            self.key = storage_key(self.unsharded)
            self.local_unsharded = self.local_chunk(self.unsharded)
            self.unsharded_bytes, self.local_bytes = self.unsharded.view(torch.uint8), self.local_unsharded.view(torch.uint8)
            self.memory = SharedStorage() if self.is_shared else ResizableStorage(self.unsharded, "whole")
            for place, part in zip(param_infos, self.parts, strict=True):
                self._take_shard(place.parameter, part)
        self.sharded_params: tuple[nn.Parameter, ...] = tuple(originals)
        self.split_sizes, self.local_params = self._split_sizes()
        self._shard_pointers = [p.data_ptr() for p in originals]
        self._requires_grad_flags = [p.requires_grad for p in originals]
        self._filled = [p for p in self.unsharded_params if p.numel()]
        starts = (slot.start for slot in self.layout.slots if slot.numel)
        self._byte_offsets = [start * self.unsharded.element_size() for start in starts]
        self.inplace_updates = self.count_inplace_updates()
        """As of the last forward."""

    def _take_shard(self, parameter: nn.Parameter, part: ShardExtent) -> None:
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

    def _split_sizes(self) -> tuple[list[int], list[tuple[int, int, tuple[int, ...]]]]:
        """Lengths that cut a chunk (C,) into parts and padding with one split; and for each parameter of which this
        rank holds something: its number, its segment, its shape here."""
        lengths: list[int] = []
        local_params = []
        at = 0
        for number, part in enumerate(self.parts):
            if part.numel:
                if part.offset > at:
                    lengths.append(part.offset - at)
                local_params.append((number, len(lengths), part.shape))
                lengths.append(part.numel)
                at = part.offset + part.numel
        return [*lengths, self.layout.shard_numel - at], local_params

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Every parameter in full, of a whole flat tensor (W * C,)."""
        if not self._templates:
            self._templates, self._slots = _templates(self.layout, flat)
        # one call into C++, where a slice and a view of each take as long as a small kernel
        pieces = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        return [
            pieces[at] if slot.numel else flat[:0].view(slot.shape)
            for at, slot in zip(self._slots, self.layout.slots, strict=True)
        ]

    def shard_view(self, part: ShardExtent) -> Tensor:
        """The elements of `part` in the shard."""
        return self.shard[part.offset : part.offset + part.numel].view(part.shape)

    def local_chunk(self, flat: Tensor) -> Tensor:
        """This rank's chunk of a whole flat tensor: (W * C,) -> (C,)."""
        return flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    @property
    def is_replaced(self) -> bool:
        """Whether a parameter was re-pointed from outside."""
        return [p.data_ptr() for p in self.sharded_params] != self._shard_pointers

    def check_shards(self, unit: str) -> bool:
        """Take over parameters that were re-pointed from outside since the last forward (`p.data = x`, `model.to(...)`);
        return whether any was.

        Raises:
            ShardingError: the new data has another shape, dtype or device.
        """
        if not self.is_replaced:
            return False
        for place, parameter, part in zip(self.param_infos, self.sharded_params, self.parts, strict=True):
            mine = self.shard_view(part)
            if parameter.shape != mine.shape or parameter.dtype != mine.dtype or parameter.device != mine.device:
                raise ShardingError(
                    f"parameter {place.names[0]!r} of unit {unit!r} was replaced from outside by a tensor of shape "
                    f"{tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}; "
                    f"its shard is {tuple(mine.shape)}, {mine.dtype} on {mine.device}. "
                    "Convert or move the module before wrapping it; for another compute precision give mp_policy."
                )
        for parameter, part in zip(self.sharded_params, self.parts, strict=True):
            mine = self.shard_view(part)
            if parameter.data_ptr() != mine.data_ptr():
                mine.copy_(parameter.detach())
                parameter.data = mine.data
        self._shard_pointers = [p.data_ptr() for p in self.sharded_params]
        return True

    def sync_requires_grad(self) -> bool:
        """Carry `requires_grad` from the shards to the whole parameters; return whether any changed."""
        now = [p.requires_grad for p in self.sharded_params]
        if now == self._requires_grad_flags:
            return False
        for unsharded, wanted in zip(self.unsharded_params, now, strict=True):
            unsharded.requires_grad_(wanted)
        self._requires_grad_flags = now
        return True

    def count_inplace_updates(self) -> list[int]:
        """Of each whole parameter, how often it was changed in place."""
        return [p._version for p in self.unsharded_params]

    def write_back_inplace(self, unit: str, before_them: Before) -> int:
        """Copy this rank's part of whole parameters that were changed in place to their shards; return how many were.

        Raises:
            ShardingError: they are in another precision than the shards.
        """
        before, self.inplace_updates = self.inplace_updates, self.count_inplace_updates()
        base = self.unsharded.data_ptr()
        replaced = [p.data_ptr() for p in self._filled] != [base + offset for offset in self._byte_offsets]
        if not replaced and before == self.inplace_updates:
            return 0
        with torch.no_grad():
            if replaced:
                self._take_replaced(unit, before)
            return self._take_changed(unit, before, before_them)

    def _take_changed(self, unit: str, before: list[int], before_them: Before) -> int:
        taken = 0
        for i, parameter in enumerate(self.sharded_params):
            if before[i] == self.inplace_updates[i]:
                continue
            if self.unsharded.dtype != self.shard.dtype:
                raise ShardingError(
                    f"parameter {self.param_infos[i].names[0]!r} was changed in place in the forward of unit {unit!r}, where it "
                    f"is {self.unsharded.dtype}; its shard is {self.shard.dtype} and would lose precision. Change it between "
                    "forwards."
                )
            part = self.parts[i]
            mine = self.unsharded_params[i].detach().view(-1)[part.first : part.first + part.numel]
            shard = self.shard_view(part)
            if before_them is not None:
                before_them.append((shard, shard.clone()))
            shard.copy_(mine.view(part.shape))
            increment_version(parameter)
            taken += 1
        return taken

    def _take_replaced(self, unit: str, before: list[int]) -> None:
        """A forward pointed whole parameters at other data (`p.data = x`): take the values over, and note them as edits."""
        for i, (parameter, slot) in enumerate(zip(self.unsharded_params, self.layout.slots, strict=True)):
            view = self.unsharded[slot.start : slot.end].view(slot.shape)
            if parameter.data_ptr() == view.data_ptr():
                continue
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise ShardingError(
                    f"parameter {self.param_infos[i].names[0]!r} was replaced in the forward of unit {unit!r} by a tensor of "
                    f"shape {tuple(parameter.shape)}, {parameter.dtype}; it is {tuple(view.shape)}, {view.dtype}."
                )
            view.copy_(parameter.data)
            parameter.data = view.data
            before[i] -= 1

    @property
    def requires_grad_flags(self) -> list[bool]:
        """Of each parameter, as of the last forward."""
        return self._requires_grad_flags


def _like(original: nn.Parameter, view: Tensor) -> nn.Parameter:
    """A permanent whole parameter. Through `.data`, so that it does not share the buffer's version counter."""
    unsharded = nn.Parameter(view.data, requires_grad=original.requires_grad)
    unsharded.__dict__.update(original.__dict__)
    if original._backward_hooks:
        # set before wrapping: they see the full gradient; the user's handles refer to this very dict
        unsharded._backward_hooks, original._backward_hooks = original._backward_hooks, None
    refuse_freed_reads(unsharded)
    return unsharded


def _templates(layout: Layout, like: Tensor) -> tuple[list[Tensor], list[int]]:
    """What `views_of` is to cut a tensor into, the gaps as well, and which of it are the parameters."""
    element = like.new_empty(())
    templates: list[Tensor] = []
    param_infos = []
    end = 0
    for slot in layout.slots:
        if slot.start > end:
            templates.append(element.expand(slot.start - end))
        param_infos.append(len(templates))
        if slot.numel:
            templates.append(element.expand(slot.shape))
        end = slot.end
    return templates, param_infos


def in_pieces(param_infos: Sequence[ParamInfo], config: Config) -> Iterator[list[ParamInfo]]:
    """The parameters of a unit by dtype and whether they are trainable, in pieces of one bucket each.

    Frozen ones too: a frozen twin of a trained unit (a momentum encoder) is to be laid out like it. One whose gradients stay
    sparse is a piece of its own.
    """
    groups: dict[tuple[Any, ...], list[ParamInfo]] = {}
    for place in param_infos:
        alone = id(place) if place.is_sparse and config.mesh_kind is MeshKind.REPLICATE else None
        groups.setdefault((place.parameter.dtype, place.parameter.requires_grad, alone), []).append(place)
    for members in groups.values():
        pieces: list[list[ParamInfo]] = []
        limit, taken, left = 0, 0, sum(size_of(place.parameter) for place in members)
        ended = True
        # in the order of the backward: what is left over comes last
        for place in reversed(members):
            size = size_of(place.parameter)
            if ended or taken + size > limit:
                pieces.append([])
                limit, taken = next_bucket_limit(left, config.bucket_bytes or left, config.tapers), 0
            pieces[-1].append(place)
            taken += size
            left -= size
            ended = place.names[0] in config.reduction.triggers
        for piece in reversed(pieces):
            yield piece[::-1]
