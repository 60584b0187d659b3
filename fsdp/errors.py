"""Every error raised on purpose."""

from state_machine import IllegalTransition

__all__ = ["IllegalTransition", "ShardingError", "WorldError"]


class ShardingError(ValueError):
    """A use of the library that cannot be right. The text says what to do. Nothing moved."""


class WorldError(RuntimeError):
    """Ranks that disagree: they called different collectives, or wait for each other for ever."""
