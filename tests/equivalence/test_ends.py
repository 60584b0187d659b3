"""However a process ends, it prints nothing of ours, and the other rank is told which rank has ended.

And what models that come and go leave behind in a process.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.end_programs import HYGIENE, IN_FORKS, PROGRAMS
from tests.equivalence.hygiene_programs import ROUNDS
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


@pytest.fixture(scope="module")
def ranks(ended: Path) -> list[dict[str, Any]]:
    """What the ranks of hygiene_programs.py found."""
    folder = ended / HYGIENE
    printed = [OF_TRITON.sub("", (folder / f"{rank}.txt").read_text()) for rank in range(2)]
    assert json.loads((folder / "codes.json").read_text()) == [0, 0], printed
    # on a busy machine one rank may wrap seconds after the other
    printed = [re.sub(r"fsdp: rank \d has waited \d+ s in fully_shard for rank \d\.\n", "", one) for one in printed]
    return [{**json.loads((folder / f"{rank}.json").read_text()), "printed": printed[rank]} for rank in range(2)]


def test_fifty_rounds_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    """On real ranks: no thread, file, group, hook or tensor, and no memory but what the allocator keeps."""
    for one in ranks:
        before, after = one["before"], one["after"]
        grown = after.pop("resident") - before.pop("resident")
        assert after == before
        assert grown < 8 * 2**20, f"{grown:,} bytes in {ROUNDS} rounds"


def test_loaders_that_fork_and_that_spawn_work_beside_it(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["spawn"] == ranks[1]["fork"] == 276.0


def test_an_end_with_collectives_in_flight_is_quiet(ranks: list[dict[str, Any]]) -> None:
    assert [one["printed"] for one in ranks] == ["", ""]
