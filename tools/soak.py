"""Random programs on simulated ranks, and random faults on four processes over gloo, for as long as asked.

python -m tools.soak --seconds 1800 --programs 20000     both at the same time; `faults` or `programs` is one of the two
python -m tools.soak programs --seed 1234                begins with the batch of that seed; `--seconds 0` ends after it
python -m tools.soak paths --seed 1234                   programs of ranks that go different ways (`uneven_paths`)
python -m tools.soak paths-gloo --seed 1234              the same on three processes over gloo
python -m tools.soak uneven --seed 1234                  the programs of random trees, of which each rank takes its own calls
python -m tools.soak acts --seed 1234                    moves of training and acts of a user between them, at every moment
python -m tools.soak dimensions --programs 200           plans of tensor and of expert parallelism, one of each for a seed
python -m tools.soak accelerator --seed 1234             programs on the pretend accelerator, with the bits of the host
python -m tools.soak slow --seed 1234                    four processes over gloo that are only slow: nobody is told of a failure
python -m tools.soak faults --seed 7 --first 1234        begins with fault 1234 of that run
python -m tools.soak RANK FOLDER SECONDS SEED FIRST      is one of the four processes of faults
python -m tools.soak RANK FOLDER SECONDS SEED paths      is one of the three of paths-gloo
python -m tools.soak RANK FOLDER SECONDS SEED slow       is one of the four of slow

It says what it did about once a minute, with the seeds, and ends with an error if a number is wrong, something is left behind, or
somebody hangs.
"""

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fsdp.debug import dump_on_signal
from tests.support.processes import command, environment
from tools.failures import APART, LATE, NOT_REACHED, PAGE, PHASES, RECOVERED, STRATEGIES, TOO_LATE, cell, rows_of, tight

if TYPE_CHECKING:
    import hypothesis

SIZE: Final = 4
PATHS: Final = "paths"
PATHS_SIZE: Final = 3
SLOW: Final = "slow"
HANGS: Final = 180
"""Seconds after which a fault, or a batch of programs, that is not over is a hang."""
BATCH: Final = 50
"""Programs that Hypothesis draws from one seed."""
MOVES: Final = 20
"""Rules of the state machine of acts in one program, at most."""
WARM: Final = 20
"""Faults after which what is held is taken for what a run needs."""
WARM_BATCHES: Final = 6
"""The same in batches of programs: what Hypothesis keeps of strategies has stopped growing."""
SLACK: Final = 16 * 2**20
"""Bytes that a process may grow by after that. A small model and its engine hold 0.4 MiB: 40 of them are noticed."""
STORED: Final = 24 * 2**10
"""And for each fault: the addresses of new connections stay in the store, and a FileStore is held by every process."""
LATE_CLEAN_UP: Final = 10.0
"""Seconds in which a thread of autograd for a device drops a backward that has failed."""
SPOKEN: Final = 60.0
"""Seconds between two lines of what was done."""


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library, 2.33 or newer."""

    NAMES: Final = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


LIBC: Final = ctypes.CDLL(None)
LIBC.mallinfo2.restype = Mallinfo


class Held(NamedTuple):
    """What a process has of the machine."""

    bytes: int
    """Allocated and not freed. The resident process may grow by far more: one program left 42 MiB of it, and held 0.03."""
    threads: int
    files: int

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:.1f} MiB, {self.threads} threads, {self.files} files"


def held_now() -> Held:
    gc.collect()  # a model that failed is let go of with its exception, often in a cycle
    found = LIBC.mallinfo2()
    return Held(found.uordblks + found.hblkhd, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


class Speaker:
    """Says about once a minute what was done, and what the process has."""

    def __init__(self) -> None:
        self._spoken = time.monotonic()

    def say(self, done: str) -> None:
        if time.monotonic() - self._spoken > SPOKEN:
            self._spoken = time.monotonic()
            print(f"{done}; {held_now()}", flush=True)


class Drawn(NamedTuple):
    """One fault: its cell of the page, and whether rank 1 fails alone or every rank."""

    name: str
    strategy: str
    phase: str
    alone: bool


def reached() -> dict[str, list[tuple[str, str]]]:
    """By strategy, the cells of the page's first table in which something fails: what, and in which part of a step."""
    found: dict[str, list[tuple[str, str]]] = {strategy: [] for strategy in STRATEGIES}
    for (name, strategy), row in rows_of(PAGE.read_text(encoding="utf-8").partition("over gloo")[0]).items():
        # after some cells nobody can go on on a mesh, and groups of a new one would be left behind by each
        phases = PHASES[:3] if strategy == "HYBRID_SHARD" else PHASES
        if not (strategy == "HYBRID_SHARD" and name in LATE):
            found[strategy] += [(name, phase) for phase in phases if row[phase] != NOT_REACHED]
    return found


