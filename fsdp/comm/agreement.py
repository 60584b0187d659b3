"""Prepare on every rank, so that a rank that cannot go on stops all ranks."""

from collections.abc import Callable
from typing import TypeVar

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError

Answer = TypeVar("Answer")


def agree_on_refusals(comm: Communicator, prepare: Callable[[], Answer]) -> list[Answer]:
    """Call `prepare` on every rank and return all answers, by rank. They must be picklable.

    Raises:
        ShardingError: `prepare` failed on another rank, which is named.
        Exception: the one that `prepare` raised on this rank.
    """
    try:
        mine = prepare()
    except Exception as refusal:  # any failure, a full disk for example, must reach the other ranks
        reason = str(refusal) if isinstance(refusal, ShardingError) else repr(refusal)
        comm.gather_objects((reason, None), "agreement")
        raise
    answers = comm.gather_objects(("", mine), "agreement")
    for rank, (reason, _) in enumerate(answers):
        if reason:
            raise ShardingError(f"rank {rank}: {reason}")
    return [answer for _, answer in answers]
