"""The commands `python -m fsdp trace` and `python -m fsdp who`."""

import argparse
import json
from pathlib import Path
from typing import Any

from fsdp.commands.reporting.advice import advise
from fsdp.commands.reporting.clocks import aligned, merged
from fsdp.commands.reporting.formats import write_text
from fsdp.commands.reporting.numbers import numbers_of
from fsdp.commands.reporting.rank_trace import missing_ranks, read_traces, refuse_missing
from fsdp.commands.reporting.report_page import write_page
from fsdp.commands.reporting.text import lines_of
from fsdp.commands.reporting.who import ask, run_dir_of, table_of
from fsdp.errors import ShardingError


def add_trace(commands: Any) -> None:
    """Add `trace merge` and `trace report` to the commands."""
    parser = commands.add_parser("trace", help="merge traces of several ranks, and explain them")
    kinds = parser.add_subparsers(dest="kind", required=True)
    merge = kinds.add_parser("merge", help="write one trace of all ranks, on one clock")
    merge.add_argument("traces", type=Path, nargs="+", help="files of trace.save")
    merge.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    report = kinds.add_parser("report", help="say where the time and the memory of a step went, and what would help")
    report.add_argument("traces", type=Path, nargs="+", help="files of trace.save or of trace merge")
    report.add_argument("--html", type=Path, help="write the report as a page too, which needs no network")
    report.add_argument("--json", type=Path, help="write its numbers too")
    report.add_argument("--allow-missing", action="store_true", help="report about the ranks that are there")
    parser.set_defaults(run=run_trace)


def add_who(commands: Any) -> None:
    """Add `who` to the commands."""
    parser = commands.add_parser("who", help="ask all ranks of a running job where they are, and print one table")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--run-dir", type=Path, help="the folder that FSDP_RUN_DIR named when the job began")
    place.add_argument("--pid", type=int, help="a process of the job on this host, or the one that started it")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for answers (default: %(default)s)")
    parser.add_argument("--stacks", action="store_true", help="print the stack of each rank's main thread too")
    parser.set_defaults(run=run_who)


def run_trace(given: argparse.Namespace) -> int:
    """Run `trace merge` or `trace report`; return the exit status."""
    traces = read_traces(given.traces)
    if given.kind == "merge":
        refuse_missing(traces)
        if given.out.exists() and any(map(given.out.samefile, given.traces)):
            raise ShardingError(f"merge: {given.out} is one of the traces, and would be lost; give another file as --out.")
        write_text("merge", given.out, json.dumps(merged(traces)))
        print(f"wrote {given.out}")
        return 0
    if not given.allow_missing:
        refuse_missing(traces)
    traces, offsets = aligned(traces)
    numbers = [numbers_of(one) for one in traces]
    advice, missing = advise(traces, numbers), missing_ranks(traces)
    print("\n".join(lines_of(numbers, offsets, missing, advice)))
    if given.json is not None:
        steps = {str(one.rank): vars(one.typical) | {"length": one.typical.length, "rest": one.typical.rest} for one in numbers}
        for step in steps.values():
            step["exposed"] = {f"{lane}: {unit}": waited for (lane, unit), waited in step["exposed"].items()}
        write_text("report", given.json, json.dumps({"steps": steps, "advice": [vars(one) for one in advice]}))
    if given.html is not None:
        write_page(given.html, traces, numbers, offsets, missing, advice)
        print(f"wrote {given.html}")
    return 0


def run_who(given: argparse.Namespace) -> int:
    """Run `who`; return the exit status: 0 if every rank has answered."""
    folder = given.run_dir if given.run_dir is not None else run_dir_of(given.pid)
    known, answers = ask(folder, given.timeout)
    print("\n".join(table_of(known, answers, given.stacks)))
    return 0 if len(answers) == max(one["world_size"] for one in known.values()) else 1
