"""What a plan took for granted: the dtypes, the inputs, the kernels, the memory that is left free, and what it cannot see."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp.commands.rehearsal.hardware import Device
from fsdp.commands.rehearsal.rehearse import Batch, Rehearsal
from fsdp.commands.reporting.formats import size
from fsdp.config import MixedPrecisionPolicy

RESERVE: Final = 0.06
"""The part of a device's memory that is left free unless `reserve` says another amount. Assumed, measured on no device here."""
_HALF: Final = {torch.float16, torch.bfloat16}
_MOST_SHAPES: Final = 4


def default_reserve(device: Device, memory: int) -> int:
    """Bytes that are left free for what no tensor of torch is. On processors nothing is."""
    return 0 if device.name == "cpu" else int(RESERVE * memory)


def assumptions(
    model: nn.Module,
    batch: Batch,
    policy: MixedPrecisionPolicy | None,
    found: Rehearsal,
    reserve: int,
    sums: bool,
    grows: bool | None,
) -> Iterator[str]:
    """Sentences about what the numbers of a plan assume. `found`: any of its rehearsals. `sums`: it had no loss.

    `grows`: whether ranks that share data have larger micro-batches, else more of them. None: no ranks share data.
    """
    parameters = _dtypes_of(model)
    state = f", optimizer state {found.optimizer_dtypes}" if found.optimizer_dtypes else ", no optimizer state"
    yield f"Parameters and gradients {parameters}{state}; {_computing(parameters, policy)}."
    if found.optimizer_dtypes and {one.dtype for one in model.parameters() if one.requires_grad} <= _HALF:
        yield "The optimizer rounds its state and every update to 16 bits: this is the model's dtype (params float32 is another)."
    yield f"A micro-batch of {_described(batch)}."
    if grows is not None:
        more = "times the rows in a micro-batch" if grows else "times the micro-batches, one after another"
        yield f"A step of every choice has as much data: ranks that share it by tp take tp {more}."
    if sums:
        yield "The backward begins at the sum of what the model returns: a loss of your own is not counted (loss= in Python)."
    if found.attention:
        yield f"Attention by {', '.join(f'{kernel} in {count} calls' for kernel, count in found.attention.items())}."
    if policy is None and not {one.dtype for one in model.parameters()} <= _HALF:
        yield "Products in float32 are counted as TF32 where the device has it: torch.set_float32_matmul_precision('high')."
    if reserve:
        yield f"{size(reserve)} of each device are left free, for the context, buffers of communicators, and fragmentation."
    if found.autocast:
        yield "The model uses torch.autocast, which does nothing here: activations are counted in the dtype of the parameters."
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield "Recurrent layers are counted step by step; the fused kernels of a device keep another amount."


def _dtypes_of(model: nn.Module) -> str:
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return " and ".join(_name(dtype) for dtype, _ in counts.most_common())


def _computing(parameters: str, policy: MixedPrecisionPolicy | None) -> str:
    policy = policy or MixedPrecisionPolicy()
    computing = parameters if policy.param_dtype is None else _name(policy.param_dtype)
    return f"computing in {computing}, reducing in {computing if policy.reduce_dtype is None else _name(policy.reduce_dtype)}"


def _described(batch: Batch) -> str:
    tensors = [one for one in tree_leaves((batch.args, dict(batch.kwargs))) if isinstance(one, Tensor)]
    named: Mapping[Any, int] = Counter(f"{tuple(one.shape)} {_name(one.dtype)}" for one in tensors)
    shown = [f"{count} x {name}" if count > 1 else str(name) for name, count in list(named.items())[:_MOST_SHAPES]]
    return ", ".join(shown) + (", ..." if len(named) > _MOST_SHAPES else "") if shown else "no tensor"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
