"""`make test` does not run tests/compat/frameworks, which needs other packages. So it looks whether what they import exists."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "tests" / "compat" / "frameworks").glob("*.py"), *(ROOT / "examples").glob("*.py")])


def bound(tree: ast.Module) -> set[str]:
    """The names that the top level of a module binds, also inside `try`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing(source: str) -> list[str]:
    """What some source imports from this repository that does not exist, as "module.name"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("fsdp", "tests", "state_machine"):
            place = ROOT / str(node.module).replace(".", "/")
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names = bound(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else set()
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_tests_of_frameworks_and_examples_import_exists(file: Path) -> None:
    assert missing(file.read_text(encoding="utf-8")) == []


def test_a_name_that_is_not_there_is_found() -> None:
    assert missing("from fsdp.integrations.accelerate import install, FIELDS") == ["fsdp.integrations.accelerate.FIELDS"]
    assert missing("from fsdp.nowhere import it") == ["fsdp.nowhere.it"]
