"""Preparing on every rank: if one rank cannot go on, every rank is told."""

from collections.abc import Callable
from typing import TypeVar

from fsdp.comm.process_group import Collectives
from fsdp.errors import ShardingError

Answer = TypeVar("Answer")


def agree_on_refusals(collectives: Collectives, prepare: Callable[[], Answer]) -> list[Answer]:
    """Prepare on every rank; the picklable answers of all, by rank. A failure on one rank is raised on every rank.

    Raises:
        ShardingError: the preparation failed on another rank, which is named.
        Exception: what `prepare` raised here.
    """
    try:
        mine = prepare()
    except Exception as refusal:  # a full disk, for example: the peers must hear of it, whatever it is
        reason = str(refusal) if isinstance(refusal, ShardingError) else repr(refusal)
        collectives.gather_objects((reason, None), "agreement")
        raise
    answers = collectives.gather_objects(("", mine), "agreement")
    for rank, (reason, _) in enumerate(answers):
        if reason:
            raise ShardingError(f"rank {rank}: {reason}")
    return [answer for _, answer in answers]
