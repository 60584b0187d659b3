"""The TCP connections of a group's communicators, and whether the hosts at their other ends still answer.

A host that loses its network or its power sends nothing, not even that its connections are closed. A rank that waits for it would
wait for the time-out of the process group. But the kernel of a host that lives acknowledges what it receives, also for a process
that computes or is stopped. So the kernel is asked to look, with TCP keep-alive, when a connection is idle; where data are on
their way, a rank that has waited long looks itself for how long they were not acknowledged. No rank sends anything for this.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import unpack_from
from threading import Thread
from typing import Any, Final, TypeVar

_ESTABLISHED: Final = 1
_PROBES: Final = 3
_AVAILABLE: Final = all(hasattr(socket, name) for name in ("TCP_INFO", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"))
_INFO_BYTES: Final = 104
"""The part of struct tcp_info that every kernel since 2.6 has."""
T = TypeVar("T")


class Connections:
    """The connections of one epoch. Empty on systems other than Linux, where no host is found to be lost."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        """For how long a host may be silent."""
        self._watched: set[tuple[int, int]] = set()
        """The file descriptor and the inode of each connection."""
        self._closing: set[tuple[int, int]] = set()
        """The same of those that this rank closes, which takes until their collectives in flight have ended."""
        self._closer: Thread | None = None
        """The last thread that closes connections."""
        self._were_lost = False
        """Whether one was lost at the last look."""

    def opened_by(self, connect: Callable[[], T]) -> T:
        """Call `connect`, watch the connections that it opens, and return its result."""
        before = _sockets()
        result = connect()
        for descriptor, inode in _sockets() - before:
            if _ask_kernel_to_look(descriptor, self._seconds):
                self._watched.add((descriptor, inode))
        return result

    def close(self, groups: dict[str, Any]) -> None:
        """Drop the process groups of these connections, which closes them, in a thread.

        That waits for collectives in flight, and these may wait for peers that have not disconnected yet.
        """
        self.forget()
        closer = Thread(target=groups.clear, name="fsdp disconnects", daemon=True)
        try:
            closer.start()
            self._closer = closer
        except RuntimeError:  # Python 3.12 starts no thread when the process ends
            self.cut()
            groups.clear()

    def wait_until_closed(self, seconds: float) -> None:
        """Wait for the thread that closes; if it takes longer than `seconds`, end what is in flight."""
        if self._closer is not None:
            self._closer.join(seconds)
            if self._closer.is_alive():
                self.cut()
                self._closer.join(seconds)

    def forget(self) -> None:
        """This rank closes its connections."""
        self._closing = {one for one in self._closing | self._watched if _is_open(*one)}
        self._watched = set()
        self._were_lost = False

    def cut(self) -> None:
        """End all collectives in flight with an error. The backend alone would wait for those that a lost host is part of."""
        for descriptor, inode in self._closing | self._watched:
            if _is_open(descriptor, inode):
                with suppress(OSError), _socket_of(descriptor) as one:
                    one.shutdown(socket.SHUT_RDWR)
        self.forget()

    def stay_lost(self) -> bool:
        """Look at the connections; return whether one is lost now, and one was lost at the last look.

        At a time-out the backend closes its connections and raises. Then there is no second look, and the error says more.
        """
        before, self._were_lost = self._were_lost, self.is_any_lost()
        return before and self._were_lost

    def is_any_lost(self) -> bool:
        """Whether a connection was closed by the other end or the kernel, or data on it were not acknowledged for too long."""
        return any(self._is_lost(*one) for one in self._watched)

    def _is_lost(self, descriptor: int, inode: int) -> bool:
        if not _is_open(descriptor, inode):
            return True  # the backend closed it, after an error
        try:
            with _socket_of(descriptor) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return True
        state, retransmits = info[0], info[2]
        unacknowledged = unpack_from("I", info, 24)[0]
        silent_milliseconds = unpack_from("I", info, 56)[0]
        # a process that is stopped fills its window, and then nothing is unacknowledged
        silent = unacknowledged and retransmits and silent_milliseconds > 1000 * self._seconds
        return state != _ESTABLISHED or bool(silent)


def _is_open(descriptor: int, inode: int) -> bool:
    """Whether a connection is not closed yet: another file may have its descriptor."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _sockets() -> set[tuple[int, int]]:
    """The file descriptor and the inode of each socket of this process."""
    found = set()
    with suppress(FileNotFoundError):  # not Linux
        for name in os.listdir("/proc/self/fd") if _AVAILABLE else ():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.add((int(name), os.fstat(int(name)).st_ino))
    return found


def _ask_kernel_to_look(descriptor: int, seconds: float) -> bool:
    """Set TCP keep-alive. Returns False if this is no connected TCP socket."""
    idle, interval = max(1, round(seconds / 2)), max(1, round(seconds / 2 / _PROBES))
    options = (socket.TCP_KEEPIDLE, idle), (socket.TCP_KEEPINTVL, interval), (socket.TCP_KEEPCNT, _PROBES)
    with suppress(OSError), _socket_of(descriptor) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        one.getpeername()  # raises for one that listens
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options:
            one.setsockopt(socket.IPPROTO_TCP, option, value)
        return True
    return False


@contextmanager
def _socket_of(descriptor: int) -> Iterator[socket.socket]:
    """A Python socket of this descriptor, which stays open."""
    one = socket.socket(fileno=descriptor)
    try:
        yield one
    finally:
        one.detach()