def drawn(cells: dict[str, list[tuple[str, str]]], seed: int, number: int) -> Drawn:
    """The same on every rank, and whatever came before."""
    chance = random.Random(f"{seed}/{number}")
    strategy = chance.choice(list(cells))
    name, phase = chance.choice(cells[strategy])
    return Drawn(name, strategy, phase, strategy == "HYBRID_SHARD" or chance.random() < 0.8)


def faults_of_rank(rank: int, folder: Path, seconds: float, seed: int, first: int) -> None:
    """One process of the four."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=HANGS))
    found = dict[str, int]()
    number, begin, speaker = first, time.monotonic(), Speaker()
    cells, go_on, warm = reached(), torch.ones(1), held_now()
    with tight():
        while go_on:
            faulthandler.dump_traceback_later(HANGS, exit=True)
            fault = drawn(cells, seed, number)
            try:
                result = cell(*fault)
                assert result in (RECOVERED, NOT_REACHED, TOO_LATE, APART), result
            except BaseException:
                print(f"rank {rank}: failed with --seed {seed} --first {number}: {fault}", flush=True)
                raise
            found[result] = found.get(result, 0) + 1
            number += 1
            if number == first + WARM:
                warm = held_now()
            if rank == 0:
                speaker.say(f"faults up to {number} of seed {seed}: {json.dumps(found)}")
            go_on.fill_(time.monotonic() - begin < seconds)
            dist.broadcast(go_on, 0)
    end = held_now()
    line = f"rank {rank}: {number - first} faults, seed {seed}: {json.dumps(found)}; at first {warm}, at last {end}"
    print(line, flush=True)
    # a connection of a model before may still be closing
    assert number - first <= WARM or (end.threads <= warm.threads + SIZE and end.files <= warm.files + 4 * SIZE), line
    assert number - first <= WARM or end.bytes <= warm.bytes + SLACK + STORED * (number - first), line
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def on_accelerator(seconds: float, count: int, seed: int) -> None:
    """The same programs on the pretend accelerator, against the same engine on the host."""
    from tests.support.accelerator.device import load
    from tests.support.accelerator.random_programs import check

    torch.set_num_threads(1)
    load()
    batches(seconds, count, seed, partial(batch_of, check))


def of_plain_torch(seconds: float, count: int, seed: int, uneven: bool = False) -> None:
    """Random programs on random trees, against plain torch. `uneven`: each rank takes its own calls (`uneven_paths`)."""
    from tests.support.against_plain import check

    batches(seconds, count, seed, partial(batch_of, check, own_calls=uneven))


def acts(seconds: float, count: int, seed: int) -> None:
    """Random moves of training, and acts of a user between and inside them, against plain torch."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    batches(seconds, count, seed, batch_of_acts)


def dimensions(seconds: float, count: int, seed: int) -> None:
    """Random plans of tensor parallelism, and of experts, against one process."""
    from tests.building import test_experts, test_random_dimensions

    torch.set_num_threads(1)

    def play(number: int) -> int:
        test_random_dimensions.check(number)
        test_experts.check_seed(number)
        return 2

    batches(seconds, count, seed, play)


