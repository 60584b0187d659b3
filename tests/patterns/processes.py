"""Starts the processes of gloo_patterns.py and reads what they left."""

import pickle
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.patterns.every import PATTERNS
from tests.patterns.harness import Outcome
from tests.support.everything import EVERYTHING
from tests.support.processes import end_all, start_rank

SIZES: Final = (2, 3) if EVERYTHING else (2,)
LIMIT = 200
"""Seconds for one start. A rank that is stuck in one pattern ends itself long before."""


def _read(path: Path) -> list[Outcome]:
    found = []
    with open(path, "rb") as outcomes:
        while True:
            try:
                found.append(pickle.load(outcomes))
            except (EOFError, pickle.UnpicklingError):  # the last one was cut short
                return found


def _run(size: int, names: list[str]) -> tuple[list[list[Outcome]], str]:
    """What every rank left, by rank, pattern by pattern as far as they came; and what they printed if one died."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            start_rank("tests.patterns.gloo_patterns", rank, size, folder, *names, output=folder / f"{rank}.txt")
            for rank in range(size)
        ]
        end = time.monotonic() + LIMIT
        try:
            # until all have ended well, or one has not
            while time.monotonic() < end and None in (codes := [one.poll() for one in ranks]) and not any(codes):
                time.sleep(0.05)
        finally:
            end_all(ranks)
        printed = [f"rank {rank} printed:\n{(folder / f'{rank}.txt').read_text(errors='replace')}" for rank in range(size)]
        return [_read(folder / f"{rank}.pickle") for rank in range(size)], "\n".join(printed)


def run_all(size: int) -> dict[str, list[Outcome]]:
    """Where the processes died in a pattern, others are started for the rest."""
    names = [name for name, of in PATTERNS.items() if size == 2 or not of.slow]
    found: dict[str, list[Outcome]] = {}
    while names:
        by_rank, printed = _run(size, names)
        found.update(zip(names, map(list, zip(*by_rank, strict=False)), strict=False))
        names = [name for name in names if name not in found]
        if names:
            found[names.pop(0)] = [Outcome(raised=f"a rank died, or was stuck\n{printed}")] * size
    return found
