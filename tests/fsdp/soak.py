"""For as long as SOAK_SECONDS says (60): random programs on simulated ranks, and random faults on four processes over gloo.

python soak.py     says at the end how many there were; it fails if a number is wrong, memory is left behind, or somebody hangs
"""

import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from failures import APART, LATE, PHASES, POINTS, STRATEGIES, cell, tight

HERE: Final = Path(__file__).resolve().parent
SIZE: Final = 4
HANGS: Final = 120
"""Seconds after which a fault that is not over is a hang."""


def faults(rank: int, folder: Path, seconds: float) -> None:
    """One process: every rank draws the same faults, which rank 1 has alone or all have."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=HANGS))
    chance = random.Random(f"{os.environ.get('SOAK_SEED', 1)}")
    begin, number, found = time.monotonic(), 0, dict[str, int]()
    go_on = torch.ones(1)
    resident = 0
    with tight():
        while go_on:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            strategy = chance.choice(list(STRATEGIES))
            # on a mesh all models share their groups, and one on which nobody can go on would end the run
            mesh = strategy == "HYBRID_SHARD"
            name = chance.choice([name for name in POINTS if not (mesh and name in LATE)])
            phase = chance.choice(PHASES[:3] if mesh else PHASES)
            result = cell(name, strategy, phase, alone=mesh or chance.random() < 0.8)
            found[result] = found.get(result, 0) + 1
            number += 1
            if number == 20:
                resident = memory()
            go_on.fill_(time.monotonic() - begin < seconds)
            dist.broadcast(go_on, 0)
    if rank == 0:
        grown = memory() - resident if resident else 0
        print(f"{number} faults over gloo, {SIZE} ranks: {found}; memory grew by {grown / 2**20:.1f} MiB", flush=True)
        assert set(found) <= {"recovered", "–", "raised after the commit", APART}
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def programs(seconds: float) -> None:
    """Random programs on random trees, against plain torch."""
    sys.path.insert(0, str(HERE.parents[1]))
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from tests.fsdp.strategies import programs, trees, world_sizes
    from tests.fsdp.test_property_training import check

    begin, count = time.monotonic(), 0

    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), world_sizes, st.integers(0, 2**16))
    def some(data: st.DataObject, world_size: int, seed: int) -> None:
        nonlocal count
        tree = data.draw(trees())
        check(tree, data.draw(programs(tree)), world_size, seed)
        count += 1

    while time.monotonic() - begin < seconds:
        some()
    print(f"{count} programs on simulated ranks", flush=True)


def main() -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "60")) / 2
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, str(rank), folder, str(seconds)]) for rank in range(SIZE)]
        codes = [one.wait() for one in ranks]
    assert codes == [0] * SIZE, "a fault was not survived, or somebody hung"
    programs(seconds)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        faults(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
