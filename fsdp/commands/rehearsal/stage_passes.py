"""The forwards and backwards of one stage of a pipeline in a step, in the order of 1F1B, by the engine's own `PipelineStage`."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.api.pipeline import PipelineStage
from fsdp.commands.rehearsal.memory import Memory
from fsdp.commands.rehearsal.rehearsed_communicator import RehearsedRank

RECEIVED: Final = "what a stage receives"


class Sent(NamedTuple):
    """A tensor that a stage sends to the next one, for each micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def make(self) -> Tensor:
        """Where the next stage receives it, or this one its gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)


class _Stage(PipelineStage):
    """Without neighbours: what calls for other stages is left out."""

    def __init__(self, module: nn.Module) -> None:
        self.submod, self.has_backward, self._grads_before, self._together = module, True, {}, [module]


class PassesOfStage:
    """The passes of one stage. Each call is those of a step."""

    def __init__(
        self,
        module: nn.Module,
        place: tuple[int, int],
        batches: Callable[[], list[Any]],
        loss: Callable[[Any], Any],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stage = _Stage(module)
        self._index, count = place
        self._is_last = self._index == count - 1
        self._ahead = count - self._index
        """How many forwards are ahead of the backwards."""
        self._batches = batches
        self._loss = loss
        self._around = around
        self._received: list[Any] = []
        self._gradients: list[tuple[Tensor, ...]] = []
        self._in_sends: dict[str, Any] = {}
        """What torch's schedule still refers to after it was sent: an output from before the first backward, and a gradient."""
        self.part = ""
        """What runs now, for errors."""
        self._micro_batches = 0
        self.sent: tuple[Sent, ...] = ()
        """What the next stage gets, of each micro-batch."""

    def run(self, memory: Memory, played: RehearsedRank) -> None:
        """The passes of all micro-batches. Gradients are kept."""
        with self._around():
            self._run(memory, played)

    def _run(self, memory: Memory, played: RehearsedRank) -> None:
        # torch makes the buffers of what is received once, and keeps them
        batches = self._received or self._batches()
        self._micro_batches = len(batches)
        if self._index:
            self._received = batches
        hop = played.comm("pp", (0, played.size))
        running: deque[tuple[int, Any, Any]] = deque()
        for number, batch in enumerate(batches):
            if self._index:
                hop.carry("receive", _bytes_of(batch.args), "pp")
            self.part = f"a forward of stage {self._index}"
            output = self._stage.submod(*batch.args, **batch.kwargs)
            self.part = f"the loss of {type(output).__name__}, which stage {self._index} returns,"
            running.append((number, self._loss(output), [*batch.args, *batch.kwargs.values()]))
            if number == self._ahead - 2:
                self._in_sends["output"] = [one.detach() for one in running[-1][1]]
            del output
            memory.forward_ended()
            if not self._is_last and not self._gradients:
                self.sent = tuple(Sent(tuple(one.shape), one.dtype) for one in running[-1][1])
                self._gradients = [tuple(one.make().detach() for one in self.sent) for _ in batches]
                memory.hold(RECEIVED, self._bytes())
            if len(running) == self._ahead:
                self._backward(*running.popleft(), hop, memory)
        while running:
            self._backward(*running.popleft(), hop, memory)
        memory.hold(RECEIVED, self._bytes())
        self._in_sends.clear()

    def reduce(self) -> None:
        """Reduce what was kept."""
        self._stage.perform_reduce_grad(self._micro_batches)

    def _backward(self, number: int, output: Any, inputs: Any, hop: Any, memory: Memory) -> None:
        self.part = f"a backward of stage {self._index}"
        gradients = None if self._is_last else self._gradients[number]
        if gradients is not None:
            hop.carry("receive", _bytes_of(gradients), "pp")
        given = {"stage_output": output, "output_grads": gradients, "input_values": inputs}
        self._in_sends["gradient"], _ = self._stage.backward_maybe_with_nosync("full", given)
        memory.hold_gradients(self._stage.submod)

    def _bytes(self) -> int:
        return sum(map(_bytes_of, (*(batch.args for batch in self._received), *self._gradients)))


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
