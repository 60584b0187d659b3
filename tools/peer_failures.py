"""The failures of failures.py that can be expressed for FSDP1, FSDP2 and DDP as well, on two processes over gloo.

python -m tools.peer_failures write                  writes what happened to docs/reference/failures.md, below our own tables
python -m tools.peer_failures ENGINE "PLACE" PHASE [alone]     one cell
python -m tools.peer_failures rank RANK FOLDER       is one of the two processes
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from operator import is_
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.shards.shard_tensor import ShardTensor, plain
from tests.support.models import Net, loss_of
from tests.support.processes import end_all, start_rank
from tools.failures import BESIDE, NOT_REACHED, PAGE, PHASES, Checkpointed, Fault, Mine, same, x_of
from tools.peer_engines import ALONE, ENGINES, EXPRESSED, PLACES, Model, install, refusing, wrapped
from tools.tables.markdown import table_of

NONE: Final = "no such place"
TIME_OUT: Final = 8.0
"""Seconds of the groups; 30 minutes unless somebody says so."""
HANGS: Final = 60.0
"""Seconds without a result after which two processes are ended."""


class Cell(NamedTuple):
    engine: str
    place: str
    phase: str
    alone: bool


class Seen(NamedTuple):
    """What one rank saw."""

    raised: str
    """The type of what the step raised, or nothing."""
    own: bool
    """It was the very exception of the fault."""
    waited: bool
    """It took until the time-out of the group."""
    grad_kept: bool
    """`.grad` was as before the step."""
    shows: bool
    """The model shows the parameters that the optimizer has."""
    bytes_kept: int
    """Of tensors, beyond those before the step and `.grad`."""
    next: str
    """Of the next step: right, wrong, or what it raised."""


# one cell, on one rank --------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    part: Any = plain(tensor) if isinstance(tensor, ShardTensor) else tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part


Named = dict[str, nn.Parameter]
"""The parameters that the model shows at rest, and the optimizer has."""


def gradients_of(named: Named) -> dict[str, Any]:
    """As this rank has them."""
    return {name: None if p.grad is None else local(p.grad).clone() for name, p in named.items()}


def held(named: Named) -> int:
    """Bytes of all tensors that Python can reach, but the gradients."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not hasattr(one, "to_local")]
    return _bytes(tensors) - _bytes([local(p.grad) for p in named.values() if p.grad is not None])


def _bytes(tensors: Sequence[Tensor]) -> int:
    storages = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    return sum({one._cdata: one.size() for one in storages}.values())


class Once(Fault):
    """Says whether it was fired."""

    fired = False

    def fire(self, *_: Any) -> None:
        self.fired = self.fired or self.armed is not None
        super().fire()


def attempt(model: Model, phase: str, fault: Fault, error: BaseException | None) -> None:
    """One forward and backward; the fault is armed for the part that is to fail."""
    x = x_of(dist.get_rank(), 1)
    with model.no_sync() if phase == "no_sync" else nullcontext():
        fault.armed = error if phase in ("forward", "no_sync") else None
        loss = loss_of(fault.in_loss(model.module(x)))
        fault.armed = fault.armed if phase == "no_sync" else error if phase != "forward" else None
        loss.backward()


def live(cell: Cell, fails: bool, group: Any, wanted: Any = None) -> Any:
    """What this rank saw; or, if nothing `fails`, gradients and weights at the end."""
    torch.manual_seed(3)
    fault = Once()
    with refusing(cell.place, fault):
        model = wrapped(cell.engine, (Checkpointed if cell.phase == "replay" else Net)(2), group)
        install(cell.engine, cell.place, model, fault)
        named = dict(model.module.named_parameters())
        optimizer = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
        loss_of(model.module(x_of(dist.get_rank(), 0))).backward()
        optimizer.step()
        if cell.phase == "no_sync":
            with model.no_sync():
                loss_of(model.module(x_of(dist.get_rank(), 2))).backward()
        if cell.alone and cell.phase != "no_sync":
            optimizer.zero_grad()  # so that the step of a rank that hears nothing is the one that is wanted
        seen = fail(cell, model, named, fault) if fails else None
        if seen is not None and not (fault.fired or seen.raised or cell.alone):
            return seen
        try:
            if seen is None or seen.raised:
                if cell.phase != "no_sync":
                    optimizer.zero_grad()
                attempt(model, cell.phase, fault, None)
            if cell.phase == "no_sync":
                loss_of(model.module(x_of(dist.get_rank(), 3))).backward()
            end = gradients_of(named)
            optimizer.step()
        except (Exception, KeyboardInterrupt) as caught:
            if seen is None:
                raise
            return seen._replace(next=type(caught).__name__)
        values = [end, {name: local(p).clone() for name, p in named.items()}]
    if seen is None:
        return values
    right = all(same(one, other) for one, other in zip(values, wanted, strict=True))
    return seen._replace(next="right" if right else "wrong")


