"""int8 in blocks: how far it is off, element by element. What the hooks come to over gloo is in tests/equivalence."""

from pathlib import Path

import compression
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

ROOT = Path(__file__).parents[2]

BLOCKS = st.integers(1, 40)


@given(st.integers(1, 3), st.integers(1, 100), BLOCKS, st.integers(0, 9), st.sampled_from([1e-30, 1.0, 1e30]))
def test_every_element_is_off_by_half_a_level_of_its_block(rows: int, chunk: int, block: int, seed: int, scale: float) -> None:
    chunks = scale * torch.randn(rows, chunk, generator=torch.Generator().manual_seed(seed))
    chunks[:, ::7] = 0
    message = compression.quantise(chunks, block)
    assert message.dtype is torch.uint8
    assert message.shape == (rows, -(-chunk // block) * (block + 4))
    off = (compression.dequantise(message, block, chunk) - chunks).abs()
    for row in range(rows):
        for begin in range(0, chunk, block):
            part = slice(begin, begin + block)
            assert float(off[row, part].max()) <= float(chunks[row, part].abs().max()) / 254 * (1 + 1e-5)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_arrives_and_does_not_come_back(bad: float) -> None:
    """So that a GradScaler sees it, and the next step is as if it had not been."""
    state = compression.Compression(block=4)
    gradients = torch.tensor([1.0, bad, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    first = compression.int8_reduce_scatter(state, Shown(gradients)).wait()
    assert not torch.isfinite(first[:4]).all()
    torch.testing.assert_close(first[4:], gradients[4:], rtol=0, atol=8 / 254)
    usual = torch.arange(8.0)
    again = compression.int8_reduce_scatter(state, Shown(usual)).wait()
    torch.testing.assert_close(again, usual, rtol=0, atol=2 * 8 / 254)


class Shown:
    """A bucket, as far as the hooks look at it."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = gradients

    def buffer(self) -> Tensor:
        return self._gradients

    def index(self) -> int:
        return 0


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_any_real_precision_are_taken(dtype: torch.dtype) -> None:
    gradients = torch.linspace(-1, 1, 32, dtype=dtype)
    before = gradients.clone()
    for hook in (compression.bf16_reduce_scatter, compression.int8_reduce_scatter):
        found = hook(compression.Compression(), Shown(gradients)).wait()
        torch.testing.assert_close(found.to(dtype), before, rtol=0, atol=1 / 254)
        assert torch.equal(gradients, before), "the bucket is the engine's"


def test_the_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    compression.main()
    printed = capsys.readouterr().out
    assert "the losses are within 0.01 of each other" in printed
    assert all(f"| {way} |" in printed for way in compression.WAYS)
