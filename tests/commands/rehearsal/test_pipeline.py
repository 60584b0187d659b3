"""What a rehearsal says of the stages of a pipeline is what torch's schedule over the engine's `PipelineStage` does."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fsdp.commands.planning.shapes import Block, cut_decoder
from fsdp.commands.rehearsal.pipeline import BUBBLE, rehearse_all
from fsdp.commands.rehearsal.rehearse import Batch, Dimensions
from fsdp.commands.rehearsal.stage_passes import RECEIVED
from tests.commands.rehearsal.models import WIDTH
from tests.commands.rehearsal.parallel_models import PARALLEL, job_of
from tests.commands.rehearsal.pipeline_allocator_program import LENGTH, MICRO_BATCHES, ROWS, STRATEGIES, Run
from tests.support.processes import results_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("tests.commands.rehearsal.pipeline_allocator_program", 4, tmp_path_factory.mktemp("runs"))


def rehearsed(strategy: str, micro_batches: int = MICRO_BATCHES, stages: int = 2) -> Any:
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    job = replace(
        job_of(PARALLEL["sequences"], 2 * stages, micro_batches), batch=lambda: Batch((tokens.clone(),)), cut=cut_decoder
    )
    options = {"sharding_strategy": strategy, "auto_wrap_policy": {Block}}
    return rehearse_all(job, options, dimensions=Dimensions(pp=stages))


ALLOCATES_LATE = find_spec("torch.distributed.pipelining._recv_buffers") is not None
"""Whether torch allocates what a stage receives when it comes: from 2.15 on."""


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_stage_is_as_in_a_run(strategy: str, runs: list[dict[str, Any]]) -> None:
    found = rehearsed(strategy)
    # a plan counts what a stage receives from the beginning, as torch does that allocates it there: inputs and gradients
    late = 2 * MICRO_BATCHES * sum(one.nbytes for stage in found.stages for one in stage.sent) if ALLOCATES_LATE else 0
    for stage, run in zip(found.stages, runs[::2], strict=True):
        counted = Run(*run[strategy])
        assert [(one.kind, one.label, one.received) for one in stage.collectives if one.label != "pp"] == counted.collectives
        assert stage.engine_peak == counted.engine_peak
        # the threads of gloo hold copies of their own for a moment
        assert 0.97 * counted.peak < stage.peak < 1.005 * (counted.peak + late)


def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages_from_it_to_the_last_one() -> None:
    many, few = (rehearsed("SHARD_GRADIENTS", micro_batches=count, stages=3).stages for count in (6, 3))
    saved = [stage.saved for stage in few]
    # the tokens of all micro-batches are there from the beginning, and what was sent first stays; other activations do not
    more = 3 * ROWS * LENGTH * 8 + ROWS * LENGTH * WIDTH * 4
    assert [stage.saved for stage in many] == [saved[0] + more, *saved[1:]]
    assert saved[0] > 1.4 * saved[1]
    assert many[1].held[RECEIVED] == 2 * few[1].held[RECEIVED]


def test_a_step_has_the_bubble_of_the_slowest_stage() -> None:
    found = {count: rehearsed("SHARD_GRADIENTS", micro_batches=count) for count in (2, 8)}
    for count, one in found.items():
        slowest = max(one.stages, key=lambda stage: stage.seconds)
        a_micro_batch = max(stage.passing for stage in one.stages) / count
        assert one.seconds == slowest.seconds + one.exposed[BUBBLE]
        assert a_micro_batch < one.exposed[BUBBLE] < 1.5 * a_micro_batch
        assert one.peak == max(stage.peak for stage in one.stages)
    assert found[8].exposed[BUBBLE] / found[8].seconds < found[2].exposed[BUBBLE] / found[2].seconds / 2


def test_what_is_received_is_counted() -> None:
    sent = ROWS * LENGTH * WIDTH * 4
    for stage in rehearsed("FULL_SHARD").stages:
        received = [(one.kind, one.received) for one in stage.collectives if one.label == "pp"]
        assert received == [("receive", sent)] * MICRO_BATCHES
