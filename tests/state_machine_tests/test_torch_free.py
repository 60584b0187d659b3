"""The machines know nothing of torch: importing them, the explorer included, does not load it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def torch_loaded_by(imports: str) -> bool:
    """Import in a fresh interpreter and ask it whether torch came along."""
    probe = f"import sys; import {imports}; print(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip() == "True"


@pytest.mark.parametrize(
    "module",
    [
        "state_machine",
        "state_machine.explorer.explore",
        "tools.tables.diagram",
        "tools.tables.markdown",
        "tools.tables.picture",
        "state_machine.__main__",
    ],
)
def test_importing_it_loads_no_torch(module: str) -> None:
    assert not torch_loaded_by(module)


def test_the_probe_would_notice() -> None:
    assert torch_loaded_by("state_machine, torch.version")
