"""The parts of pages that are printed from tables: of illegal moves, of other engines' options, of doors, and of optimizers.

python -m tools.generated     writes them
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fsdp.build.peer_options import PEER_OPTIONS
from fsdp.compat.doors import DOORS, replacements
from state_machine.markdown import remedies
from tests.shards import optimizer_table

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARK: Final = "<!-- {}: written by tools/generated.py -->\n{}<!-- /{} -->"


def peer_options() -> str:
    """Options of other engines by remedy, with the values that are accepted."""
    by_remedy: dict[str, list[str]] = {}
    for name, option in PEER_OPTIONS.items():
        by_remedy.setdefault(option.remedy, []).append(name)
    rows = ["| the text | options of other engines | accepted |", "| --- | --- | --- |"]
    for remedy, names in by_remedy.items():
        accepted = [f"`{name}={value}`" for name in names for value in PEER_OPTIONS[name].accepted]
        rows.append(f"| ``{remedy}`` | {', '.join(f'`{name}`' for name in names)} | {', '.join(accepted) or 'no value'} |")
    return "\n".join(rows)


def installed_names() -> str:
    """Every attribute that `fsdp.compat.install` replaces, by door and module of the library."""
    rows = ["| door | module of the library | attributes that become those of the door |", "| --- | --- | --- |"]
    for name, door in DOORS.items():
        if find_spec(door.module):
            places: dict[str, list[str]] = {}
            for one in replacements(door):
                places.setdefault(one.place, []).append(f"`{one.name}`")
            rows += [f"| `{name}` | `{place}` | {', '.join(sorted(names))} |" for place, names in places.items()]
    return "\n".join(rows)


PARTS: Final[dict[str, dict[str, Callable[[], str]]]] = {
    "errors.md": {"illegal moves": remedies},
    "options.md": {"options of other engines": peer_options},
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
