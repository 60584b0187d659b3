"""A signal makes a process that hangs print what its engines were doing."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from fsdp.comm.simulated import SimulatedCommunicator
from fsdp.debug.dump import DUMP, dump
from fsdp.failure.pending_call import PendingCall, Wait


class Mine(Exception):
    """What the user's code raises."""


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


HANGS = """
import threading, torch, fsdp
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
model = fsdp.fully_shard(torch.nn.Linear(2, 2))
if {call}:
    fsdp.dump_on_signal()
    fsdp.dump_on_signal()
output = model(torch.ones(1, 2))
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire(timeout=60)
"""


@pytest.mark.parametrize("call", [True, False], ids=["by a call", "by the environment"])
def test_a_signal_makes_a_process_that_waits_print_its_story(call: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS.format(call=call)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if call else {DUMP: "1"})},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            told = []
            while not told or 'File "<string>"' not in told[-1]:
                told.append(process.stderr.readline())
                assert told[-1], told
            assert told[0].startswith("fsdp: process ")
            assert told[1].startswith("root 'Linear', rank 1 of 2, backward RESTING; bytes held: ")
            assert told[4].split() == ["Linear", "IDLE", "CACHED", "PRE_FORWARD", "POST_FORWARD"]
    finally:
        process.kill()
        process.wait()


def test_a_handler_of_the_user_stays() -> None:
    handler = raising(Mine())
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(fsdp.ShardingError, match="SIGUSR2 has the handler"):
            fsdp.dump_on_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_wait_and_the_collectives_of_shared_communicators_are_notified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "rank 0 has waited 12 s in all_gather of blocks.3 for rank 1"
    call = PendingCall("shard", 1, "all_gather('blocks.3')", "", {}, where="all_gather of blocks.3")
    monkeypatch.setattr(Wait, "seconds", 12.0)
    monkeypatch.setattr(SimulatedCommunicator, "waits", lambda comm: Wait(0.0, call, 0, (1,)) if comm.name == "shard" else None)

    gc.collect()  # models of other tests would be in the dump

    def one_rank(rank: int) -> tuple[str, str]:
        one, other = (fsdp.fully_shard(torch.nn.Linear(2, 2)) for _ in range(2))
        text = dump()
        assert one is not other
        return text, fsdp.story(other)

    text, story = fsdp.simulate(2, one_rank)[0]
    assert re.match(r"fsdp: process \d+, at \d\d:\d\d:\d\d\n", text)
    assert text.count("root 'Linear'") >= 2
    assert text.count(f"\n  {wait}\n") == 1 and story.count(f"\n  {wait}\n") == 1
    assert text.count("shard: gather_objects fully_shard, gather_objects fully_shard") == 1
