"""Where the whole parameters of a unit are: a second, tiny machine.

The lifecycle asks NEED, KEEP and FREE; only prefetch asks WANT. This keeps prefetch from
falsifying the lifecycle, and memory from being freed under a collective that still writes it.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final, NamedTuple

from state_machine.vocabulary import Word


class ResidencyState(Word):
    """Where the whole parameters are."""

    SHARDED = auto()
    """Nowhere: their memory is given back."""
    GATHERING = auto()
    """A gather into their memory is in flight."""
    WHOLE = auto()
    """In memory, and shown by the modules."""
    KEPT = auto()
    """In memory, while the modules show the shards."""


class Ask(Word):
    """What can be asked of the residency."""

    WANT = auto()
    """They will be needed soon: prefetch."""
    NEED = auto()
    """They are needed now."""
    KEEP = auto()
    """They will be needed again in the backward."""
    FREE = auto()
    """They are not needed any more."""


class Effect(Word):
    """What the unit must do, in order."""

    LAUNCH = auto()
    """Allocate the memory and launch the gather."""
    AWAIT = auto()
    """Wait for the gather."""
    SHOW = auto()
    """Show the whole face."""
    HIDE = auto()
    """Show the shard face."""
    RELEASE = auto()
    """Give the memory back."""


class Residence(NamedTuple):
    """Where an ask leads, and what the unit must do on the way, in order."""

    to: ResidencyState
    effects: tuple[Effect, ...] = ()


RESIDENCES: Final[Mapping[ResidencyState, Mapping[Ask, Residence]]] = {
    ResidencyState.SHARDED: {
        Ask.WANT: Residence(ResidencyState.GATHERING, (Effect.LAUNCH,)),
        Ask.NEED: Residence(ResidencyState.WHOLE, (Effect.LAUNCH, Effect.AWAIT, Effect.SHOW)),
        # nothing is there to keep
        Ask.KEEP: Residence(ResidencyState.SHARDED),
        # a gather that failed while it was awaited left its memory behind
        Ask.FREE: Residence(ResidencyState.SHARDED, (Effect.RELEASE,)),
    },
    ResidencyState.GATHERING: {
        Ask.WANT: Residence(ResidencyState.GATHERING),
        Ask.NEED: Residence(ResidencyState.WHOLE, (Effect.AWAIT, Effect.SHOW)),
        # gathered ahead, and not needed yet
        Ask.KEEP: Residence(ResidencyState.KEPT, (Effect.AWAIT,)),
        # the collective still writes the memory: wait, then release
        Ask.FREE: Residence(ResidencyState.SHARDED, (Effect.AWAIT, Effect.RELEASE)),
    },
    ResidencyState.WHOLE: {
        Ask.WANT: Residence(ResidencyState.WHOLE),
        Ask.NEED: Residence(ResidencyState.WHOLE),
        Ask.KEEP: Residence(ResidencyState.KEPT, (Effect.HIDE,)),
        Ask.FREE: Residence(ResidencyState.SHARDED, (Effect.HIDE, Effect.RELEASE)),
    },
    ResidencyState.KEPT: {
        Ask.WANT: Residence(ResidencyState.KEPT),
        Ask.NEED: Residence(ResidencyState.WHOLE, (Effect.SHOW,)),
        Ask.KEEP: Residence(ResidencyState.KEPT),
        Ask.FREE: Residence(ResidencyState.SHARDED, (Effect.RELEASE,)),
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

    def on(self, ask: Ask) -> tuple[Effect, ...]:
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
