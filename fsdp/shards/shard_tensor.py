"""The tensor classes of shards: parameters, gradients, optimizer state, and everything that is computed from them.

[Note: shards that know that they are shards]
A shard that is an ordinary tensor is taken for the full tensor by all code that does not know this engine. A norm is then the
norm of a part, and each rank gets another one. So a shard is a tensor subclass. Its operators come to
`ShardTensor.__torch_dispatch__`, below autograd. `__torch_function__` is disabled. operators.py says what is done: element by
element on this rank's part, over all ranks, or refused.

A parameter is complete on each rank if nothing is cut (NO_SHARD, or one rank): it stays an ordinary nn.Parameter.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves

from fsdp.autograd.dynamo import uncompiled
from fsdp.autograd.frames import in_backward
from fsdp.comm.exchanges import gather_rows
from fsdp.errors import ShardingError
from fsdp.shards.dtensors import here_of
from fsdp.shards.info import ShardInfo
from fsdp.shards.norms_and_sums import REDUCTIONS, Reduction, gather_and_combine, only_element
from fsdp.shards.operators import Rule, outputs_of, rule_of
from fsdp.shards.refusals import refuse, refuse_dcp, refuse_grad_dtype, refuse_memory, refuse_unreduced

local_operators = torch._C._DisableTorchDispatch
"""A context in which operators treat shards as ordinary tensors: for code of the engine that means this rank's part."""
quick_attributes = torch._C.DisableTorchFunctionSubclass
"""A context in which an attribute of a shard costs what it costs on an ordinary tensor. Outside of it, torch looks for
`__torch_function__` in the class of the shard at each read and each call, which takes 0.1 µs."""


