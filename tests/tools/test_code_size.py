"""`python -m tools.code_size` counts, and no number of its table goes up."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.code_size import (
    ROOT,
    Size,
    above,
    arrows,
    code_lines,
    conditions,
    conditions_on_kinds,
    files_of,
    is_core,
    lowered,
    one_step,
    rooms,
    size_of,
)

SOURCE = '''"""A module."""

class One:
    """Has
    a docstring."""

    def f(self):
        # why
        return """a
        text"""
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert code_lines(SOURCE) == 4


def test_the_longest_file_and_function_are_found(tmp_path: Path) -> None:
    for name, source in (("a.py", SOURCE), ("b.py", "x = 1\n")):
        (tmp_path / name).write_text(source)
    assert size_of(tmp_path, [Path("a.py"), Path("b.py")]) == Size(2, 11, 5, 1, (10, "a.py"), (4, "a.py: f"))


@pytest.mark.parametrize(
    ("path", "core"),
    [
        ("fsdp/runtime/engine.py", True),
        ("fsdp/config.py", True),
        ("fsdp/checkpoint/save.py", True),
        ("state_machine/explorer/explore.py", True),
        ("fsdp/compat/fsdp1/wrapper.py", False),
        ("fsdp/commands/main.py", False),
        ("fsdp/integrations/lightning.py", False),
    ],
)
def test_the_core_is_the_engine_without_names_of_others_and_commands(path: str, core: bool) -> None:
    assert is_core(Path(path)) is core


def test_a_step_passes_through_the_engine_and_the_tables_and_no_checkpoint() -> None:
    step = one_step(ROOT)
    assert {Path("fsdp/runtime/passes.py"), Path("fsdp/params/unit.py"), Path("state_machine/machine.py")} <= step.files
    assert step.files <= set(files_of(ROOT)) and len(step.files) < step.calls
    assert not [path for path in step.files if "checkpoint" in path.parts]


def test_every_kind_of_condition_counts_once() -> None:
    source = (
        "if a:\n    x = 1 if b else 2\nelif c and d:\n    y = [e for e in f if g if h]\nwhile i:\n    pass\nelse:\n    pass\n"
    )
    assert conditions(source) == 6
    assert conditions_on_kinds("a = x.copies\nif x.copies or not y.is_meta:\n    b = a\nd = [e for e in f if e.copies]") == 3


def test_arrows_join_rooms_and_files_that_are_in_no_room_are_one(tmp_path: Path) -> None:
    for name, source in {
        "fsdp/a/__init__.py": "",
        "fsdp/b/__init__.py": "",
        "fsdp/errors.py": "import torch\n",
        "fsdp/a/one.py": "import fsdp.errors\nfrom fsdp.a import two\nfrom fsdp.b.deep import three\n",
        "fsdp/b/four.py": "def f():\n    from fsdp import a\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert (rooms(tmp_path), arrows(tmp_path)) == ({"fsdp", "a", "b"}, {("a", "fsdp"), ("a", "b"), ("b", "a")})


def test_a_number_above_the_table_is_named_and_one_below_it_is_written() -> None:
    most = {"tests: lines": 1000, "core: classes": 10}
    assert above({"tests: lines": 1000, "core: classes": 9}, most) == []
    [text] = above({"tests: lines": 1001, "core: classes": 9}, most)
    assert text.startswith("tests: lines: 1,001, and tools/code_size.json allows 1,000. Take out")
    assert lowered({"tests: lines": 1001, "core: classes": 9}, most) == {"tests: lines": 1000, "core: classes": 9}
    assert lowered({"tests: lines": 801, "core: classes": 11}, most) == {"tests: lines": 900, "core: classes": 10}


def test_no_number_is_above_the_table() -> None:
    """In a process of its own, where no other model is sharded."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.code_size", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
