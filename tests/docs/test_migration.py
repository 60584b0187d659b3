"""A user's script before and after it moved here: one import changes, and the losses stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import DOCS, ROOT, blocks_of
from tests.support.several_scripts import MARK

NAMES = ("before.py", "after.py")


def scripts() -> dict[str, dict[str, str]]:
    """By page, the scripts of those pages that have both."""
    found = {}
    for page in sorted((DOCS / "migration").glob("*.md")):
        blocks = {block.title: block.text for block in blocks_of(page.read_text(encoding="utf-8")) if block.title in NAMES}
        if blocks:
            found[page.stem] = {str(name): text for name, text in blocks.items()}
    return found


@pytest.mark.parametrize("page", scripts())
def test_imports_alone_change(page: str) -> None:
    before, after = (scripts()[page][name].splitlines() for name in NAMES)
    changed = [line for line in {*before} ^ {*after}]
    assert changed and all(line.startswith(("import ", "from ")) for line in changed)


@pytest.mark.gloo
def test_losses_are_the_same_before_and_after(tmp_path: Path) -> None:
    files = []
    for page, texts in scripts().items():
        for name in NAMES:
            files.append(tmp_path / f"{page}-{name}")
            files[-1].write_text(texts[name], encoding="utf-8")
    starter = ROOT / "tests" / "support" / "several_scripts.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(starter)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *map(str, files)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = {
        part.split("\n")[0]: [float(line) for line in part.split("\n")[1:] if line] for part in done.stdout.split(MARK)[1:]
    }
    assert len(printed) == len(files)
    for page in scripts():
        before, after = (printed[f"{page}-{Path(name).stem}"] for name in NAMES)
        assert before and after == pytest.approx(before, abs=2e-5)
