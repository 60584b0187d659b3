"""How large the code is, and how many files one training step passes through.

python -m tools.code_size     prints a row for each figure
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

import fsdp

ROOT: Final = Path(__file__).resolve().parents[1]
PROOFS: Final = ("explorer", "__main__")
"""The files of `state_machine/` that check the tables."""
ELSEWHERE: Final = ("simulated", "simulated_ops", "dynamo")
"""The simulated world, and what is for torch.compile alone."""
CORE: Final = ("building", "runtime", "params", "reduction", "comm", "device", "autograd")
"""The packages of the core, without the packages in them. `config.py` and `api/wrap.py` belong to it too."""

NO_CODE: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Size(NamedTuple):
    """The figures of some files."""

    files: int
    lines: int
    code: int
    """Lines that are no comment, no docstring and not blank."""
    classes: int
    longest_file: tuple[int, str]
    longest_function: tuple[int, str]


def is_core(path: Path) -> bool:
    """Whether a file, relative to the root, is needed to train over process groups."""
    package, *rest = path.with_suffix("").parts
    if rest[-1] == "__init__" or rest[-1] in ELSEWHERE:
        return package == "state_machine"
    if package == "state_machine":
        return not set(rest) & set(PROOFS)
    return (rest[0] in CORE and len(rest) == 2) or rest in (["config"], ["api", "wrap"])


def code_lines(source: str) -> int:
    """The number of lines with code."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(used - texts)


def size_of(root: Path, files: list[Path]) -> Size:
    """Measure files, which are relative to `root`."""
    lines = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in files}
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8")))]
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}: {node.name}")
        for path, node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Size(
        len(files),
        sum(lines.values()),
        sum(code_lines((root / path).read_text(encoding="utf-8")) for path in files),
        sum(isinstance(node, ast.ClassDef) for _, node in nodes),
        max((count, str(path)) for path, count in lines.items()),
        max(functions),
    )


def files_of(root: Path) -> list[Path]:
    """All files of the product below `root`."""
    return sorted(path.relative_to(root) for package in ("fsdp", "state_machine") for path in (root / package).rglob("*.py"))


def files_in_a_step(root: Path) -> set[Path]:
    """The files whose functions run in one step of a small model on two ranks. The simulated world is left out."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            # the first steps learn the order
            sys.setprofile(profile if step == 3 else None)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        sys.setprofile(None)

    fsdp.simulate(2, fn)
    paths = {Path(name).resolve() for name in found}
    inside = {path.relative_to(root) for path in paths if path.is_relative_to(root)}
    return {path for path in inside if path.parts[0] in ("fsdp", "state_machine") and path.stem not in ELSEWHERE}


def rows(root: Path) -> Iterator[tuple[str, str]]:
    """Name and value of each figure."""
    everything = files_of(root)
    core = [path for path in everything if is_core(path)]
    for name, files in (("all of it", everything), ("the core", core)):
        size = size_of(root, files)
        yield f"{name}: files", f"{size.files}"
        yield f"{name}: lines", f"{size.lines:,}"
        yield f"{name}: lines of code", f"{size.code:,}"
        yield f"{name}: classes", f"{size.classes}"
        yield f"{name}: longest file", f"{size.longest_file[0]} ({size.longest_file[1]})"
        yield f"{name}: longest function", f"{size.longest_function[0]} ({size.longest_function[1]})"
    step = files_in_a_step(root)
    yield "one step: files", f"{len(step)}"
    yield (
        "one step: lines of these files",
        f"{sum(len((root / path).read_text(encoding='utf-8').splitlines()) for path in step):,}",
    )


def main() -> None:
    """Print the figures."""
    for name, value in rows(ROOT):
        print(f"{name:<32} {value}")


if __name__ == "__main__":
    main()
