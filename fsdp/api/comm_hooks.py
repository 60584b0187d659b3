"""Communication hooks: a function of the user reduces the buckets."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.futures import Future

from fsdp.errors import ShardingError
from fsdp.reduction.comm_hook import CommHook
from fsdp.runtime.registry import engines_in, refuse_unless_resting


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
        if engine.reducer.hook is not None:
            raise ShardingError("register_comm_hook: this model has a communication hook already; a second would replace it.")
        policy = engine.reducer.policy
        for name, given in (
            ("deterministic=True", policy.deterministic),
            ("average=False", not policy.average),
            ("predivide_factor", policy.predivide_factor is not None),
            ("streams", policy.streams > 1),
        ):
            if given:
                raise ShardingError(
                    f"register_comm_hook: the hook does the sums, so reduction.{name} means nothing; leave it out."
                )
    for engine in engines:
        engine.reducer.set_hook(CommHook(state, hook))
