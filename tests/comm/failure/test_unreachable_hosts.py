"""Connections of this process that are watched: which are, when one is lost, and how they are ended."""

import os
import socket
import sys
import threading
import time

import pytest

from fsdp.comm.failure.unreachable_hosts import Connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux finds lost hosts")


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Two ends of a connection, and the socket that listened."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    return one, listener.accept()[0], listener


def test_connections_are_watched_and_other_sockets_are_not() -> None:
    unix = socket.socketpair()
    before = pair()
    watched = Connections(9.0)
    one, other, listener = watched.opened_by(pair)
    for end in (one, other):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, probes = (end.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * probes <= 10
    assert not any(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in (listener, *before))
    assert not watched.is_any_lost()
    for opened in (*unix, *before, one, other, listener):
        opened.close()


@pytest.mark.parametrize("closes_here", [False, True])
def test_a_closed_connection_is_lost(closes_here: bool) -> None:
    watched = Connections(9.0)
    one, other, listener = watched.opened_by(pair)
    descriptor = one.fileno()
    (one if closes_here else other).close()
    assert watched.is_any_lost()
    if closes_here:  # another file has its number now
        with open(os.devnull) as other_file:
            assert other_file.fileno() == descriptor and watched.is_any_lost()
    assert [watched.stay_lost() for _ in range(3)] == [False, True, True], "at the first look the backend may still say why"
    watched.forget()
    assert not watched.is_any_lost() and not watched.stay_lost()
    for opened in (one, other, listener):
        opened.close()


def test_a_process_that_reads_nothing_is_not_lost() -> None:
    watched = Connections(0.2)
    one, other, listener = watched.opened_by(pair)
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            one.send(bytes(2**20))
    time.sleep(0.6)
    assert not watched.is_any_lost(), "its kernel acknowledges that its window is full"
    for opened in (one, other, listener):
        opened.close()


def test_cut_ends_who_waits_there() -> None:
    watched = Connections(9.0)
    one, other, listener = watched.opened_by(pair)
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(one.recv(1)))
    waits.start()
    watched.cut()
    waits.join(5)
    assert found == [b""]
    assert not watched.is_any_lost()
    for opened in (one, other, listener):
        opened.close()
