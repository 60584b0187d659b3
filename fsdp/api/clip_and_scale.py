"""The gradient norm over all shards, and the gradient scaler that agrees on overflows."""

import math
import threading
from collections.abc import Sequence
from functools import cache, wraps
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.comm.communicator import Communicator
from fsdp.comm.open_communicators import Mesh, open_comms
from fsdp.config import MeshKind
from fsdp.errors import ShardingError
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import collective_call, engines_in, refusal, refuse_unless_resting
from fsdp.runtime.steps import engines_of
from fsdp.shards.dtensors import agree_on_meshes, local_of
from fsdp.shards.norms_and_sums import summing_dtype
from fsdp.shards.shard_parameter import EmptyShardParameter
from fsdp.shards.shard_tensor import local_operators, plain


@collective_call
def clip_grad_norm_(
    model: nn.Module | Sequence[nn.Module], max_norm: float, norm_type: float = 2.0, *, pp_mesh: Mesh | None = None
) -> Tensor:
    """Scale the gradients of `model` so that their global norm is at most `max_norm`, and return the norm before scaling.

    The norm is taken over all gradients of all ranks together: (sum |g|^p)^(1/p), or the largest |g| for p = inf. Each element
    counts once, in whichever dimension it lies or is replicated. A missing gradient counts as zero. Gradients of
    `ignored_modules` are neither counted nor scaled. Communicates once for each model.

    For a pipeline, give the stages of this rank, one or a list, and `pp_mesh`, the one-dimensional mesh of the stages: the norm
    is then over all stages. A parameter that two stages share counts twice.

    Raises:
        ShardingError: `norm_type` is not a positive number, `max_norm` is no number, a parameter is not sharded, a forward,
            backward or summon is running, or gradients are kept under `no_sync` and not reduced.
    """
    power, max_norm = power_of(norm_type), as_number("max_norm", max_norm)
    try:
        models = [model] if isinstance(model, nn.Module) else [*model]
    except TypeError:
        models = []
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise ShardingError("clip_grad_norm_ takes a model, or a list of those of this rank's stages of a pipeline.")
    stages = None if pp_mesh is None else _comm_of_stages("clip_grad_norm_", models[0], pp_mesh)
    measured = [_measure(one, power) for one in models]
    total = measured[0][0]
    if len(measured) > 1 or stages is not None:
        over_all = torch.linalg.vector_norm(torch.stack([norm.to(total.device, torch.float64) for norm, *_ in measured]), power)
        total = (over_all if stages is None else _combine(stages, over_all, power)).to(total.dtype)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for norm, strided, sparse in measured:
        _scale(strided, factor.to(norm.dtype))
        for gradient in sparse:
            gradient.mul_(factor)
    return total


