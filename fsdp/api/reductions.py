"""Statistics of the reductions of a model, and a way to learn their order again."""

from torch import nn

from fsdp.errors import ShardingError
from fsdp.reduction.stats import BucketStats
from fsdp.runtime.registry import engines_in, refusal, refuse_unless_resting


def reducer_stats(model: nn.Module) -> list[BucketStats]:
    """Return the reductions of the last backward that synchronised, in the order of their launches on this rank.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    return [one for engine in engines_in(model, "reducer_stats") for one in engine.reducer.stats.report()]


def relearn_order(model: nn.Module) -> None:
    """Learn the order of the reductions again in the next backward that synchronises.

    The order is the one in which gradients arrive on rank 0. It is learned in the first such backward, and again when a new set
    of parameters is trainable. Every rank must call this alike.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    for engine in engines_in(model, "relearn_order"):
        engine.reducer.relearn()


def set_divide_factors(model: nn.Module, before: float, after: float) -> None:
    """Divide gradients by `before` before the sum over the ranks, and by `after` after it, from the next backward on.

    It replaces `average` and `predivide_factor` of the `ReductionPolicy`. Every rank must call this alike.

    Raises:
        ShardingError: a factor is not a positive number, a communication hook reduces the gradients, a backward is running, or
            `model` contains no unit or is only a part of a root.
    """
    for name, factor in (("before", before), ("after", after)):
        if not 0 < factor < float("inf"):
            raise ShardingError(f"set_divide_factors: {name} must be a positive number, not {factor!r}.")
    for engine in engines_in(model, "set_divide_factors"):
        refuse_unless_resting("set_divide_factors", engine)
        if engine.reducer.hook is not None:
            raise refusal("set_divide_factors: a communication hook reduces the gradients, and it alone divides them.", engine)
        engine.reducer.set_divide_factors(before, after)
