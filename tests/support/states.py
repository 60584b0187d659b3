"""Full states that tests compare and load."""

import pytest
import torch
from torch import Tensor

from tests.support.models import (
    CASES,
    Case,
)

STATEFUL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Names, order, dtypes, shapes and every bit."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(found[name], tensor), name


def shifted(case: Case) -> dict[str, Tensor]:
    """A state dict of the plain module that differs from a fresh one everywhere."""
    return {name: tensor + 1 for name, tensor in case.model().state_dict().items()}