def _shown_to_modes(method: Callable[..., Any], name: str = "") -> Any:
    """A method of shards that a TorchFunctionMode sees as it sees torch's own: `full_parameters` calls it on a full value."""
    of_torch = getattr(Tensor, name or method.__name__)

    @wraps(of_torch)
    def shown(given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(given):
            return handle_torch_function(shown, (given,), given, *args, **kwargs)
        return (method if isinstance(given, ShardTensor) else of_torch)(given, *args, **kwargs)

    return shown


def _refused(name: str, refuse: Callable[[str, ShardInfo], NoReturn] = refuse) -> Any:
    """A method of shards that refuses its use."""

    def method(shard: "ShardTensor", *_: Any, **__: Any) -> NoReturn:
        refuse(name, shard.shard_info)

    return _shown_to_modes(method, name)


def _new_of_size(name: str) -> Any:
    """A method of shards that makes a shard if the size is that of the full tensor, or of its rows; else an ordinary tensor."""
    make = getattr(Tensor, name)

    def method(shard: "ShardTensor", *given: Any, **options: Any) -> Tensor:
        if bool(given) is ("size" in options):
            raise TypeError(f"{name}() takes one size")
        info, given = shard.shard_info, given or (options.pop("size"),)
        size, rest = (tuple(given[0]), given[1:]) if isinstance(given[0], Sequence) else (given, ())
        if name == "new_empty" and not size and "device" in options and info.shape:
            refuse_dcp(info)  # so torch's asynchronous save begins a copy, which would be an ordinary tensor
        made_info = info if size == info.shape else info.of_row_sizes(size)
        if made_info is None or prod(size) == 1:  # a size of one number is rather a constant than the size of the parameter
            return cast(Tensor, make(plain(shard), size, *rest, **options))
        return as_shard(make(plain(shard), made_info.local_shape, *rest, **options), made_info)

    return _shown_to_modes(method, name)


def _of_item(convert: Callable[[Any], Any]) -> Any:
    """A method of shards that converts the number which they are."""
    return lambda shard: convert(shard.item())


class ShardTensor(Tensor):
    """This rank's part of a tensor. What it shows of its sizes is the full tensor's. Operators compute as if on that, or raise.

    Its memory has `shard_info.local_shape`: `plain` gives it as an ordinary tensor.
    """

    shard_info: ShardInfo
    """What this is a part of."""
    is_parameter = False
    alias_of: "ShardTensor | None" = None
    """The parameter whose memory this shares, if it is `p.data` or the like: torch does not count what is changed through it."""
    is_reduced = True
    """Whether it can be combined with other shards: whether it is the same on all ranks that hold it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and in_backward():
            _refuse_recomputed(func, args)
        rule = rule_of(func)
        if rule is Rule.COMPOSITE:
            return func.decompose(*args, **(kwargs or {}))
        with local_operators():
            return _COMPUTE[rule](func, args, kwargs or {})

    def refuse_collective(self, name: str) -> NoReturn:
        """Raise ShardingError: the user has called a collective of torch."""
        raise ShardingError(
            f"{name} on {self.shard_info.describe()}: a collective would mix the parts of different ranks. The model is sharded "
            "already; do not wrap it in another data-parallel wrapper. For a collective of your own, use fsdp.to_local(tensor)."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with local_operators():
            return f"{type(self).__name__}({self.shard_info.describe()}: {plain(self)!r})"

    # sizes, for code that decides by them: learning rates by fan-in, states by shape, counts of parameters

    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return self.shard_info.numel

    nelement = numel

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the full tensor. Inside `local_operators`, that of the part: kernels of the meta device ask in Python."""
        return self.shard_info.local_shape if _is_local() else torch.Size(self.shard_info.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape of the full tensor, or its size in one dimension."""
        return self.shape if dim is None else _as_full(self).size(dim)

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the full tensor, contiguous, or its stride in one dimension."""
        return Tensor.stride(self, dim) if _is_local() else _as_full(self).stride(dim)

    def dim(self) -> int:
        """The number of dimensions of the full tensor."""
        return len(self.shard_info.shape)

    ndimension = dim
    ndim = property(dim)

    def __len__(self) -> int:
        """The number of rows of the full tensor."""
        return len(_as_full(self))

    def item(self) -> Any:
        """The number, if the full tensor has one element. torch's own would look at the size of this rank's part."""
        return gather_and_combine([only_element(self.shard_info, plain(self))], [self.shard_info], "item")[0].item()

    __bool__, __int__, __float__, __complex__ = _of_item(bool), _of_item(int), _of_item(float), _of_item(complex)

    def __index__(self) -> int:
        return self.item().__index__()  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the full tensor."""
        return self.shard_info.numel * self.itemsize

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refused except for parameters: autograd's formulas use the number of elements of the part."""
        if requires_grad and not isinstance(self, torch.nn.Parameter):
            refuse_memory("requires_grad_", self.shard_info)
        return super().requires_grad_(requires_grad)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient: the parameter's."""
        return self.dtype

    @grad_dtype.setter
    def grad_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype not in (None, self.dtype):
            refuse_grad_dtype(self.shard_info.name, self.dtype)

    storage = _refused("storage")
    __dlpack__ = _refused("__dlpack__")
    numpy = _refused("numpy")
    tolist = _refused("tolist")
    share_memory_ = _refused("share_memory_", refuse_memory)
    # torch's own look at the size of the part before they call an operator
    quantile = _refused("quantile")
    nanquantile = _refused("nanquantile")
    diff = _refused("diff")

    new_empty, new_zeros, new_ones, new_full = map(_new_of_size, ("new_empty", "new_zeros", "new_ones", "new_full"))

    # views, by the full shape; torch's own would use the sizes of this rank's part

    @_shown_to_modes
    def view(self, *shape: Any) -> Any:
        if isinstance(shape[0], torch.dtype):
            return super().view(*shape)
        return _viewed(self, _as_full(self).view(*shape).shape)

    @_shown_to_modes
    def reshape(self, *shape: Any) -> Any:
        return _viewed(self, _as_full(self).reshape(*shape).shape)

    @_shown_to_modes
    def flatten(self, *dims: Any, **named: Any) -> Any:
        return _viewed(self, _as_full(self).flatten(*dims, **named).shape)

    @_shown_to_modes
    def view_as(self, other: Tensor) -> Any:
        return self.view(other.shape)

    reshape_as = view_as

    @_shown_to_modes
    def ravel(self) -> Any:
        return self.flatten()

    @_shown_to_modes
    def __getitem__(self, index: Any) -> Any:
        """All elements in another shape, or what tensors select."""
        if not _has_numbers_alone(index):
            return super().__getitem__(index)
        shape = _as_full(self)[index].shape
        if shape.numel() != self.shard_info.numel:
            refuse(f"an index {index}", self.shard_info)
        return _viewed(self, shape)

    @_shown_to_modes
    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to all elements, or to those that a mask selects."""
        if not _has_numbers_alone(index):
            super().__setitem__(index, value)
        elif isinstance(value, Tensor):
            self[index].copy_(value)
        else:
            self[index].fill_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with local_operators():
            copied = make_shard(type(self), plain(self).clone(), self.requires_grad, self.shard_info)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        info = self.shard_info
        raise ShardingError(
            f"{info.name!r} cannot be pickled: this rank holds {tuple(info.local_shape)} of {info.shape}. Save what "
            "fsdp.full_state_dict(model) or fsdp.full_optim_state_dict(model, optimizer) returns, or call "
            "fsdp.save(path, model)."
        )

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        """Refuse to be saved by torch's Distributed Checkpoint, which would take the part for the full tensor."""
        refuse_dcp(self.shard_info)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded by torch's Distributed Checkpoint."""
        refuse_dcp(self.shard_info)


def _numel_of(count: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    @wraps(count)
    def numel(input: Tensor) -> int:
        return input.numel() if isinstance(input, ShardTensor) else count(input)

    return numel


# `torch.numel` asks no class of tensors. It is replaced at the import, because programs keep what they import from torch.
torch.numel = _numel_of(torch.numel)  # type: ignore[assignment]


def plain(tensor: Tensor) -> Tensor:
    """`tensor` as an ordinary tensor: this rank's part, which shares its memory, without autograd."""
    with local_operators():
        return here_of(tensor).detach()


def gather_full(tensor: ShardTensor) -> Tensor:
    """The full tensor of which `tensor` is this rank's part, without autograd. Communicates.

    Traffic: this rank receives W - 1 times the elements of the rank that holds the most.
    """
    info, numels = tensor.shard_info, tensor.shard_info.cut.numels()
    mine = torch.empty(max(numels), dtype=tensor.dtype, device=tensor.device)
    mine[: numels[info.comm.rank]] = plain(tensor).reshape(-1)
    parts = gather_rows(info.comm, mine, f"full value of {info.name}")
    return torch.cat([part[:numel] for part, numel in zip(parts, numels, strict=True)]).view(info.shape)


def _as_full(shard: ShardTensor) -> Tensor:
    """A tensor without memory that has the sizes of the full tensor, to ask torch for the sizes of a view."""
    return torch.empty(shard.shard_info.shape, device="meta")


def _viewed(shard: ShardTensor, shape: Sequence[int]) -> Tensor:
    """A view with the elements of `shard` in the same order."""
    info = shard.shard_info
    viewed = info.viewed(tuple(shape))
    if viewed is info or not shard.is_reduced:
        return Tensor.view_as(shard, shard)
    if viewed is None:
        refuse(f"a view of shape {tuple(shape)}", info)
    return cast(Tensor, _View.apply(shard, viewed))  # type: ignore[no-untyped-call]


def _as_viewed(shard: ShardTensor, viewed: ShardInfo) -> ShardTensor:
    return _as_alias(as_shard(plain(shard).view(viewed.local_shape), viewed), shard)


class _View(torch.autograd.Function):
    """A view of another shape. The formula of torch's own would ask for the sizes of this rank's part."""

    @staticmethod
    def forward(ctx: Any, shard: ShardTensor, viewed: ShardInfo) -> ShardTensor:
        ctx.info = shard.shard_info
        return _as_viewed(shard, viewed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[ShardTensor, None]:
        return as_shard(plain(gradient).reshape(ctx.info.local_shape), ctx.info), None


def _has_numbers_alone(index: Any) -> bool:
    """Whether an index has slices and numbers alone, no tensors or lists."""
    return set(map(type, index if isinstance(index, tuple) else (index,))) <= {slice, int, type(None), type(...)}


def _full_shape(tensor: Tensor) -> torch.Size:
    """The shape that code outside `local_operators` sees."""
    return torch.Size(tensor.shard_info.shape) if isinstance(tensor, ShardTensor) else tensor.shape


def _is_local() -> bool:
    """Whether this thread is inside `local_operators`."""
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return excluded


def as_shard(local: Tensor, info: ShardInfo) -> ShardTensor:
    """`local` as this rank's part of a tensor that is cut like the parameter of `info`. It shares the memory."""
    made: ShardTensor = make_shard(ShardTensor, local, False, info)
    return made


def make_shard(cls: type[Tensor], local: Tensor, requires_grad: bool, info: ShardInfo) -> Any:
    """A tensor of the class `cls` over the memory of `local`."""
    made = torch.Tensor._make_subclass(cls, local, requires_grad)
    made.shard_info = info  # type: ignore[attr-defined]
    return made


# what each rule does. torch dispatch is off here ---------------------------------------


def _element_wise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    info = _common_cut(func, operands)
    if func._schema.is_mutable:
        _check_target(func, args, kwargs, info)
    if not all([isinstance(operand, ShardTensor) for operand in operands]):
        args = tuple([_part_of(func, arg, info) for arg in args])
        kwargs = {name: _part_of(func, arg, info) for name, arg in kwargs.items()}
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for target in [kwargs[name] for name in outputs_of(func)] or args[:1]:
            _count_change(target)
        return result
    made = _wrap(func, result, info)
    return _as_alias(made, args[0]) if func in _ALIASES else made


def _check_target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: ShardInfo) -> None:
    """Refuse to write into what is not a shard with the cut of the result. torch itself would resize what is given as out=."""
    outputs = [kwargs[name] for name in outputs_of(func)]
    for target in outputs or args[:1]:
        if not isinstance(target, ShardTensor):
            _refuse_ordinary(f"{func} into", target, info)
    if outputs:
        shape = torch.broadcast_shapes(*[_full_shape(arg) for arg in args if isinstance(arg, Tensor)])  # type: ignore[no-untyped-call]
        if any(one.shard_info.cut != info.cut or _full_shape(one) != shape for one in outputs):
            refuse(f"{func} into a tensor of another shape than {tuple(shape)}", info)


def _element_wise_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, ShardTensor):
            refuse(f"{func} beside lists", arg.shard_info)
    infos: list[ShardInfo | None] = []
    for operands in zip(*lists, strict=True):
        sharded = any(isinstance(operand, ShardTensor) for operand in operands)
        infos.append(_common_cut(func, operands) if sharded else None)
        if sharded and func._schema.is_mutable and not isinstance(operands[0], ShardTensor):
            _refuse_ordinary(f"{func} into", operands[0], cast(ShardInfo, infos[-1]))

    def parts_of(arg: Any) -> Any:
        if not any(arg is given for given in lists):
            return arg
        return [one if info is None else _part_of(func, one, info) for one, info in zip(arg, infos, strict=True)]

    results = func(*map(parts_of, args), **{name: parts_of(arg) for name, arg in kwargs.items()})
    if results is None or func._schema.is_mutable:
        for changed in lists[0]:
            if isinstance(changed, ShardTensor):
                _count_change(changed)
        return results
    return [one if info is None else _wrap(func, one, info) for one, info in zip(results, infos, strict=True)]


_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _as_alias(made: ShardTensor, shard: ShardTensor) -> ShardTensor:
    """`made`, which shares the memory of `shard`."""
    made.alias_of = shard if shard.is_parameter else shard.alias_of
    return made


def _count_change(changed: ShardTensor) -> None:
    """Count a change through an alias as a change of the parameter, so that copies of the parameter are known to be old."""
    if changed.alias_of is not None:
        increment_version(changed.alias_of)


def _common_cut(func: Any, operands: Iterable[Tensor]) -> ShardInfo:
    """The cut of the shards among `operands`, to which the others are cut."""
    info = None
    for operand in operands:
        if not isinstance(operand, ShardTensor):
            continue
        if not operand.is_reduced:
            refuse_unreduced(str(func), operand.shard_info)
        other = operand.shard_info
        if info is None or other is info or other.covers(info):
            info = other
        elif not info.covers(other):
            info.check_same_cut(other, str(func))
    assert info is not None, "an operator comes here because of a shard"
    return info


def _part_of(func: Any, operand: Any, info: ShardInfo) -> Any:
    """What this rank computes with: of an ordinary tensor with the full shape, which all ranks have, the part of this rank."""
    if not isinstance(operand, Tensor) or isinstance(operand, ShardTensor):
        return operand
    part = info.part_of(operand)
    if part is None:
        _refuse_ordinary(f"{func} with", operand, info)
    return part


def _refuse_ordinary(operation: str, ordinary: Tensor, info: ShardInfo) -> NoReturn:
    refuse(f"{operation} an ordinary tensor of shape {tuple(ordinary.shape)} (torch.zeros_like(parameter) makes a shard)", info)


def _wrap(func: Any, result: Any, info: ShardInfo) -> Any:
    if isinstance(result, list | tuple):
        return tuple(_wrap(func, one, info) for one in result)
    if result.shape != info.local_shape:
        refuse(str(func), info)
    return as_shard(result, info)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A shard like the first one, or the answer to a question about that."""
    result = func(*args, **kwargs)
    return as_shard(result, _first_info(args)) if isinstance(result, Tensor) else result


def _same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What composite operators of torch ask for by the sizes of this rank's part. Methods of shards know the full shape."""
    info, sizes = _first_info(args), tuple(args[1])
    in_a_row = info.viewed((info.numel,))
    if in_a_row not in (info, None) and sizes in ((-1,), in_a_row.local_shape) and func is not torch.ops.aten.expand.default:
        return _as_viewed(args[0], in_a_row)
    keeps = len(sizes) == len(info.shape) == len(info.local_shape) and all(
        size in (-1, here, full) for size, here, full in zip(sizes, info.local_shape, info.shape, strict=True)
    )
    if not keeps and sizes != tuple(info.local_shape):
        refuse(f"{func} to {sizes}", info)
    return _as_alias(as_shard(args[0].detach(), info), args[0])


def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, indices, value, *more = args
    mask, shape = indices[0], _full_shape(target)
    is_mask = len(indices) == 1 and isinstance(mask, Tensor) and mask.dtype is torch.bool and _full_shape(mask) == shape
    if not is_mask or value.numel() != 1 or isinstance(value, ShardTensor) or any((*more, *kwargs.values())):
        _refuse(func, args, kwargs)
    fill = torch.ops.aten.masked_fill_ if func._schema.is_mutable else torch.ops.aten.masked_fill
    return _element_wise(fill.Tensor, (target, mask, value.view(())), {})


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    info, sizes = _first_info(args), tuple(args[1])
    made = func(*args, **kwargs)
    if made.numel() == 1:  # a constant, unless it stands for features: then its sizes were asked of the part
        return made if len(sizes) < 2 or len(sizes) != len(info.shape) else refuse(str(func), info)
    # composite operators of torch ask for a tensor of the size of the part, or of as many rows
    rows = info.of_row_sizes((info.shape[0], *sizes[1:])) if sizes and sizes[0] == info.local_shape[0] else None
    made_info = info if made.shape == info.local_shape else rows
    return made if made_info is None else as_shard(made, made_info)


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    name = func._schema.name.removeprefix("aten::")
    target = given.pop("self")
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, target, given["found_inf"], given["inv_scale"])
    if isinstance(target, list | tuple):
        return _reduce_lists(func, name, target, given)
    if name in ("equal", "allclose", "dot", "vdot"):
        return _reduce_two(func, name, target, given.pop("tensor" if name == "dot" else "other"), given)
    info = target.shard_info
    dims = given.get("dim")
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    ndim = len(info.shape)
    if any(not -max(ndim, 1) <= dim < max(ndim, 1) for dim in dims):
        raise IndexError(f"{func}: dimension out of range for {info.name!r} of shape {info.shape}, but got {given['dim']}")
    over = {dim % max(ndim, 1) for dim in dims}
    if over and 0 not in over and info.keeps_rows:
        result = func(*args, **kwargs)
        return as_shard(result, info.of_rows(result.shape))
    left = {dim for dim in range(ndim) if over and dim not in over}
    if any(info.shape[dim] != 1 for dim in left):
        refuse(f"{func} over some dimensions", info)
    (result,) = gather_and_combine([REDUCTIONS[name](info, plain(target), given)], [info], name)
    return result.view((1,) * (ndim if given.get("keepdim") else len(left)))


def _reduce_lists(func: Any, name: str, tensors: Sequence[Tensor], given: dict[str, Any]) -> list[Tensor]:
    if "scalar" in given:
        given["ord"] = given["scalar"]
    if any([here_of(tensor) is not tensor for tensor in tensors]):
        raise ShardingError(f"{func} of a list of shards and DTensors: to clip the gradients of both, call fsdp.clip_grad_norm_.")
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardTensor)]
    reductions = [REDUCTIONS[name](tensor.shard_info, plain(tensor), given) for tensor in sharded]
    results = iter(gather_and_combine(reductions, [tensor.shard_info for tensor in sharded], name))
    others = [tensor for tensor in tensors if not isinstance(tensor, ShardTensor)]
    here = iter(func(others, **given) if others else ())
    return [next(results if isinstance(tensor, ShardTensor) else here) for tensor in tensors]


