"""Removes each wait, event and stream context of the device code, one at a time, and reports which of them nothing notices.

Each change is made in a copy of the package. Stories of training then run on the pretend accelerator under every scheduler,
until a weight differs from that of the same story on the host, or something raises, or a stream is given other work than it is
for. No GPU takes part.

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
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
FILES: Final = (
    "fsdp/device/streams.py",
    "fsdp/params/unit.py",
    "fsdp/params/versions.py",
    "fsdp/params/flat_buffer.py",
    "fsdp/reduction/in_flight.py",
    "fsdp/reduction/used_params.py",
    "fsdp/reduction/order.py",
    "fsdp/runtime/stale_params.py",
    "fsdp/comm/buffers.py",
    "fsdp/runtime/engine.py",
    "fsdp/reduction/reducer.py",
    "fsdp/api/clipping.py",
    "fsdp/build/builder.py",
    "fsdp/shards/reductions.py",
    "fsdp/shards/shard_tensor.py",
    "fsdp/runtime/gathers.py",
    "fsdp/uneven/gather_order.py",
    "fsdp/uneven/data_left.py",
    "fsdp/state_dict/param_ranges.py",
    "fsdp/api/join_result.py",
)
"""The files whose waits reach a device."""
HOST: Final = "HostStreams"
"""A class whose methods wait for nothing."""
CALLS: Final = (
    *("wait_stream", "wait_event", "record", "pass_begins", "released", "await_reductions", "wait"),
    *("uploaded", "copied", "await_copies", "synchronize"),
)
CONTEXTS: Final = ("gathering", "reducing", "landing", "uploading")
LIMIT: Final = 7200
"""Seconds for one change. A story that is not over after its own limit ends its process, which is noticed."""


WANTED: Final = ROOT / "build" / "accelerator" / "wanted.pt"
"""The weights of the host. The run without any change writes them."""


class Mutant(NamedTuple):
    """One change: the text between two offsets of a file is replaced."""

    file: str
    line: int
    what: str
    start: int
    end: int
    text: str


def mutants() -> list[Mutant]:
    """Every change, in the order of the files."""
    return [mutant for file in FILES for mutant in _in_file(file)]


def _in_file(file: str) -> Iterator[Mutant]:
    source = (ROOT / file).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def change(node: ast.expr | ast.stmt, what: str, text: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, node.lineno, what, start, end, text)

    for top in ast.parse(source).body:
        if isinstance(top, ast.ClassDef) and top.name == HOST:
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.Expr) and _method(node.value) in CALLS:
                call = node.value
                assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
                kept = ast.get_source_segment(source, call.func.value) or ""
                if kept.endswith("versions"):
                    continue  # it counts, and nothing waits
                # the collective stays, and nobody waits for it
                text = kept if isinstance(call.func.value, ast.Call) else "pass"
                yield change(node, f"{_method(call)} of {kept.split('(')[0]}", text)
            elif isinstance(node, ast.With):
                for item in node.items:
                    if _method(item.context_expr) in CONTEXTS:
                        yield change(item.context_expr, f"context {_method(item.context_expr)}", _NO_CONTEXT)
            elif isinstance(node, ast.Return) and node.value is not None and _method(node.value) == "entered":
                yield change(node.value, "entered", _NO_CONTEXT)
            elif isinstance(node, ast.AugAssign) and _method(node.value) == "gathered":
                yield change(node, "gathered", "pass")


_NO_CONTEXT: Final = "__import__('contextlib').nullcontext()"


def _method(node: ast.AST) -> str | None:
    """The name of the method that an expression calls."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def run(mutant: Mutant | None) -> str | None:
    """What notices a change; None if nothing does. Without a change: what is wrong anyway."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "fsdp", folder / "fsdp", ignore=shutil.ignore_patterns("__pycache__"))
        for other in ("state_machine", "tests", "build"):
            (folder / other).symlink_to(ROOT / other)
        if mutant is not None:
            path = folder / mutant.file
            source = path.read_text(encoding="utf-8")
            path.write_text(source[: mutant.start] + mutant.text + source[mutant.end :], encoding="utf-8")
        variables = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.support.accelerator.notice", str(WANTED)]
        ended = subprocess.run(command, cwd=name, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False)
    if ended.returncode == 0:
        return None
    return (ended.stdout.strip().splitlines() or [f"ended with {ended.returncode}: {ended.stderr[-200:]}"])[-1]


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
