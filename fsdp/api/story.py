"""What an engine says of itself: the state of every unit and its last events, as text for people, and the bytes it holds."""

from torch import nn

from fsdp.debug.error_notes import lines_of
from fsdp.runtime.registry import engines_in


def story(model: nn.Module) -> str:
    """Return what the engine does with `model` on this rank now, as text. Does not communicate.

    Use it to look at a run that hangs or surprises. Each root has a line with the bytes it holds by kind, a line for each
    communicator with its last collectives, and a line for each unit with its state, its residency (where its unsharded
    parameters are) and its last events. Collectives and events are in order, oldest first.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    return "\n".join(line for engine in engines_in(model, "story") for line in lines_of(engine.snapshot()))


def memory_bytes(model: nn.Module, peak: bool = False) -> int:
    """Return how many bytes the engine holds for `model` on this rank; with `peak`, the most it has held at once.

    Counted are shards, unsharded and summoned parameters, buckets and the memory that reducing them takes, reduced gradients
    that are not in `.grad` yet, and gradients kept under `no_sync`. Memory of `.grad` is the user's and not counted.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    trackers = [engine.tracker for engine in engines_in(model, "memory_bytes")]
    return sum(tracker.peak if peak else tracker.now for tracker in trackers)
