"""A signal, and every rank says where it is: for a run that hangs.

[Note: who prints]
Python runs a signal's handler on the main thread, between two of its instructions, and the main thread of a run that hangs may be
inside a collective. So a thread prints: it is woken by the byte that the interpreter writes when the signal comes
(`signal.set_wakeup_fd`), whatever the main thread does. Where somebody else has taken that way (asyncio), the handler prints.
"""

import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from types import FrameType
from typing import Final

from fsdp.debug.error_notes import Told, lines_of
from fsdp.errors import ShardingError

DUMP: Final = "FSDP_DUMP_ON_SIGNAL"
"""The environment variable that installs the handler when the first model is wrapped, with the value 1."""
FRAMES: Final = 12
"""Innermost frames of the main thread that are printed."""


def dump_on_signal(number: int = signal.SIGUSR1) -> None:
    """From now on, on that signal, print `fsdp.story` of every model of this process and the stack of its main thread to stderr.

    One call a process, on its main thread; a second call changes nothing. With FSDP_DUMP_ON_SIGNAL=1 in the environment the first
    wrapping calls it, unless the signal has a handler. To ask all ranks under torchrun: `pkill -USR1 -f your_script.py`.

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
    _installed.add(number)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    taken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if taken == -1:
        _sockets.append((reader, writer))
        signal.signal(number, _leave_it_to_the_thread)
        threading.Thread(target=_print_when_woken, args=(reader, number), name="fsdp dump", daemon=True).start()
    else:
        signal.set_wakeup_fd(taken)
        reader.close()
        writer.close()
        signal.signal(number, _print_now)


def remember(engine: Told) -> None:
    """It will be told of, while it lives."""
    _engines.add(engine)
    main = threading.current_thread() is threading.main_thread()
    if os.environ.get(DUMP) == "1" and main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        dump_on_signal()


def dump() -> str:
    """The stories of all models of this process, and where its main thread is."""
    lines = [f"fsdp: process {os.getpid()}"]
    for engine in list(_engines):
        lines += lines_of(engine)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None:
        lines += ["main thread, innermost call last:", *"".join(traceback.format_stack(frame)[-FRAMES:]).splitlines()]
    return "\n".join(lines)


_engines: "weakref.WeakSet[Told]" = weakref.WeakSet()
_installed: Final[set[int]] = set()
_sockets: Final[list[tuple[socket.socket, socket.socket]]] = []


def _print() -> None:
    try:
        text = dump()
    except Exception as failure:  # what is printed changes while it is read
        text = f"fsdp: process {os.getpid()} could not be told of: {failure!r}"
    # at once, so that the ranks' texts do not mix
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"{text}\n".encode())


def _print_when_woken(reader: socket.socket, number: int) -> None:
    while woken := reader.recv(64):
        if number in woken:
            _print()


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A signal without a handler would end the process."""


def _print_now(number: int, frame: FrameType | None) -> None:
    _print()
