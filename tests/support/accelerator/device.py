"""Loads the pretend accelerator into this process as torch's device type "pretend". It cannot be taken out again.

Rule 1: only processes of their own load it, because torch then has an accelerator, and asks it for streams in every backward.
"""

import ctypes
import enum
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

from tests.support.accelerator.build import compiled_file

NAME: Final = "pretend"
"""The type of the device. There are eight: pretend:0 to pretend:7."""


class Scheduler(enum.IntEnum):
    """Which queue advances when."""

    EAGER = 0
    """Every queue, as far as it can."""
    LAZY = 1
    """None, until the host waits for something; then only the work that this needs."""
    RANDOM = 2
    """The seed decides."""
    STARVE = 3
    """All but one stream of each device, which the seed chooses; that one advances only when the host waits for it."""


@cache
def load() -> Any:
    """Register the device with torch and return the functions of the library."""
    lib = ctypes.CDLL(str(compiled_file()))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.pa_failure.restype = lib.pa_counts.restype = lib.pa_recorded.restype = ctypes.c_char_p
    for name in ("queued", "host_waits", "bytes", "bytes_of_stream", "peak", "allocations"):
        getattr(lib, f"pa_{name}").restype = number
    lib.pa_bytes_of_stream.argtypes = [ctypes.c_int, number]
    lib.pa_configure.argtypes = [ctypes.c_int, ctypes.c_uint64]
    lib.pa_limit.argtypes = lib.pa_fail_at.argtypes = [ctypes.c_int, number]
    lib.pa_abort.argtypes = [number]
    lib.pa_in_flight.argtypes = [number]
    lib.pa_launch_between_processes.argtypes = [number, ctypes.c_char_p, *[ctypes.c_int] * 6, number, pointer, pointer, number]
    lib.pa_launch.argtypes = [number, *[ctypes.c_int] * 6, number, pointer, pointer, number]
    lib.pa_start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(lib))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return lib


def configure(scheduler: Scheduler, seed: int = 0) -> None:
    """Drop what is queued, and let this scheduler decide from now on."""
    load().pa_reset()
    load().pa_configure(int(scheduler), seed)


def host_waits(device: int) -> int:
    """How often the host has waited for a stream of a device since `configure`."""
    return int(load().pa_host_waits(device))


def counted(device: int) -> dict[int, Counter[str]]:
    """By stream of a device, how many kernels of each name and how many allocations it was given since `configure`."""
    found: dict[int, Counter[str]] = {}
    for line in load().pa_counts(device).decode().splitlines():
        stream, name, number = line.split()
        found.setdefault(int(stream), Counter())[name] = int(number)
    return found


@contextmanager
def recording() -> Iterator[Callable[[], str]]:
    """Record what the hosts enqueue and wait for. Yields a function that returns the record so far: see `timeline`."""
    load().pa_record(1)
    try:
        yield lambda: str(load().pa_recorded().decode())
    finally:
        load().pa_record(0)


def mark(device: int, number: int) -> None:
    """Record that the host of a device has come to a place of its program."""
    load().pa_mark(device, number)


@contextmanager
def memory_limit(device: int, count: int) -> Iterator[None]:
    """A device with so many bytes. An allocation beyond them raises torch.OutOfMemoryError."""
    load().pa_limit(device, count)
    try:
        yield
    finally:
        load().pa_limit(device, -1)


@contextmanager
def failing_allocation(device: int, number: int) -> Iterator[Callable[[], int]]:
    """Allocation `number` from now on raises torch.OutOfMemoryError. Yields a function that counts the allocations so far."""
    lib = load()
    lib.pa_fail_at(device, number)
    try:
        yield lambda: int(lib.pa_allocations(device))
    finally:
        lib.pa_fail_at(device, -1)


_TYPE: Final = int(torch._C._autograd.DeviceType.PrivateUse1)
"""The number of the device type in torch."""


def _index(device: Any) -> int:
    if device is None:
        return int(load().pa_current_device())
    if isinstance(device, int):
        return device if device >= 0 else int(load().pa_current_device())
    found = torch.device(device).index
    return int(load().pa_current_device()) if found is None else found


class _Device:
    """A context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = load().pa_current_device()
        load().pa_set_device(self._index)

    def __exit__(self, *error: Any) -> None:
        load().pa_set_device(self._before)


class Stream(torch.Stream):
    """A stream of the current or the given device."""

    def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, torch.device(NAME))


@contextmanager
def entered(stream: Any) -> Iterator[None]:
    """A context whose work runs on `stream`."""
    before = torch.accelerator.current_stream(stream.device.index)
    torch._C._accelerator_setStream(stream)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


def _module(lib: Any) -> types.ModuleType:
    """The module that torch finds as `torch.pretend`."""
    module = types.ModuleType(f"torch.{NAME}")

    def synchronize(device: Any = None) -> None:
        if lib.pa_synchronize(_index(device)):
            raise RuntimeError(lib.pa_failure().decode())

    members: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: int(lib.pa_current_device()),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=_TYPE),
        "device": _Device,
        "device_count": lambda: int(lib.pa_device_count()),
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda device=None: int(lib.pa_peak(_index(device))),
        "memory_allocated": lambda device=None: int(lib.pa_bytes(_index(device))),
        "reset_peak_memory_stats": lambda device=None: lib.pa_reset_peak(_index(device)),
        "set_device": lambda device: lib.pa_set_device(_index(device)),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "stream": entered,
        "synchronize": synchronize,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
