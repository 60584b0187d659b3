"""How tests start programs of this repository as processes of their own."""

import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """The environment of such a process: it imports this repository and its examples, and computes in one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def without(folder: Path, *packages: str) -> Path:
    """Make `folder`, to be named in PYTHONPATH, such that these packages are not installed."""
    folder.mkdir(exist_ok=True)
    for name in packages:
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (folder / f"{name}.py").write_text(missing, encoding="utf-8")
    return folder