def batches(seconds: float, count: int, seed: int, play: Callable[[int], int]) -> None:
    """Draw batches of programs and check them until the time is over and there were `count` programs."""
    done, batch, begin, speaker, warm = 0, seed, time.monotonic(), Speaker(), held_now()
    while batch == seed or time.monotonic() - begin < seconds or done < count:
        faulthandler.dump_traceback_later(4 * HANGS, exit=True)
        try:
            done += play(batch)
        except BaseException:
            print(f"programs: failed with --seed {batch}", flush=True)
            raise
        batch += 1
        if batch - seed <= WARM_BATCHES:
            warm = held_now()
        grown = held_now().bytes - warm.bytes
        assert grown <= SLACK, f"{grown:,} bytes more than after {WARM_BATCHES} batches, with {done} programs from --seed {seed}"
        speaker.say(f"{done} programs, seeds {seed} to {batch - 1}")
    faulthandler.cancel_dump_traceback_later()
    print(f"{done} programs on simulated ranks, seeds {seed} to {batch - 1}; at last {held_now()}", flush=True)


def paths(seconds: float, count: int, seed: int) -> None:
    """Programs of two to eight simulated ranks, of which each draws its own path, against a single process."""
    from tests.support.paths import OPTIONS, check

    def play(number: int) -> int:
        check(number, number % (len(OPTIONS) + 1), 2 + number % 7, number)
        return 1

    batches(seconds, count, seed, play)


def paths_of_rank(rank: int, folder: Path, seconds: float, seed: int) -> None:
    """One of three processes: programs of which each rank draws its own path, under every option in turn."""
    from tests.support.paths import OPTIONS, assert_alike, draw_program, plain, sharded

    def play(number: int) -> None:
        program = draw_program(number, PATHS_SIZE)
        wanted, weights = plain(program, PATHS_SIZE)
        assert_alike(sharded(rank, program, **OPTIONS[number % len(OPTIONS)]), (wanted[rank], weights))

    store = dist.FileStore(str(folder / "store"), PATHS_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PATHS_SIZE, timeout=timedelta(seconds=HANGS))
    together(rank, seconds, seed, "programs of paths over gloo", play)


def slow_rank(rank: int, folder: Path, seconds: float, seed: int) -> None:
    """One of four processes that sleep at random."""
    from tools import slow_ranks

    warnings.simplefilter("ignore")
    together(rank, seconds, seed, "programs of slow ranks", lambda number: slow_ranks.play(number, SIZE, rank, folder))


def together(rank: int, seconds: float, seed: int, what: str, play: Callable[[int], None]) -> None:
    """Play programs on several processes, as long as rank 0 has time. The seeds count up."""
    torch.set_num_threads(1)
    number, begin, speaker, go_on = seed, time.monotonic(), Speaker(), torch.ones(1)
    while go_on:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            play(number)
        except BaseException:
            print(f"rank {rank}: failed with --seed {number}", flush=True)
            raise
        number += 1
        if rank == 0:
            speaker.say(f"{number - seed} {what} from seed {seed}")
        go_on.fill_(time.monotonic() - begin < seconds)
        dist.broadcast(go_on, 0)
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        print(f"{number - seed} {what}, from seed {seed}; at last {held_now()}", flush=True)
    dist.destroy_process_group()


def batch_of(check: Callable[..., None], number: int, own_calls: bool = False) -> int:
    """Draw a batch from one seed; return how many programs were right."""
    import hypothesis
    from hypothesis import strategies as st

    from tests.support.strategies import programs, trees, uneven, world_sizes

    done = 0

    @hypothesis.seed(number)
    @settings_of_batch()
    @hypothesis.given(st.data(), world_sizes, st.integers(0, 2**16))
    def some(data: st.DataObject, world_size: int, order: int) -> None:
        nonlocal done
        if own_calls:
            tree, program = data.draw(uneven(), label="tree and program")
        else:
            tree = data.draw(trees(), label="tree")
            program = data.draw(programs(tree), label="program")
        check(tree, program, world_size, order)
        done += 1

    with no_engine_left():
        some()
    return done


