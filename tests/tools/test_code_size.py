"""`python -m tools.code_size` counts files, lines, classes and functions."""

from pathlib import Path

import pytest

from tools.code_size import ROOT, Size, code_lines, files_in_a_step, files_of, is_core, size_of

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
    wanted = Size(2, 11, 5, 1, (10, "a.py"), (4, "a.py: f"))
    assert size_of(tmp_path, [Path("a.py"), Path("b.py")]) == wanted


@pytest.mark.parametrize(
    ("path", "core"),
    [
        ("fsdp/runtime/engine.py", True),
        ("fsdp/config.py", True),
        ("fsdp/errors.py", False),
        ("fsdp/runtime/__init__.py", False),
        ("fsdp/comm/simulated.py", False),
        ("fsdp/comm/failure/peer_monitor.py", False),
        ("fsdp/checkpoint/save.py", False),
        ("state_machine/table.py", True),
        ("state_machine/__init__.py", True),
        ("state_machine/explorer/explore.py", False),
        ("tools/tables/picture.py", False),
    ],
)
def test_the_core_is_what_training_over_process_groups_needs(path: str, core: bool) -> None:
    assert is_core(Path(path)) is core


def test_a_step_passes_through_the_engine_and_the_tables_and_no_checkpoint() -> None:
    step = files_in_a_step(ROOT)
    assert {Path("fsdp/runtime/engine.py"), Path("fsdp/params/unit.py"), Path("state_machine/lifecycle.py")} <= step
    assert step <= set(files_of(ROOT))
    assert not [path for path in step if "checkpoint" in path.parts]
