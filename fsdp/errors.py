"""Every class of errors that fsdp raises on purpose."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from state_machine import IllegalTransition as IllegalTransition

EVERY_RANK: Final = "Every rank must call it."
FEWER_BATCHES: Final = "If a rank has fewer batches than the others, train inside fsdp.join."
"""The remedy for a rank that has left the training loop before the others."""
UNEVEN_PATHS: Final = (
    "If some ranks leave out or repeat units that others use, or give a unit inputs that need a gradient where others give it "
    "such that need none, pass uneven_paths=True."
)
"""The remedy for ranks that go different ways through the units of a model."""
NO_SYNC: Final = "If gradients are accumulated, enter no_sync on every rank, for the same backwards."
"""The remedy for ranks of which some alone reduce their gradients."""


class ShardingError(ValueError):
    """A use of the library that cannot be right. The text says what to do. Nothing was changed."""


class ShardingAssertion(ShardingError, AssertionError):
    """A refusal that torch's FSDP2 raises as an AssertionError, so that code which catches that goes on to work."""


class NoMemoryYet(ShardingError, RuntimeError):
    """Parameters of a wrapped module are on the meta device still. A RuntimeError, as in torch's FSDP2."""


class StateMismatch(ShardingError, RuntimeError):
    """A state dict has other names or shapes than the model. A RuntimeError, as from torch's `load_state_dict`."""


class InputsExhausted(ShardingError, RuntimeError):
    """A rank inside a join that stops at the first one has no further batch. Every rank raises it."""


class WorldError(RuntimeError):
    """The ranks disagree: they called different collectives, or wait for each other without end."""


class PeerFailed(WorldError):
    """Another rank has abandoned the step or ended while this one waited for it. Has the rank, its unit and the reason."""

    def __init__(self, text: str, rank: int, unit: str | None, reason: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.unit = unit
        """The innermost unit that rank was in, if it is known."""
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.unit, self.reason), self.__dict__


def require_package(name: str, package: str) -> None:
    """Raise ShardingError if `name` needs `package`, and it cannot be imported."""
    try:
        import_module(package)
    except ImportError:
        raise ShardingError(f"{name} needs the package {package}: pip install {package}.") from None


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
