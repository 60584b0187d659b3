"""Which ranks of a job wait for each other for ever, by what each has published."""

import pytest

from fsdp.comm.failure import job_waits
from fsdp.comm.failure.job_waits import JobWaits
from fsdp.comm.failure.pending_call import PendingCall
from tests.support.stores import MemoryStore

GATHER = PendingCall("shards/gather", 3, "a gather", "", {"shards/gather": 3}, among=(0, 1))
SAVE = PendingCall("all/world", 2, "a save", "all/2/save", {"shards/gather": 2, "all/world": 1}, among=(0, 1, 2, 3))
RECEIVE = PendingCall("pp/messages 3 to 2", 5, "a message", "", {"pp/messages 3 to 2": 5, "all/world": 1}, among=(3,))


@pytest.mark.parametrize(
    ("waits", "stuck", "others"),
    [
        ({0: GATHER, 1: SAVE}, {0, 1}, set()),
        ({0: GATHER, 1: SAVE, 2: RECEIVE}, {0, 1}, set()),  # 2 waits for 3, which computes
        ({0: GATHER, 1: SAVE, 2: SAVE}, {0, 1}, {2}),  # nobody waits for 2
        ({0: GATHER, 1: SAVE, 2: RECEIVE, 3: SAVE}, {0, 1, 2, 3}, set()),
        ({0: SAVE, 1: SAVE}, set(), set()),  # both are about to make the same call
        ({0: GATHER, 1: SAVE._replace(launched={"shards/gather": 3, "all/world": 1})}, set(), set()),  # 1 has made the gather
        ({0: GATHER}, set(), set()),
        ({1: SAVE}, set(), set()),
        ({2: RECEIVE, 3: GATHER._replace(launched={"pp/messages 3 to 2": 5}, among=(2,))}, set(), set()),  # 3 has sent it
        ({2: RECEIVE, 3: GATHER._replace(launched={"pp/messages 3 to 2": 4}, among=(2,))}, {2, 3}, set()),
    ],
)
def test_ranks_are_stuck_that_wait_for_calls_that_one_of_them_has_not_made(
    waits: dict[int, PendingCall], stuck: set[int], others: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_waits, "STALL_SECONDS", 0.0)
    store = MemoryStore()
    JobWaits(store, 3).publish(SAVE)  # in a world before this one
    ranks = [JobWaits(store, rank) for rank in range(4)]
    for rank, pending in waits.items():
        ranks[rank].publish(pending)
    for rank, one in enumerate(ranks):
        assert one.find_stuck().keys() == (stuck if rank in stuck | others else set())