def _measure(model: nn.Module, power: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The norm over the gradients of one model, and the gradients of which this rank holds elements: dense and sparse ones."""
    engines = engines_in(model, "clip_grad_norm_")
    sharded = set(map(id, chain.from_iterable(unit.sharded_params for engine in engines for unit in engine.units)))
    parameters = list(model.parameters())
    unsharded = [id(p) for p in parameters if id(p) not in sharded]
    if unsharded:  # gradients of ignored modules are left out
        inside = {id(p) for engine in engines for one in engine.units[0].modules for p in one.parameters()}
        parameters = [p for p in parameters if id(p) in sharded]
        unsharded = [key for key in unsharded if key not in inside]
    if unsharded or not all(engine.comms.same_ranks_as(engines[0].comms) for engine in engines):
        names = {id(p): name for name, p in model.named_parameters()}
        why = f"{names[unsharded[0]]!r} is not sharded" if unsharded else "the roots have different process groups"
        raise ShardingError(
            f"clip_grad_norm_: {why}, so the norm over all of them is not defined here; wrap the whole model over one group."
        )
    refuse_unless_reduced(engines)
    return norm_over(engines, parameters, power)


def refuse_unless_reduced(engines: Sequence[Engine]) -> None:
    """Raise ShardingError while a step of one of these roots runs, or gradients are kept under `no_sync`."""
    for engine in engines:
        refuse_unless_resting("clip_grad_norm_", engine)
        if engine.reducer.keeps_gradients:
            raise refusal("clip_grad_norm_: gradients are kept under no_sync; clip after a backward that synchronises.", engine)


def norm_over(
    engines: Sequence[Engine], parameters: list[nn.Parameter], power: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The norm over the gradients of `parameters` on all ranks of these roots, which have the same; and the gradients here.

    Communicates.
    """
    strided, sparse = counted = gradients_of(parameters)
    comms, flats = engines[0].comms, [flat for engine in engines for unit in engine.units for flat in unit.flats]
    comm = comms.reduce_comm
    if any(flat.tensor_parallel for flat in flats):
        comm = comms.joint
        is_first = comm.rank == 0 or comm.ranks[0] in comms.reduce_comm.ranks
        placed = {id(p): one for flat in flats for p, one in zip(flat.sharded_params, flat.placements, strict=True)}
        counted = gradients_of([p for p in parameters if placed[id(p)].counts_among(comm.ranks, is_first)])
    # every rank must choose one dtype, also one that holds no gradient
    is_double = any(flat.shard.dtype is torch.float64 for flat in flats)
    dtype, device = torch.float64 if is_double else torch.float32, engines[0].units[0].shard_device
    return _combine(comm, local_norm(*counted, power, dtype, device), power), strided, sparse


def as_number(name: str, value: Any) -> Any:
    """Convert a number, as torch's function does. A tensor on a device stays there."""
    try:
        return value if isinstance(value, Tensor) and not value.ndim else float(value)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        raise ShardingError(f"clip_grad_norm_: {name} must be a number, not {value!r}.") from None


def power_of(norm_type: float) -> float:
    """The type of a norm, which must be positive."""
    power = float(as_number("norm_type", norm_type))
    if not power > 0:
        raise ShardingError(f"norm_type must be a positive number or inf, not {norm_type!r}.")
    return power


def _comm_of_stages(caller: str, model: nn.Module, pp_mesh: Mesh) -> Communicator:
    """The communicator of the stages of a pipeline.

    Raises:
        ShardingError: ranks of the mesh have parts of the same stage.
    """
    comm = open_comms(None, pp_mesh, MeshKind.SHARD).world_comm
    of_one_stage = sorted({*comm.ranks} & {*engines_in(model, caller)[0].comms.joint.ranks})
    if len(of_one_stage) > 1:
        raise ShardingError(f"{caller}: ranks {of_one_stage} of pp_mesh train one stage; give the mesh of stages, as mesh['pp'].")
    return comm


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients, of which some may be in host memory and others on the device of the factor, or the other way round."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


def gradients_of(parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of which this rank holds elements: dense ones, as plain tensors, and sparse ones."""
    gradients = [p.grad for p in parameters if type(p) is not EmptyShardParameter and p.grad is not None]
    with local_operators():
        strided = [plain(gradient) for gradient in gradients if not gradient.is_sparse]
    return strided, [gradient for gradient in gradients if gradient.is_sparse]


def local_norm(strided: list[Tensor], sparse: list[Tensor], power: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm over this rank's parts of the gradients: ()."""
    filled = [values for values in (*strided, *(one.coalesce().values() for one in sparse)) if values.size().numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for values in filled:  # a norm of float16 overflows above 65,504, and one of bfloat16 has three digits
        by_dtype.setdefault(summing_dtype(values.dtype), []).append(values)
    norms = [norm.to(device, dtype) for wide, alike in by_dtype.items() for norm in torch._foreach_norm(alike, power, wide)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), power)
    return total


def _combine(comm: Communicator, local: Tensor, power: float) -> Tensor:
    if math.isinf(power):
        # a backend may leave out a NaN where it looks for the largest number
        both = torch.stack([local.nan_to_num(0.0, math.inf), local.isnan().to(local.dtype)])
        comm.all_reduce(both, "max", "norm of gradients").wait()
        return torch.where(both[1] > 0, math.nan, both[0])
    summed = local**power
    comm.all_reduce(summed, "sum", "norm of gradients").wait()
    return summed ** (1 / power)


_scaling: Final = threading.local()
"""Of this thread, whether a scaler asks the ranks itself, after it has looked at the gradients of this rank."""


@cache
def let_scalers_agree() -> None:
    """From now on, let torch's gradient scaler ask all ranks of all roots of an optimizer whether one has found an overflow.

    torch calls one operator for the gradients of each dtype. It asks the ranks that share the first DTensor, or a shard of that
    call. Other ranks that train a part of the optimizer's parameters would take a step that these leave out. So it looks at this
    rank's parts, and the roots are asked afterwards. Gradients may be DTensors and others, of which no operator takes both.
    """
    together = torch._amp_foreach_non_finite_check_and_unscale_

    def by_kind(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        if inv_scale.device.type == "cpu" and inv_scale.is_pinned():
            torch.accelerator.synchronize()  # torch's scaler copies both numbers to the host and does not wait for them
        if getattr(_scaling, "asks", False):
            together([plain(gradient) for gradient in gradients], found_inf, inv_scale)
            return
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for gradient in gradients:
            kinds[local_of(gradient) is None].append(gradient)
        for of_kind in filter(None, kinds):
            together(of_kind, found_inf, inv_scale)

    setattr(torch, together.__name__, by_kind)
    scaler: Any = torch.amp.GradScaler
    unscale = scaler._unscale_grads_

    @wraps(unscale)
    def agreed(
        self: Any, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        engines, others = engines_of(optimizer)
        own = self._comms if isinstance(self, ShardedGradScaler) else ()
        # ranks have the same gradients of one that is replicated, and those without data left in a join do not answer
        is_alone = not own and len(engines) == 1 and engines[0].is_replicated
        comms = [*dict.fromkeys((*own, *(engine.comms.joint for engine in engines if not is_alone)))]
        has_others = any(local_of(parameter) is not None for parameter in others)
        _scaling.asks = bool(comms) and not has_others
        try:
            found: dict[torch.device, Tensor] = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        finally:
            _scaling.asks = False
        if comms:
            _agree_on_overflow(found, found_inf.device, comms)
        if has_others:
            agree_on_meshes(found.values(), others)
        return found

    scaler._unscale_grads_ = agreed


def _agree_on_overflow(found: dict[torch.device, Tensor], device: torch.device, comms: list[Communicator]) -> None:
    """Let the flag of `device` be 1 if a rank of `comms` has one that is. Communicates.

    The widest are asked last, because other ranks may have these alone, and then the others again. Without a gradient on any rank
    there is no flag.
    """
    both = torch.zeros(2, device=device)
    for flag in found.values():
        both[0] = torch.maximum(both[0], flag.to(device))
    both[1] = bool(found)
    in_order = sorted(comms, key=attrgetter("size"))
    for comm in (*in_order, *in_order[:-1]):
        comm.all_reduce(both, "max", "found inf").wait()
    if found or both[1].item():
        found[device] = both[0]


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that skips a step on all ranks if a gradient of any rank overflowed.

    Args:
        model: the wrapped model whose gradients are scaled.
        device: "cuda" or "cpu"; None means the device of the model.
        init_scale: the first scale, as all others as in `torch.amp.GradScaler`.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without an overflow.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: the number of steps without an overflow before it grows.
        enabled: False makes every method do nothing.
        pp_mesh: for a pipeline, of which `model` is a stage of this rank, the one-dimensional mesh of the stages.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        pp_mesh: Mesh | None = None,
    ) -> None:
        engines = engines_in(model, "ShardedGradScaler")
        self._found_on = engines[0].units[0].shard_device
        kind = device or self._found_on.type
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._comms = [engine.comms.joint for engine in engines]
        """The ranks that are asked, whether or not the optimizer has parameters here."""
        self.asks_stages = pp_mesh is not None
        """Whether all stages of a pipeline skip a step together."""
        if pp_mesh is not None:
            self._comms.append(_comm_of_stages("ShardedGradScaler", model, pp_mesh))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None:  # torch makes it in `scale`, which a stage without the loss and a rank without data do not call
            self._lazy_init_scale_growth_tracker(self._found_on)
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch copies both to the device of the gradients without waiting; for gradients in host memory these copies are late
        inv_scale, found_inf = inv_scale.to(self._found_on), found_inf.to(self._found_on)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
