"""The wheel of this repository, as a user installs it. Built and unpacked without a network."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.processes import ROOT

SOURCES = ("fsdp", "state_machine", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, so that no build folder appears among them."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    ran = subprocess.run(
        [*build, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel of pure Python into `folder`, which is what pip does with it."""
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