def _reduce_two(func: Any, name: str, one: Tensor, other: Tensor, given: dict[str, Any]) -> Any:
    info = _common_cut(func, (one, other))
    for operand in (one, other):
        if not isinstance(operand, ShardTensor):
            _refuse_ordinary(f"{func} with", operand, info)
    if name in ("equal", "allclose"):
        same = torch.tensor([func(plain(one), plain(other), **given)], device=one.device)
        return bool(gather_and_combine([Reduction(same, torch.all)], [info], name)[0])
    return gather_and_combine([REDUCTIONS["sum"](info, func(plain(one), plain(other)).view(1), {})], [info], name)[0]


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    func(gradients, found_inf, inv_scale)
    infos = {id(gradient.shard_info.comm): gradient.shard_info for gradient in gradients if isinstance(gradient, ShardTensor)}
    for info in infos.values():
        found = Reduction(found_inf.view(1), torch.amax)
        found_inf.copy_(gather_and_combine([found], [info], "non-finite check of gradients")[0])


def _refuse_recomputed(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse to recompute with a shard what a forward has computed with a full value: the backward would mix the two."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, ShardTensor) and leaf.requires_grad and func is not torch.ops.aten.detach.default:
            refuse(f"{func} in a recompute of activation checkpointing", leaf.shard_info)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    shard = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardTensor))
    info = shard.shard_info
    if func.namespace == "c10d":
        shard.refuse_collective(str(func))
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise ShardingError(
            f"{func} on {info.describe()}: each rank would draw other numbers than a single process. Initialise before "
            "wrapping, by param_init_fn, or inside fsdp.summon_full_params(model, writeback=True)."
        )
    refuse(str(func), info)


def _first_info(args: tuple[Any, ...]) -> ShardInfo:
    return cast(ShardTensor, args[0]).shard_info


_COMPUTE: dict[Rule, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    Rule.ELEMENT_WISE: _element_wise,
    Rule.ELEMENT_WISE_LISTS: _element_wise_lists,
    Rule.LIKE: _like,
    Rule.SAME_SIZE: _same_size,
    Rule.MASKED_FILL: _masked_fill,
    Rule.NEW: _new,
    Rule.REDUCTION: _reduce,
    Rule.REFUSED: _refuse,
}
