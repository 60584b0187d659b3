"""Where the whole parameters of a unit are: a second, tiny machine.

The lifecycle asks UNSHARD, KEEP and RESHARD; only prefetch asks PREFETCH; the end of a pass is told to every unit.
This keeps prefetch from falsifying the lifecycle, and memory from being freed under a collective that
still writes it.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.vocabulary import MachineEnum


class ResidencyState(MachineEnum):
    """Where the whole parameters are."""

    SHARDED = auto()
    """Nowhere: their memory is given back."""
    UNSHARDING = auto()
    """A gather into their memory is in flight."""
    UNSHARDED = auto()
    """In memory, and shown by the modules."""
    CACHED = auto()
    """In memory, while the modules show the shards."""


class Request(MachineEnum):
    """What can be asked of the residency."""

    PREFETCH = auto()
    """They will be needed soon: prefetch."""
    UNSHARD = auto()
    """They are needed now."""
    CACHE = auto()
    """They will be needed again in the backward."""
    RESHARD = auto()
    """They are not needed any more."""
    PASS_ENDS = auto()
    """The forward of the root has returned. It may have left the record, and never called units that prefetch wanted."""
    PASS_FAILS = auto()
    """The forward of the root has failed: no backward will come."""


class Effect(MachineEnum):
    """What the unit must do, in order."""

    ALL_GATHER = auto()
    """Allocate the memory and launch the gather."""
    WAIT_ALL_GATHER = auto()
    """Wait for the gather."""
    USE_UNSHARDED = auto()
    """Show the whole face."""
    USE_SHARDED = auto()
    """Show the shard face."""
    FREE_UNSHARDED = auto()
    """Give the memory back."""


class Residence(NamedTuple):
    """Where an ask leads, and what the unit must do on the way, in order."""

    to: ResidencyState
    effects: tuple[Effect, ...] = ()


RESIDENCES: Final[Mapping[ResidencyState, Mapping[Request, Residence]]] = {
    ResidencyState.SHARDED: {
        Request.PREFETCH: Residence(ResidencyState.UNSHARDING, (Effect.ALL_GATHER,)),
        Request.UNSHARD: Residence(ResidencyState.UNSHARDED, (Effect.ALL_GATHER, Effect.WAIT_ALL_GATHER, Effect.USE_UNSHARDED)),
        # nothing is there to keep
        Request.CACHE: Residence(ResidencyState.SHARDED),
        # a gather that failed while it was awaited left its memory behind
        Request.RESHARD: Residence(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
        Request.PASS_ENDS: Residence(ResidencyState.SHARDED),
        Request.PASS_FAILS: Residence(ResidencyState.SHARDED),
    },
    ResidencyState.UNSHARDING: {
        Request.PREFETCH: Residence(ResidencyState.UNSHARDING),
        Request.UNSHARD: Residence(ResidencyState.UNSHARDED, (Effect.WAIT_ALL_GATHER, Effect.USE_UNSHARDED)),
        # gathered ahead, and not needed yet
        Request.CACHE: Residence(ResidencyState.CACHED, (Effect.WAIT_ALL_GATHER,)),
        # the collective still writes the memory: wait, then release
        Request.RESHARD: Residence(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
        Request.PASS_ENDS: Residence(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
        Request.PASS_FAILS: Residence(ResidencyState.SHARDED, (Effect.WAIT_ALL_GATHER, Effect.FREE_UNSHARDED)),
    },
    ResidencyState.UNSHARDED: {
        Request.PREFETCH: Residence(ResidencyState.UNSHARDED),
        Request.UNSHARD: Residence(ResidencyState.UNSHARDED),
        Request.CACHE: Residence(ResidencyState.CACHED, (Effect.USE_SHARDED,)),
        Request.RESHARD: Residence(ResidencyState.SHARDED, (Effect.USE_SHARDED, Effect.FREE_UNSHARDED)),
        # an exception passes through the forward around a backward that still runs, and this unit computes in that
        Request.PASS_ENDS: Residence(ResidencyState.UNSHARDED),
        Request.PASS_FAILS: Residence(ResidencyState.UNSHARDED),
    },
    ResidencyState.CACHED: {
        Request.PREFETCH: Residence(ResidencyState.CACHED),
        Request.UNSHARD: Residence(ResidencyState.UNSHARDED, (Effect.USE_UNSHARDED,)),
        Request.CACHE: Residence(ResidencyState.CACHED),
        Request.RESHARD: Residence(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
        # they wait for the backward
        Request.PASS_ENDS: Residence(ResidencyState.CACHED),
        Request.PASS_FAILS: Residence(ResidencyState.SHARDED, (Effect.FREE_UNSHARDED,)),
    },
}


class Residency:
    """The residency of one unit. `state` changes only in `on`, which moves or raises."""

    __slots__ = ("_state", "unit")

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._state = ResidencyState.SHARDED

    @property
    def state(self) -> ResidencyState:
        return self._state

    def on(self, ask: Request) -> tuple[Effect, ...]:
        """Move and return what the unit must now do, in order.

        Raises:
            RuntimeError: the ask makes no sense here, which only a bug of ours can cause.
        """
        residence = RESIDENCES[self._state].get(ask)
        if residence is None:
            raise RuntimeError(
                f"unit {self.unit!r}: {ask.name} asked while {self._state.name}; this is a bug in fsdp, please report it."
            )
        self._state = residence.to
        return residence.effects
