"""What a rehearsal says of data and tensor parallelism is what a run does: bytes, collectives of both dimensions, the peak."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.commands.rehearsal.rehearse import WARM_UP, Dimensions, Rehearsal, rehearse
from tests.commands.rehearsal.models import WIDTH
from tests.commands.rehearsal.parallel_allocator_program import CASES, ROWS, SIZE
from tests.commands.rehearsal.parallel_models import PARALLEL, Parallel, Training, job_of, options_of
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

STRATEGIES: Final = ("SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
SIZES: Final = [(size, Dimensions(tp=tp)) for size, tp in ([(4, 2), (8, 2), (8, 4), (4, 4)] if EVERYTHING else [(4, 2)])]
SIZES_OF_EXPERTS: Final = [(4, Dimensions(ep=2)), (4, Dimensions(ep=4)), (8, Dimensions(tp=2, ep=2))]
NAMES: Final = [name for name in PARALLEL if name != "experts"]


class Run(NamedTuple):
    """What rank 0 of a run has counted."""

    peak: int
    """Bytes that the engine held at most."""
    collectives: list[tuple[str, str, int]]
    """Of the last step, in order: kind, label, bytes that reach the rank."""
    gradients: int
    optimizer_state: int
    """But for counts of steps, which are on the host."""


def trained(case: Parallel, size: int, dimensions: Dimensions, options: dict[str, Any], micro_batches: int = 1) -> Run:
    def train(rank: int) -> Run:
        training = Training(case, size, dimensions, options)
        here = current_rank()
        for _ in range(WARM_UP + 1):
            here.log.clear()
            training.step(micro_batches)
        gradients = local_bytes(parameter.grad for parameter in training.model.parameters())
        state = local_bytes(value for values in training.optimizer.state.values() for value in values.values() if value.ndim)
        found = [(call.kind, call.label, call.received) for call in here.log if call.kind != "gather_objects"]
        return Run(fsdp.memory_bytes(training.model, peak=True), found, gradients, state)

    with case.around():
        return fsdp.simulate(size, train)[0]


def local_bytes(values: Iterator[Any]) -> int:
    local = [one.to_local() if isinstance(one, DTensor) else one for one in values]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local if one.numel()}.values())


def check(found: Rehearsal, run: Run) -> None:
    assert [(one.kind, one.label, one.received) for one in found.collectives if one.kind != "all_to_all"] == [
        (kind, "tp" if label == "torch" else label, received) for kind, label, received in run.collectives
    ]
    assert found.engine_peak == run.peak
    assert {"tp", "ep"} & {one.label for one in found.collectives}


@pytest.mark.parametrize(("size", "dimensions"), SIZES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_collectives_are_those_of_a_run(name: str, strategy: str, size: int, dimensions: Dimensions) -> None:
    if strategy == "HYBRID_SHARD":
        size *= 2
    compare(name, strategy, size, dimensions)


@pytest.mark.parametrize(("size", "dimensions"), SIZES_OF_EXPERTS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_with_experts_on_some_ranks_each_too(strategy: str, size: int, dimensions: Dimensions) -> None:
    found = compare("experts", strategy, size, dimensions)
    # tokens go to the experts and back, and so do gradients: not in the list of the simulated world, where objects are sent
    sent = [one for one in found.collectives if one.kind == "all_to_all"]
    assert len(sent) == 3 * 4
    assert {(one.label, one.ranks) for one in sent} == {("ep", dimensions.ep)}
    assert {one.received for one in sent} == {2 * 16 * WIDTH * 4 * (dimensions.ep - 1) // dimensions.ep}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", PARALLEL)
def test_gradients_and_the_state_of_the_optimizer_are_those_of_a_run(name: str, micro_batches: int) -> None:
    dimensions = Dimensions(ep=2) if name == "experts" else Dimensions(tp=2)
    options = options_of(PARALLEL[name], "FULL_SHARD", 4, dimensions)
    found = rehearse(job_of(PARALLEL[name], 4, micro_batches), options, dimensions=dimensions)
    run = trained(PARALLEL[name], 4, dimensions, options, micro_batches)
    check(found, run)
    assert found.held["optimizer state"] == run.optimizer_state
    assert found.held["shards"] == run.gradients


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("dtypes", ["bf16", "float32 reduced in bf16"])
def test_with_other_dtypes_too(name: str, dtypes: str) -> None:
    computing, reducing = (torch.bfloat16, torch.float32) if dtypes == "bf16" else (torch.float32, torch.bfloat16)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=reducing)
    compare(name, "FULL_SHARD", 4, Dimensions(ep=2) if name == "experts" else Dimensions(tp=2), mp_policy=policy)


def compare(name: str, strategy: str, size: int, dimensions: Dimensions, **more: Any) -> Rehearsal:
    """Rehearse a job and train it."""
    options = options_of(PARALLEL[name], strategy, size, dimensions, **more)
    found = rehearse(job_of(PARALLEL[name], size), options, dimensions=dimensions)
    check(found, trained(PARALLEL[name], size, dimensions, options))
    return found


Peaks = dict[tuple[str, str, int], tuple[int, int]]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Peaks, Rehearsal]:
    """The most that torch's allocator gave out in a step, and the engine's peak; and a rehearsal beside real groups."""
    found: tuple[Peaks, Rehearsal] = results_of(
        "tests.commands.rehearsal.parallel_allocator_program", 1, tmp_path_factory.mktemp("peaks")
    )[0]
    return found


@pytest.mark.parametrize(("name", "strategy", "tp"), CASES)
def test_the_peak_is_that_of_the_allocator(name: str, strategy: str, tp: int, trainings: tuple[Peaks, Rehearsal]) -> None:
    found = rehearse(
        job_of(PARALLEL[name], SIZE, rows=ROWS), options_of(PARALLEL[name], strategy, SIZE, tp), dimensions=Dimensions(tp=tp)
    )
    peak, engine = trainings[0][name, strategy, tp]
    assert found.engine_peak == engine
    assert found.peak == pytest.approx(peak, rel=0.001)
    assert sum(found.held.values()) == found.peak


def test_a_rehearsal_leaves_the_groups_of_its_process_alone(trainings: tuple[Peaks, Rehearsal]) -> None:
    case = PARALLEL["perceptrons"]
    assert trainings[1] == rehearse(
        job_of(case, 4), options_of(case, "FULL_SHARD", 4, Dimensions(tp=2)), dimensions=Dimensions(tp=2)
    )
