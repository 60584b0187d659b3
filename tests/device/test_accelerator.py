"""Runs the files of tests/device/on_accelerator in a process of their own, because torch cannot lose an accelerator again.

See docs/development/pretend-accelerator.md. No GPU takes part.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.everything import EVERYTHING
from tests.support.processes import ROOT, environment

FILES = sorted(path.name for path in (Path(__file__).parent / "on_accelerator").glob("check_*.py"))
LIMIT = 7200 if EVERYTHING else 900
"""Seconds for one process."""


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("files", [[file] for file in FILES] if EVERYTHING else [FILES], ids=" ".join)
def test_on_the_pretend_accelerator(files: list[str], compiled: Path) -> None:
    """Each file in a process, or by default all of them in one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=check_*.py"]
    ended = subprocess.run(
        [*command, f"--timeout={LIMIT}", *(str(Path("tests/device/on_accelerator") / file) for file in files)],
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
