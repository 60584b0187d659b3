"""What training code of others calls, with torch's classes and with the drop-in modules over gloo processes: the same results."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import results_of

pytestmark = pytest.mark.gloo


def test_public_training_code_gets_what_torch_gives(tmp_path: Path) -> None:
    for result in results_of("tests.compat.scripts_program", 2, tmp_path):
        for name, (theirs, mine) in result.items():
            assert len(theirs) == len(mine), name
            for want, found in zip(theirs, mine, strict=True):
                if isinstance(want, torch.Tensor):
                    torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")
                else:
                    assert found == want, name
