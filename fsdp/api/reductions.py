"""What a user says about reductions: a communication hook, the order learned again; and their statistics."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.futures import Future

from fsdp.errors import ShardingError
from fsdp.reduction.comm_hook import CommHook
from fsdp.reduction.stats import BucketStats
from fsdp.runtime.registry import engines_in, refusal, refuse_unless_resting


def register_comm_hook(model: nn.Module, state: object, hook: Callable[..., Future[Tensor]]) -> None:
    """Let `hook(state, bucket)` reduce every bucket of `model` from now on, in place of the engine.

    The bucket has the methods of `torch.distributed.GradBucket`, so torch's all-reduce, fp16 compression and PowerSGD hooks run
    unchanged under NO_SHARD. The hook returns a `torch.futures.Future` of one tensor. The tensor may have any real dtype if the
    parameters are real. The engine puts it into `.grad` as it is: the hook must average over the ranks itself.

    Shapes:  bucket.buffer() (W * C,), gradients of this rank alone, one chunk for each of the W ranks that share the shards
             ->  NO_SHARD (W = 1): their average over all ranks (C,); else: the average of chunk `rank` (C,)

    Every rank calls its hook for the same buckets in the same order. The backward raises an exception of the hook, or of its
    future, and abandons the step.

    Raises:
        ShardingError: `hook` cannot be called, a hook is registered already, an option of `reduction` does the same, or a forward
            or backward is running.
    """
    if not callable(hook):
        raise ShardingError(f"register_comm_hook takes a function of (state, bucket), not {hook!r}.")
    engines = engines_in(model, "register_comm_hook")
    for engine in engines:
        refuse_unless_resting("register_comm_hook", engine)
        if engine.reducer.reductions.hook is not None:
            raise ShardingError("register_comm_hook: this model has a communication hook already; a second would replace it.")
        if engine.comms.inner:
            raise refusal("register_comm_hook: some units are shared by a part of the ranks, which a hook cannot know.", engine)
        policy = engine.reducer.policy
        for name, given in (
            ("reduction.deterministic=True", policy.deterministic),
            ("reduction.average=False", not policy.average),
            ("reduction.predivide_factor", policy.predivide_factor is not None),
            ("reduction.streams", policy.streams > 1),
            ("a divide factor", any(unit.settings.divide_factors for unit in engine.units)),
        ):
            if given:
                raise ShardingError(f"register_comm_hook: the hook does the sums, so {name} means nothing; leave it out.")
    for engine in engines:
        engine.reducer.set_hook(CommHook(state, hook))


def reducer_stats(model: nn.Module) -> list[BucketStats]:
    """Return the reductions of the last backward that synchronised, in the order of their launches on this rank.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    return [one for engine in engines_in(model, "reducer_stats") for one in engine.stats.report_reductions()]


def relearn_order(model: nn.Module) -> None:
    """Learn the order of the reductions again in the next backward that synchronises.

    The order is the one in which gradients arrive on rank 0. It is learned in the first such backward, and again when a new set
    of parameters is trainable. Every rank must call this alike.

    Raises:
        ShardingError: `model` contains no unit, or is only a part of a root.
    """
    for engine in engines_in(model, "relearn_order"):
        engine.reducer.order.relearn()
