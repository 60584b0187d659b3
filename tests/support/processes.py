"""How tests start programs of this repository as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """The environment of such a process: it imports this repository and its examples, and computes in one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def results_of(module: str, size: int, folder: Path) -> list[Any]:
    """Run a module as `size` ranks (arguments: rank, size, folder). Return what each of them saved as `folder / "RANK.pt"`."""
    ranks = [
        subprocess.Popen(command(module, rank, size, folder), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(size)
    ]
    try:
        printed = [one.communicate(timeout=120)[0].decode() for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0] * size, "\n".join(printed)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def without(folder: Path, *packages: str) -> Path:
    """Make `folder`, to be named in PYTHONPATH, such that these packages are not installed."""
    folder.mkdir(exist_ok=True)
    for name in packages:
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (folder / f"{name}.py").write_text(missing, encoding="utf-8")
    return folder
