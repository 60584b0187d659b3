"""A user's script before and after it moved here: one import changes, and the losses stay.

fairscale itself runs on the host with stand-ins for CUDA's streams.
"""

from pathlib import Path

import pytest

from tests.docs.test_pages import DOCS, blocks_of
from tests.support.jobs import run_job
from tests.support.processes import ROOT

NAMES = ("before.py", "after.py")
FAIRSCALE = "from-fairscale"


def scripts() -> dict[str, dict[str, str]]:
    """By page, the scripts of those pages that have both."""
    found = {}
    for page in sorted((DOCS / "migration").glob("*.md")):
        titled = {
            (block.title or "").removeprefix("fairscale_"): block.text for block in blocks_of(page.read_text(encoding="utf-8"))
        }
        blocks = {title: text for title, text in titled.items() if title in NAMES}
        if blocks:
            before = blocks[NAMES[0]]
            found[page.stem] = {NAMES[0]: before, NAMES[1]: applied(before, blocks[NAMES[1]])}
    return found


def applied(script: str, difference: str) -> str:
    """A script after a difference: lines with a minus, in the place of each group the lines with a plus that follow it."""
    lines, place = script.splitlines(), 0
    for line in difference.splitlines():
        if line.startswith("-"):
            place = lines.index(line[1:])
            del lines[place]
        else:
            assert line.startswith("+"), line
            lines.insert(place, line[1:])
            place += 1
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", scripts())
def test_imports_alone_change(page: str) -> None:
    before, after = (scripts()[page][name].splitlines() for name in NAMES)
    changed = [line for line in {*before} ^ {*after}]
    assert changed and all(line.startswith(("import ", "from ")) for line in changed)
    if page == FAIRSCALE:
        (lines,) = [both for both in zip(before, after, strict=True) if len({*both}) == 2]
        assert [line.split()[1] for line in lines] == ["fairscale.nn", "fsdp.compat.fairscale"]


@pytest.mark.gloo
@pytest.mark.parametrize("page", scripts())
def test_losses_are_the_same_before_and_after(page: str, tmp_path: Path) -> None:
    before, after = ([tmp_path / name] for name in NAMES)
    if page == FAIRSCALE:
        pytest.importorskip("fairscale")
        before.insert(0, ROOT / "tests" / "support" / "fairscale_on_host.py")
    losses = [losses_of(program, scripts()[page][name]) for program, name in zip((before, after), NAMES, strict=True)]
    assert losses[0] and losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert page != FAIRSCALE or len(losses[0]) == 6


def losses_of(program: list[Path], script: str) -> list[float]:
    """What a script prints in two processes. A second group in one start would find old addresses."""
    program[-1].write_text(script, encoding="utf-8")
    done = run_job(*program, size=2, cwd=program[-1].parent, PYTHONUNBUFFERED="1")
    assert done.status == 0, done.errors
    return [float(line) for line in done.output.splitlines()]
