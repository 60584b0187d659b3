"""The machines know nothing of torch: importing them, the explorer included, does not load it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "state_machine",
    "state_machine.explorer.explore",
    "tools.tables.diagram",
    "tools.tables.markdown",
    "tools.tables.picture",
    "state_machine.__main__",
)
PROBE = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if any(name.split('.')[0] == 'torch' for name in sys.modules):
        print(module)
        break
"""


def first_that_loads_torch(*modules: str) -> str:
    """Import modules in a fresh interpreter, one after the other, and name the first one after which torch is there."""
    asked = [sys.executable, "-c", PROBE, *modules]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_importing_them_loads_no_torch() -> None:
    assert not first_that_loads_torch(*MODULES)


def test_the_probe_would_notice() -> None:
    assert first_that_loads_torch("state_machine", "torch.version") == "torch.version"