def batch_of_acts(number: int) -> int:
    """The same of programs that the state machine of acts writes down."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    counted = counting_machine()
    counted.done = 0
    with no_engine_left():
        run_state_machine_as_test(
            hypothesis.seed(number)(counted), settings=hypothesis.settings(settings_of_batch(), stateful_step_count=MOVES)
        )
    return counted.done


@cache
def counting_machine() -> Any:
    """The state machine of acts, which counts its programs. One class serves all batches: Hypothesis keeps the rules of each."""
    from tests.acts import machine

    class Counted(machine.ActsAtAnyMoment):
        done = 0

        def teardown(self) -> None:
            super().teardown()
            type(self).done += 1

    return Counted


def settings_of_batch() -> "hypothesis.settings":
    import hypothesis

    return hypothesis.settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@contextmanager
def no_engine_left() -> Iterator[None]:
    """Raises AssertionError if an engine that is made inside lives on."""
    others = set(dump_on_signal._snapshots)
    yield
    gc.collect()
    end = time.monotonic() + LATE_CLEAN_UP
    while (left := dump_on_signal._snapshots - others) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert not left, f"{len(left)} engines are left"


def start_ranks(size: int, *arguments: object) -> "list[subprocess.Popen[bytes]]":
    words = [str(one) for one in arguments]
    return [subprocess.Popen(command("tools.soak", rank, *words), env=environment()) for rank in range(size)]


def end_of(ranks: "list[subprocess.Popen[bytes]]") -> None:
    """Wait for them all; if one fails the others may wait for it for ever."""
    codes: list[int | None] = [None] * len(ranks)
    while None in codes:
        time.sleep(0.5)
        codes = [one.poll() for one in ranks]
        if any(codes):
            time.sleep(10.0)  # whoever has something to say says it
            for one in ranks:
                one.kill()
            codes = [one.wait() for one in ranks]
    assert codes == [0] * len(ranks), f"a fault was not survived, or somebody hung: {codes}"


ONE_PROCESS: Final[dict[str, Callable[[float, int, int], None]]] = {
    "programs": of_plain_torch,
    "paths": paths,
    "uneven": partial(of_plain_torch, uneven=True),
    "acts": acts,
    "dimensions": dimensions,
    "accelerator": on_accelerator,
}
"""What needs no other process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("both", "faults", "paths-gloo", SLOW, *ONE_PROCESS), default="both")
    parser.add_argument("--seconds", type=float, default=60.0, help="go on for so long")
    parser.add_argument("--programs", type=int, default=0, help="and until there were so many programs")
    parser.add_argument("--seed", type=int, default=1, help="of the faults, and of the first batch of programs")
    parser.add_argument("--first", type=int, default=0, help="begin with that fault")
    asked = parser.parse_args()
    if asked.what in ONE_PROCESS:
        ONE_PROCESS[asked.what](asked.seconds, asked.programs, asked.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "paths-gloo":
            ranks = start_ranks(PATHS_SIZE, folder, asked.seconds, asked.seed, PATHS)
        elif asked.what == SLOW:
            ranks = start_ranks(SIZE, folder, asked.seconds, asked.seed, SLOW)
        else:
            ranks = start_ranks(SIZE, folder, asked.seconds, asked.seed, asked.first)
        try:
            if asked.what == "both":
                of_plain_torch(asked.seconds, asked.programs, asked.seed)
            end_of(ranks)
        finally:
            for one in ranks:
                one.kill()
                one.wait()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("PYTHONMALLOC") != "malloc":  # Python's own blocks shall be counted as well
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONMALLOC": "malloc"})
    if len(sys.argv) == 6 and sys.argv[5] in (PATHS, SLOW):
        one_rank = paths_of_rank if sys.argv[5] == PATHS else slow_rank
        one_rank(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    elif len(sys.argv) == 6 and sys.argv[1].isdecimal():
        faults_of_rank(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
