"""Prepare on every rank, so that a rank that cannot go on stops all ranks."""

from collections.abc import Callable
from typing import TypeVar

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError

Answer = TypeVar("Answer")
Shared = TypeVar("Shared")


def agree_on_refusals(comm: Communicator, function_name: str, prepare: Callable[[], Answer]) -> Answer:
    """Call `prepare` on every rank and return this rank's answer. A failure on one rank is raised on every rank.

    If the others do not come, the error says that they did not call `function_name`.

    Raises:
        ShardingError: `prepare` failed on another rank, which is named.
        Exception: the one that `prepare` raised on this rank.
    """
    return agree_and_share(comm, function_name, prepare, lambda mine: None)[0]


def agree_and_gather(comm: Communicator, function_name: str, prepare: Callable[[], Answer]) -> list[Answer]:
    """As `agree_on_refusals`; the picklable answers of all, by rank."""
    return agree_and_share(comm, function_name, prepare, lambda mine: mine)[1]


def agree_and_share(
    comm: Communicator, function_name: str, prepare: Callable[[], Answer], share: Callable[[Answer], Shared], failed: str = ""
) -> tuple[Answer, list[Shared]]:
    """As `agree_on_refusals`; also what `share` makes of the answers of all, picklable, by rank.

    `failed`: what the error says of another rank before its reason.
    """
    try:
        mine = prepare()
        shared = share(mine)
    except Exception as refusal:  # any failure, a full disk for example, must reach the other ranks
        reason = str(refusal) if isinstance(refusal, ShardingError) else repr(refusal)
        comm.gather_objects((reason, None), function_name)
        raise
    answers = comm.gather_objects(("", shared), function_name)
    for rank, (reason, _) in enumerate(answers):
        if reason:
            raise ShardingError(f"rank {rank}{failed}: {reason}")
    return mine, [answer for _, answer in answers]
