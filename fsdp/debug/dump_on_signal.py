"""Prints on a signal where this rank is: for a run that hangs.

[Note: what prints the dump]
Python runs the handler of a signal on the main thread, between two of its instructions, and the main thread of a run that hangs
may be inside a collective. So a thread prints. The interpreter writes one byte when the signal arrives
(`signal.set_wakeup_fd`), whatever the main thread does, and that byte wakes the thread. If another library uses the wakeup
descriptor already (asyncio does), the handler prints.
"""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from fsdp.debug.answer_who import answer_questions, main_stack
from fsdp.debug.error_notes import EngineSnapshot, communicator_lines, lines_of
from fsdp.errors import ShardingError
from fsdp.log import write_to_stderr

DUMP: Final = "FSDP_DUMP_ON_SIGNAL"
"""The environment variable that installs the handler when the first model is wrapped, with the value 1."""


def dump_on_signal(number: int = signal.SIGUSR1) -> None:
    """Print `fsdp.story` of every model of this process and the stack of its main thread to stderr, at each signal `number`.

    Call it once in a process, on its main thread; a second call changes nothing. With FSDP_DUMP_ON_SIGNAL=1 in the environment,
    the first wrapping calls it, unless the signal has a handler. To print all ranks under torchrun:
    `pkill -USR1 -f your_script.py`.

    Raises:
        ShardingError: the signal has a handler already, which stays; or this is not the main thread.
    """
    if number in _installed:
        return
    handler = signal.getsignal(number)
    if handler not in (signal.SIG_DFL, signal.SIG_IGN, None):
        raise ShardingError(
            f"dump_on_signal: {signal.Signals(number).name} has the handler {handler!r}, which stays; give another signal, or "
            "call fsdp.story(model) in that handler."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ShardingError("dump_on_signal: Python lets only the main thread set handlers of signals; call it there.")
    reader, writer = socket.socketpair()
    _installed[number] = writer
    writer.setblocking(False)
    taken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if taken == -1:
        signal.signal(number, lambda *_: None)  # without a handler the signal would end the process
        threading.Thread(target=_print_when_woken, args=(reader, number), name="fsdp dump", daemon=True).start()
    else:
        signal.set_wakeup_fd(taken)
        reader.close()
        writer.close()
        signal.signal(number, lambda *_: _print())


def remember(snapshot: Callable[[], EngineSnapshot]) -> None:
    """Add an engine to the dump for as long as it lives. `snapshot` is its bound method."""
    _snapshots.add(weakref.WeakMethod(snapshot, _snapshots.discard))
    answer_questions(living_snapshots)
    main = threading.current_thread() is threading.main_thread()
    if os.environ.get(DUMP) == "1" and main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        dump_on_signal()


def living_snapshots() -> Iterator[EngineSnapshot]:
    """A snapshot of each model of this process."""
    for reference in list(_snapshots):
        if (snapshot := reference()) is not None:
            yield snapshot()


def dump() -> str:
    """The stories of all models of this process, and the stack of its main thread."""
    lines = [f"fsdp: process {os.getpid()}, at {time.strftime('%H:%M:%S')}"]
    shared: set[str] = set()
    for now in living_snapshots():
        # models on the same communicators wait for the same calls
        lines += [line for line in lines_of(now) if line not in shared]
        shared.update(communicator_lines(now))
    if stack := main_stack():
        lines += ["main thread, innermost call last:", *stack]
    return "\n".join(lines)


_snapshots: Final[set[weakref.WeakMethod[Callable[[], EngineSnapshot]]]] = set()
"""One entry for each living engine."""
_installed: Final[dict[int, socket.socket]] = {}
"""The signals that print the dump, and where Python writes their numbers: kept, so that it stays open."""


def _print() -> None:
    try:
        text = dump()
    except Exception as failure:  # the engines change while they are read
        text = f"fsdp: process {os.getpid()} could not be described: {failure!r}"
    write_to_stderr(text)


def _print_when_woken(reader: socket.socket, number: int) -> None:
    while woken := reader.recv(64):
        if number in woken:
            _print()
