"""Removes each wait, event and stream context of the device code, one at a time, and reports which of them nothing notices.

Each change is made in a copy of the package. Stories of training then run under every scheduler on the pretend accelerator,
between processes over the pretend NCCL, and on virtual streams, until one shows that something is missing: another weight than
on the host, an error, work on a wrong stream, or two accesses to the same memory without an order. No GPU takes part.

    python -m tools.mutate_waits                       every change
    python -m tools.mutate_waits --only in_flight      those of one file
    python -m tools.mutate_waits --list                what would be changed
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
EXCEPT: Final = {
    "fsdp/checkpoint/dcp.py": "futures of torch's readers and writers of checkpoints, on the host",
    "fsdp/comm/routed_group.py": "collectives of gloo, on the host",
    "fsdp/comm/simulated.py": "threads of simulated ranks, whose tensors are on the host",
    "fsdp/comm/simulated_group.py": "the same, through torch's groups",
    "fsdp/comm/work.py WorkBatch": "collectives of gloo, on the host",
    "fsdp/debug/delays.py": "it adds delays to the waits of other streams, and runs in tests alone",
    "fsdp/device/streams.py Streams": "it waits for nothing",
    "fsdp/comm/failure/": "threads and messages of the host",
    "fsdp/commands/planning/": "it measures, and trains nothing",
    "fsdp/commands/rehearsal/": "it counts, and trains nothing",
    "fsdp/commands/selftest/": "it is a check itself",
    "fsdp/params/placement.py DTensorPlacement": "the tensor waits by itself at its first use",
}
"""Files, folders and classes whose calls of these names reach no device that trains, each with its reason."""
SAME_NAME: Final = ("info", "_reducer", "versions", "_order")
"""What has methods of the same names that wait for nothing: the last name before the dot."""
KNOWN: Final = "_known"
"""The compute streams. What is done for each of them is also tried for one alone."""
CALLS: Final = (
    *("wait_stream", "wait_event", "record", "pass_begins", "released", "await_reductions", "wait"),
    *("computes", "unit_begins", "uploaded", "copied", "await_copies", "synchronize"),
)
CONTEXTS: Final = ("gathering", "reducing", "landing", "computing", "uploading")
LIMIT: Final = 1800
"""Seconds for one change. A story that is not over after its own limit ends its process, which is noticed."""


WANTED: Final = ROOT / "build" / "accelerator" / "wanted.pt"
"""The weights of the host. The run without any change writes them."""


class Mutant(NamedTuple):
    """One change: the bytes between two offsets of a file are replaced."""

    file: str
    line: int
    what: str
    start: int
    end: int
    text: str


def mutants() -> list[Mutant]:
    """Every change, in the order of the files."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp").rglob("*.py"))
    return [mutant for file in files if not file.startswith(tuple(EXCEPT)) for mutant in changes_of(file)]


def changes_of(file: str) -> Iterator[Mutant]:
    """The changes of one file, also of one in `EXCEPT`."""
    source = (ROOT / file).read_text(encoding="utf-8")
    starts = [*accumulate((len(line.encode()) for line in source.splitlines(keepends=True)), initial=0)]

    def change(node: ast.expr | ast.stmt, what: str, text: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, node.lineno, what, start, end, text)

    def text_of(node: ast.AST) -> str:
        return ast.get_source_segment(source, node) or ""

    for top in ast.parse(source).body:
        if isinstance(top, ast.ClassDef) and f"{file} {top.name}" in EXCEPT:
            continue
        statements = {id(node.value) for node in ast.walk(top) if isinstance(node, ast.Expr)}
        entered = {id(item.context_expr) for node in ast.walk(top) if isinstance(node, ast.With) for item in node.items}
        entered |= {id(node.value) for node in ast.walk(top) if isinstance(node, ast.Return)}
        for node in ast.walk(top):
            if isinstance(node, ast.For) and _last_name(node.iter) == KNOWN:
                yield change(node.iter, "all known streams but one", "(self._compute,)")
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, node.func.value
            if _last_name(owner) in SAME_NAME:
                continue
            if name in CALLS and id(node) in statements:
                # the collective stays, and nobody waits for it
                yield change(
                    node, f"{name} of {text_of(owner).split('(')[0]}", text_of(owner) if isinstance(owner, ast.Call) else "..."
                )
            elif name == "wait":
                yield change(
                    node, f"{name} of {text_of(owner)}", f"{text_of(owner)}.value()"
                )  # of a future, whatever it waits for
            elif name in (*CONTEXTS, "entered") and id(node) in entered:
                yield change(node, f"context {name}", _NO_CONTEXT)
            elif name == "gathered":
                yield change(node, name, "()")
            elif name in (*CALLS, *CONTEXTS):
                raise ValueError(f"{file}:{node.lineno}: no change is known for a call of {name!r} in this place")


_NO_CONTEXT: Final = "__import__('contextlib').nullcontext()"


def _last_name(node: ast.expr) -> str | None:
    """The last name of an expression such as `self.reducer`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def run(mutant: Mutant | None) -> str | None:
    """What notices a change; None if nothing does. Without a change: what is wrong anyway."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "fsdp", folder / "fsdp", ignore=shutil.ignore_patterns("__pycache__"))
        for other in ("state_machine", "tests", "build"):
            (folder / other).symlink_to(ROOT / other)
        if mutant is not None:
            path = folder / mutant.file
            source = path.read_bytes()
            path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        variables = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        for runner in (("accelerator", str(WANTED)), ("processes",), ("virtual",)):
            command = [sys.executable, "-m", "tests.support.accelerator.notice", *runner]
            try:
                ended = subprocess.run(
                    command, cwd=name, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{runner[0]}: not done after {LIMIT} s"
            if ended.returncode != 0:
                return (ended.stdout.strip().splitlines() or [f"ended with {ended.returncode}: {ended.stderr[-200:]}"])[-1]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="changes of files whose name contains this")
    parser.add_argument("--first", type=int, default=1, help="begin with the change of this number")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if options.only in mutant.file]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.file}:{mutant.line}: {mutant.what}")
        return
    WANTED.parent.mkdir(parents=True, exist_ok=True)
    WANTED.unlink(missing_ok=True)
    if (wrong := run(None)) is not None:
        sys.exit(f"without any change: {wrong}")
    unnoticed = []
    for number, mutant in enumerate(chosen[options.first - 1 :], options.first):
        began = time.monotonic()
        noticed = run(mutant)
        said = f"UNNOTICED after {time.monotonic() - began:.0f} s" if noticed is None else noticed
        print(f"{number}/{len(chosen)} {mutant.file}:{mutant.line} {mutant.what}: {said}", flush=True)
        if noticed is None:
            unnoticed.append(mutant)
    tried = len(chosen) - options.first + 1
    print(f"noticed {tried - len(unnoticed)} of {tried}")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
