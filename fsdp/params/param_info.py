"""One parameter as the units see it: its names, and the modules that hold it."""

import sys
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp.comm.context import CommContext


class ParamInfo:
    """One parameter of a unit, its names, and every module attribute that holds it."""

    __slots__ = (
        *("_slots", "comms", "joint_mesh", "keeps_dtype", "kept_accumulator"),
        *("memory", "mesh", "names", "parameter", "shard_dim"),
    )

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        """The one that the unit shards: the user's object, or a DTensor in its place."""
        self.names: list[str] = []
        """Names below the outermost unit. The first is the one used in errors and state dicts."""
        self._slots: list[tuple[weakref.ref[nn.Module], str]] = []
        self.shard_dim = 0
        """The dimension along which the parameter is cut, if its shard is a DTensor."""
        self.mesh: Any = None
        """The mesh over which the parameter is cut, if that is another one than that of its unit: an expert's."""
        self.joint_mesh: Any = None
        """The mesh of its unit and of tensor parallelism, if the shard is a DTensor there: with copies, it has not cut it."""
        self.comms: CommContext | None = None
        """The communicators over `mesh`."""
        self.keeps_dtype = False
        """Whether the parameter computes in its own dtype, whatever mixed precision says."""
        self.memory: tuple[StorageWeakRef, int, int] | None = None
        """The storage in which the parameter was before it was sharded, its first byte there, and the byte after the last one."""
        self.kept_accumulator: Any = None
        """The AccumulateGrad node of the parameter from before it was sharded, if some other code keeps it."""

    def add(self, name: str, module: nn.Module, slot: str) -> None:
        """Record that the parameter is `module.slot` and has this name."""
        self.names.append(name)
        self._slots.append((weakref.ref(module), slot))

    def copied(self, copies: Mapping[int, Any]) -> "ParamInfo":
        """The same for a copy of the model. `copies`: the copies of parameters and modules, by the ids of the originals."""
        copied = ParamInfo(copies[id(self.parameter)])
        for name, (reference, slot) in zip(self.names, self._slots, strict=False):
            module = copies.get(id(reference()))
            if module is not None:
                copied.add(name, module, slot)
        copied.names = copied.names or self.names[:1]  # its module may have been taken out of the model
        copied.keeps_dtype = self.keeps_dtype
        return copied

    @property
    def slots(self) -> list[tuple[nn.Module, str]]:
        """Every living module that holds the parameter, with the attribute. Modules are held weakly, see `Unit.module`."""
        return [(module, slot) for reference, slot in self._slots if (module := reference()) is not None]

    @property
    def is_sparse(self) -> bool:
        """Whether a module declares that the gradients of the parameter are sparse."""
        return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module, _ in self.slots)


def kept_accumulator(parameter: nn.Parameter) -> Any:
    """The AccumulateGrad node of `parameter` if some other code keeps it; else None."""
    # a leaf that was made in inference mode has no node
    if not parameter.requires_grad or parameter.is_inference() or torch.is_inference_mode_enabled():
        return None
    node = get_gradient_edge(parameter).node
    return node if sys.getrefcount(node) > _UNKEPT else None


def _count_of_unkept() -> int:
    node = get_gradient_edge(nn.Parameter(torch.zeros(()))).node
    return sys.getrefcount(node)


_UNKEPT: Final = _count_of_unkept()
"""The number of references to a node that only one local variable holds. It depends on the version of Python."""
