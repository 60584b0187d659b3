"""How processes end: in each way that Python knows, with and without `destroy_process_group`, while another rank waits for them.

python -m tests.equivalence.end_programs FOLDER

One interpreter imports everything and forks the two ranks of each program. A fork that returns from here ends as an interpreter
does: it joins its threads, calls the functions of `atexit` and takes its modules apart. `multiprocessing` ends forks otherwise.
"""

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from tests.equivalence import hygiene_programs
from tests.support.models import Block, Net, X, loss_of
from tests.support.stalls import look_soon

LIMIT: Final = 30
"""Seconds until a rank prints its stacks and dies."""


class Mine(Exception):
    """What the user's own code raises."""


def sharded() -> Any:
    torch.manual_seed(3)
    return fsdp.fully_shard(Net(1), auto_wrap_policy={Block})


def trained(steps: int = 2) -> Any:
    model = sharded()
    for _ in range(steps):
        loss_of(model(X)).backward()
    return model


def returns() -> None:
    trained()


def destroys() -> None:
    trained()
    dist.destroy_process_group()


def destroys_at_exit() -> None:
    atexit.register(dist.destroy_process_group)
    trained()


def exits() -> None:
    trained()
    sys.exit(0)


def raises() -> None:
    trained()
    raise Mine("no")


def is_killed() -> None:
    trained()
    os.kill(os.getpid(), signal.SIGKILL)


def ends_in(place: Callable[[nn.Module], Any], how: Callable[[], None]) -> Callable[[], None]:
    """Ends inside a hook, with collectives in flight."""

    def program() -> None:
        model = trained()
        place(model)(lambda *_: how())
        loss_of(model(X)).backward()

    return program


def forward(model: Any) -> Any:
    return model.blocks[0].up.register_forward_pre_hook


def backward(model: Any) -> Any:
    return model.blocks[0].up.register_full_backward_hook


def fails() -> None:
    raise Mine("no")


def leaves(daemon: bool) -> Callable[[], None]:
    """A thread is left: one that outlives the interpreter, or one for which the interpreter waits."""

    def program() -> None:
        trained()
        threading.Thread(target=time.sleep, args=(LIMIT if daemon else 0.3,), daemon=daemon).start()

    return program


def abandons() -> None:
    """A step fails, and nobody starts it again."""
    model = trained()
    forward(model)(lambda *_: fails())
    with suppress(Mine):
        model(X)


def wraps_nothing() -> None:
    """The process ends before it wraps a module."""


def has_forked() -> None:
    """A child of the rank says nothing for it, and leaves its connections alone."""
    model = trained()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.1,))
    child.start()
    child.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process that has threads
        other = os.fork()
    if not other:
        atexit._run_exitfuncs()
        os._exit(0)  # torch's own group would wait in its destructor for threads that a fork has not
    os.waitpid(other, 0)
    loss_of(model(X)).backward()
    (Path(sys.argv[1]) / "has forked" / "went on").touch()


PROGRAMS: Final[dict[str, Callable[[], None]]] = {
    "returns": returns,
    "destroys": destroys,
    "destroys at exit": destroys_at_exit,
    "exits": exits,
    "raises": raises,
    "is killed": is_killed,
    "exits in a forward": ends_in(forward, lambda: sys.exit(0)),
    "exits in a backward": ends_in(backward, lambda: sys.exit(0)),
    "raises in a forward": ends_in(forward, fails),
    "raises in a backward": ends_in(backward, fails),
    "leaves a daemon": leaves(True),
    "leaves a thread": leaves(False),
    "abandons a step": abandons,
    "wraps nothing": wraps_nothing,
    "has forked": has_forked,
}
"""What rank 1 does. Rank 0 trains until it is told."""


def train_until_told(folder: Path) -> None:
    """Rank 0: write what it is told."""
    told: dict[str, Any] = {}
    try:
        model = sharded()
        while True:
            loss_of(model(X)).backward()
    except fsdp.PeerFailed as failure:
        told = {"rank": failure.rank, "text": str(failure)}
    (folder / "told.json").write_text(json.dumps(told))


def run_rank(program: Callable[[], None], rank: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    look_soon()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT))
    if rank:
        store.wait(["rank 0 has its group"])  # gloo on rank 0 fails to connect where rank 1 has ended before
        program()
    else:
        store.set("rank 0 has its group", "")
        train_until_told(folder)


def fork(rank: int, folder: Path) -> int | None:
    """The number of the child. None in the child, which prints into a file of its own."""
    child = os.fork()
    if child:
        return child
    print_into(folder / f"{rank}.txt")
    return None


def print_into(path: Path) -> None:
    with open(path, "wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())


def run_forked_by_multiprocessing(program: Callable[[], None], rank: int, folder: Path) -> None:
    print_into(folder / f"{rank}.txt")
    run_rank(program, rank, folder)


HYGIENE: Final = "hygiene"
"""The folder of hygiene_programs.py."""


def main(out: Path) -> None:
    fsdp.simulate(2, lambda rank: sharded()(X) is None)  # imports what a step needs; autograd must not begin before a fork
    gc.freeze()  # a collection of garbage need not search what was there before the fork
    runs = {name: partial(run_rank, program) for name, program in PROGRAMS.items()}
    forked: dict[Path, list[int]] = {}
    for name, run in {HYGIENE: hygiene_programs.run_rank, **runs}.items():
        folder = out / name
        folder.mkdir()
        forked[folder] = []
        for rank in range(2):
            child = fork(rank, folder)
            if child is None:
                return run(rank, folder)
            forked[folder].append(child)
        if len(forked) == AT_ONCE:  # the first one takes longest: the others end beside it
            await_last(forked)
    context = multiprocessing.get_context("fork")
    for name in IN_FORKS:
        folder = out / f"{name}, in a fork"
        folder.mkdir()
        ranks = [context.Process(target=run_forked_by_multiprocessing, args=(PROGRAMS[name], r, folder)) for r in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        (folder / "codes.json").write_text(json.dumps([one.exitcode for one in ranks]))
    while forked:
        await_last(forked)
    return None


AT_ONCE: Final = 3
"""Programs that run beside each other: their ranks wait for each other most of the time."""


def await_last(forked: dict[Path, list[int]]) -> None:
    """Write down how the two ranks of the program that was forked last have ended."""
    folder, children = forked.popitem()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))


IN_FORKS: Final = ("returns", "exits", "raises", "is killed", "exits in a forward", "wraps nothing")
"""Programs that run in forks of `multiprocessing` as well."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
