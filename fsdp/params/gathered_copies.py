"""Parameters used outside the forward of their unit: in full, or only this rank's part.

The gradient of either value is accumulated in the unsharded parameter, so it is kept, reduced and committed like any other.
A shard takes no gradient itself. Autograd's gradient of a shard is right for elementwise operations only, and fsdp does not
know which operations were used.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp.device.storage import is_shared
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.placement import Placement
from fsdp.params.shown_params import Owner, owning_unit
from fsdp.shards.dtensors import here_of, local_of
from fsdp.shards.shard_tensor import ShardTensor, gather_full, plain

GatheredCopies = dict[FlatBuffer, Tensor]
"""Full copies of flat buffers, each gathered when the first of its parameters was used."""


def full_tensor(parameter: Tensor) -> Tensor:
    """The full value of a parameter, outside the forward of its unit. Differentiable, in the parameter's own dtype.

    A gradient, the state of an optimizer, or what is computed from them element by element, is gathered without autograd. On one
    rank and with NO_SHARD these are ordinary tensors and full already, so they are refused.

    Use it in any loss term on the weights: a norm, an orthogonality penalty, a comparison of two layers.
    Its gradient is averaged over the ranks like every other. Communicates (one gather of the unit), in
    the forward only; every rank must call it alike. Memory: the full parameter, for as long as the graph lives.

    Raises:
        ShardingError: `parameter` is not sharded, or is None.
    """
    if (owner := _owner_of(parameter, "full_tensor")) is not None:
        return owner.full_value(cast(nn.Parameter, parameter))
    if isinstance(parameter, ShardTensor):
        return gather_full(parameter)
    if local_of(parameter) is not None:
        full: Tensor = cast(Any, parameter.detach()).full_tensor()
        return full
    _refuse_foreign(parameter, "full_tensor")


def backward_without_a_loss(on_gradient: Callable[[], object]) -> None:
    """Run a backward that reaches no parameter and calls `on_gradient`."""
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        loss = GatherParam.apply(start, start.detach, on_gradient)  # type: ignore[no-untyped-call]
    loss.backward()


def to_local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, for loss terms that are sums over its elements: sum(p ** 2), sum(|p|). Differentiable.

    Of a gradient, the state of an optimizer, or what is computed from them element by element, it is a plain tensor that
    shares the memory.

    Sum such terms over the parameters and add them to each rank's loss. Each element is then penalised once, by the rank
    that holds it, and the value is this rank's share of the penalty. A term that is not a sum over elements (a norm, a
    product of rows) needs `full_tensor`. Does not communicate; call it on every rank. The value may
    reach the loss of some ranks only. An ordinary tensor without autograd is returned as it is: so is the gradient of a
    parameter that every rank holds in full.

    Raises:
        ShardingError: `parameter` is an nn.Parameter or part of a graph, and belongs to no sharded module; or, in the backward,
            a rank has finished inside `fsdp.join`, so that nobody computes the term of its part.
    """
    if (owner := _owner_of(parameter, "to_local")) is not None:
        return owner.local_value(cast(nn.Parameter, parameter))
    if isinstance(parameter, ShardTensor):
        return plain(parameter)
    if (local := local_of(parameter)) is not None:
        return local
    if isinstance(parameter, nn.Parameter) or parameter.requires_grad:
        _refuse_foreign(parameter, "to_local")
    return parameter


def _owner_of(given: Tensor | None, caller: str) -> Owner | None:
    """The unit of a parameter; None for what is computed from one. Refused where a gradient would end."""
    if given is None:  # as `.grad` is
        raise ShardingError(
            f"{caller}: got None, and needs a tensor; a parameter has no gradient before a backward that synchronises, and after "
            "zero_grad."
        )
    owner = owning_unit(given)
    if owner is None and isinstance(given, ShardTensor) and given.requires_grad and torch.is_grad_enabled():
        raise ShardingError(
            f"{caller}: this tensor was computed from a parameter with a gradient, which would end here. Give the parameter "
            f"itself and compute with the result: fsdp.{caller}(parameter) * 2; or call it under torch.no_grad()."
        )
    return owner


def _refuse_foreign(tensor: Tensor, caller: str) -> NoReturn:
    raise ShardingError(
        f"{caller}: this tensor of shape {tuple(tensor.shape)} is not a parameter of a sharded module. A gradient or a "
        "state that is an ordinary tensor is full on one rank and with NO_SHARD; with plain_shards it is this rank's part."
    )


def gather_param(
    flat: FlatBuffer,
    index: int,
    dtype: torch.dtype,
    unit: str,
    on_external_grad: Callable[[], None],
    copies: GatheredCopies | None = None,
) -> Tensor:
    """A differentiable copy of one parameter in full, in `dtype`.

    `copies`: the copies that were gathered before. One of `flat` is used instead of a gather, and a new one is added.

    Traffic: this rank receives (W - 1) * C elements, the whole flat buffer.
    """
    placement = flat.placements[index]

    def gather() -> Tensor:
        if copies is None:
            return placement.full_in(flat.gather_copy(dtype, unit)).clone()
        if flat not in copies:
            copies[flat] = flat.gather_copy(dtype, unit)
        return placement.full_in(copies[flat]).data  # with a version counter of its own

    value: Tensor = GatherParam.apply(flat.unsharded_params[index], gather, on_external_grad)  # type: ignore[no-untyped-call]
    return value


