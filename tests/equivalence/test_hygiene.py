"""Models that come and go leave nothing behind, loaders of data work beside them, and an end in the middle is quiet."""

import gc
import json
import pickle
import re
import subprocess
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.equivalence.hygiene_programs import LIMIT, ROUNDS, X, round_of_training
from tests.support.models import Block, loss_of, make_net
from tests.support.processes import command, environment
from tests.support.ranks import on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hygiene")
    processes = []
    for rank in range(2):
        with open(folder / f"{rank}.txt", "wb") as output:
            program = command("tests.equivalence.hygiene_programs", rank, folder)
            processes.append(subprocess.Popen(program, env=environment(), stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [one.wait(timeout=LIMIT + 10) for one in processes]
    finally:
        for one in processes:
            one.kill()  # nothing, to one that has ended
            one.wait()
    printed = [(folder / f"{rank}.txt").read_text() for rank in range(2)]
    assert codes == [0, 0], printed
    # on a busy machine one rank may wrap seconds after the other
    printed = [re.sub(r"fsdp: rank \d has waited \d+ s in fully_shard for rank \d\.\n", "", one) for one in printed]
    return [{**json.loads((folder / f"{rank}.json").read_text()), "printed": printed[rank]} for rank in range(2)]


@pytest.mark.gloo
def test_fifty_rounds_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    """On real ranks: no thread, file, group, hook or tensor, and no memory but what the allocator keeps."""
    for one in ranks:
        before, after = one["before"], one["after"]
        grown = after.pop("resident") - before.pop("resident")
        assert after == before
        assert grown < 8 * 2**20, f"{grown:,} bytes in {ROUNDS} rounds"


@pytest.mark.gloo
def test_loaders_that_fork_and_that_spawn_work_beside_it(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["spawn"] == ranks[1]["fork"] == 276.0


@pytest.mark.gloo
def test_an_end_with_collectives_in_flight_is_quiet(ranks: list[dict[str, Any]]) -> None:
    assert [one["printed"] for one in ranks] == ["", ""]


def test_twenty_rounds_in_the_simulated_world_leave_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    fsdp.simulate(2, lambda rank: round_of_training())
    before = held()
    fsdp.simulate(2, lambda rank: [round_of_training() for _ in range(20)] and None)
    assert held() == before


@pytest.mark.parametrize("door", [fsdp.FullyShardedDataParallel, fsdp.fully_shard])
def test_a_pickle_is_refused_with_the_remedy(door: Any) -> None:
    def one_rank(rank: int) -> str:
        with pytest.raises(fsdp.ShardingError) as caught:
            pickle.dumps(door(make_net(), auto_wrap_policy={Block}))
        return str(caught.value)

    assert (
        "save model.state_dict() where each rank has all parameters, and fsdp.full_state_dict(model)"
        in fsdp.simulate(2, one_rank)[1]
    )


@on_ranks(2)
def test_printing_a_model_at_any_time_shows_what_is_there(rank: int) -> None:
    """Whatever is reached through the module has memory, also while its whole parameters have none."""
    model = fsdp.FullyShardedDataParallel(make_net(), auto_wrap_policy={Block})
    printed: list[str] = []

    def look(*_: Any) -> None:
        printed.append(repr(model))
        printed.extend(repr(p) for p in model.parameters())
        printed.extend(repr(getattr(one, "weight", None)) for one in model.modules())
        printed.extend(repr(p) for one in model.modules() for p in one._parameters.values())

    for module in (model.blocks[1], model.blocks[2].up, model.leave):
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for _ in range(2):
        loss_of(model(X)).backward()
        look()
    assert all(printed)


def test_a_module_that_prints_its_weights_may_be_one() -> None:
    class Shows(nn.Linear):
        def extra_repr(self) -> str:
            return f"{fsdp.to_local(self.weight).detach().tolist()}"

    def one_rank(rank: int) -> tuple[str, str]:
        model = fsdp.fully_shard(nn.Sequential(Shows(2, 2), nn.Linear(2, 2)), auto_wrap_policy={Shows})
        loss = model(torch.ones(1, 2)).sum()
        between = repr(model)
        loss.backward()
        return between, repr(model)

    for between, after in fsdp.simulate(2, one_rank):
        assert between.startswith("Sequential(\n  (0): Shows([") and after == between
