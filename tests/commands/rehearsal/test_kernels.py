"""Where torch chooses a kernel by the device, a rehearsal takes the one of the planned device."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.commands.rehearsal.kernels import FLASH, MATH, Attention, attention_flops, kernels_of

LENGTH = 64


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that are called, but for views of graph nodes, and the operations of attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in ("detach", "new_empty_strided", "copy_"):  # gradients of leaves get the strides of their leaves
            self.names.append(name)
        self.flops += attention_flops(func, args, kwargs or {}) or 0.0
        return func(*args, **(kwargs or {}))


def saved_by(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps after a forward. Then runs the backward."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    result.sum().backward()
    return sum(found.values())


def heads(device: str, dtype: torch.dtype = torch.float32, count: int = 8, length: int = LENGTH, size: int = 16) -> Tensor:
    return torch.empty(2, count, length, size, device=device, dtype=dtype, requires_grad=True)


def mask_of(kind: str, device: str, keys: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "":
        return None
    if kind == "booleans":
        return torch.ones(2, 1, 1, keys, dtype=torch.bool, device=device)
    return torch.zeros(2, 8, LENGTH, keys, dtype=dtype, device=device, requires_grad=kind == "trained")


def taken(on_cpu: bool, run: Callable[[], Tensor], attention: Attention = "auto") -> tuple[str, int]:
    """The kernel of attention, and the bytes that autograd keeps."""
    with kernels_of(on_cpu, attention) as found:
        saved = saved_by(run)
    ((kernel, count),) = found.items()
    assert count == 1
    return kernel, saved


CALLS = list(
    product(
        (torch.float32, torch.bfloat16, torch.float64),
        ("", "booleans", "numbers", "trained"),
        (8, 2),
        (0.0, 0.1),
        (LENGTH, 48),
        (16, 24),
    )
)


@pytest.mark.parametrize(("dtype", "mask", "count", "dropout", "keys", "size"), CALLS)
def test_the_cpu_takes_the_kernel_that_torch_takes(
    dtype: torch.dtype, mask: str, count: int, dropout: float, keys: int, size: int
) -> None:
    """With what autograd keeps, and its operators: of all masks, grouped heads, dropout, and other numbers of keys."""

    def run(device: str) -> Tensor:
        return functional.scaled_dot_product_attention(
            heads(device, dtype),
            heads(device, dtype, count, keys),
            heads(device, dtype, count, keys, size),
            attn_mask=mask_of(mask, device, keys, dtype),
            dropout_p=dropout,
            is_causal=not mask,
            enable_gqa=count != 8,
        )

    with Watch() as real:
        expected = saved_by(lambda: run("cpu"))
    is_fused = "_scaled_dot_product_flash_attention_for_cpu" in real.names
    kernel, saved = taken(True, lambda: run("meta"))
    assert kernel.startswith(FLASH if is_fused else MATH)
    # where a matrix is filled from numbers of Python, the CPU keeps other numbers of 8 bytes
    assert saved == pytest.approx(expected, abs=64)


HALF: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, FLASH),
    "grouped heads": ({"count": 2}, FLASH),
    "a mask": ({"mask": "booleans"}, FLASH),
    "a mask, grouped heads": ({"mask": "booleans", "count": 2}, "math (grouped heads with a mask)"),
    "dropout": ({"dropout": 0.1}, FLASH),
    "a head that 8 does not divide": ({"size": 12}, FLASH),
    "a large head": ({"size": 512}, FLASH),
    "a large head that 8 does not divide": ({"size": 300}, "math (a head of 300 elements, which 8 does not divide)"),
    "float32": ({"dtype": torch.float32}, FLASH),
    "float32, grouped heads": ({"dtype": torch.float32, "count": 2}, "math (grouped heads with torch.float32)"),
    "float32, a head that 4 does not divide": (
        {"dtype": torch.float32, "size": 18},
        "math (a head of 18 elements, which 4 does not divide)",
    ),
    "float64": ({"dtype": torch.float64}, "math (torch.float64)"),
}


def attend(
    dtype: torch.dtype = torch.bfloat16,
    count: int = 8,
    mask: str = "",
    dropout: float = 0.0,
    size: int = 16,
    causal: bool = False,
) -> Tensor:
    return functional.scaled_dot_product_attention(
        heads("meta", dtype, size=size),
        heads("meta", dtype, count, size=size),
        heads("meta", dtype, count, size=size),
        mask_of(mask, "meta", LENGTH, dtype),
        dropout,
        causal,
        enable_gqa=count != 8,
    )


@pytest.mark.parametrize("name", HALF)
def test_an_accelerator_takes_a_fused_kernel_where_its_conditions_hold(name: str) -> None:
    given, expected = HALF[name]
    kernel, saved = taken(False, lambda: attend(**given))
    assert kernel == expected
    width = given.get("dtype", torch.bfloat16).itemsize
    kept = 2 * LENGTH * width * given.get("size", 16) * (2 * 8 + 2 * given.get("count", 8))
    others = 2 * 8 * LENGTH * 4 + (2 * LENGTH * width if "mask" in given else 0)
    assert saved == kept + others if kernel == FLASH else saved > kept + others


def test_a_kernel_that_is_disabled_is_not_taken() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert taken(False, attend)[0] == "math (other kernels are disabled)"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert taken(False, attend)[0] == FLASH


def test_a_kernel_that_is_asked_for_is_taken() -> None:
    for on_cpu in (True, False):
        assert taken(on_cpu, attend, "math")[0] == MATH
        assert taken(on_cpu, lambda: attend(dtype=torch.float64, size=18), "flash")[0] == FLASH


def test_operations_of_attention_are_those_of_its_products() -> None:
    pairs, size = 2 * 8 * LENGTH * LENGTH, 16
    with kernels_of(False, "auto"), Watch() as watch:
        attend().sum().backward()
    # two products forward, five backward, each of a multiplication and an addition
    assert watch.flops == 7 * 2 * pairs * size
    with kernels_of(False, "auto"), Watch() as causal:
        attend(causal=True).sum().backward()
    assert causal.flops == watch.flops / 2


def test_after_a_rehearsal_torch_takes_its_own_kernels() -> None:
    with pytest.raises(ValueError, match="meta"), kernels_of(False, "auto"):
        raise ValueError("meta")
    with Watch() as watch:
        attend()
    assert "bmm" in watch.names
    with pytest.raises(ValueError, match="FlexAttention is only supported"):
        flex_attention(*(heads("meta") for _ in range(3)))


# other operators -------------------------------------------------------------------------------


def test_dropout_of_an_accelerator_keeps_a_byte_an_element() -> None:
    def drop() -> Tensor:
        return functional.dropout(torch.empty(4, 1024, device="meta", requires_grad=True), 0.5)

    with kernels_of(False, "auto"):
        assert saved_by(drop) == 4 * 1024
    with kernels_of(True, "auto"):
        assert saved_by(drop) == 4 * 4 * 1024
    given = torch.empty(4, device="meta", requires_grad=True)
    with kernels_of(False, "auto"):
        assert functional.dropout(given, 0.5, training=False) is given
        assert functional.dropout(given, 1.0).shape == (4,)


def test_the_fused_norm_of_an_accelerator_keeps_its_input_alone() -> None:
    def norm(weights: torch.dtype = torch.bfloat16) -> Tensor:
        x, weight = (
            torch.empty(64, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True),
            torch.ones(1024, device="meta"),
        )
        return functional.rms_norm(x, (1024,), weight.to(weights).requires_grad_())

    whole = 2 * 64 * 1024
    with kernels_of(False, "auto"):
        assert whole < saved_by(norm) < 1.05 * whole
    with kernels_of(True, "auto"):
        assert saved_by(norm) > 3 * whole  # the CPU keeps it in float32, twice
    with kernels_of(False, "auto"):
        assert saved_by(lambda: norm(torch.float32)) > 3 * whole


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_keeps_what_its_compiled_kernel_keeps(compiled: bool) -> None:
    attend = torch.compile(flex_attention) if compiled else flex_attention

    def run() -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="meta")
        found = attend(*(heads("meta", torch.bfloat16, length=256) for _ in range(3)), block_mask=mask)
        assert isinstance(found, Tensor)
        return found

    kernel, saved = taken(False, run)
    one = 2 * 8 * 256 * 16 * 2
    assert kernel == "flex_attention" and saved == 4 * one + 2 * 8 * 256 * 4


def test_rows_of_different_lengths_keep_no_matrix() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    with kernels_of(False, "auto"), Watch() as watch:
        tensors = (torch.empty(256, 4, 32, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        ends = torch.tensor([0, 100, 256], dtype=torch.int32, device="meta")
        saved = saved_by(lambda: varlen.varlen_attn(*tensors, ends, ends, 156, 156))
    one = 256 * 4 * 32 * 2
    assert "torch_attn::_varlen_attn" in watch.names
    assert saved == pytest.approx(4 * one + 256 * 4 * 4, abs=64)


def test_what_was_compiled_runs_as_it_was_written() -> None:
    layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU())).to("meta")
    with kernels_of(False, "auto"), Watch() as watch:
        layer(torch.empty(2, 8, device="meta")).sum().backward()
    assert "gelu" in watch.names and "gelu_backward" in watch.names


def images(device: str) -> Tensor:
    return torch.zeros(2, 8, 12, 12, device=device, requires_grad=True)


def rows(device: str) -> Tensor:
    return torch.zeros(2, 6, 16, device=device, requires_grad=True)


def words(device: str) -> Tensor:
    return torch.zeros(2, 6, dtype=torch.long, device=device)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Tensor]]] = {
    "linear": (lambda: nn.Linear(16, 8), rows),
    "embedding": (lambda: nn.Embedding(9, 16), words),
    "layer norm": (lambda: nn.LayerNorm(16), rows),
    "rms norm": (lambda: nn.RMSNorm(16), rows),
    "batch norm": (lambda: nn.BatchNorm2d(8), images),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), images),
    "convolution": (lambda: nn.Conv2d(8, 4, 3), images),
    "transposed convolution": (lambda: nn.ConvTranspose2d(8, 4, 3, 2), images),
    "depthwise convolution": (lambda: nn.Conv2d(8, 8, 3, groups=8), images),
    "maximum of windows": (lambda: nn.MaxPool2d(2), images),
    "mean of windows": (lambda: nn.AdaptiveAvgPool2d(3), images),
    "upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), images),
    "gelu": (nn.GELU, rows),
    "silu": (nn.SiLU, rows),
    "softmax": (lambda: nn.Softmax(-1), rows),
    "dropout": (lambda: nn.Dropout(0.1), rows),
    "attention of torch": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), rows),
    "gated recurrent cell": (lambda: nn.GRUCell(16, 8), lambda device: rows(device)[0]),
}


def called(layer: nn.Module, inputs: Tensor) -> tuple[list[str], int]:
    def run() -> Tensor:
        found: Tensor | tuple[Tensor, ...] = layer(inputs)
        return found if isinstance(found, Tensor) else found[0]

    with kernels_of(True, "auto"), Watch() as watch:
        saved = saved_by(run)
    return watch.names, saved


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_calls_the_same_operators_on_the_cpu_and_without_memory(name: str) -> None:
    build, inputs = LAYERS[name]
    assert called(build(), inputs("cpu")) == called(build().to("meta"), inputs("meta"))


def test_what_is_known_to_differ_on_the_cpu_differs_as_the_page_says() -> None:
    """docs/how-to/plan-a-job.md lists these. A version of torch that mends one fails here."""
    fused, steps = (called(nn.LSTM(16, 32, batch_first=True).to(device), rows(device)) for device in ("cpu", "meta"))
    assert "mkldnn_rnn_layer" in fused[0] and "sigmoid_" in steps[0] and fused[1] > steps[1]
    real, without = (called(nn.Mish().to(device), rows(device)) for device in ("cpu", "meta"))
    assert "mish_backward" in real[0] and "softplus" in without[0] and real[1] == without[1]
    half, other = (
        called(nn.LayerNorm(16).to(device, torch.bfloat16), rows(device).detach().bfloat16().requires_grad_())
        for device in ("cpu", "meta")
    )
    assert half[0] == other[0] and other[1] - half[1] == 2 * 12 * 2, "a mean and a deviation of each row in float32, not bfloat16"
