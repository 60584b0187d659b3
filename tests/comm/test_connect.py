"""What the engine asks of a process group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp.comm import open_communicators


def group_of(backend: str) -> Any:
    """A group whose collectives on CUDA this backend carries."""
    return SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")],
        _get_backend=lambda device: SimpleNamespace(name=lambda: backend),
    )


@pytest.mark.parametrize(("backend", "is_nccl"), [("nccl", True), ("nccl2", True), ("gloo", False), ("ucc", False)])
def test_nccl_is_known_by_its_name(backend: str, is_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since torch 2.15 it is another class."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert open_communicators._carries_on_device(group_of(backend)) is is_nccl
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert not open_communicators._carries_on_device(group_of(backend))
