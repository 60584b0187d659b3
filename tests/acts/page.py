"""The table of acts and moments in docs/reference/patterns.md, which is the record of what each pair does.

python -m tests.acts.page          plays every pair in every world, about half an hour on two cores, and writes the table
python -m tests.acts.page "freeze a parameter" ...     plays the pairs of these acts, and writes the table
python -m tests.acts.page 1 3       plays every pair on one rank and on three, in one world each, and prints what differs
"""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from tests.acts.table import DIFFERS, MOMENTS, differs, outcome, pairs, worlds
from tests.acts.vocabulary import ACTS

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "patterns.md"
BEGIN: Final = "<!-- acts: written by python -m tests.acts.page -->\n"
END: Final = "<!-- /acts -->\n"
Outcomes = dict[tuple[str, str], set[str]]
"""Of each pair, what happens in its worlds: "right", "too", or a sentence."""


UNKNOWN: Final = "not right yet"
"""What is printed of a fault that `DIFFERS` does not have."""


def play(key: tuple[str, str]) -> tuple[set[str], list[str]]:
    """What a pair does in all its worlds of two ranks, and the faults that are not known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, faults = set(), []
    for pair in pairs(*key):
        said, verdict = outcome(pair)
        if said == "fault":
            said = DIFFERS.get((*key, pair.door), UNKNOWN)
            faults += [f"{pair}: {verdict.fault}"] if said == UNKNOWN else []
        found.add(said)
    return found, faults


def printed(outcomes: Outcomes) -> str:
    """The table, and below it the sentences."""
    sentences = sorted({said for found in outcomes.values() for said in found} - {"right", "too", UNKNOWN, *DIFFERS.values()})
    reasons = sorted({said for found in outcomes.values() for said in found} & {UNKNOWN, *DIFFERS.values()})
    codes = {"right": "R", "too": "T"}
    codes |= {said: f"S{number}" for number, said in enumerate(sentences, 1)}
    codes |= {said: f"D{number}" for number, said in enumerate(reasons, 1)}
    lines = [f"| act | {' | '.join(MOMENTS)} |", f"| --- |{' --- |' * len(MOMENTS)}"]
    alike: dict[str, list[str]] = {}
    for act in ACTS:
        cells = [" ".join(sorted((codes[said] for said in outcomes[act, moment]), key=_order)) for moment in MOMENTS]
        alike.setdefault(" | ".join(cells), []).append(act)
    lines += [f"| {'; '.join(acts)} | {cells} |" for cells, acts in alike.items()]
    lines += ["", "| code | what the refusal says |", "| --- | --- |", *(f"| {codes[said]} | {said} |" for said in sentences)]
    if reasons:
        lines += [
            "",
            "| code | different from plain torch |",
            "| --- | --- |",
            *(f"| {codes[said]} | {said} |" for said in reasons),
        ]
    return "\n".join(lines) + "\n"


def _order(code: str) -> tuple[int, int]:
    return "RTSD".index(code[0]), int(code[1:] or 0)


def shown() -> Outcomes:
    """What the page says of each pair."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    said = {"R": "right", "T": "too"} | {row[0]: row[1] for row in rows if re.fullmatch(r"[SD]\d+", row[0])}
    return {
        (act, moment): {said[code] for code in cell.split()}
        for row in rows
        for act in row[0].split("; ")
        if act in ACTS
        for moment, cell in zip(MOMENTS, row[1:], strict=True)
    }


def differences(size: int) -> Iterator[str]:
    """What pairs do on another number of ranks that the table does not say of two."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = shown()
    for pair in worlds(size):
        said, verdict = outcome(pair)
        key = pair.act, pair.moment
        if said == "fault":
            if not differs(*key, pair.door, size):
                yield f"{pair}: {verdict.fault}"
        elif said not in known[key]:
            yield f"{pair}: {said}"


def main() -> None:
    if sys.argv[1:] and all(number.isdecimal() for number in sys.argv[1:]):
        for text in chain.from_iterable(map(differences, map(int, sys.argv[1:]))):
            print(text, flush=True)
        return
    played_now = sys.argv[1:] or list(ACTS)
    keys = [(act, moment) for act in ACTS for moment in MOMENTS]
    before_now = shown() if sys.argv[1:] else {}
    outcomes: Outcomes = {key: said for key, said in before_now.items() if key in keys and key[0] not in played_now}
    known = True
    with ProcessPoolExecutor(int(os.environ.get("PROCESSES", "2")), get_context("fork")) as pool:
        for key, played in {key: pool.submit(play, key) for key in keys if key[0] in played_now}.items():
            outcomes[key], faults = played.result()
            if faults:
                known = False
                print(f"{key}:", *faults, "", sep="\n", flush=True)
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has no {BEGIN}...{END}"
    PAGE.write_text(before + BEGIN + printed(outcomes) + END + after, encoding="utf-8")
    assert known, "faults are printed above; mend them, or enter them into DIFFERS with the reason"


if __name__ == "__main__":
    main()
