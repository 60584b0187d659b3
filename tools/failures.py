"""Every place where a step can fail, in every part of a step, with every strategy; and a page of what happens then.

python -m tools.failures gloo     writes docs/reference/failures.md, from simulated ranks and from processes over gloo
python -m tools.failures RANK WORLD_SIZE FOLDER     is one of these processes
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.comm.process_group import ProcessGroupCommunicator
from fsdp.comm.simulated import SimulatedCommunicator, current_rank
from fsdp.debug.error_notes import MARK
from fsdp.device import storage
from fsdp.runtime.registry import unit_ref_of
from tests.support.models import Block, Net, gradients_of, is_at_rest, loss_of, weights_of
from tests.support.processes import ROOT, end_all, start_rank
from tools.tables.markdown import table_of

PAGE: Final = ROOT / "docs" / "reference" / "failures.md"
BESIDE: Final = "\n## FSDP1, FSDP2 and DDP beside it\n"
"""The end of the page, which peer_failures.py writes."""
PHASES: Final = ("forward", "backward", "replay", "no_sync")
STRATEGIES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "FULL_SHARD": (2, {}),
    "SHARD_GRAD_OP": (2, {}),
    "SHARD_GRADIENTS": (2, {}),
    "NO_SHARD": (2, {}),
    "HYBRID_SHARD": (4, {"mesh": (2, 2)}),
}
RECOVERED: Final = "recovered"
NOT_REACHED: Final = "–"
TOO_LATE: Final = "raised after the commit"
APART: Final = "all are told"


class Mine(Exception):
    """What a hook or a module of the user raises."""


class Fault:
    """Raises what it is armed with, once."""

    def __init__(self) -> None:
        self.armed: BaseException | None = None
        self.in_loss: Callable[[Tensor], Tensor] = _as_it_is
        """What the loss does with what the model returned."""

    def fire(self, *_: Any) -> None:
        armed, self.armed = self.armed, None
        if armed is not None:
            raise armed


def _as_it_is(output: Tensor) -> Tensor:
    return output


class FailsInBackward(torch.autograd.Function):
    """A node behind the model's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:  # type: ignore[override]
        ctx.fault = fault
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.fault.fire()
        return gradient, None


_faults: Final[dict[int, Fault]] = {}


def here() -> int:
    world = current_rank()
    return dist.get_rank() if world is None else world.rank


