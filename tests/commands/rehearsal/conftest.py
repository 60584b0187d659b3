"""What the tests of rehearsals share."""

import pytest
import torch

from fsdp.comm.simulated import SimulatedCommunicator


@pytest.fixture(autouse=True)
def memory_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated world reduces in place. Here it says what gloo needs, as a rehearsal on the CPU does."""

    def scratch_bytes(self: SimulatedCommunicator, bucket: torch.Tensor, fixed_order: bool = False) -> int:
        return bucket.nbytes // (2 if self.size == 2 else 1)

    monkeypatch.setattr(SimulatedCommunicator, "scratch_bytes", scratch_bytes)
