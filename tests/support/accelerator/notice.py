"""Runs training stories on devices that are not there until one shows that a wait is missing. See tools/mutate_waits.py.

python -m tests.support.accelerator.notice accelerator FILE: until weights differ from those of the host, or work is on a wrong
stream of the pretend accelerator. The weights of the host are read from FILE, or written to it by the first run.

python -m tests.support.accelerator.notice processes: until weights differ from those of the host, over the pretend NCCL.

python -m tests.support.accelerator.notice virtual: until two accesses to the same memory have no order, on virtual streams.
"""

import faulthandler
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

import fsdp
from tests.device.test_races import HALF, STRATEGIES, WAITING, races_of
from tests.runtime.uneven.test_races import different_paths, harness_of, without_data
from tests.support.accelerator import door_stories, side_streams
from tests.support.accelerator.device import Scheduler, load
from tests.support.accelerator.failed_backward import FEW_CASES, FEW_SCHEDULES, taken_after_a_failure
from tests.support.accelerator.nccl_rank import trained
from tests.support.accelerator.placement import CASES, misplaced
from tests.support.accelerator.stories import STORIES, Weights, first_difference, on_accelerator, on_host

RUNS: Final[list[tuple[str, str, dict[str, Any]]]] = [
    *(("training", strategy, {}) for strategy in ("FULL_SHARD", "one rank", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    *(("training", strategy, {"mp_policy": HALF}) for strategy in ("FULL_SHARD", "one rank", "NO_SHARD")),
    ("training", "FULL_SHARD", {"broadcast_buffers": True, "sync_module_states": True}),
    ("training", "FULL_SHARD", {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002, streams=2)}),
    ("training", "NO_SHARD", {"reduction": fsdp.ReductionPolicy(static_graph=True)}),
    *(
        ("training", "one rank", {"sharding_strategy": "NO_SHARD", **more})
        for more in (
            {"mp_policy": HALF},
            {"offload_policy": fsdp.OffloadPolicy(), "reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.001)},
        )
    ),
    *(
        (story, strategy, {})
        for story in ("a step between", "weights edited between calls")
        for strategy in ("FULL_SHARD", "one rank")
    ),
    *(("a step inside a forward", strategy, {}) for strategy in ("FULL_SHARD", "one rank", "NO_SHARD")),
    *(("a failing backward with a hook", strategy, {}) for strategy in ("FULL_SHARD", "one rank", "NO_SHARD")),
    *(("a failing backward", strategy, {}) for strategy in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD")),
    ("a hook that remembers", "FULL_SHARD", {}),
    ("weights read and loaded", "FULL_SHARD", {}),
    ("a scaler that skips a step", "FULL_SHARD", {}),
    ("a layer left out", "HYBRID_SHARD", {}),
    ("norms of weights", "FULL_SHARD", {}),
    ("different paths", "FULL_SHARD", {}),
    ("an evaluation on one rank", "FULL_SHARD", {}),
    ("training", "FULL_SHARD", {"reduction": fsdp.ReductionPolicy(coalesce_cap_mb=1.0)}),
    *(("uneven inputs", strategy, {}) for strategy in ("FULL_SHARD", "NO_SHARD")),
    *(("late gradients", strategy, {}) for strategy in ("NO_SHARD", "HYBRID_SHARD")),
    ("accumulation", "SHARD_GRADIENTS", {}),
    ("checkpointing", "FULL_SHARD", {}),
    *(
        (story, strategy, {"offload_policy": fsdp.OffloadPolicy()})
        for story in (
            *("training", "accumulation", "a step inside a forward", "weights changed after an evaluation"),
            *("weights changed under no_sync", "a failing backward", "late gradients"),
        )
        for strategy in ("FULL_SHARD", "NO_SHARD")
    ),
]
RUNS += [
    *((story, "FULL_SHARD", {}) for story in door_stories.STORIES),
    *((story, "FULL_SHARD", {}) for story in side_streams.STORIES),
    *((story, "NO_SHARD", {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.0002)}) for story in side_streams.STORIES),
    *((story, "FULL_SHARD", {"offload_policy": fsdp.OffloadPolicy()}) for story in side_streams.STORIES),
    *((story, "SHARD_GRAD_OP", {}) for story in side_streams.STORIES),
    ("a hook on a stream of its own", "FULL_SHARD", {}),
    ("a failing backward on a stream of one's own", "NO_SHARD", {}),
    *(
        (story, "FULL_SHARD", {"offload_policy": fsdp.OffloadPolicy()})
        for story in ("a scaler that skips a step", "torch's scaler")
    ),
    ("units that share gathers", "FULL_SHARD", {}),
    *(("training", strategy, {"reduction": fsdp.ReductionPolicy(deterministic=True)}) for strategy in ("FULL_SHARD", "NO_SHARD")),
]
PROCESSES: Final = 2
LIMIT: Final = 180
"""Seconds for one run of one story, on a machine that does other work too. Ranks that wait for ever end the process with 1."""
SCHEDULES: Final = [(Scheduler.EAGER, 0), *((Scheduler.STARVE, n) for n in range(6)), (Scheduler.RANDOM, 1), (Scheduler.LAZY, 0)]


def on_the_accelerator(path: Path) -> str | None:
    """What differs; None if nothing does."""
    load()
    if path.exists():
        wanted: list[Weights] = torch.load(path)
    else:
        wanted = [on_host(STORIES[story], STRATEGIES[name][0], **STRATEGIES[name][1], **more) for story, name, more in RUNS]
        torch.save(wanted, path)
    try:
        if (found := next(filter(None, map(misplaced, CASES)), None)) is not None:
            return found
        for case, schedule in product(FEW_CASES, FEW_SCHEDULES):
            if any(one.overwritten for one in taken_after_a_failure(*case, *schedule)):
                return f"{', '.join(case)}, {schedule[0].name} {schedule[1]}: memory is written late after a failed backward"
    except Exception as failure:
        return _text(failure)
    # a few schedules of every story first: most changes are noticed there
    for schedules in (SCHEDULES[:3], SCHEDULES[3:]):
        for (story, strategy, more), weights in zip(RUNS, wanted, strict=True):
            size, options = STRATEGIES[strategy]
            for scheduler, seed in schedules:
                where = f"{story}, {strategy}, {sorted(more)}, {scheduler.name} {seed}"
                faulthandler.dump_traceback_later(LIMIT, exit=True)
                try:
                    difference = first_difference(
                        on_accelerator(STORIES[story], size, scheduler, seed, **options, **more), weights
                    )
                except Exception as failure:
                    return f"{where}: {_text(failure)}"
                if difference is not None:
                    return f"{where}: {difference}"
    return None


def between_processes() -> str | None:
    """What differs between two processes over the pretend NCCL and the host; None if nothing does."""
    wanted = fsdp.simulate(PROCESSES, lambda rank: trained(rank, "cpu"))
    for scheduler in (Scheduler.STARVE, Scheduler.LAZY, Scheduler.EAGER):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.support.accelerator.nccl_rank"]
            arguments = (str(PROCESSES), folder, "trained", scheduler.name)
            ranks = [subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.DEVNULL) for rank in range(PROCESSES)]
            try:
                codes = [one.wait(LIMIT) for one in ranks]
            except subprocess.TimeoutExpired:
                return f"pretend NCCL, {scheduler.name}: a process did not end"
            finally:
                for one in ranks:
                    one.kill()
                    one.wait()
            if any(codes):
                return f"pretend NCCL, {scheduler.name}: processes ended with {codes}"
            found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(PROCESSES)]
        if (difference := first_difference(found, wanted)) is not None:
            return f"pretend NCCL, {scheduler.name}: {difference}"
    return None


def on_virtual_streams() -> str | None:
    """The first race; None if there is none."""
    doors = [(story, "FULL_SHARD", {}) for story in door_stories.STORIES.values()]
    for story, strategy, more in (*WAITING, *doors):
        size, options = STRATEGIES[strategy]
        if races := races_of(size, partial(story, **options, **more)).races:
            return f"virtual streams, {story.__name__}, {strategy}: {races[0]}"
    for path in (different_paths, without_data):
        for strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            if races := harness_of(path, strategy).races:
                return f"virtual streams, {path.__name__}, {strategy}: {races[0]}"
    return None


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure)[:80]}".splitlines()[0]


if __name__ == "__main__":
    began = time.monotonic()
    torch.set_num_threads(1)
    if sys.argv[1] == "accelerator":
        noticed = on_the_accelerator(Path(sys.argv[2]))
    else:
        try:
            noticed = between_processes() if sys.argv[1] == "processes" else on_virtual_streams()
        except Exception as failure:
            noticed = _text(failure)
    print(noticed or f"nothing differs, {time.monotonic() - began:.0f} s")
    sys.stdout.flush()
    sys.exit(noticed is not None)
