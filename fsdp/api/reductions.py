"""What the user may ask of the reductions of a model: what was launched when, and to learn the order anew."""

from torch import nn

from fsdp.reduction.stats import BucketStats
from fsdp.runtime.registry import engines_in


def reducer_stats(model: nn.Module) -> list[BucketStats]:
    """The reductions of the last backward that synchronised, in the order of their launches on this rank.

    Raises:
        ShardingError: there is no unit in `model`.
    """
    return [one for engine in engines_in(model, "reducer_stats") for one in engine.reducer.launches.stats()]


def relearn_order(model: nn.Module) -> None:
    """In the next backward that synchronises, learn the order of the reductions anew: it is rank 0's order of arrival.

    It is learned in the first such backward, and again whenever what is trainable changes to what was not seen before. Every rank
    must call it alike.

    Raises:
        ShardingError: there is no unit in `model`.
    """
    for engine in engines_in(model, "relearn_order"):
        engine.reducer.relearn()