class Checkpointed(Net):
    """Each block is replayed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


def _comm_hook(model: nn.Module, fault: Fault) -> None:
    engine = unit_ref_of(model).engine  # type: ignore[union-attr]
    shards, rank = engine.comms.reduce_comm.size, engine.comms.reduce_comm.rank

    def hook(state: None, bucket: Any) -> "torch.futures.Future[Tensor]":
        fault.fire()
        # a hook replaces the whole reduction; this one takes the rank's own gradient for it: wrong, and the same each time
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().chunk(shards)[rank] * 1.0)
        return future

    fsdp.register_comm_hook(model, None, hook)


def _root_callback(model: nn.Module, fault: Fault) -> None:
    """In what runs once when a backward is over."""
    reducer = unit_ref_of(model).engine.reducer  # type: ignore[union-attr]
    settle = reducer.settle

    def settle_and_fail() -> None:
        settle()
        fault.fire()

    reducer.settle = settle_and_fail


def _loss(model: nn.Module, fault: Fault) -> None:
    def in_loss(output: Tensor) -> Tensor:
        fault.fire()
        return output

    fault.in_loss = in_loss


def _loss_node(model: nn.Module, fault: Fault) -> None:
    fault.in_loss = lambda output: FailsInBackward.apply(output, fault)  # type: ignore[no-untyped-call, no-any-return]


def _nothing(model: nn.Module, fault: Fault) -> None:
    """What fails is one of the functions that are replaced for all models."""


Point = tuple[Callable[[nn.Module, Fault], Any], type[BaseException], str]
OOM: Final = torch.OutOfMemoryError

POINTS: Final[dict[str, Point]] = {
    "a module inside a unit": (lambda m, f: m.blocks[1].up.register_forward_hook(f.fire), Mine, ""),
    "between units": (lambda m, f: m.leave.register_forward_pre_hook(f.fire), Mine, ""),
    "a forward pre-hook of a unit": (lambda m, f: m.blocks[1].register_forward_pre_hook(f.fire), Mine, ""),
    "a forward hook of a unit": (lambda m, f: m.blocks[1].register_forward_hook(f.fire), Mine, ""),
    "a forward hook of the root": (lambda m, f: m.register_forward_hook(f.fire), Mine, ""),
    "the loss": (_loss, Mine, ""),
    "a node of the loss": (_loss_node, Mine, ""),
    "a node of the backward": (lambda m, f: m.blocks[1].up.register_full_backward_hook(f.fire), Mine, ""),
    "a hook on a parameter": (lambda m, f: [p.register_hook(f.fire) for p in m.parameters()], Mine, ""),
    "the communication hook": (_comm_hook, Mine, ""),
    "the final callback": (_root_callback, Mine, ""),
    "a post-accumulate hook": (lambda m, f: [p.register_post_accumulate_grad_hook(f.fire) for p in m.parameters()], Mine, ""),
    "Ctrl-C in a module": (lambda m, f: m.blocks[1].up.register_forward_hook(f.fire), KeyboardInterrupt, ""),
    "Ctrl-C in a node": (lambda m, f: m.blocks[1].up.register_full_backward_hook(f.fire), KeyboardInterrupt, ""),
    "out of memory in a gather": (_nothing, OOM, "whole"),
    "out of memory for a bucket": (_nothing, OOM, "bucket"),
    "out of memory in a reduction": (_nothing, OOM, "reduce"),
}


LATE: Final = ("a hook on a parameter", "the final callback")
"""When they fail the other ranks have completed the backward."""
UNHEARD: Final = ("a forward hook of the root", "the loss", "a node of the loss")
"""Outside the model, between its forward and its backward: no note can be made, what is kept for the backward stays until the
next forward, and the others hear of it then."""


@contextmanager
def tight() -> Iterator[None]:
    """Functions of the engine that run out of memory when the fault of their rank is armed for them. Around all ranks."""
    allocate = storage.ResizableStorage.allocate

    def allocated(memory: Any, tracker: Any) -> None:
        if memory._kind == _short.get(here()):
            _faults[here()].fire()
        allocate(memory, tracker)

    def reducing(real: Callable[..., Any]) -> Callable[..., Any]:
        def launch(channel: Any, tensor: Tensor, *args: Any) -> Any:
            if _short.get(here()) == "reduce" and tensor.is_floating_point():
                _faults[here()].fire()
            return real(channel, tensor, *args)

        return launch

    with mock.patch.object(storage.ResizableStorage, "allocate", allocated), ExitStack() as patches:
        for kind, name in product((SimulatedCommunicator, ProcessGroupCommunicator), ("reduce_scatter", "all_reduce")):
            patches.enter_context(mock.patch.object(kind, name, reducing(getattr(kind, name))))
        yield


_short: Final[dict[int, str]] = {}


def x_of(rank: int, step: int) -> Tensor:
    return torch.linspace(-1, 1, 12).view(2, 6) + 0.1 * rank + step


def attempt(model: nn.Module, phase: str, fault: Fault, error: BaseException | None) -> None:
    """One forward and backward; the fault is armed for the part that is to fail."""
    x = x_of(here(), 1)
    with fsdp.no_sync(model) if phase == "no_sync" else nullcontext():
        fault.armed = error if phase in ("forward", "no_sync") else None
        loss = loss_of(fault.in_loss(model(x)))
        fault.armed = error if phase in ("backward", "replay") else fault.armed if phase == "no_sync" else None
        loss.backward()
        fault.armed = None


_meshes: Final[list[Any]] = []
"""The one that is used; none when nobody can go on on the last one."""


@contextmanager
def own_group(strategy: str, alone: bool) -> Iterator[dict[str, Any]]:
    """What else a model is wrapped with: some cells leave a group, or a mesh, on which nobody can go on."""
    if not alone:
        yield {}
    elif "mesh" in STRATEGIES[strategy][1]:
        # torch gives the groups of a mesh the names of those that were destroyed, so they are used as long as they can be
        if not _meshes:
            _meshes.append(init_device_mesh("cpu", STRATEGIES[strategy][1]["mesh"]))
        yield {"mesh": _meshes[0]}
    else:
        group = dist.new_group()
        yield {"process_group": group}
        dist.destroy_process_group(group)


def live(
    point: Point, strategy: str, phase: str, error: BaseException | None, alone: bool, own: dict[str, Any]
) -> tuple[str, list[Any]]:
    """What happened, and the gradients and weights at the end, on one rank. Without `error`: as if nothing failed."""
    install, _, short = point
    torch.manual_seed(3)
    net = (Checkpointed if phase == "replay" else Net)(2)
    options = {**STRATEGIES[strategy][1], **own}
    model = fsdp.FullyShardedDataParallel(net, auto_wrap_policy={Block}, sharding_strategy=strategy, **options)
    fault = _faults[here()] = Fault()
    install(net, fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model(x_of(here(), 0))).backward()
    optimizer.step()
    if phase == "no_sync":
        with fsdp.no_sync(model):
            loss_of(model(x_of(here(), 2))).backward()
    before, kept = gradients_of(model), held(model, strategy)
    _short[here()] = short
    mine = error if not alone or here() == 1 else None
    result = NOT_REACHED
    try:
        attempt(model, phase, fault, mine)
    except (Mine, KeyboardInterrupt, OOM, fsdp.PeerFailed) as caught:
        fault.armed = None
        if isinstance(caught, fsdp.PeerFailed):
            assert alone and here() != 1, "it was told of another rank"
        else:
            assert caught is mine
        notes = [note for note in getattr(caught, "__notes__", ()) if note.startswith(MARK)]
        heard = isinstance(caught, fsdp.PeerFailed) or point not in [POINTS[name] for name in UNHEARD]
        assert len(notes) == heard, notes
        caught.__traceback__ = None  # its frames have the loss, which has the graph
        del caught
        result = RECOVERED
        if not same(gradients_of(model), before):
            if alone:
                look_around(model)
            return TOO_LATE, []
        if heard:
            assert is_at_rest(model), fsdp.story(model)
            assert held(model, strategy) == kept, f"{held(model, strategy)} instead of {kept}"
    try:
        if result is RECOVERED:
            with_peers(lambda: attempt(model, phase, fault, None))
        if phase == "no_sync":
            with_peers(lambda: loss_of(model(x_of(here(), 3))).backward())
        end: list[Any] = [gradients_of(model)]
        optimizer.step()
        end.append(weights_of(model))
        if alone:
            with_peers(lambda: look_around(model))
    except fsdp.WorldError as caught:
        # where a backward needs no peers, nobody can tell one that failed from one that was left out, until they do
        unheard = phase == "no_sync" and point in [POINTS[name] for name in UNHEARD]
        assert alone and ("may be a step apart" in str(caught) or (unheard and "Deadlock: nobody can go on" in str(caught)))
        return APART, []
    return result, end


_wanted: Final[dict[tuple[int, bool, str, str], list[Any]]] = {}


def held(model: nn.Module, strategy: str) -> dict[str, int]:
    """Bytes at rest, by kind. Copies that outlive a step may have been gathered in it or not."""
    tracker = unit_ref_of(model.module).engine.tracker  # type: ignore[union-attr, arg-type]
    outlive = "whole" if strategy == "SHARD_GRADIENTS" else ""
    return {kind: count for kind, count in tracker.held.items() if count and kind != outlive}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True)
    )


def with_peers(part: Callable[[], None]) -> None:
    """A part of a step, started again when a peer has failed meanwhile."""
    try:
        part()
    except fsdp.PeerFailed:
        part()


def look_around(model: nn.Module) -> None:
    """Whoever has heard of nothing yet hears of it here: also that a rank failed after its commit and so has not stepped."""
    try:
        loss_of(model(x_of(here(), 4))).backward()
    except fsdp.ShardingError as apart:
        assert "an optimizer has stepped on some ranks only" in str(apart), apart


def cell(name: str, strategy: str, phase: str, alone: bool = False) -> str:
    """What happened on this rank; the numbers are those of a run in which nothing failed."""
    point = POINTS[name]
    with own_group(strategy, alone) as own:
        result, end = live(point, strategy, phase, point[1]("no"), alone, own)
    if result is APART and "mesh" in STRATEGIES[strategy][1]:
        _meshes.clear()
    # what is installed changes no number, but for the communication hook
    key = (here(), point[0] is _comm_hook, strategy, phase)
    if key not in _wanted:
        with own_group(strategy, alone) as own:
            _wanted[key] = live(point, strategy, phase, None, alone, own)[1]
    wanted = _wanted[key]
    if result not in (TOO_LATE, APART):
        assert all(same(one, other) for one, other in zip(end, wanted, strict=True)), "the numbers are others"
    return result


def simulated(name: str, strategy: str, phase: str) -> str:
    """On simulated ranks, which all fail alike."""
    with tight():
        found = set(fsdp.simulate(STRATEGIES[strategy][0], lambda rank: cell(name, strategy, phase)))
    assert len(found) == 1, found
    return found.pop()


def over_gloo(rank: int, size: int, folder: Path) -> None:
    """One of the processes: rank 1 fails alone."""
    import faulthandler

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = {}
    with tight():
        for name, strategy, phase in json.loads((folder / "cells.json").read_text()):
            faulthandler.dump_traceback_later(200, exit=True)
            found[f"{name}/{strategy}/{phase}"] = cell(name, strategy, phase, alone=True)
            print(f"{name}/{strategy}/{phase}: {found[f'{name}/{strategy}/{phase}']}", flush=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def in_processes(cells: Sequence[tuple[str, str, str]], limit: float | None = None) -> dict[str, str]:
    """By cell, all of which need as many processes: what happened on the rank that failed."""
    size = STRATEGIES[cells[0][1]][0]
    with tempfile.TemporaryDirectory() as base:
        (Path(base) / "cells.json").write_text(json.dumps(cells))
        output = Path(base) / "printed.txt"
        ranks = [start_rank("tools.failures", rank, size, base, output=output) for rank in range(size)]
        try:
            codes = [one.wait(limit) for one in ranks]
            assert codes == [0] * size, output.read_text(encoding="utf-8", errors="replace")
        finally:
            end_all(ranks)
        found: dict[str, str] = json.loads((Path(base) / "1.json").read_text())
        return found


def all_over_gloo() -> dict[str, str]:
    every = [(name, strategy, phase) for strategy in STRATEGIES for name in POINTS for phase in PHASES]
    mesh = [one for one in every if "mesh" in STRATEGIES[one[1]][1]]
    two = in_processes([one for one in every if one not in mesh])
    return two | in_processes(mesh)


def page(rows: dict[tuple[str, str], dict[str, str]]) -> str:
    """A table of `rows`, in which strategies and then faults with the same cells share a line."""
    by_fault: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, strategy), row in rows.items():
        by_fault.setdefault((name, tuple(row[phase] for phase in PHASES)), []).append(strategy)
    shared: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, cells), strategies in by_fault.items():
        shared.setdefault((", ".join(strategies), cells), []).append(name)
    lines = [("; ".join(names), strategies, *cells) for (strategies, cells), names in shared.items()]
    return table_of(("what fails", "strategy", *PHASES), lines)


def rows_of(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a table that `page` made."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| what", "| ---")):
            names, strategies, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for name, strategy in product(names.split("; "), strategies.split(", ")):
                assert (name, strategy) not in found, f"{name} under {strategy} is there twice"
                found[name, strategy] = dict(zip(PHASES, cells, strict=True))
    return found


def row_of(name: str, strategy: str, find: Callable[[str, str, str], str]) -> dict[str, str]:
    return {phase: find(name, strategy, phase) for phase in PHASES}


ALONE: Final = "## One rank fails alone, over gloo"
HEAD: Final = """# When a step fails

