"""How large the code is, and what one training step runs. Some of the numbers may only go down: those of code_size.json.

python -m tools.code_size             prints a row for each figure
python -m tools.code_size --check     names the numbers that are above code_size.json, and fails if there is one
python -m tools.code_size --lower     writes the numbers that have become lower than code_size.json says
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

import fsdp

ROOT: Final = Path(__file__).resolve().parents[1]
CEILINGS: Final = Path(__file__).with_suffix(".json")
"""What each number of `counts` may be at most."""
BESIDE: Final = ("compat", "commands", "integrations")
"""The packages in `fsdp/` that are no core: names of other engines, and what `python -m fsdp` offers."""
WORLD: Final = ("simulated", "simulated_group", "simulated_ops", "random_states")
"""The simulated world and what it keeps for each rank: a step over process groups does not pass through these files."""
KINDS: Final = frozenset(
    [
        "replaces_param",
        "replaces_params",
        "asks_addresses",
        "refuses_data",
        "has_empty_grad",
        "is_row_range",
        "is_tensor_parallel",
        "tensor_parallel",
        "is_replicated",
        "keeps_state",
        "copies",
        "copies_shards",
        "is_put_away",
        "is_meta",
    ]
)
"""Attributes by which code asks of which kind a placement or a home is: how a parameter is cut, and in which memory it lies."""
SAY_KINDS: Final = (Path("fsdp/params/placement.py"), Path("fsdp/device/home.py"))
"""Where these questions belong."""
SMALL: Final = 60
LARGE: Final = 700
TOP: Final = "fsdp"
"""The room of the files that are directly in `fsdp/`."""

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
    """Whether a file, relative to the root, belongs to the engine or to its tables."""
    return path.parts[0] == "state_machine" or path.parts[1] not in BESIDE


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


class Step(NamedTuple):
    """What one training step of rank 0 runs."""

    files: set[Path]
    calls: int
    """Calls of Python functions, generators and comprehensions of the product. The simulated world is left out."""


def one_step(root: Path) -> Step:
    """Count in the fourth step of a small model on two simulated ranks; the first steps learn the order.

    Calls are the same each time in a process that has no other sharded model: some questions go to all of them.
    """
    found: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_filename)

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            sys.setprofile(profile if step == 3 and rank == 0 else None)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        sys.setprofile(None)

    fsdp.simulate(2, fn)
    inside = [path.relative_to(root) for path in map(Path, found) if path.is_relative_to(root)]
    ours = [path for path in inside if path.parts[0] in ("fsdp", "state_machine") and path.stem not in WORLD]
    return Step(set(ours), len(ours))


def rooms(root: Path) -> set[str]:
    """The packages directly in `fsdp/`, and one room for the files that are in none."""
    return {TOP, *(path.parent.name for path in (root / "fsdp").glob("*/__init__.py"))}


def arrows(root: Path) -> set[tuple[str, str]]:
    """Each pair of rooms of which the first has a file that imports something of the second."""
    found, known = set(), rooms(root)
    for path in (root / "fsdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                package, _, rest = name.partition(".")
                if package == "fsdp":
                    pair = [part if part in known else TOP for part in (path.relative_to(root).parts[1], rest.partition(".")[0])]
                    found.add((pair[0], pair[1]))
    return {(one, other) for one, other in found if one != other}


def conditions(source: str) -> int:
    """The number of `if`, `elif`, `while`, conditional expressions and conditions of comprehensions."""
    nodes = list(ast.walk(ast.parse(source)))
    return sum(isinstance(node, ast.If | ast.IfExp | ast.While) for node in nodes) + sum(
        len(node.ifs) for node in nodes if isinstance(node, ast.comprehension)
    )


def conditions_on_kinds(source: str) -> int:
    """How often conditions, and operands of `and`, `or` and `not`, read an attribute of `KINDS`; each attribute counts once."""
    asked: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            asked.add(node.test)
        elif isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            asked.add(node)
        elif isinstance(node, ast.comprehension):
            asked.update(node.ifs)
    read = {inner for node in asked for inner in ast.walk(node)}
    return sum(isinstance(node, ast.Attribute) and node.attr in KINDS for node in read)


def lines_below(folder: Path, pattern: str) -> int:
    """The lines of all files of a folder whose names fit a pattern."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob(pattern))


def counts(root: Path) -> dict[str, int]:
    """The numbers that may only go down."""
    everything = files_of(root)
    core = [path for path in everything if is_core(path)]
    texts = {path: (root / path).read_text(encoding="utf-8") for path in everything}
    lengths = {path: len(texts[path].splitlines()) for path in everything}
    size, step = size_of(root, core), one_step(root)
    return {
        "core: lines": size.lines,
        "core: classes": size.classes,
        "core: conditions": sum(conditions(texts[path]) for path in core),
        "core: conditions on the kind of a shard": sum(
            conditions_on_kinds(texts[path]) for path in core if path not in SAY_KINDS
        ),
        "core: uses of the first unit's options": sum(len(re.findall(r"units\[0\]\.config", texts[path])) for path in core),
        "rooms in fsdp/": len(rooms(root)),
        "arrows between the rooms": len(arrows(root)),
        f"files with fewer than {SMALL} lines": sum(
            length < SMALL and path.stem not in ("__init__", "__main__") for path, length in lengths.items()
        ),
        f"files with more than {LARGE} lines": sum(length > LARGE for length in lengths.values()),
        "one step: files": len(step.files),
        "one step: calls": step.calls,
        "tests: lines": lines_below(root / "tests", "*.py"),
        "pages: lines": lines_below(root / "docs", "*.md"),
    }


def ceilings() -> dict[str, int]:
    """The table of `code_size.json`."""
    found: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    return found


def above(now: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """One sentence for each number that is above the table."""
    return [
        f"{name}: {now[name]:,}, and tools/code_size.json allows {most[name]:,}. Take out as much as the change brings in: "
        f"what it makes unneeded, a second way to do the same, a condition that a noun would spare. If the number must go up, "
        f"change it in tools/code_size.json and say why in the message of that commit."
        for name in most
        if now[name] > most[name]
    ]


def lowered(now: Mapping[str, int], most: Mapping[str, int]) -> dict[str, int]:
    """The table with each number that has become lower; none becomes higher. Lines are rounded up to hundreds."""
    found = {name: -(-number // 100) * 100 if name.endswith(": lines") else number for name, number in now.items()}
    return {name: min(found[name], limit) for name, limit in most.items()}


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
    most = ceilings()
    for name, number in counts(root).items():
        yield name, f"{number:,} (at most {most[name]:,})"


def main() -> None:
    """Print the figures, check them, or write the lower ones."""
    parser = argparse.ArgumentParser(prog="python -m tools.code_size")
    parser.add_argument("--check", action="store_true", help="fail if a number is above the table")
    parser.add_argument("--lower", action="store_true", help="write the numbers that have become lower")
    given = parser.parse_args()
    if given.check:
        sys.exit("\n".join(above(counts(ROOT), ceilings())) or None)
    elif given.lower:
        CEILINGS.write_text(json.dumps(lowered(counts(ROOT), ceilings()), indent=2) + "\n", encoding="utf-8")
    else:
        for name, value in rows(ROOT):
            print(f"{name:<40} {value}")


if __name__ == "__main__":
    main()
