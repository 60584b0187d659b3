"""Shards as torch's DTensors, for code that looks at `placements`, `to_local()` and `full_tensor()`.

[Note: shards as DTensors]
A DTensor with the placement Shard(0) holds on each rank as many rows as on the next, except at the end. A flat buffer of one
parameter, cut between rows, has just that layout, so a DTensor over the shard's memory needs no copy. A buffer of several
parameters can not: its chunks would hold a part of every parameter, and the gathered parameters would not be contiguous. So with
the option `dtensors` each parameter has a flat buffer and collectives of its own.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DTensorMesh(NamedTuple):
    """The mesh over which DTensors lie, and the placement on each of its dimensions."""

    mesh: "DeviceMesh"
    placements: tuple[Any, ...]

    def layout_of(self, parameter: Tensor) -> "DTensorLayout":
        """The layout of tensors with the shape of `parameter`."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        contiguous = torch.empty(parameter.shape, device="meta").stride()
        return DTensorLayout(DTensorSpec(self.mesh, self.placements, TensorMeta(parameter.shape, contiguous, parameter.dtype)))


class DTensorLayout(NamedTuple):
    """How a parameter, its gradient and its optimizer state lie on a mesh."""

    spec: Any
    """torch's DTensorSpec."""

    @property
    def shape(self) -> Size:
        """The shape of the full tensor."""
        shape: Size = self.spec.tensor_meta.shape
        return shape

    def fits(self, tensor: Any) -> bool:
        """Whether a DTensor has this shape and lies on the ranks in this way."""
        return bool(
            tensor.shape == self.shape and tensor.placements == self.spec.placements and tensor.device_mesh == self.spec.mesh
        )

    def tensor(self, local: Tensor) -> Tensor:
        """A DTensor whose part on this rank is `local`. It shares the memory."""
        from torch.distributed.tensor import DTensor

        # the constructor that torch's own fully_shard calls; DTensor.from_local takes three times as long
        made: Tensor = DTensor(local, self.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made


def make_dtensor_mesh(mesh: "DeviceMesh") -> DTensorMesh:
    """The last dimension of the mesh shards rows, the others hold replicas."""
    from torch.distributed.tensor import Replicate, Shard

    _hook_optimizers()
    return DTensorMesh(mesh, (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)))


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises:
    ShardingError: the optimizer has a parameter in whose place a DTensor is trained, and would never change it.
    """
    for group in optimizer.param_groups:
        if any([REPLACED in parameter.__dict__ for parameter in group["params"]]):
            raise ShardingError(
                f"{type(optimizer).__name__} was made before the module was wrapped with DTensors as shards, which replace its "
                "parameters: make the optimizer after wrapping."
            )


def replace_by_dtensor(original: nn.Parameter, local: Tensor, layout: DTensorLayout) -> nn.Parameter:
    """A parameter over the memory of `local`, with the attributes and hooks of `original`, which it replaces."""
    made = nn.Parameter(layout.tensor(local), original.requires_grad)
    made.__dict__.update(original.__dict__)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    original.__dict__[REPLACED] = True
    return made


REPLACED = "_fsdp_replaced"
"""The attribute of a parameter in whose place a DTensor is trained."""


def local_of(tensor: Any) -> Tensor | None:
    """This rank's part of a DTensor, without autograd; None if `tensor` is none."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    return local


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Let `local` be this rank's part of a DTensor."""
    tensor._local_tensor = local  # type: ignore[attr-defined]
