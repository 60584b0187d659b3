"""A signal makes a process that hangs print what its engines were doing."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fsdp
from fsdp.comm.failure.pending_call import PendingCall, Wait
from fsdp.comm.simulated import SimulatedCommunicator
from fsdp.debug.dump_on_signal import DUMP, dump
from tests.debug.test_error_notes import raising
from tests.support.processes import Rank, start_rank


class Mine(Exception):
    """What the user's code raises."""


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


def lines_of(file: Path, process: Rank) -> Iterator[str]:
    """The lines that a process writes to a file, as they come."""
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.01)
    with file.open(encoding="utf-8") as opened:
        line = ""
        while True:
            line += opened.readline()
            if line.endswith("\n"):
                yield line
                line = ""
            else:
                assert process.poll() is None, f"it has ended: {file.read_text(encoding='utf-8')}"
                time.sleep(0.01)


@pytest.mark.parametrize("call", [True, False], ids=["by a call", "by the environment"])
def test_a_signal_makes_a_process_that_waits_print_its_story(call: bool, tmp_path: Path) -> None:
    script, output, errors = (tmp_path / name for name in ("hangs.py", "output.txt", "errors.txt"))
    script.write_text(HANGS.format(call=call))
    process = start_rank(script, output=output, errors=errors, **({} if call else {DUMP: "1"}))
    try:
        assert next(lines_of(output, process)) == "ready\n"
        lines = lines_of(errors, process)
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            told = [next(lines)]
            while told[-1].strip() != "lock.acquire(timeout=60)":
                told.append(next(lines))
            assert f'File "{script}"' in told[-2]
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

    # what waits is said once in a dump, perhaps below a model that another test has left
    monkeypatch.setattr("fsdp.debug.dump_on_signal._snapshots", set())

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