def local_param(flat: FlatBuffer, index: int, factor: Callable[[], float], on_external_grad: Callable[[], None]) -> Tensor:
    """This rank's part of one parameter, differentiable. Shares the memory of the shard.

    `factor` gives, in the backward, by what its gradient is multiplied, because other ranks have none for this part.

    For autograd, a shard in host memory is copied to the device: a backward computes there in the order of the program, and
    beside it, in another thread, what is on the host.
    """
    unsharded, shard, placement = flat.unsharded_params[index], plain(flat.sharded_params[index]), flat.placements[index]
    if unsharded.requires_grad and torch.is_grad_enabled():
        shard = shard.to(flat.device)
    value: Tensor = LocalShard.apply(unsharded, shard, placement, factor, on_external_grad)  # type: ignore[no-untyped-call]
    return value


class GatherParam(torch.autograd.Function):
    """Returns `gather()`, as a function of the unsharded parameter, which may have no memory now.

    The backward calls `on_external_grad` before it returns the gradient.
    """

    @staticmethod
    def forward(ctx: Any, unsharded: nn.Parameter, gather: Callable[[], Tensor], on_external_grad: Callable[[], None]) -> Tensor:
        ctx.on_external_grad = on_external_grad
        return gather()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.on_external_grad()
        return gradient, None, None


class LocalShard(torch.autograd.Function):
    """Returns this rank's part of the unsharded parameter.

    Shapes:   gradient of the part  ->  zeros of the unsharded shape with the part filled in, times a factor
    Why:      gradients are averaged over the ranks, and this part has a gradient on this rank only
    """

    @staticmethod
    def forward(
        ctx: Any, unsharded: nn.Parameter, shard: Tensor, placement: Placement, factor: Any, on_external_grad: Callable[[], None]
    ) -> Tensor:
        ctx.on_external_grad, ctx.placement, ctx.factor = on_external_grad, placement, factor
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        factor = ctx.factor()
        ctx.on_external_grad()
        placement, part = ctx.placement, ctx.placement.part
        full = gradient.new_zeros(placement.extent.shape)
        full.view(-1)[part.first : part.first + part.numel] = placement.stored(gradient).reshape(-1) * factor
        return placement.unsharded(placement.shown(full)), None, None, None, None


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(copy: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingError(
            f"{name}: parameter {copy.__dict__['read']!r} is read outside the forward of its unit while a forward or a recompute "
            "runs, which gives a copy, so this would be lost; do it between forwards, or in the forward of that unit."
        )

    return refuse


class ReadCopy(Tensor):
    """What a read of a parameter in a forward outside its unit returns: a copy, on which nothing that is set would stay."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    requires_grad_ = _refused("requires_grad_")
    register_hook = _refused("register_hook")


for _name in ("data", "grad", "requires_grad", "grad_dtype"):
    setattr(ReadCopy, _name, property(getattr(Tensor, _name).__get__, _refused(f"{_name} = ...")))


class WatchedCopy:
    """A copy of a parameter that a read in a forward returned, and how it was then: an update would never reach the parameter.

    What is set on the copy is refused. `guard`: it is also watched for updates through `.data`, which no version counts. Memory:
    the copy twice, as long as something else has it, or until the next check.
    """

    __slots__ = ("_kept", "_name", "_stand_in", "_storage", "_version")

    def __init__(self, name: str, copy: Tensor, guard: bool) -> None:
        if type(copy) is Tensor:
            copy.__class__, copy.__dict__["read"] = ReadCopy, name
        self._name = name
        self._stand_in = copy.detach()
        """A tensor without memory that has the version counter of the copy."""
        self._stand_in.data = copy.new_empty(0)
        self._version = copy._version
        memory = here_of(copy.detach())
        self._storage: Any = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
        self._kept = (memory, memory.clone()) if guard else None
        """In guard mode, the copy and its values then."""

    def refuse_changed(self, unit: str) -> None:
        """Raise ShardingError if the copy was changed in place."""
        if self._stand_in._version != self._version or (
            self._kept is not None and bool(_bytes(self._kept[0]).ne(_bytes(self._kept[1])).any())
        ):
            raise ShardingError(
                f"parameter {self._name!r} was read in a forward outside its unit {unit!r} and changed there in place, which "
                "reaches a copy only; change the parameter itself, in the forward of its unit or between forwards, or clone "
                "what was read."
            )

    def is_alive(self) -> bool:
        """Whether a tensor of the user, or a graph, has the memory of the copy."""
        return not self._storage.expired() if self._kept is None else is_shared(self._kept[0])


def _bytes(tensor: Tensor) -> Tensor:
    """What this rank holds. As bytes, NaN is equal to itself."""
    return here_of(tensor).reshape(-1).view(torch.uint8)


class RefuseShardGrad:
    """The hook of a sharded parameter: raises when autograd would accumulate a gradient into the shard."""

    __slots__ = ("_name", "_unit")

    def __init__(self, name: str, unit: str) -> None:
        self._name = name
        self._unit = unit

    def __call__(self, gradient: Tensor) -> NoReturn:
        raise ShardingError(
            f"parameter {self._name!r} was used outside its unit {self._unit!r}, where this rank holds only its part of it: "
            "compute inside `with fsdp.full_parameters(model):` there, or with fsdp.full_tensor(parameter); in a sum over "
            "elements, such as a weight penalty, with fsdp.to_local(parameter)."
        )
