"""`python -m tools.mutate_waits` knows every wait, event and stream context of the package."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from fsdp.device import streams
from tools import mutate_waits
from tools.mutate_waits import CALLS, CONTEXTS, EXCEPT, ROOT, changes_of, mutants


def test_every_name_of_the_streams_is_changed() -> None:
    names = {name for name in vars(streams.Streams) if not name.startswith("_")} - {"on_host"}
    assert names == {*CALLS, *CONTEXTS, "gathered"} - {"wait_stream", "wait_event", "record", "wait", "synchronize"}


def test_every_exception_is_one() -> None:
    """Each names a file or a folder with calls of these names, or a class that is there."""
    for place in EXCEPT:
        name, _, of_class = place.partition(" ")
        path = ROOT / name
        assert path.exists(), place
        if of_class:
            tops = ast.parse(path.read_text(encoding="utf-8")).body
            assert any(isinstance(top, ast.ClassDef) and top.name == of_class for top in tops), place
        else:
            files = [path] if path.is_file() else list(path.rglob("*.py"))
            assert any(_calls(file) for file in files), place


def _calls(file: Path) -> list[str]:
    return [
        node.func.attr
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in (*CALLS, *CONTEXTS, "gathered")
    ]


def test_each_change_leaves_a_program() -> None:
    found = mutants()
    assert len(found) > 80
    for mutant in found:
        source = (ROOT / mutant.file).read_bytes()
        changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant
    assert max(Counter((mutant.file, mutant.start) for mutant in found).values()) == 1, "one change twice"


SOURCE = """
def f(streams, work, future, hook):
    with streams.gathering(), hook:
        work.launch().wait()
    found = future.wait()
    works = (work, *streams.gathered())
    versions.pass_begins()
    streams.pass_begins()
    return queues.entered(found)
"""


def test_what_a_change_puts_in_the_place_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text(SOURCE)
    monkeypatch.setattr(mutate_waits, "ROOT", tmp_path)
    context = "__import__('contextlib').nullcontext()"
    assert {(mutant.what, mutant.text) for mutant in changes_of("one.py")} == {
        ("context gathering", context),
        ("wait of work.launch", "work.launch()"),
        ("wait of future", "future.value()"),
        ("gathered", "()"),
        ("pass_begins of streams", "..."),
        ("context entered", context),
    }


def test_a_call_for_which_no_change_is_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be left out without a word."""
    (tmp_path / "one.py").write_text(SOURCE + "held = streams.reducing(0)\n")
    monkeypatch.setattr(mutate_waits, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"one\.py:\d+: no change is known for a call of 'reducing'"):
        list(changes_of("one.py"))
