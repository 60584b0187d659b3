"""The values of a sharded state dict: one rank's part of a tensor, which torch's Distributed Checkpoint can save and load.

Rule 1: a value shares the memory of the shard. Making one copies nothing and communicates nothing.
Rule 2: an operation that would take a value for the full tensor is refused by name: computing with it, pickling it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp.errors import ShardingError
from fsdp.shards.cut import Chunk, Shape, chunks_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


class ShardedValue(Tensor):
    """One rank's part of a tensor. `shape`, `dtype` and `device` are the tensor's; `local` is what this rank holds.

    It can be moved, cloned, and overwritten by the same part of another tensor. All other operations raise.
    """

    local: Tensor
    """Elements `first` to `first + local.numel()` of the flattened tensor, with the shape of the shard: () to (1, ..., 1, n)."""
    plain_name: str
    first: int
    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls, name: str, local: Tensor, shape: Shape, first: int, saves_empty: bool = False) -> "ShardedValue":
        """The part `local` of a tensor of `shape`, from element `first` on.

        `saves_empty`: this rank saves the tensor if it has no elements.
        """
        value: ShardedValue = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        value.plain_name = name
        value.local = local
        value.first = first
        value.chunks = (Chunk((0,) * len(shape), shape, 0),) if saves_empty else chunks_of(shape, first, local.numel())
        return value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedValue({self.plain_name!r}, {tuple(self.local.shape)} of {tuple(self.shape)}, {self.dtype}, {self.device})"

    def like(self, local: Tensor) -> "ShardedValue":
        """The same part of another tensor of this shape, with the values `local`."""
        return ShardedValue(self.plain_name, local, tuple(self.shape), self.first, bool(self.chunks) and not self.numel())

    def cut_like(self, other: "ShardedValue") -> bool:
        """True if `other` is the same part of a tensor of the same shape."""
        return (self.shape, self.first, self.local.numel()) == (other.shape, other.first, other.local.numel())

    # torch -------------------------------------------------------------------------------

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if func in _SAME_PART and isinstance(args[0], cls):
            given: ShardedValue = args[0]
            return given.like(func(given.local, *args[1:], **(kwargs or {})))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # torch's asynchronous save begins a copy with new_empty, then copies every attribute
            original: ShardedValue = args[0]
            return original.like(original.local.new_empty(original.local.shape, **(kwargs or {})))
        if func is aten.copy_.default and all(isinstance(arg, cls) for arg in args[:2]) and args[0].cut_like(args[1]):
            target: ShardedValue = args[0]
            target.local.copy_(args[1].local)
            return target
        found = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise ShardingError(
            f"{func} on {found.plain_name!r}, of which this rank holds {tuple(found.local.shape)} of {tuple(found.shape)}: "
            "compute with the parameter (fsdp.full_tensor, fsdp.to_local), or with what fsdp.full_state_dict(model) returns."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedValue":
        return self.like(self.local.clone())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"{self.plain_name!r} cannot be pickled: this rank holds {tuple(self.local.shape)} of {tuple(self.shape)}. Save what "
            "fsdp.full_state_dict(model) or fsdp.full_optim_state_dict(model, optimizer) returns, or call fsdp.save(path, model)."
        )

    def storage(self) -> NoReturn:
        """Refused: the package safetensors asks for it before it writes a tensor."""
        raise ShardingError(
            f"{self.plain_name!r} has no memory as a full tensor: this rank holds {tuple(self.local.shape)} of "
            f"{tuple(self.shape)}. For safetensors files (save_file, save_pretrained), call "
            "fsdp.export_safetensors(model, folder) on every rank, or give them what fsdp.full_state_dict(model) returns on rank "
            "0."
        )

    # torch's Distributed Checkpoint -------------------------------------------------------

    def __create_write_items__(self, fqn: str, value: object) -> "list[WriteItem]":
        """One item for each chunk that this rank writes."""
        return write_items(fqn, self.chunks, self.shape, self.dtype)

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        """The chunks that this rank holds."""
        return [item.tensor_data.chunk for item in write_items("", self.chunks, self.shape, self.dtype) if item.tensor_data]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        """The chunk that begins at the offsets of `index`: a view of the shard."""
        chunk = next(chunk for chunk in self.chunks if index.offset is not None and chunk.offsets == tuple(index.offset))
        return self.local.reshape(-1)[chunk.start : chunk.start + torch.Size(chunk.sizes).numel()].view(chunk.sizes)


def write_items(fqn: str, chunks: Sequence[Chunk], shape: torch.Size, dtype: torch.dtype) -> "list[WriteItem]":
    """One item for each of these chunks of a tensor, which torch's Distributed Checkpoint then asks for."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    places = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks]
    data = [TensorWriteData(place, TensorProperties(dtype=dtype), shape) for place in places]
    return [WriteItem(MetadataIndex(fqn, one.chunk.offsets), WriteItemType.SHARD, tensor_data=one) for one in data]


_SAME_PART: frozenset[Callable[..., Any]] = frozenset(
    {aten.detach.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default, aten.zeros_like.default}
)
