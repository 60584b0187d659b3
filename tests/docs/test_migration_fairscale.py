"""A script of fairscale before and after it moved here. fairscale itself runs on the host with stand-ins for CUDA's streams."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import DOCS, blocks_of
from tests.support.processes import ROOT, environment

BEFORE, AFTER = "fairscale_before.py", "fairscale_after.py"


def script(title: str) -> str:
    (found,) = (one.text for one in blocks_of((DOCS / "migration" / "from-fairscale.md").read_text()) if one.title == title)
    return found


def losses_of(folder: Path, title: str, *program: str) -> list[float]:
    """What a script of the page prints in two processes."""
    (folder / title).write_text(script(title), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program, title],
        cwd=folder,
        env=environment(PYTHONUNBUFFERED="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.splitlines()]


def test_one_import_changes() -> None:
    before, after = (script(title).splitlines() for title in (BEFORE, AFTER))
    (changed,) = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert [line.split()[1] for line in changed] == ["fairscale.nn", "fsdp.compat.fairscale"]


@pytest.mark.gloo
def test_losses_are_the_same_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    before = losses_of(tmp_path, BEFORE, str(ROOT / "tests" / "support" / "fairscale_on_host.py"))
    assert len(before) == 6 and losses_of(tmp_path, AFTER) == pytest.approx(before, abs=2e-5)
