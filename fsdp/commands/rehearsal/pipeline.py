"""Rehearses a pipeline: each stage by itself, in the order of 1F1B, and the step of all of them from the slowest one.

Rule 1: a stage keeps what torch's keeps: a buffer for each micro-batch that it receives, and one for each gradient.
Rule 2: sends are not waited for. While the pipeline fills and drains, the slowest stage waits for as many micro-batches as there
        are other stages. This is the bubble of GPipe and 1F1B: (stages - 1) / micro-batches of the passes, after Narayanan and
        others, 2021, section 2.2.1 (arXiv:2104.04473).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp.commands.rehearsal.hardware import Cluster
from fsdp.commands.rehearsal.rehearse import ALONE, Batch, Dimensions, Job, Rehearsal, Stage, rehearse
from fsdp.errors import ShardingError

BUBBLE: Final = "the bubble of the pipeline"


def rehearse_all(
    job: Job,
    options: Mapping[str, Any],
    checkpointed: Callable[[nn.Module], list[nn.Module]] | None = None,
    dimensions: Dimensions = ALONE,
) -> Rehearsal:
    """`rehearse`, also over the stages of a pipeline. What is said of memory is the largest of a stage.

    Raises:
        ShardingError: as `rehearse`, or the stages cannot be made or be sent to each other.
    """
    count = dimensions.pp
    if count == 1:
        return rehearse(job, options, checkpointed, dimensions)
    found: list[Rehearsal] = []
    sent: tuple[Any, ...] = ()
    for index in range(count):
        stage = Stage(index, count)
        own = replace(job, build=partial(_cut, job, stage), world_size=job.world_size // count)
        if index:
            own = replace(own, batch=partial(_received, sent))
        if index < count - 1:
            own = replace(own, loss=_tensors)
        found.append(rehearse(own, options, checkpointed, dimensions._replace(pp=1), stage))
        sent = found[-1].sent
    return _together(job, found)


def _together(job: Job, found: list[Rehearsal]) -> Rehearsal:
    slowest, largest = max(found, key=lambda one: one.seconds), max(found, key=lambda one: one.peak)
    hop = max(_seconds_of(job.cluster, job.world_size // len(found), one.sent) for one in found)
    bubble = (len(found) - 1) * (max(one.passing for one in found) / job.micro_batches + 2 * hop)
    return replace(
        slowest,
        peak=largest.peak,
        held=largest.held,
        engine_peak=max(one.engine_peak for one in found),
        saved=max(one.saved for one in found),
        host_peak=max(one.host_peak for one in found),
        padding=sum(one.padding for one in found),
        units=sum(one.units for one in found),
        seconds=slowest.seconds + bubble,
        exposed={**slowest.exposed, BUBBLE: bubble},
        stages=tuple(found),
    )


def _seconds_of(cluster: Cluster, distance: int, sent: tuple[Any, ...]) -> float:
    """Seconds until these tensors are at the same rank of the next stage, `distance` ranks away."""
    link = cluster.link_of((0, distance))
    count: int = sum(one.nbytes for one in sent)
    return link.latency + count / link.bandwidth


def _received(sent: tuple[Any, ...]) -> Batch:
    return Batch(tuple(one.make() for one in sent))


def _cut(job: Job, stage: Stage) -> nn.Module:
    assert job.cut is not None
    try:
        module = job.cut(job.build(), stage.number, stage.total)
    except Exception as reason:
        raise ShardingError(
            f"plan: stages failed for stage {stage.number} of {stage.total} ({type(reason).__name__}: {reason})."
        ) from reason
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is None:
        raise ShardingError(
            f"plan: stages returned {type(module).__name__} for stage {stage.number} of {stage.total}; return a module that has "
            "parameters."
        )
    return module


def _tensors(output: Any) -> tuple[Tensor, ...]:
    """What a stage sends.

    Raises:
        ShardingError: it is something else than one tensor or several.
    """
    sent = tuple(output) if isinstance(output, tuple | list) else (output,)
    if not sent or any(not isinstance(one, Tensor) or type(one) not in (Tensor, nn.Parameter) for one in sent):
        names = ", ".join(type(one).__name__ for one in tree_leaves(output))
        raise ShardingError(f"plan: a stage that is not the last one returned {names}; return ordinary tensors.")
    return sent
