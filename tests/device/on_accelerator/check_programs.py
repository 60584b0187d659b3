"""Random programs on the pretend accelerator have the bits of the host: a few by default. See tools/soak.py."""

import pytest
import torch

from tests.support.accelerator.device import load
from tests.support.accelerator.random_programs import check
from tests.support.everything import EVERYTHING
from tools import soak

load()
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seed", range(6 if EVERYTHING else 1))
def test_random_programs_have_the_bits_of_the_host(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not EVERYTHING:
        monkeypatch.setattr(soak, "BATCH", 8)
    assert soak.batch_of(check, seed, own_calls=False) == soak.BATCH
