"""With random delays before everything that computes or communicates, the bits are the same."""

from typing import Any

import pytest
import torch

import fsdp
from fsdp.debug.delays import DELAYS, delayed
from fsdp.device.streams import Streams
from tests.support.everything import some
from tests.support.models import CASES, Trained, assert_trained_alike, is_at_rest, own_batches, train, wrap

OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"prefetch": 2},
    "SHARD_GRAD_OP": {},
    "SHARD_GRADIENTS": {},
    "SHARD_OPTIMIZER": {},
    "NO_SHARD": {},
    "HYBRID_SHARD": {"mesh": (2, 2)},
}


def trained(strategy: str, deterministic: bool) -> list[Trained]:
    case = CASES["net"]

    def one_rank(rank: int) -> Trained:
        reduction = fsdp.ReductionPolicy(deterministic=deterministic)
        model = wrap(case, sharding_strategy=strategy, reduction=reduction, **OPTIONS[strategy])
        found = train(model, own_batches(case, rank, micro=2), accumulate=lambda: fsdp.no_sync(model))
        assert is_at_rest(model)
        return found

    return fsdp.simulate(4, one_rank)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("strategy", OPTIONS)
def test_delays_in_the_simulated_world_change_no_bit(strategy: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(strategy, deterministic)
    for seed in some(0, 1):
        monkeypatch.setenv(DELAYS, str(seed))
        for one, other in zip(trained(strategy, deterministic), wanted, strict=True):
            assert_trained_alike(one, other, within=0)


def test_every_entrance_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host by sleeping, half of the times."""
    slept: list[float] = []
    monkeypatch.setattr("fsdp.debug.delays.time.sleep", slept.append)
    monkeypatch.setenv(DELAYS, "1")
    streams = delayed(Streams(), 0, torch.device("cpu"))
    for entered in (streams.gathering, streams.reducing, streams.landing):
        with entered():
            pass
    for call in (streams.pass_begins, streams.released, streams.await_reductions):
        call()
    for work in streams.gathered():
        work.wait()
    assert len(slept) == 7
    assert 0 < sum(seconds > 0 for seconds in slept) < 7
    assert max(slept) <= 0.002
