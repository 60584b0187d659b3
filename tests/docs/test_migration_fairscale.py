"""A script of fairscale before and after it moved here. fairscale itself runs on the host with stand-ins for CUDA's streams."""

from pathlib import Path

import pytest

from tests.docs.test_migration import applied
from tests.docs.test_pages import DOCS, blocks_of
from tests.support.jobs import run_job
from tests.support.processes import ROOT

BEFORE, AFTER = "fairscale_before.py", "fairscale_after.py"


def script(title: str) -> str:
    blocks = {one.title: one.text for one in blocks_of((DOCS / "migration" / "from-fairscale.md").read_text())}
    return applied(blocks[BEFORE], blocks[AFTER]) if title == AFTER else blocks[BEFORE]


def losses_of(folder: Path, title: str, *program: Path) -> list[float]:
    """What a script of the page prints in two processes."""
    file = folder / title
    file.write_text(script(title), encoding="utf-8")
    done = run_job(*program, file, size=2, cwd=folder, PYTHONUNBUFFERED="1")
    assert done.status == 0, done.errors
    return [float(line) for line in done.output.splitlines()]


def test_one_import_changes() -> None:
    before, after = (script(title).splitlines() for title in (BEFORE, AFTER))
    (changed,) = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert [line.split()[1] for line in changed] == ["fairscale.nn", "fsdp.compat.fairscale"]


@pytest.mark.gloo
def test_losses_are_the_same_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    before = losses_of(tmp_path, BEFORE, ROOT / "tests" / "support" / "fairscale_on_host.py")
    assert len(before) == 6 and losses_of(tmp_path, AFTER) == pytest.approx(before, abs=2e-5)