def fail(cell: Cell, model: Model, named: Named, fault: Once) -> Seen:
    """The step that fails, and how it leaves the model."""
    before, memory = gradients_of(named), held(named)
    kind: Any = KeyboardInterrupt if "Ctrl-C" in cell.place else Mine
    error = None if cell.alone and dist.get_rank() == 0 else kind("no")
    raised, own, begin = "", False, time.monotonic()
    try:
        attempt(model, cell.phase, fault, error)
    except (Exception, KeyboardInterrupt) as caught:
        raised, own = type(caught).__name__, caught is error
    error = fault.armed = None  # it leads to everything that was alive where it was raised
    waited = time.monotonic() - begin > TIME_OUT * 0.9
    shows = all(map(is_, model.module.parameters(), named.values()))
    return Seen(raised, own, waited, same(gradients_of(named), before), shows, held(named) - memory, NOT_REACHED)


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    for line in json.loads((folder / "cells.json").read_text()):
        cell = Cell(*line)
        patience = timedelta(seconds=TIME_OUT)
        wanted = live(cell, False, dist.new_group(timeout=patience))
        seen = live(cell, True, dist.new_group(timeout=patience), wanted)
        with (folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\n")
    os._exit(0)  # groups on which nobody can go on may not end


# all cells, in pairs of processes ---------------------------------------------------------


def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """What happened in each cell. A pair of processes that hangs or dies is ended, and another one goes on."""
    left = list(cells)
    while left:
        # after one rank has failed alone, a pair may not be of one mind any more
        batch = left[:1] if left[0].alone else [cell for cell in left if not cell.alone]
        with tempfile.TemporaryDirectory() as base:
            found, end = _pair(batch, Path(base))
        done = [_verdict(cell, *both) for cell, both in zip(batch, found, strict=False)]
        yield from zip(batch, done, strict=False)
        if len(done) < len(batch):
            yield batch[len(done)], end
            done.append(end)
        left = left[len(done) :]


def _pair(cells: Sequence[Cell], folder: Path) -> tuple[list[tuple[Seen, Seen]], str]:
    """What both ranks saw, by cell, as far as they came; and what ended them."""
    (folder / "cells.json").write_text(json.dumps(cells))
    ranks = [start_rank("tools.peer_failures", "rank", rank, folder, output=folder / "printed.txt") for rank in (0, 1)]
    files, known, since, end = [folder / f"{rank}.jsonl" for rank in (0, 1)], 0, time.monotonic(), ""
    try:
        while not end and any(one.poll() is None for one in ranks):
            time.sleep(0.1)
            size = sum(file.stat().st_size for file in files if file.exists())
            if size > known:
                known, since = size, time.monotonic()
            codes = [code for one in ranks if (code := one.poll())]
            if codes:
                end = f"**the process ends** (signal {-codes[0]})" if codes[0] < 0 else f"**the process ends** (code {codes[0]})"
            elif time.monotonic() - since > HANGS:
                end = "**hangs**"
    finally:
        end_all(ranks)
    lines = [[Seen(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    return list(zip(*lines, strict=False)), end


def _verdict(cell: Cell, first: Seen, second: Seen) -> str:
    if second.next == NOT_REACHED or (cell.alone and not second.raised):
        return NOT_REACHED
    parts = []
    if not second.own:
        parts.append(f"{second.raised or 'nothing'} is raised instead" if second.raised != "Mine" else "a copy is raised")
    if not (second.grad_kept and (first.grad_kept or cell.alone)):
        parts.append("`.grad` differs")
    if not (second.shows and (first.shows or cell.alone)):
        parts.append("other parameters are shown")
    if max(first.bytes_kept, second.bytes_kept) > 0 and not cell.alone:
        parts.append("memory is held")
    if cell.alone and first.waited:
        parts.append("the other waits for the time-out")
    elif cell.alone and not first.raised:
        parts.append("the other hears nothing")
    bad = [one.next for one in (first, second) if one.next != "right"]
    if bad:
        parts.append("**the next step is wrong**" if "wrong" in bad else f"**the next step raises {bad[-1]}**")
    return "; ".join(parts) or "recovered"


# the page ---------------------------------------------------------------------------------

VERSION: Final = torch.__version__.partition("+")[0]
WORDS: Final = f"""
Written by `python -m tools.peer_failures write`: two processes over gloo, torch {VERSION}. The blocks are the units of
every engine (FSDP1 with `use_orig_params=True`). Shown are the places that exist in all of them; our final callback and the
memory of our buckets do not. An exception refuses *a gather* and *a reduction* before anything is sent, in the function by
which the engine calls them. DDP reduces in C++, where nothing can be refused. After the failure the loop does what most
loops do: `zero_grad()` (except under `no_sync`, where it would drop the accumulated gradients), and the same step again,
with no call of the engine's own.

- *recovered*: the very exception was raised, `.grad` was as before, Python could reach no more memory than before, and the
  next step had the numbers of a run in which nothing failed, to the bit. Where a cell says something else, the rest was so.
- *`.grad` differs* from before the step, as in plain torch after a failed backward. A loop that accumulates in it without
  `no_sync`, or steps after a failure, goes on with a part of a step.
- *other parameters are shown*: `model.parameters()` yields others than the optimizer has, until the next step.
- *memory is held* beyond that before the step, until the next step at least.
- *–*: that part of a step does not reach that place, or such hooks never run. *{NONE}*: it cannot be expressed.
"""
ALIKE_TITLE: Final = "### Both ranks fail alike"
ALONE_TITLE: Final = f"""### Rank 1 fails alone

The groups had a time-out of {TIME_OUT:g} s; by default it is 30 minutes. Rank 1 starts the step again at once, and so does
rank 0 when it gets an error. Memory is left out, because the memory of a rank that waits says nothing. Where rank 0 gets no
error, it had completed its part of the step; `PeerFailed` in the next step tells both ranks of ours that they may be a step
apart.
"""


def all_cells(alone: bool) -> list[Cell]:
    return [
        Cell(engine, place, phase, alone)
        for engine in ENGINES
        for place in (ALONE if alone else PLACES)
        for phase in PHASES
        if engine in EXPRESSED.get(place, ENGINES)
    ]


def table(found: dict[Cell, str], alone: bool) -> str:
    lines = []
    for place in ALONE if alone else PLACES:
        for phase in PHASES:
            row = [found.get(Cell(engine, place, phase, alone), NONE) for engine in ENGINES]
            if set(row) - {NONE, NOT_REACHED}:
                lines.append((place, phase, *row))
    return table_of(("what fails", "in", *ENGINES), lines)


def write() -> None:
    found = {}
    for cell, verdict in run([*all_cells(False), *all_cells(True)]):
        print(*cell, verdict, flush=True)
        found[cell] = verdict
    own = PAGE.read_text(encoding="utf-8").partition(BESIDE)[0]
    tables = f"{WORDS}\n{ALIKE_TITLE}\n\n{table(found, False)}\n\n{ALONE_TITLE}\n{table(found, True)}\n"
    PAGE.write_text(f"{own}{BESIDE}{tables}", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] == "rank":
        one_rank(int(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "write":
        write()
    else:
        for _, what in run([Cell(*sys.argv[1:4], alone="alone" in sys.argv[4:])]):
            print(what)
