"""The parameters that had a gradient in a backward, on this rank and on any rank: one small collective.

A rank on which all of them had one does not read the result: on CUDA the host would have to wait for it.

[Note: ranks that step differently]
The same collective says which ranks have changed their weights since the last backward. Only what is certain is said: a parameter
of which several ranks hold elements was changed by one of them, and another one has changed nothing at all. An optimizer may
leave a parameter out, and a rank may hold none of those that were stepped. A change is seen by its version counter, which fused
optimizers do not move. The flags are read on the host only.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import and_, attrgetter, ne
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.comm.work import Work
from fsdp.errors import ShardingError, name_ranks
from fsdp.params.unit import Unit
from fsdp.reduction.bucket import Bucket
from fsdp.shards.shard_tensor import quick_attributes

_KEPT_MESSAGES: Final = 8
_ALL_LOCAL_USED: Final = attrgetter("all_local_used")
_AT_FORWARD: Final = attrgetter("at_forward")
_VERSION: Final = attrgetter("_version")


class _Exchange(NamedTuple):
    """The exchange of one backward, in flight."""

    flags: Tensor
    """One for each parameter. 1: it had a gradient; 2: it has a gradient that arrived after its bucket was launched."""
    all_local_used: bool
    """True if all parameters had a gradient on this rank, which then needs no result."""
    work: Work
    steps: tuple[int, ...]
    """The flags of this rank's steps, which follow those of the parameters."""


class StepFlags:
    """Which parameters of several ranks this one has changed since the last backward. See [Note: ranks that step differently]."""

    def __init__(self, units: Sequence[Unit], buckets: Sequence[Bucket]) -> None:
        self._clocks = [unit.versions for unit in units]
        self._params = [
            (info.names[0], bucket.name, info.parameter if placement.part.numel else None)
            for bucket in buckets
            if not bucket.flat.is_replicated
            for info, placement in zip(bucket.flat.param_infos, bucket.flat.placements, strict=True)
            if placement.cut.numel_first is not None  # else one rank holds all of it
        ]
        nothing = torch.empty(0)
        self._held = [nothing if parameter is None else parameter for _, _, parameter in self._params]
        self._when_idle = tuple(flag for _, _, parameter in self._params for flag in (0, int(parameter is not None)))
        """The flags of a rank that has changed nothing."""
        self.count = 2 * len(self._params)
        self._before: tuple[list[int], list[int]] | None = None
        """The version counters at the last backward that was completed; None if the last one was not."""
        self._now: tuple[list[int], list[int]] | None = None

    def take(self) -> tuple[int, ...]:
        """Two flags for each parameter: this rank has changed it; this rank has elements of it and has changed nothing at all."""
        with quick_attributes():
            versions = [*map(_VERSION, self._held)]
        before, now = self._before, ([*map(_AT_FORWARD, self._clocks)], versions)
        self._now = now
        if before is None:
            return (0,) * self.count
        if before == now:
            return self._when_idle
        flags = [0] * self.count
        flags[::2] = map(int, map(ne, before[1], versions))
        return tuple(flags)

    def keep(self) -> None:
        """The backward is completed: the next one compares with it."""
        self._before = self._now

    def forget(self) -> None:
        """The backward was given up, maybe on this rank alone: the next one compares with nothing."""
        self._before = self._now = None

    def check(self, mine: Sequence[int], of_any_rank: Sequence[int], world_comm: Communicator) -> None:
        """Compare the flags of this rank with those that any rank has set. Communicates only if ranks differ.

        Raises:
            ShardingError: some ranks have changed a parameter, and others that hold a part of it have changed nothing.
        """
        if list(mine) == list(of_any_rank):
            return
        for index, (name, unit, _) in enumerate(self._params):
            if of_any_rank[2 * index] and of_any_rank[2 * index + 1]:
                found = world_comm.gather_objects((mine[2 * index], mine[2 * index + 1]), "who has stepped")
                stepped = name_ranks([rank for rank, (changed, _) in enumerate(found) if changed])
                idle = name_ranks([rank for rank, (_, unchanged) in enumerate(found) if unchanged])
                raise ShardingError(
                    f"parameter {name!r} of unit {unit!r} was changed on {stepped} since the last backward, and nothing was "
                    f"changed on {idle}: an optimizer has stepped on some ranks only, so their weights are a step apart. Load a "
                    "checkpoint, and let a condition or a scaler decide alike on all ranks whether to step."
                )


