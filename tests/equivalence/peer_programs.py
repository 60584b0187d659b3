"""What happens to the others when one rank abandons a step, or dies. Run as a script, it is one rank.

python -m tests.equivalence.peer_programs RANK WORLD_SIZE FOLDER PROGRAM ...
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from tests.support.models import CASES, Trained, gradients_of, is_at_rest, loss_of, own_batches, weights_of, wrap
from tests.support.stalls import look_soon

LIMIT: Final = 40
"""Seconds until a rank prints its stacks and dies."""
STEPS: Final = 4
TIME_OUT: Final = 5
"""Seconds of a group in which a rank stops."""


class Mine(Exception):
    """What one rank's own code raises."""


Told = tuple[str, str, int | None, str | None, str, str]
"""What a rank was told when a step failed: the type, the text; of PeerFailed the rank, the unit, the reason; and the notes."""


def told(error: BaseException) -> Told:
    notes = "\n".join(getattr(error, "__notes__", ()))
    if isinstance(error, fsdp.PeerFailed):
        return "PeerFailed", str(error), error.rank, error.unit, error.reason, notes
    return type(error).__name__, str(error), None, None, "", notes


def forward(model: nn.Module) -> Any:
    return model.blocks[1].up.register_forward_pre_hook(fail)


def backward(model: nn.Module) -> Any:
    return model.blocks[1].up.register_full_backward_hook(fail)


def between(model: nn.Module) -> Any:
    return model.leave.register_forward_pre_hook(fail)


def at_the_end(model: nn.Module) -> Any:
    """When every collective of the backward is over, and the others have their gradients."""
    return next(p for p in model.parameters() if p.shape.numel()).register_hook(fail)


def fail(*_: Any) -> None:
    raise Mine("no")


def retried(
    place: Callable[[nn.Module], Any], failing: int | None = 1, agree: bool = False, forwards: int = 0, **options: Any
) -> Any:
    """Training in which one rank fails in its second step, or all do (None); every rank starts the step again.

    `forwards`: how many come before the step's own, once before it fails and again in it.
    """

    def program(rank: int) -> tuple[Trained, list[Told]]:
        case = CASES["net"]
        model = wrap(case, process_group=None if "mesh" in options else dist.new_group(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        gradients, heard = [], []
        for step, (batch,) in enumerate(own_batches(case, rank, STEPS)):
            for _ in range(forwards):
                model(batch)
            handle = place(model) if step == 1 and failing in (rank, None) else None
            while True:
                try:
                    for _ in range(forwards):
                        model(batch)
                    loss_of(model(batch)).backward()
                    break
                except (Mine, fsdp.PeerFailed) as error:
                    assert is_at_rest(model), fsdp.story(model)
                    assert all(p.grad is None for p in model.parameters())
                    heard.append(told(error))
                    if handle is not None:
                        handle.remove()
                    if agree:
                        fsdp.agree_abandoned(model)
            gradients.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
        return Trained(gradients, weights_of(model)), heard

    return program


def apart(rank: int) -> list[Told]:
    """One rank abandons a backward that the others have completed: nobody can go on."""
    model = wrap(CASES["net"], process_group=dist.new_group())
    batch = CASES["net"].batch(rank, 0)
    heard = []
    handle = at_the_end(model) if rank == 1 else None
    for _ in range(2):
        try:
            loss_of(model(batch)).backward()
        except (Mine, fsdp.WorldError) as error:
            heard.append(told(error))
            if handle is not None:
                handle.remove()
            break
    try:
        fsdp.agree_abandoned(model)
    except fsdp.WorldError as error:
        heard.append(told(error))
    return heard


def dies(how: Callable[[], None], agree: bool = False) -> Any:
    """The last rank ends in the middle of a step; the others say what they were told, in the step and when they want to go on."""

    def program(rank: int) -> tuple[Told, list[Told]]:
        case = CASES["net"]
        model = wrap(case)
        last = rank == dist.get_world_size() - 1
        for step in range(3):
            if last and step == 2:
                model.blocks[1].up.register_forward_pre_hook(lambda *_: how())
            try:
                loss_of(model(case.batch(rank, step))).backward()
            except fsdp.PeerFailed as error:
                assert is_at_rest(model)
                again = []
                try:
                    model(case.batch(rank, step))
                except fsdp.PeerFailed as more:
                    again.append(told(more))
                return told(error), again
        raise AssertionError("nobody has heard of it")

    return program


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops(rank: int) -> Told:
    """The last rank stops in the middle of a step, for good, and the time-out of its group is over before anybody knows why."""
    case = CASES["net"]
    model = wrap(case, process_group=dist.new_group(timeout=timedelta(seconds=TIME_OUT)))
    for step in range(3):
        if rank == dist.get_world_size() - 1 and step == 2:
            model.blocks[1].up.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            loss_of(model(case.batch(rank, step))).backward()
        except RuntimeError as error:
            assert is_at_rest(model)
            return told(error)
    raise AssertionError("nobody has waited for it")


def wraps_alone(rank: int) -> Told | None:
    """Rank 1 ends without having wrapped anything."""
    try:
        return fsdp.fully_shard(nn.Linear(2, 2)) and None if rank == 0 else None
    except fsdp.PeerFailed as error:
        return told(error)


def hybrid(place: Callable[[nn.Module], Any]) -> Any:
    return retried(place, sharding_strategy="HYBRID_SHARD", mesh=(2, 2))


PROGRAMS: Final[dict[str, Callable[[int], Any]]] = {
    "fails in a forward": retried(forward),
    "fails in a backward": retried(backward),
    "fails between units": retried(between),
    "fails in a forward, agreed": retried(forward, agree=True),
    "all fail in a backward": retried(backward, failing=None),
    "rank 0 fails in a forward": retried(forward, failing=0),
    # the others come through the forward that fails, and wait where the next one begins
    "fails in a forward, copies are kept": retried(forward, forwards=1, sharding_strategy="SHARD_GRADIENTS"),
    "apart": apart,
    "hybrid, fails in a backward": hybrid(backward),
    "killed": dies(kill),
    "raises": dies(fail),
    "stops": stops,
    "wraps alone": wraps_alone,
}


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    look_soon()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    found = {}
    for name in names:
        found[name] = PROGRAMS[name](rank)
        torch.save(found, folder / f"{rank}.pt")  # the last one may end it
    if not set(names) & {"killed", "raises", "stops", "wraps alone"}:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
