"""One all-gather for several ranges of memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.work import Work


class JointGather:
    """An all-gather of chunks that belong to several places. `wait` copies them there; it may be called more than once."""

    __slots__ = ("_allocate", "_count", "_joint", "_places", "_sizes", "_work")

    def __init__(
        self,
        comm: Communicator,
        places: list[Tensor],
        own: Sequence[Tensor],
        label: str,
        count: Callable[[str, int], None],
        allocate: Callable[[], None],
    ) -> None:
        """`places`: the bytes (W, c) that each part of chunks fills. `own`: this rank's chunk as bytes, in one or more tensors.

        `count`: counts bytes of memory of a kind as allocated or, if negative, as released.
        `allocate`: allocates the memory of the places that have none, just before it is needed.

        Memory: the bytes of all of them once more, until they are copied out.
        """
        self._places = places
        self._count = count
        self._allocate = allocate
        self._sizes = [place.shape[1] for place in places]
        self._joint = places[0].new_empty(comm.size, sum(self._sizes))
        if len(own) == 1:
            self._joint[comm.rank].copy_(own[0])
        else:
            torch.cat([*own], out=self._joint[comm.rank])
        self._work: Work | None = comm.all_gather(self._joint.view(-1), label)
        count("scratch", self._joint.numel())

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
            self._allocate()
            torch.split_with_sizes_copy(self._joint, self._sizes, 1, out=self._places)
        finally:
            self._count("scratch", -self._joint.numel())
            del self._joint