class UsedParams:
    """The used parameters of one root, in one backward at a time."""

    def __init__(
        self, units: Sequence[Unit], buckets: Sequence[Bucket], static: bool, world_comm: Communicator, device: torch.device
    ) -> None:
        self._buckets = buckets
        self._steps = StepFlags(units, buckets)
        self._world_comm = world_comm
        self._static = static
        self._offsets = list(accumulate((len(bucket.views) for bucket in buckets), initial=0))
        self._device = device
        count = self._offsets[-1]
        self._all_used_message: Callable[[tuple[int, ...]], Tensor] = lru_cache(_KEPT_MESSAGES)(
            lambda steps: torch.tensor([1] * count + [*steps], dtype=torch.uint8, device=device)
        )
        """The message of a rank on which all parameters had a gradient, by the flags of its steps."""
        self._exchange: _Exchange | None = None
        self._step_flags: tuple[Sequence[int], Sequence[int]] | None = None
        """The flags of steps that were read: of this rank, of any rank."""
        self._combined: Tensor | None = None
        """What `combine` found last, on a rank that was not at the end of a backward."""
        self._static_used: list[bool] | None = None
        """With a static graph: the parameters that the first backward used on any rank."""
        self._static_remainders: list[bool] = []
        """With a static graph: the parameters that had a remainder on any rank."""
        self._static_local: list[list[bool]] = []
        """With a static graph: for each bucket, the parameters used on this rank."""
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self.has_grad: list[bool] = []
        """For each bucket, whether this rank had gradients at the exchange that were not launched."""
        self.has_remainder: list[bool] = []
        """For each bucket, whether these are a remainder."""
        self._used: list[bool] = []
        """For each parameter, whether any rank had a gradient. Empty: every parameter of this rank had one."""
        self._remainders: list[bool] = []
        """For each parameter, whether any rank has a remainder."""

    def exchange(self, launched: Sequence[bool], message: Sequence[int] = ()) -> None:
        """At the end of a backward: begin to exchange which parameters had a gradient, and which have a remainder.

        `launched` says which buckets were launched. `message`: numbers that are sent along.

        Traffic: an all-reduce of one byte a parameter, except with a static graph after its first backward.

        Raises:
            ShardingError: the graph was declared static and has changed.
        """
        not_launched = self._collect(launched)
        if self._static_used is not None:
            self._check_static()
            self._used, self._remainders = self._static_used, self._static_remainders
            return
        if self._static:
            self._static_local = [list(bucket.local_used) for bucket in self._buckets]
        all_local_used = all(map(_ALL_LOCAL_USED, self._buckets))
        if message:  # a frozen bucket is asked about too
            all_local_used = all_local_used and all(all(bucket.local_used) for bucket in self._buckets)
        steps = (*self._steps.take(), *message)
        if all_local_used and not any(self.has_remainder):
            flags = self._all_used_message(steps).clone()
        else:
            values = [
                used + (was_launched and has_grad)
                for bucket, was_launched, has_grads in zip(self._buckets, launched, not_launched, strict=True)
                for used, has_grad in zip(bucket.local_used, has_grads, strict=True)
            ]
            flags = torch.tensor([*values, *steps], dtype=torch.uint8, device=self._device)
        work = self._world_comm.all_reduce(flags, "max", "which gradients came")
        self._exchange = _Exchange(flags, all_local_used, work, steps)

    def combine(self, message: Sequence[int], launched: Sequence[bool] | None = None) -> Sequence[int]:
        """Return the maximum of the messages of all ranks. `launched`: this rank is at the end of a backward, see `exchange`.

        Traffic: an all-reduce of one byte a number, and one a parameter.
        """
        if launched is not None:
            self.exchange(launched, message)
            assert self._exchange is not None
            flags = self._exchange.flags
            self.wait_all(read=True)
        else:
            silent = [0] * (self._offsets[-1] + self._steps.count)
            flags = torch.tensor([*silent, *message], dtype=torch.uint8, device=self._device)
            self._world_comm.all_reduce(flags, "max", "which gradients came").wait()
            self._combined = flags
        combined: list[int] = flags[self._offsets[-1] + self._steps.count :].tolist()
        return combined

    def take_combined(self, launched: Sequence[bool]) -> None:
        """Use what `combine` found last, in place of an exchange: this rank has no data, and met the others there."""
        assert self._combined is not None
        self._collect(launched)
        self._steps.take()  # what the next backward compares with
        self._read(self._combined, (0,) * self._steps.count)  # it was silent, so it is none of the ranks that have not stepped

    def _collect(self, launched: Sequence[bool]) -> Sequence[Sequence[bool]]:
        """Record which parameters had a gradient on this rank; return, for each bucket, those that were not launched."""
        not_launched = [*map(Bucket.collect_used, self._buckets, launched)]
        self.has_grad = [*map(any, not_launched)]
        self.has_remainder = list(map(and_, self.has_grad, launched))
        return not_launched

    def used(self, number: int) -> Sequence[bool]:
        """For each parameter of a bucket, whether it had a gradient on some rank."""
        return self._used[self._offsets[number] : self._offsets[number + 1]] if self._used else self._buckets[number].all_used

    def any_rank_has(self, number: int, remainder: bool = False) -> bool:
        """Whether any rank has a gradient, or a remainder, of a bucket. Waits for the exchange if this rank has none."""
        if (self.has_remainder if remainder else self.has_grad)[number]:
            return True
        self.wait_all(read=True)
        return any(self._remainders[self._offsets[number] : self._offsets[number + 1]] if remainder else self.used(number))

    def wait_all(self, read: bool = False) -> None:
        """Wait for the exchange, and read its result if this rank needs it."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.work.wait()
        self._read(exchange.flags, exchange.steps, read or not exchange.all_local_used or self._static)
        if self._static:
            self._static_used, self._static_remainders = self._used, self._remainders

    def _read(self, flags: Tensor, steps: Sequence[int], needs_used: bool = True) -> None:
        """Read what all ranks have sent. `steps`: the flags of this rank's own steps. `needs_used`: also which gradients came."""
        if steps and self._device.type == "cpu":
            end = self._offsets[-1] + self._steps.count
            self._step_flags = steps[: self._steps.count], flags[self._offsets[-1] : end].tolist()
        if needs_used:
            values = flags[: self._offsets[-1]].tolist()
            self._used = [value > 0 for value in values]
            self._remainders = [value > 1 for value in values]

    def end(self) -> None:
        """After `wait_all`, when all reductions are complete: compare which ranks have changed their weights.

        Raises:
            ShardingError: some ranks have stepped, and others have not.
        """
        flags, self._step_flags = self._step_flags, None
        if flags is not None:
            self._steps.check(*flags, self._world_comm)
        self._steps.keep()

    def drop(self) -> None:
        """The backward was given up."""
        self._step_flags = None
        self._steps.forget()

    def take_work(self) -> Sequence[Work]:
        """Take the exchange in flight away, if there is one, for a caller that waits for it and does not read it."""
        exchange, self._exchange = self._exchange, None
        return () if exchange is None else (exchange.work,)

    def _check_static(self) -> None:
        for bucket, first in zip(self._buckets, self._static_local, strict=True):
            for info, now, before in zip(bucket.flat.param_infos, bucket.local_used, first, strict=True):
                if now != before:
                    raise ShardingError(
                        f"parameter {info.names[0]!r} of unit {bucket.name!r} had {'a' if before else 'no'} gradient in the "
                        f"first backward and has {'one' if now else 'none'} in this one; leave out reduction.static_graph."
                    )
