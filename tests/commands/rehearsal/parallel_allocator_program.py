"""Trains models with torch's parallel styles as rank 0 of a group that sends nothing, and saves peaks of torch's allocator."""

import gc
from collections.abc import Iterator
from itertools import product

import fsdp
from fsdp.commands.rehearsal.rehearse import Dimensions, Rehearsal, rehearse
from tests.commands.rehearsal.allocator_program import allocated
from tests.commands.rehearsal.parallel_models import PARALLEL, Training, job_of, options_of
from tests.support.everything import EVERYTHING
from tests.support.processes import be_alone, rank_0_of

SIZE, ROWS = 16, 32
ALL = product(("perceptrons", "sequences"), ("SHARD_GRAD_OP", "FULL_SHARD"), (2, 4))
CASES = [*ALL] if EVERYTHING else [("perceptrons", "FULL_SHARD", 2), ("sequences", "SHARD_GRAD_OP", 4)]
"""Models, strategies and sizes of tensor parallelism."""


def peak_of(name: str, strategy: str, tp: int) -> tuple[int, int]:
    """Bytes held at most in a third step, and of these the engine's peak over all steps."""

    def train() -> Iterator[int]:
        case = PARALLEL[name]
        training = Training(case, SIZE, Dimensions(tp=tp), options_of(case, strategy, SIZE, Dimensions(tp=tp)), ROWS)
        with case.around():
            training.step()
            training.model.zero_grad()
            gc.collect()
            yield 0
            training.step()
            yield fsdp.memory_bytes(training.model, peak=True)

    (_, peak), engine = allocated(train)
    return peak.most, engine


def measured() -> tuple[dict[tuple[str, str, int], tuple[int, int]], Rehearsal]:
    with rank_0_of(SIZE):
        # a plan is made beside the groups of a process, which the trainings use afterwards
        case, dimensions = PARALLEL["perceptrons"], Dimensions(tp=2)
        rehearsed = rehearse(job_of(case, 4), options_of(case, "FULL_SHARD", 4, dimensions), dimensions=dimensions)
        return {case: peak_of(*case) for case in CASES}, rehearsed


if __name__ == "__main__":
    be_alone(measured)
