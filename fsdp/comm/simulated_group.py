"""torch.distributed inside a simulated world: process groups, device meshes and DTensors of the rank that runs.

A rank's default group is made as soon as some code asks for it. Its collectives, and those of groups made of it, are those of the
simulated world: another rank may take over in each of them, and ranks that call different ones get an error.

Rule 1: the only file that knows where torch keeps process groups.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from fsdp.comm.routed_group import COLLECTIVES, MESSAGES, Beside, RoutedWork
from fsdp.errors import ShardingError, WorldError

c10d_bindings: Any = torch._C._distributed_c10d
BACKEND: Final = "simulated"
"""The name of the backend, as `torch.distributed.get_backend` returns it."""


@contextmanager
def torch_groups(current_rank: Callable[[], Any]) -> Iterator[None]:
    """Inside, `torch.distributed` of each simulated rank is that of its world. `current_rank`: the rank that runs, or None."""

    def make(options: Any, _: Any = None) -> SimulatedGroup:
        ranks = list(options.global_ranks_in_group) or None
        return SimulatedGroup(current_rank().comm(f"torch.distributed group {options.group_id}", ranks))

    torch_state: Any = c10d
    before = torch_state._world
    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    torch_state._world = _Worlds(before, current_rank)
    # torch keeps plans of redistributions by mesh: those of two ranks are equal to it, unless this number is another one
    mesh_class: Any = DeviceMesh
    mesh_class._thread_id = property(
        lambda mesh: getattr(current_rank(), "rank", None), lambda mesh, given: mesh.__dict__.update(_thread_id=given)
    )
    # a group is looked up by its name, which ranks have alike, in what its own thread has registered
    c10d_bindings._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d_bindings._set_thread_isolation_mode(False)
        torch_state._world = before
        del mesh_class._thread_id


class _Worlds:
    """Stands for torch's record of process groups: that of the simulated rank that runs, or of the process."""

    def __init__(self, of_process: Any, current_rank: Callable[[], Any]) -> None:
        self.__dict__.update(_of_process=of_process, _current_rank=current_rank, _of_ranks={})

    def _here(self) -> Any:
        rank = self._current_rank()
        return self._of_process if rank is None else self._of_ranks.setdefault(rank, _WorldOfRank(rank.rank, rank.size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


class _WorldOfRank:
    """Torch's record of the process groups of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._default: Any = None
        self._is_making = False
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.group_count = 0

    @property
    def default_pg(self) -> Any:
        """The default group, which the first question makes.

        A module of torch that is imported meanwhile asks as well, for default arguments that outlive the world: it gets None.
        """
        if self._default is None and not self._is_making and not _is_importing():
            self._is_making = True
            hook = sys.excepthook  # torch would put the number of a rank before every error of the process, also afterwards
            try:
                dist.init_process_group(BACKEND, store=c10d_bindings.HashStore(), rank=self._rank, world_size=self._size)
            finally:
                sys.excepthook = hook
                self._is_making = False
        return self._default

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default = group


def _is_importing() -> bool:
    """Whether a module asks at its top level: through this property, that of `_Worlds`, and torch's `group.WORLD`."""
    frame = sys._getframe(4)
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("torch.")


def _of_ordinary_tensors(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Let tensors that refuse collectives do so. Over processes torch's dispatcher asks them, which is not on the way here.

    A failure is passed on, as by a `RoutedGroup`.
    """

    @wraps(collective)
    def checked(group: Any, *args: Any, **named: Any) -> Any:
        for tensor in tree_leaves(args):
            if hasattr(tensor, "refuse_collective"):
                tensor.refuse_collective(collective.__name__)
        try:
            return collective(group, *args, **named)
        except WorldError as failure:
            group.beside.abandon(failure)
            raise

    return checked


_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are those of a communicator of the simulated world. Each is over when it returns.

    The methods are those that torch calls; older versions call some by other names.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self.beside = Beside()

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(c10d._world.pg_names[self])

    pg_name = group_name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            self._reduce(tensor, opts)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        kind = _kind_of(opts)
        if kind not in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
            raise ShardingError(f"fsdp.simulate has no reduction by {kind}; use SUM, AVG, MAX, MIN or PRODUCT.")
        if kind in ("SUM", "AVG", "MAX"):
            self.comm.all_reduce(tensor, "max" if kind == "MAX" else "sum", "torch").wait()
            if kind == "AVG":
                tensor.div_(self.comm.size)
            return
        gathered = self._gathered(tensor)
        tensor.copy_(gathered.amin(0) if kind == "MIN" else gathered.prod(0))

    def _gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks: (W, *shape)."""
        gathered = tensor.new_empty(self.comm.size, *tensor.shape)
        self._fill(gathered, tensor)
        return gathered

    def _fill(self, output: Tensor, chunk: Tensor) -> None:
        flat = output.view(-1)
        flat.view(self.comm.size, -1)[self.comm.rank] = chunk.reshape(-1)
        self.comm.all_gather(flat, "torch").wait()

    def all_gather_single(self, output: Tensor, chunk: Tensor, opts: Any = None) -> Any:
        self._fill(output, chunk)
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], chunks: list[Tensor], opts: Any = None) -> Any:
        for output, chunk in zip(outputs, chunks, strict=True):
            self._fill(output, chunk)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], chunks: list[Tensor], opts: Any = None) -> Any:
        for output, chunk in zip(outputs, chunks, strict=True):
            for one, value in zip(output, self._gathered(chunk), strict=True):
                one.copy_(value)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, chunks: Tensor, opts: Any = None) -> Any:
        kind = _kind_of(opts)
        if kind not in ("SUM", "AVG"):
            raise ShardingError(f"fsdp.simulate has no reduce-scatter by {kind}; use SUM or AVG.")
        self.comm.reduce_scatter(chunks.contiguous().view(-1), output.view(-1), "torch").wait()
        if kind == "AVG":
            output.div_(self.comm.size)
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], chunks: list[Tensor], opts: Any = None) -> Any:
        for output, of_all in zip(outputs, chunks, strict=True):
            self.reduce_scatter_single(output, of_all, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            contiguous = tensor.contiguous()
            self.comm.broadcast(contiguous, opts.rootRank, "torch").wait()
            if contiguous is not tensor:
                tensor.copy_(contiguous)
        return _done(tensors)

    def scatter(self, outputs: list[Tensor], chunks: list[list[Tensor]], opts: Any) -> Any:
        sent = self.comm.gather_objects([chunk.clone() for chunk in chunks[0]] if chunks else None, "torch")
        outputs[0].copy_(sent[opts.rootRank][self.comm.rank])
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], chunks: list[Tensor], opts: Any = None) -> Any:
        gathered = self._gathered(chunks[0])
        for output in outputs:  # none on the other ranks
            torch._foreach_copy_(output, [*gathered])
        return _done(chunks)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            reduced = tensor.clone()
            self._reduce(reduced, opts)
            if self.comm.rank == opts.rootRank:
                tensor.copy_(reduced)
        return _done(tensors)

    def reduce_scatter(self, outputs: list[Tensor], chunks: list[list[Tensor]], opts: Any = None) -> Any:
        for output, of_all in zip(outputs, chunks, strict=True):
            self.reduce_scatter_single(output, torch.stack(of_all), opts)
        return _done(outputs)

    def alltoall(self, outputs: list[Tensor], chunks: list[Tensor], opts: Any = None) -> Any:
        sent = self.comm.gather_objects([chunk.clone() for chunk in chunks], "torch")
        for output, of_rank in zip(outputs, sent, strict=True):
            output.copy_(of_rank[self.comm.rank])
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, of_output: list[int], of_input: list[int], opts: Any = None
    ) -> Any:
        ranks = self.comm.size
        rows = list(of_input) or [given.shape[0] // ranks] * ranks
        parts = [part.clone() for part in given.split_with_sizes(rows)]
        sent = self.comm.gather_objects(parts, "torch")
        output.copy_(torch.cat([one[self.comm.rank] for one in sent]))
        return _done([output])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> RoutedWork:
        work = self.comm.message(tensors[0].contiguous(), self.comm.rank, target, tag)
        return RoutedWork(work, work, self.beside)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RoutedWork:
        work = self.comm.message(tensors[0], source, self.comm.rank, tag)
        return RoutedWork(work, work, self.beside)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # torch 2.15 would record a group that has a device while it makes it, which it can only do with groups of its own
        return [torch.device("cpu")] * (self in c10d._world.pg_names)

    def barrier(self, opts: Any = None) -> Any:
        self.comm.gather_objects(None, "torch")
        return _done([])


for _name in {*COLLECTIVES, *MESSAGES}.intersection(vars(SimulatedGroup)):
    setattr(SimulatedGroup, _name, _of_ordinary_tensors(vars(SimulatedGroup)[_name]))


def _kind_of(opts: Any) -> str:
    """The name of the reduction that torch asks for."""
    if opts is None:
        return "SUM"
    kind = opts.reduceOp
    return str(getattr(kind, "op", kind)).rpartition(".")[2]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return c10d_bindings._create_work_from_future(future)
