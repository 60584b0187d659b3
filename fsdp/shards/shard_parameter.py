"""The user's Parameter objects as shards, and how they become what they are.

torch.utils.swap_tensors refuses parameters that have weak references, and units have some. `exchange` does without it.
"""

from itertools import count
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.errors import ShardingError
from fsdp.shards.info import ShardInfo
from fsdp.shards.shard_tensor import ShardTensor, make_shard


def hooks_of(parameter: nn.Parameter) -> set[int]:
    """The numbers of all hooks on the gradient of a parameter."""
    return {*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())}


class Clock:
    """Counts changes that code makes, so that who looks for them compares one number."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


shard_changes: Final = Clock()
"""How often `requires_grad` of a shard was set, or a hook was added to one, in the whole process."""


def _counted(name: str) -> Any:
    """A method of shards of parameters that counts as a change of one."""

    def method(shard: "ShardParameter", *args: Any, **kwargs: Any) -> Any:
        shard_changes.count += 1
        return getattr(super(ShardParameter, shard), name)(*args, **kwargs)

    return method


class ShardParameter(ShardTensor, nn.Parameter):
    """This rank's part of a parameter."""

    is_parameter = True

    def _set_requires_grad(self, requires_grad: bool) -> None:
        shard_changes.count += 1
        Tensor.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]

    requires_grad = property(Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[attr-defined]

    requires_grad_, detach_ = _counted("requires_grad_"), _counted("detach_")
    register_hook = _counted("register_hook")
    register_post_accumulate_grad_hook = _counted("register_post_accumulate_grad_hook")

    @property
    def data(self) -> Tensor:
        """The values without autograd. They remember where they lie, so that it is known when they are put back."""
        data: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        data.__dict__[_PLACE] = (self, moved_shards.get(self, 0))  # type: ignore[no-untyped-call]
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        if Tensor.numel(data) and not data.untyped_storage().size():
            raise ShardingError(
                f"p.data = x of {self.shard_info.describe()}: x has no memory. It was kept from inside a forward (`kept = "
                "p.data`), where p is an unsharded parameter, whose memory is released afterwards. Keep a copy: p.data.clone()."
            )
        Tensor.data.__set__(self, data)  # type: ignore[attr-defined]
        owner, place = data.__dict__.get(_PLACE, (None, 0))
        if owner is not self:
            data.__dict__[_PLACE] = (self, place := next(_places))
        if place:
            moved_shards[self] = place
        else:
            moved_shards.pop(self, None)  # type: ignore[no-untyped-call]


class EmptyShardParameter(ShardParameter):
    """A parameter of which this rank holds no element.

    Its gradient exists as on the other ranks, so that each rank gives equal lists of gradients to a collective. A step of an
    optimizer that works element by element does not see it, see optimizer_steps.py.
    """


moved_shards: Final = WeakIdKeyDictionary()
"""For each shard that the user has pointed at another tensor (`p.data = x`), a number that stands for that tensor.

No address says so, because a shard may have no elements, and all ranks must see it alike: they gather anew then.
"""
summoned: Final = WeakIdKeyDictionary()
"""The name of each parameter whose full value the model shows now, for `summon_full_params`."""
_PLACE: Final = "_fsdp_place"
"""The attribute of a tensor that was `p.data` or is: the shard, and the number of the tensor in `moved_shards`; 0 for its own."""
_places: Final = count(1)


_PARAMETER_CLASSES: dict[tuple[type, bool], type[ShardParameter]] = {
    (nn.Parameter, False): ShardParameter,
    (nn.Parameter, True): EmptyShardParameter,
}


def become_shard(parameter: nn.Parameter, local: Tensor, info: ShardInfo) -> None:
    """Turn the object `parameter`, which other code refers to, into this rank's part `local`. It keeps hooks and attributes."""
    kind = (type(parameter), not local.numel())
    if kind not in _PARAMETER_CLASSES:
        base = EmptyShardParameter if kind[1] else ShardParameter
        _PARAMETER_CLASSES[kind] = type(type(parameter).__name__, (base, type(parameter)), {})
    full = make_shard(_PARAMETER_CLASSES[kind], local, parameter.requires_grad, info)
    exchange(parameter, full)
    # an AccumulateGrad node that other code has kept refers to the full parameter, which needs no memory any more
    full.data = full.data.new_empty(0)


def become_local(parameter: nn.Parameter, local: Tensor) -> None:
    """Let the object `parameter` be `local`, which may be on another device, and be an ordinary parameter that can be trained."""
    if local.device == parameter.device and not parameter.is_inference():
        parameter.data = local
        return
    full = nn.Parameter(local, parameter.requires_grad)
    full.__class__ = type(parameter)
    exchange(parameter, full)
    full.data = full.data.new_empty(0)


def make_plain(shard: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter over `data` of the class that `shard` had before it became a shard."""
    kinds: dict[type, type] = {shard_class: kind for (kind, _), shard_class in _PARAMETER_CLASSES.items()}
    kind = kinds.get(type(shard), type(shard))
    return cast(nn.Parameter, torch.Tensor._make_subclass(kind, data, shard.requires_grad))


def become_full(parameter: nn.Parameter, full: Tensor, kept: Tensor | None = None) -> None:
    """Turn the object `parameter`, a shard, into an ordinary parameter with the data `full`. It keeps hooks and attributes.

    `kept`: the tensor into which an AccumulateGrad node from before wrapping accumulates, if other code has kept that node.
    """
    if kept is parameter:
        parameter.data = full
        return
    if kept is None:
        other = make_plain(parameter, full)
    else:
        other = cast(nn.Parameter, kept)
        other.data = full
        other.requires_grad_(parameter.requires_grad)
    exchange(parameter, other)


def exchange(one: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange what two parameters are: memory, gradient, class. Hooks, attributes, and references to the objects stay."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    torch._C._swap_tensor_impl(one, other)
    info, other_info = one.__dict__.pop("shard_info", None), other.__dict__.pop("shard_info", None)
    for parameter, its_info in ((one, other_info), (other, info)):
        if its_info is not None:
            parameter.shard_info = its_info  # type: ignore[attr-defined]
