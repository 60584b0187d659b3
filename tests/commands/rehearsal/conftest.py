"""What the tests of rehearsals share."""

from typing import Any

import pytest
import torch

from fsdp.comm.simulated import SimulatedCommunicator
from fsdp.comm.work import Work, WorkThen


@pytest.fixture(autouse=True)
def memory_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated world reduces in place. Here it says what gloo needs, as a rehearsal on the CPU does."""

    def reduce_scatter(self: SimulatedCommunicator, bucket: torch.Tensor, *args: Any) -> Work:
        return WorkThen(inner(self, bucket, *args), lambda: None, bucket.nbytes // (2 if self.size == 2 else 1))

    inner = SimulatedCommunicator.reduce_scatter
    monkeypatch.setattr(SimulatedCommunicator, "reduce_scatter", reduce_scatter)
