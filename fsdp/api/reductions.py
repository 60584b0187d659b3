"""Statistics of the reductions of a model, and a way to learn their order again."""

from torch import nn

from fsdp.reduction.stats import BucketStats
from fsdp.runtime.registry import engines_in


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
