"""`python -m state_machine explore`, `... buckets` and `... paths`."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m state_machine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explore_parser = commands.add_parser("explore", help="visit every reachable joint state of small unit trees")
    explore_parser.add_argument("--tree", default="all", help="one tree by its name, or 'all'")
    commands.add_parser("buckets", help="visit every reachable joint state of a few buckets on one or two ranks")
    commands.add_parser("paths", help="run small programs of ranks that go different ways, in every interleaving")
    chosen = parser.parse_args(arguments)
    if chosen.command == "buckets":
        from state_machine.explorer.explore_buckets import run as run_buckets

        return run_buckets()
    if chosen.command == "paths":
        from state_machine.explorer.explore_paths import run as run_paths

        return run_paths()
    from state_machine.explorer.explore import run

    return run(chosen.tree)


if __name__ == "__main__":
    sys.exit(main())
