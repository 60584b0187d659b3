"""Runs the files of tests/device/on_accelerator, each in a process of its own, because torch cannot lose an accelerator again.

See docs/development/pretend-accelerator.md. No GPU takes part.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.accelerator import build
from tests.support.everything import EVERYTHING
from tests.support.processes import ROOT, environment

FILES = sorted(path.name for path in (Path(__file__).parent / "on_accelerator").glob("check_*.py"))
LIMIT = 7200 if EVERYTHING else 240
"""Seconds for one file."""


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The compiled accelerator, which takes half a minute the first time."""
    if (why := build.missing()) is not None:
        pytest.skip(why)
    return build.compiled_file()


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("file", FILES)
def test_on_the_pretend_accelerator(file: str, compiled: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=check_*.py"]
    ended = subprocess.run(
        [*command, f"--timeout={LIMIT}", str(Path("tests/device/on_accelerator") / file)],
        cwd=ROOT,
        env=environment(),
        timeout=LIMIT + 30,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    assert "[100%]" in ended.stdout, ended.stdout
