"""`benchmarks/memory.py` counts the same bytes in two ways."""

from collections.abc import Callable
from typing import Any

import memory
import pytest

from tests.support.models import ALONE

TINY = ("--blocks", "3", "--width", "32", "--heads", "2", "--vocabulary", "32", "--sequence", "4")


def test_the_script_writes_what_it_prints(
    report_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ours", memory.OVER_NCCL):  # the small units of this test stand for large ones
        monkeypatch.setitem(memory.ENGINES[name].given, "reduction", ALONE)
    (case,) = report_of(memory, *TINY, "--world", "4", "--contenders", "fsdp2", "ours", memory.OVER_NCCL)["cases"]
    ours, over_nccl = case["contenders"]["ours"], case["contenders"][memory.OVER_NCCL]
    assert ours["kinds"]["shards"] == ours["at_rest"] == over_nccl["at_rest"]
    assert ours["peak"] - over_nccl["peak"] == ours["kinds"]["scratch"] > 0
    assert "scratch" not in over_nccl["kinds"]
    # what the ledger knows, and up to one block's gradients in the hands of autograd
    booked = sum(ours["kinds"].values())
    assert booked <= ours["engine"] <= booked + ours["kinds"]["bucket"] * 1.1
    assert case["activations"] > 0
    assert "| 4 | fsdp2 |" in capsys.readouterr().out
