"""The parts of pages that are printed from tables: of illegal moves, of options, of doors, of commands, and of optimizers.

python -m tools.generated     writes them
"""

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fsdp.building.peer_options import PEER_OPTIONS
from fsdp.commands.main import make_parser
from fsdp.compat.doors import DOORS, replacements
from tests.shards import optimizer_table
from tools.tables.markdown import remedies, table_of

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARK: Final = "<!-- {}: written by tools/generated.py -->\n{}<!-- /{} -->"


def peer_options() -> str:
    """Options of other engines by remedy, with the values that are accepted."""
    by_remedy: dict[str, list[str]] = {}
    for name, option in PEER_OPTIONS.items():
        by_remedy.setdefault(option.remedy, []).append(name)
    rows = []
    for remedy, names in by_remedy.items():
        accepted = [f"`{name}={value}`" for name in names for value in PEER_OPTIONS[name].accepted]
        rows.append((f"``{remedy}``", ", ".join(f"`{name}`" for name in names), ", ".join(accepted) or "no value"))
    return table_of(("the text", "options of other engines", "accepted"), rows)


LATER: Final = {("fully_shard", "torch.distributed.fsdp"): {"GradientReductionHandle": " (torch 2.15)"}}
"""Names that the torch of constraints.txt has not: by door and module, with what the page says of each."""


def installed_names() -> str:
    """Every attribute that `fsdp.compat.install` replaces, by door and module of the library."""
    rows = []
    for name, door in DOORS.items():
        if find_spec(door.module):
            places: dict[str, set[str]] = {}
            for place, attribute in ((one.place, one.name) for one in replacements(door)):
                places.setdefault(place, set()).add(attribute)
            for place, names in places.items():
                later = LATER.get((name, place), {})
                shown = [f"`{one}`{later.get(one, '')}" for one in sorted(names | later.keys())]
                rows.append((f"`{name}`", f"`{place}`", ", ".join(shown)))
    return table_of(("door", "module of the library", "attributes that become those of the door"), rows)


def command_line() -> str:
    """Every command with what it does. Its arguments are what `--help` prints."""
    return table_of(("command", "what it does"), _commands_of(make_parser()))


def _commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {one.dest: one.help for one in action._choices_actions}
            for name, command in action.choices.items():
                what = f"{said[name] or ''}."
                yield f"`{command.prog}`", f"{what[0].upper()}{what[1:]}"
                yield from _commands_of(command)


PARTS: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "errors.md": {"illegal moves": remedies},
    "options.md": {"options of other engines": peer_options},
    "command-line.md": {"commands": command_line},
    "optimizers.md": {"optimizers": optimizer_table.page},
    "../migration/install.md": {"installed names": installed_names},
}
"""By page, from the folder of the reference, and by the name of the marks."""


def generated(page: str, text: str) -> str:
    """`text` with its parts as they are printed today."""
    for name, printed in PARTS[page].items():
        begin, end = MARK.format(name, "\0", name).split("\0")
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"{page} has no {begin} ... {end} to write between"
        text = f"{before}{begin}\n{printed()}\n\n{end}{after}"
    return text


def main() -> None:
    for page in PARTS:
        path = REFERENCE / page
        path.write_text(generated(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
