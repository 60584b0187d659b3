"""What a rehearsal says is what the engine then does: bytes, collectives, and the peak with activations."""

from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.commands.rehearsal.hardware import DEVICES, NETWORKS, Cluster
from fsdp.commands.rehearsal.rehearse import WARM_UP, Batch, Job, rehearse
from tests.commands.rehearsal.models import MODELS, Case
from tests.support.everything import EVERYTHING

STRATEGIES: Final = ("NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
PAIRS: Final = [
    (name, strategy)
    for number, name in enumerate(MODELS)
    for other, strategy in enumerate(STRATEGIES)
    if EVERYTHING or (number + other) % 2 == 0
]
"""In the default tests each model has half of the strategies, and each strategy half of the models."""
BF16: Final = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "no prefetch": {"prefetch": 0},
    "prefetch of three": {"prefetch": 3},
    "small buckets": {"reduction": fsdp.ReductionPolicy(bucket_cap_mb=0.01)},
    "bf16": {"mp_policy": BF16},
    "kept after the forward": {"reshard_after_forward": False},
    "unaligned": {"aligned": False},
}


def job_of(case: Case, size: int, micro_batches: int = 1) -> Job:
    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return case.build()

    return Job(
        build,
        lambda: Batch((case.inputs().to("meta"),)),
        lambda output: output.float().square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        size,
        Cluster(DEVICES["cpu"], NETWORKS["ethernet-10"], per_host=2),
        micro_batches,
    )


def options_of(case: Case, strategy: str, size: int, **more: Any) -> dict[str, Any]:
    mesh = {"mesh": (size // 2, 2)} if strategy == "HYBRID_SHARD" else {}
    return {"sharding_strategy": strategy, "auto_wrap_policy": case.units, **mesh, **more}


def trained(case: Case, size: int, options: dict[str, Any], micro_batches: int = 1) -> tuple[int, list[Any]]:
    """The peak bytes of rank 0, and what it launched in its last step."""

    def train(rank: int) -> tuple[int, list[Any]]:
        torch.manual_seed(0)
        model = fsdp.fully_shard(case.build(), **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        here = current_rank()
        for _ in range(WARM_UP + 1):
            here.log.clear()
            for number in range(micro_batches):
                with fsdp.no_sync(model) if number < micro_batches - 1 else nullcontext():
                    model(case.inputs()).float().square().mean().backward()
            optimizer.step()
            model.zero_grad()
        log = [(call.kind, call.label, call.received) for call in here.log if call.kind != "gather_objects"]
        return fsdp.memory_bytes(model, peak=True), log

    return fsdp.simulate(size, train)[0]


def check(case: Case, size: int, options: dict[str, Any], micro_batches: int = 1) -> None:
    """A rehearsal says what a run does."""
    found = rehearse(job_of(case, size, micro_batches), options)
    peak, log = trained(case, size, options, micro_batches)
    assert found.engine_peak == peak
    assert [(one.kind, one.label, one.received) for one in found.collectives] == log


@pytest.mark.parametrize("size", [2, 8] if EVERYTHING else [4])
@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_bytes_and_collectives_are_those_of_the_engine(name: str, strategy: str, size: int) -> None:
    check(MODELS[name], size, options_of(MODELS[name], strategy, size))


@pytest.mark.parametrize("name", OPTIONS)
def test_with_any_option_too(name: str) -> None:
    check(MODELS["GPT"], 3, options_of(MODELS["GPT"], "FULL_SHARD", 3, **OPTIONS[name]))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "SHARD_GRADIENTS"])
def test_with_accumulation_too(strategy: str) -> None:
    check(MODELS["GPT"], 2, options_of(MODELS["GPT"], strategy, 2), micro_batches=3)
