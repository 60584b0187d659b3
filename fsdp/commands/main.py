"""The command line: python -m fsdp inspect|convert|trace|who|plan|selftest."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.checkpoint.hf_safetensors import size_in_bytes
from fsdp.commands.convert import convert, damage_in, describe
from fsdp.commands.planning.command import add_plan
from fsdp.commands.reporting.command import add_trace, add_who
from fsdp.commands.selftest.command import add_selftest
from fsdp.errors import ShardingError
from fsdp.file_errors import file_errors


def make_parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp",
        description="Examine checkpoints, traces, running jobs and this machine, and plan new jobs.",
        epilog="The first command to try is selftest. `python -m fsdp COMMAND --help` lists the options of a command.",
    )
    commands = parser.add_subparsers(dest="command")
    inspect = commands.add_parser("inspect", help="describe a checkpoint, and check every byte against its checksums")
    inspect.add_argument("path", type=Path, help="a checkpoint")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.set_defaults(run=run)
    converting = commands.add_parser("convert", help="write a checkpoint in another form, without a GPU and without other ranks")
    converting.add_argument("path", type=Path, help="a checkpoint, a file of torch.save, a safetensors file or folder")
    converting.add_argument("out", type=Path, help="must not exist")
    converting.add_argument("--to", choices=["safetensors", "torch", "dcp"], required=True, help="the form to write")
    converting.add_argument(
        "--max-shard-size",
        default="5GB",
        help="limit for one output file, which is held in memory while it is made; unused with --to torch (default: %(default)s)",
    )
    converting.set_defaults(run=run)
    add_trace(commands)
    add_who(commands)
    add_plan(commands)
    add_selftest(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    It is 0, or 1 if a checkpoint is damaged, a rank does not answer, no choice fits, a check of the selftest failed, or the
    command failed. Without a command the help is printed.
    """
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    try:
        found: int = given.run(given)
        return found
    except ShardingError as refusal:
        print(f"fsdp: {refusal}", file=sys.stderr)
        return 1


def run(given: argparse.Namespace) -> int:
    """Run `inspect` or `convert`; return the exit status."""
    with file_errors(given.command, given.path):
        if not given.path.exists():
            raise ShardingError(f"{given.command}: there is no file or folder {given.path}.")
        if given.command == "convert":
            size = given.max_shard_size
            limit = size_in_bytes(int(size) if size.isdecimal() else size, "convert: --max-shard-size")
            convert(given.path, given.out, given.to, limit)
            print(f"wrote {given.out}")
            return 0
        for line in describe(given.path, given.tensors):
            print(line)
        damage = damage_in(given.path)
        print("damaged:" if damage else "healthy", *damage, sep="\n  " if damage else "")
        return 1 if damage else 0
