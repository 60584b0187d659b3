"""Ranks as threads of this process, rank r on pretend:r, with a process group of torch. Other engines train on it.

Rule 1: collectives of device tensors are those of the pretend accelerator: queued on a stream of the group, and no host waits.
        Those of host tensors are torch's own, of its group for threads.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.support.accelerator.device import NAME, Scheduler, configure, load
from tests.support.accelerator.world import _BLOCKED, _BROADCAST, _GATHER, _MAX, _SCATTER, _SUM, PretendWork, _scalar_type

T = TypeVar("T")
BACKEND: Final = "pretend_threads"
PATIENCE: Final = 120
"""Seconds that a host waits for a collective which its peers have not launched."""
_keys: Final[dict[tuple[str, int], int]] = {}
_lock: Final = threading.Lock()


class _Completed(dist._Work):
    """A collective of a process group: `wait` makes the current stream wait."""

    def __init__(self, works: Sequence[PretendWork], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=[results[0].device])
        with torch.get_device_module(NAME).stream(works[-1].stream):
            self._future.set_result(list(results))

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> Any:
        return self._future


class _StreamWork(PretendWork):
    __slots__ = ("stream",)

    def __init__(self, event: Any, tensors: Sequence[Tensor], stream: Any) -> None:
        super().__init__(event, tensors)
        self.stream = stream


class ThreadGroup(threaded.ProcessLocalGroup):  # type: ignore[misc]
    """The group of one rank. Its collectives of device tensors are queued."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._stream: Any = None
        self._called = 0

    def getBackendName(self) -> str:
        return BACKEND

    def _launch(self, kind: int, given: Tensor, into: Tensor, elements: int, op: Any = None, source: int = 0) -> Any:
        module = torch.get_device_module(NAME)
        assert given.is_contiguous() and into.is_contiguous()
        if self._stream is None:
            self._stream = module.Stream(given.device)
        with _lock:
            key = _keys.setdefault((self.pg_name, self._called), len(_keys))
        self._called += 1
        self._stream.wait_stream(module.current_stream(given.device))
        load().pa_launch(
            *(key, self._world_size, self._rank, kind, source, _scalar_type(given.dtype), given.device.index),
            *(self._stream.stream_id, given.data_ptr(), into.data_ptr(), elements),
        )
        if op == dist.ReduceOp.AVG:
            with module.stream(self._stream):
                into.div_(self._world_size)
        event = module.Event()
        event.record(self._stream)
        return _StreamWork(event, (given, into), self._stream)

    def all_gather_single(self, output_tensor: Tensor, input_tensor: Tensor, opts: Any = None) -> Any:
        if output_tensor.device.type != NAME:
            return super().all_gather_single(output_tensor, input_tensor)
        return _Completed([self._launch(_GATHER, input_tensor, output_tensor, input_tensor.numel())], [output_tensor])

    def reduce_scatter_single(self, output_tensor: Tensor, input_tensor: Tensor, opts: Any = None) -> Any:
        if output_tensor.device.type != NAME:
            return super().reduce_scatter_single(output_tensor, input_tensor, opts)
        op = opts.reduceOp.op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        work = self._launch(_SCATTER, input_tensor, output_tensor, output_tensor.numel(), op)
        return _Completed([work], [output_tensor])

    def allreduce(self, tensor_list: list[Tensor], opts: Any = None) -> Any:
        if tensor_list[0].device.type != NAME:
            return super().allreduce(tensor_list, opts)
        op = opts.reduceOp.op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)
        kind = _MAX if op == dist.ReduceOp.MAX else _SUM
        works = [self._launch(kind, one, one, one.numel(), op) for one in tensor_list]
        return _Completed(works, tensor_list)

    allreduce_coalesced = allreduce

    def broadcast(self, tensor_list: list[Tensor], opts: Any = None) -> Any:
        if tensor_list[0].device.type != NAME:
            return super().broadcast(tensor_list, opts)
        works = [self._launch(_BROADCAST, one, one, one.numel(), None, opts.rootRank) for one in tensor_list]
        return _Completed(works, tensor_list)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensor: list[Tensor], opts: Any = None) -> Any:
        if input_tensor[0].device.type != NAME:
            return super().allgather(output_tensors, input_tensor)
        own = input_tensor[0].contiguous()
        gathered = own.new_empty(self._world_size * own.numel())
        work = self._launch(_GATHER, own, gathered, own.numel())
        work.wait()
        for to, part in zip(output_tensors[0], gathered.chunk(self._world_size), strict=True):
            to.copy_(part.view_as(to))
        return _Completed([work], output_tensors[0])


@_BLOCKED
def _on_blocked(key: int) -> int:
    """The host waits for a collective that a peer has not launched: the peers' threads run."""
    time.sleep(0.001)
    return int(time.monotonic() < _deadline[0])


_deadline: Final = [0.0]


def _create(store: Any, rank: int, world_size: int, timeout: Any) -> ThreadGroup:
    group = ThreadGroup(rank, world_size)
    threaded._store_based_barrier(rank, store, "", world_size, timeout)
    return group


def run_threads(world_size: int, fn: Callable[[int], T], scheduler: Scheduler, seed: int = 0) -> list[T]:
    """The results of `fn(rank)` in threads, each of which has a default process group of torch. Once a process."""
    lib = load()
    configure(scheduler, seed)
    lib.pa_on_blocked(_on_blocked)
    _deadline[0] = time.monotonic() + PATIENCE
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu", NAME])
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, results, errors = dist.HashStore(), [None] * world_size, []

    def ranked(rank: int) -> None:
        try:
            torch.get_device_module(NAME).set_device(rank)
            # torch's cache of tensors without memory, which all threads share, gives one of another thread's device
            no_cache = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
            with torch.autograd.set_multithreading_enabled(False), no_cache:
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
                results[rank] = fn(rank)  # type: ignore[call-overload]
                torch.get_device_module(NAME).synchronize(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
            _deadline[0] = 0

    threads = [threading.Thread(target=ranked, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
