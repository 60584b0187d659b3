"""What the gradients of a unit are divided by, before and after the sum over the ranks."""

from fsdp.errors import ShardingError
from fsdp.runtime.registry import UnitRef, refusal, refuse_unless_resting


def divide_by(caller: str, ref: UnitRef, before: float, after: float) -> None:
    """Divide the gradients of a unit by these factors, from the next backward on. Every rank must call this alike.

    It replaces `average` and `predivide_factor` of the `ReductionPolicy`. Errors begin with `caller`.

    Raises:
        ShardingError: a factor is not a positive number, a communication hook reduces the gradients, or a backward is running.
    """
    for factor in (before, after):
        check_factor(caller, factor)
    refuse_unless_resting(caller, ref.engine)
    if ref.engine.reducer.hook is not None:
        raise refusal(f"{caller}: a communication hook reduces the gradients, and it alone divides them.", ref.engine)
    ref.engine.reducer.set_divide_factors(ref.unit, (before, after))


def check_factor(caller: str, factor: float) -> None:
    """Raise ShardingError unless gradients can be divided by a factor."""
    if not 0 < factor < float("inf"):
        raise ShardingError(f"{caller}: a factor must be a positive number, not {factor!r}.")
