"""Ranks as forks of this process, which has imported the frameworks already: an import of one takes seconds."""

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
SECONDS = 120
KILLED = -9


def run(world_size: int, fn: Callable[[int], Result], exits: int = 0) -> list[Result]:
    """Call `fn(rank)` on `world_size` forks, with the environment that torchrun gives, and return the results.

    Each fork must end with the exit status `exits`. Forks that were killed have no result.
    """
    folder = Path(tempfile.mkdtemp())
    port = _free_port()
    forks = [
        multiprocessing.get_context("fork").Process(target=_rank, args=(fn, rank, world_size, port, folder))
        for rank in range(world_size)
    ]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(SECONDS)
    for fork in forks:
        if fork.is_alive():
            fork.kill()
    raised = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not raised, "\n".join(raised)
    assert [fork.exitcode for fork in forks] == [exits] * world_size
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.result"))]


def alone(fn: Callable[[int], Result]) -> Result:
    """What `fn(0)` returns in a process without others."""
    return run(1, fn)[0]


def _rank(fn: Callable[[int], Any], rank: int, world_size: int, port: int, folder: Path) -> None:
    # forked ranks have no use for the fixtures and the reports of the parent
    status = 1
    try:
        torch.set_num_threads(1)
        if world_size > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                GROUP_RANK="0",
                WORLD_SIZE=str(world_size),
                LOCAL_WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID="forked",
            )
        torch.save(fn(rank), folder / f"{rank}.result")
        status = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def mean_over_ranks(losses: Sequence[Sequence[float]]) -> list[float]:
    """The mean of the losses of all ranks at each step."""
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def script_of_page(page: str, title: str) -> str:
    """The block of that title in a how-to page."""
    text = (Path(__file__).parents[3] / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
    return text.partition(f'```python title="{title}"\n')[2].partition("\n```")[0]
