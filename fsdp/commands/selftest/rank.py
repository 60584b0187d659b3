"""One rank of `python -m fsdp selftest`: python -m fsdp.commands.selftest.rank RANK SIZE FOLDER DEVICE BACKEND.

It writes what it finds to a file of FOLDER, one line for each check. It stops after a check that failed on any rank, because
the ranks may then be in different places.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from fsdp.commands.selftest.checks import CHECKS
from fsdp.commands.selftest.training import Place

TIME_OUT: Final = timedelta(seconds=40)
"""How long a rank waits for its peers."""


def main(rank: int, size: int, folder: Path, kind: str, backend: str) -> int:
    """Run every check; return the exit status."""
    device = torch.device("cpu")
    if kind == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device(kind, rank)
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, store=_store(folder / "store", size), rank=rank, world_size=size, timeout=TIME_OUT)
    beside = _store(folder / "beside", size)
    beside.set_timeout(TIME_OUT)
    place, passed = Place(rank, size, device, folder), True
    with open(folder / f"{rank}.jsonl", "w", encoding="utf-8") as found:
        for number, (name, check) in enumerate(CHECKS.items()):
            began = time.monotonic()
            try:
                said, outcome = check(place), "passed"
                if said is None:
                    said, outcome = "this device cannot be asked", "skipped"
            except Exception as failure:
                said, outcome, passed = f"{type(failure).__name__}: {failure}", "FAILED", False
            line = {"check": name, "outcome": outcome, "said": said, "seconds": time.monotonic() - began}
            found.write(json.dumps(line) + "\n")
            found.flush()
            beside.set(f"{number} of {rank}", "well" if passed else "badly")
            if any(beside.get(f"{number} of {one}") != b"well" for one in range(size)):
                return 1
    if not place.on_device:  # there the last check has aborted what the group would wait for
        dist.destroy_process_group()
    return 0


def _store(path: Path, size: int) -> Any:
    """A store in a file that all ranks open."""
    return dist.FileStore(str(path), size)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]))
