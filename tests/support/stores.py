"""Stores and groups for threads that play ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import fsdp


class MemoryStore:
    """A store for threads. Counts what is asked of it."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.asked = 0
        self._lock = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[dict[str, Any]]:
        with self._lock:
            self.asked += 1
            yield self.held

    def add(self, key: str, amount: int) -> int:
        with self._alone() as held:
            held[key] = held.get(key, 0) + amount
            return int(held[key])

    def set(self, key: str, value: str) -> None:
        with self._alone() as held:
            held[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._alone() as held:
            found: bytes = held[key]
            return found

    def check(self, keys: list[str]) -> bool:
        with self._alone() as held:
            return all(key in held for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._alone() as held:
            return held.pop(key, None) is not None


class Scope(MemoryStore):
    """Keys of one part of a store."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        super().__init__()
        self.held, self._lock, self._name = store.held, store._lock, name

    def add(self, key: str, amount: int) -> int:
        return super().add(f"{self._name}/{key}", amount)

    def set(self, key: str, value: str) -> None:
        super().set(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes:
        return super().get(f"{self._name}/{key}")

    def check(self, keys: list[str]) -> bool:
        return super().check([f"{self._name}/{key}" for key in keys])


def said(fn: Callable[[], object]) -> fsdp.WorldError:
    with pytest.raises(fsdp.WorldError) as caught:
        fn()
    return caught.value


def together(*programs: Callable[[], object]) -> list[BaseException | None]:
    found: list[BaseException | None] = [None] * len(programs)

    def live(number: int, program: Callable[[], object]) -> None:
        try:
            program()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=live, args=one, daemon=True) for one in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    return found
