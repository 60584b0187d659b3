"""However a process ends, it prints nothing of ours, and the other rank is told which rank has ended."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.end_programs import IN_FORKS, PROGRAMS
from tests.support.processes import run_module

pytestmark = pytest.mark.gloo

NAMES = [*PROGRAMS, *(f"{name}, in a fork" for name in IN_FORKS)]
OF_TRITON = re.compile(r"^(nanobind: | - |See .*refleaks).*\n?", re.MULTILINE)
"""Lines that triton prints at the end of an interpreter where torch is one for CUDA."""
ABANDONED = ("raises in a forward", "in a backward", "abandons a step")
"""What the names of programs have in them in which rank 1 abandons a step before it ends."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each program has one of its own."""
    folder = tmp_path_factory.mktemp("ends")
    done = run_module("tests.equivalence.end_programs", folder, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(260)
@pytest.mark.parametrize("name", NAMES)
def test_an_end_is_quiet_and_the_other_rank_is_notified(name: str, ended: Path) -> None:
    folder = ended / name
    printed = [OF_TRITON.sub("", (folder / f"{rank}.txt").read_text()) for rank in range(2)]
    codes = json.loads((folder / "codes.json").read_text())
    assert codes == [0, -9 if "killed" in name else 1 if "raises" in name else 0], printed
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    assert told["rank"] == 1, told
    assert ("has abandoned the step" if any(one in name for one in ABANDONED) else "has ended") in told["text"]
    assert "\n" not in printed[0].removesuffix("\n") and "has waited" in (printed[0] or "has waited"), printed[0]
    mine = printed[1]
    if "raises" in name:
        # the user's error and nothing after it
        assert mine.count("Traceback") == 1 and "Mine: no" in mine, mine
    else:
        assert mine == "", mine
    assert name != "has forked" or (folder / "went on").exists()
