"""Where the unsharded parameters of a unit are: a second, small machine.

The lifecycle requests UNSHARD, CACHE and RESHARD, and prefetch requests PREFETCH. Every unit gets the end of a pass.
So prefetch does not change the lifecycle, and no memory is freed while a collective still writes it.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from state_machine.machine import Machine, Step
from state_machine.vocabulary import MachineEnum


class ResidencyState(MachineEnum):
    """Where the unsharded parameters of a unit are."""

    SHARDED = auto()
    """Not in memory."""
    UNSHARDING = auto()
    """An all-gather into their memory is in flight."""
    UNSHARDED = auto()
    """In memory, and the modules use them."""
    CACHED = auto()
    """In memory, while the modules use the shards."""


class Request(MachineEnum):
    """A request to the residency of a unit."""

    PREFETCH = auto()
    """The unsharded parameters will be needed soon."""
    UNSHARD = auto()
    """The unsharded parameters are needed now."""
    CACHE = auto()
    """The unsharded parameters will be needed again."""
    RESHARD = auto()
    """The unsharded parameters are not needed any more."""
    PASS_ENDS = auto()
    """The forward of the root has returned. It may not have called every unit that was prefetched."""
    PASS_FAILS = auto()
    """The forward of the root has failed: no backward will follow."""


class Effect(MachineEnum):
    """A task of the unit. A row lists its effects in order."""

    ALL_GATHER = auto()
    """Allocate the memory and launch the all-gather."""
    WAIT_ALL_GATHER = auto()
    """Wait for the all-gather."""
    USE_UNSHARDED = auto()
    """Let the modules use the unsharded parameters."""
    USE_SHARDED = auto()
    """Let the modules use the shards."""
    FREE_UNSHARDED = auto()
    """Free the memory of the unsharded parameters."""


RESIDENCES: Final[Mapping[ResidencyState, Mapping[Request, Step[ResidencyState, Effect]]]] = {
    ResidencyState.SHARDED: {
        Request.PREFETCH: Step(ResidencyState.UNSHARDING, (Effect.ALL_GATHER,)),
        Request.UNSHARD: Step(ResidencyState.UNSHARDED, (Effect.ALL_GATHER, Effect.WAIT_ALL_GATHER, Effect.USE_UNSHARDED)),
        # there is nothing to cache
        Request.CACHE: Step(ResidencyState.SHARDED),
        # an all-gather that failed while the engine waited for it has left its memory allocated
        Request.RESHARD: Step(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
        Request.PASS_ENDS: Step(ResidencyState.SHARDED),
        Request.PASS_FAILS: Step(ResidencyState.SHARDED),
    },
    ResidencyState.UNSHARDING: {
        Request.PREFETCH: Step(ResidencyState.UNSHARDING),
        Request.UNSHARD: Step(ResidencyState.UNSHARDED, (Effect.WAIT_ALL_GATHER, Effect.USE_UNSHARDED)),
        # gathered ahead, and not needed yet
        Request.CACHE: Step(ResidencyState.CACHED, (Effect.WAIT_ALL_GATHER,)),
        # the collective still writes the memory: wait, then free it
        Request.RESHARD: Step(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
        Request.PASS_ENDS: Step(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
        Request.PASS_FAILS: Step(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
    },
    ResidencyState.UNSHARDED: {
        Request.PREFETCH: Step(ResidencyState.UNSHARDED),
        Request.UNSHARD: Step(ResidencyState.UNSHARDED),
        Request.CACHE: Step(ResidencyState.CACHED, (Effect.USE_SHARDED,)),
        Request.RESHARD: Step(ResidencyState.SHARDED, (Effect.USE_SHARDED, Effect.FREE_UNSHARDED)),
        # an exception leaves the forward around a backward that still runs, and this unit computes in that backward
        Request.PASS_ENDS: Step(ResidencyState.UNSHARDED),
        Request.PASS_FAILS: Step(ResidencyState.UNSHARDED),
    },
    ResidencyState.CACHED: {
        Request.PREFETCH: Step(ResidencyState.CACHED),
        Request.UNSHARD: Step(ResidencyState.UNSHARDED, (Effect.USE_UNSHARDED,)),
        Request.CACHE: Step(ResidencyState.CACHED),
        Request.RESHARD: Step(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
        # the unsharded parameters wait for the backward
        Request.PASS_ENDS: Step(ResidencyState.CACHED),
        Request.PASS_FAILS: Step(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
    },
}


class Residency(Machine[ResidencyState, Request, Effect]):
    """The residency of one unit."""

    __slots__ = ()

    def __init__(self, unit: str) -> None:
        super().__init__(unit, RESIDENCES, ResidencyState.SHARDED)