Written by `python -m tools.failures gloo`; the first table is checked by `tests/comm/failure/test_failures.py`. In each cell
one thing fails, once, in that part of a step. *replay*: while activation checkpointing runs a forward again in the
backward. *no_sync*: in a forward or backward under `no_sync`, with gradients accumulated by an earlier one.

- *recovered*: the caller got the very exception. `.grad` and the accumulated gradients were as before, every unit was at
  rest, nothing was in flight, and no more memory was held. The same step, started again with no other call, gave the
  numbers of a run in which nothing failed, to the bit.
- *raised after the commit*: these hooks of the user run when all gradients are in place. The gradients stay.
- *all are told*: the other rank had already completed the backward, whose end needs no peer any more (nor does much of a
  backward under `no_sync`). The two ranks may be a step apart. Every rank gets an error that says so, or that nobody can go
  on.
- *–*: that part of a step does not reach that place.

A forward hook of the root, the loss and its nodes are outside the model, where no hook of the engine sees them fail. What
the forward keeps for its backward stays until the next forward begins, and the other ranks learn of the failure then.
"""


def write() -> None:
    cells = [(name, strategy) for name in POINTS for strategy in STRATEGIES]
    alike = {one: row_of(*one, simulated) for one in cells}
    gloo = all_over_gloo()
    alone = {one: row_of(*one, lambda name, strategy, phase: gloo[f"{name}/{strategy}/{phase}"]) for one in cells}
    beside = "".join(PAGE.read_text(encoding="utf-8").partition(BESIDE)[1:])
    PAGE.write_text(
        f"{HEAD}\n## All ranks fail alike, simulated\n\n{page(alike)}\n\n{ALONE}\n\n"
        f"The others raise `fsdp.PeerFailed`, and start the step again as it does.\n\n{page(alone)}\n{beside}",
        encoding="utf-8",
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] == "gloo":
        write()
    else:
        over_gloo(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
