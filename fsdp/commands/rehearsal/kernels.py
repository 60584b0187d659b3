"""Takes the kernels that the planned device would take, where an operator of torch chooses its kernel by the device.

On the meta device such an operator takes the path that is written for any device. For attention this path keeps a matrix of all
pairs of tokens in each layer, which no fused kernel does.

Rule 1: while a rehearsal runs, these operators are replaced for tensors on the meta device, and for no others.
Rule 2: on the CPU, torch itself is asked which kernel of attention it takes: with tensors of the same shapes, on the CPU.
Rule 3: on other devices the conditions of torch are written here, because torch answers only where such a device is.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch import library as operators
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

Attention: TypeAlias = Literal["auto", "flash", "math"]
"""Which kernel a scaled_dot_product_attention takes: torch's choice, always a fused one, or never."""
ATTENTION: Final = ("auto", "flash", "math")
FLASH: Final = "a fused kernel"
MATH: Final = "math"
_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
"""Elements of a head, at most, in the flash kernels of torch."""
_FLEX: Final = "torch.nn.attention.flex_attention"


@contextmanager
def kernels_of(on_cpu: bool, attention: Attention) -> Iterator[Counter[str]]:
    """Take the kernels of the CPU or of an accelerator inside. Yields how often each kernel of attention was called.

    An accelerator is one of Nvidia since 2020 (compute capability 8.0), or one of AMD that torch's fused kernels support.
    """
    taken: Counter[str] = Counter()
    choose = _ask_torch if on_cpu else _as_on_an_accelerator
    if attention != "auto":
        choose = partial(_one_kernel, FLASH if attention == "flash" else MATH)
    replaced: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": partial(_attention, choose, taken)}
    if not on_cpu:
        replaced |= {"dropout": _dropout, "rms_norm": _rms_norm}
    library = operators.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, function in replaced.items():
            library.impl(name, function, "AutogradMeta")  # type: ignore[no-untyped-call]
        with _flex_attention(partial(_flex, taken)), _nothing_compiled():
            yield taken
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _attention(
    choose: Callable[..., tuple[str, str]],
    taken: Counter[str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, as torch calls its kernels."""
    kernel, reason = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    taken[f"{kernel} ({reason})" if reason else kernel] += 1
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        allowed, forbidden = (torch.full((), number, dtype=query.dtype, device="meta") for number in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, allowed, forbidden)
    if kernel == MATH:
        result = _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    else:
        # of all fused kernels this one takes any size of a head. They keep the same: query, key, value, mask, result, logsumexp
        result = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    output: Tensor = result[0]
    return output


def _one_kernel(kernel: str, *given: Any) -> tuple[str, str]:
    """The kernel that was asked for, if it can do this."""
    reason = _reason(0.0, given[3])
    return (MATH, reason) if reason else (kernel, "")


def _ask_torch(*given: Any) -> tuple[str, str]:
    """The kernel of the CPU."""
    *tensors, dropout, is_causal, grouped = given
    choose: Any = torch._fused_sdp_choice
    with _disable_current_modes():  # nothing that is done here belongs to the model
        stand_ins = [None if one is None else _stand_in(one) for one in tensors]
        choice = choose(*stand_ins, dropout, is_causal, enable_gqa=grouped)
    if choice == SDPBackend.MATH.value:
        return MATH, _reason(dropout, tensors[3]) or "torch's choice on the CPU"
    return FLASH, ""


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the CPU of the same shape, of which all rows are the same memory."""
    step = tensor.stride(-1)
    row = torch.empty((tensor.shape[-1] - 1) * step + 1, dtype=tensor.dtype)
    return row.as_strided(tensor.shape, (*(0,) * (tensor.ndim - 1), step)).requires_grad_(tensor.requires_grad)


def _reason(dropout: float, mask: Tensor | None) -> str:
    if dropout:
        return "dropout inside attention"
    return "the mask needs a gradient" if mask is not None and mask.requires_grad else ""


def _as_on_an_accelerator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, grouped: bool
) -> tuple[str, str]:
    """The kernel of an accelerator: of the flash kernel's conditions and of the memory-efficient one's, all of one must hold."""
    head, of_values = query.shape[-1], value.shape[-1]
    is_half = query.dtype in _HALF
    if query.ndim != 4 or any(one.stride(-1) != 1 for one in (query, key, value)):
        return MATH, "not four dimensions of which the last one is contiguous"
    if head != key.shape[-1]:
        return MATH, "heads of different sizes"
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if is_half and mask is None and head == of_values and head <= _LARGEST_HEAD and square and _allowed("flash"):
        return FLASH, ""
    alignment = 8 if is_half else 4
    if grouped and key.shape[1] != query.shape[1]:
        return MATH, f"grouped heads with {'a mask' if mask is not None else query.dtype}"
    if not (is_half or query.dtype is torch.float32):
        return MATH, str(query.dtype)
    if head % alignment or of_values % alignment:
        return MATH, f"a head of {head} elements, which {alignment} does not divide"
    if not _allowed("mem_efficient"):
        return MATH, "other kernels are disabled"
    return FLASH, ""


def _allowed(kernel: str) -> bool:
    """Whether nobody has disabled a kernel, as `torch.nn.attention.sdpa_kernel` does."""
    return bool(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")())


def _dropout(given: Tensor, p: float, train: bool) -> Tensor:
    """The dropout of accelerators: it keeps a mask of one byte an element, where the CPU keeps a factor."""
    if not train or p == 0:
        return given
    result: Tensor = given * 0 if p == 1 else _aten.native_dropout(given, p, True)[0]
    return result


def _rms_norm(given: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """The fused kernel of accelerators. A layer norm stands for it, which keeps the same and a mean of each row."""
    if weight is not None and weight.dtype is not given.dtype:
        result: Tensor = _aten._fused_rms_norm(given, normalized_shape, weight, eps)[0]
        return result
    return torch.layer_norm(given, normalized_shape, weight, None, eps or 0.0)


@contextmanager
def _flex_attention(instead: Callable[..., Any]) -> Iterator[None]:
    """Let flex_attention run on the meta device inside, by a function in place of its kernel, if it was imported."""
    module = sys.modules.get(_FLEX)
    names = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True, "flex_attention_hop": instead}
    kept = {name: getattr(module, name) for name in names if hasattr(module, name)}
    try:
        for name in kept:
            setattr(module, name, names[name])
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Run what torch.compile made as it was written: its compilers need values, or a device."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _flex(taken: Counter[str], query: Tensor, key: Tensor, value: Tensor, *more: Any, **others: Any) -> Any:
    """The compiled kernel of flex_attention, of which a block mask has no values here: all pairs are counted."""
    taken["flex_attention"] += 1
    result = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False)
    return (*result, query.new_empty(0))


class SeesAutocast(TorchFunctionMode):
    """Notices whether functions of torch are called under torch.autocast, which does nothing for tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used = self.used or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        return func(*args, **(kwargs or {}))


# operations -------------------------------------------------------------------------------


def attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The operations of a fused kernel of attention; None for other operators. A causal one leaves out half of the pairs."""
    name = func._schema.name
    if not name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
        return None
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * (0.5 if given.get("is_causal") else 1.0)
    # two products forward; backward the first one again, and two for each of them
    forward, backward = query.shape[3] + value.shape[3], 3 * query.shape[3] + 2 * value.shape[3]
    return float(2 * pairs * (backward if name.endswith("backward") else forward))
