"""One rank fails in a mesh of two dimensions: the ranks of both know who and why within seconds, and do the step again."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.comm.failure.pending_call import RESTARTED
from tests.building import test_experts as experts
from tests.comm.failure.dimension_programs import LATE, PLACES, STAGES, STEPS, Mine, Retried, Told, alone, fail, retried, told
from tests.state_dict import test_dimensions as dimensions
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

RETRIED = [*(f"{place}, rank {rank}" for place in PLACES for rank in (0, 3)), "agreed", "all fail"]
STAGED = [f"stage {stage}" for stage in (*STAGES, ("", None, 0))]
OF_ONE_WORLD = [*RETRIED, "disagrees", "leaves out", "context 0", "context 3", "experts", "stage late", *STAGED]
"""In this order: after the last ones no model can be wrapped, because a stage may be a step behind."""
UNITS = {"a forward": "1", "a backward": "Net", "the end of a forward": "Net", "agreed": "Net"}
"""The unit that is named: in a backward, the last one of which the engine has learned something."""


def run(folder: Path, *names: str) -> list[dict[str, Any]]:
    """What every rank saved before it ended."""
    return results_of("tests.comm.failure.dimension_programs", 4, folder, *names, seconds=240, may_fail=1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("dimensions"), *OF_ONE_WORLD)


def check_trained(found: Retried, wanted: Retried) -> None:
    """As one process trains."""
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    for mine, theirs in zip(found.weights, wanted.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)


def check_told(found: list[Retried], culprit: int, unit: str) -> None:
    """Each rank was told once, of the first cause."""
    for rank, one in enumerate(found):
        (told,) = one.told
        if rank == culprit:
            assert told.kind == "Mine"
        else:
            assert told[0] == "PeerFailed" and told[2:] == (culprit, unit, "Mine: no")


@pytest.mark.gloo
@pytest.mark.parametrize("name", [name for name in RETRIED if name != "all fail"])
def test_all_name_the_one_that_fails_and_do_the_step_again(name: str, ranks: list[dict[str, Any]]) -> None:
    found = [one[name] for one in ranks]
    place, _, culprit = name.partition(", rank ")
    check_told(found, int(culprit or 3), UNITS[place])
    assert all(one.seconds[0] < 5 for one in found)
    wanted = alone()
    for one in found:
        check_trained(one, wanted)


@pytest.mark.gloo
def test_a_step_that_fails_on_all_ranks_is_done_again(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["all fail"].told == [Told("Mine", "no", None, None, "")]
        check_trained(one["all fail"], alone())


@pytest.mark.parametrize("seed", range(20) if EVERYTHING else (0, 3))
@pytest.mark.parametrize("place", PLACES)
def test_in_the_simulated_world_too(place: str, seed: int) -> None:
    culprit = seed % 4
    found = fsdp.simulate(4, lambda rank: retried(place, culprit), seed=seed)
    check_told(found, culprit, UNITS[place])
    wanted = alone()
    for one in found:
        check_trained(one, wanted)


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("kind", ["replicas", "experts", "experts and tensor parallel"])
def test_over_replicas_and_experts_too(kind: str, culprit: int) -> None:
    def attempts() -> list[tuple[str, int | None]]:
        model = dimensions.build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = model[1].register_forward_pre_hook(fail) if dist.get_rank() == culprit else None
        said: list[tuple[str, int | None]] = []
        while not said or said[-1][0] != "fine":
            try:
                dimensions.step(kind, model, optimizer, 0)
                said.append(("fine", None))
            except (Mine, fsdp.WorldError) as failure:
                said.append(told(failure)[0:3:2])
                if handle is not None:
                    handle.remove()
        return said

    for rank, said in enumerate(dimensions.on_all(kind, attempts)):
        assert said == [("Mine", None) if rank == culprit else ("PeerFailed", culprit), ("fine", None)]


def test_a_step_that_fails_on_all_simulated_ranks_is_done_again() -> None:
    for one in fsdp.simulate(4, lambda rank: retried("a forward", None)):
        assert [told.kind for told in one.told] == ["Mine"]
        check_trained(one, alone())


@pytest.mark.gloo
@pytest.mark.parametrize("how", ["killed", "ends"])
def test_a_rank_that_ends_is_named_by_all_others(how: str, tmp_path: Path) -> None:
    *others, last = run(tmp_path, how)
    assert last == {}
    for first, seconds, again in (one[how] for one in others):
        assert (first.kind, first.rank) == ("PeerFailed", 3)
        assert first.text.startswith("rank 3 has ended, while this rank waited for it")
        assert seconds < 5
        assert again.kind == "PeerFailed"


@pytest.mark.gloo
def test_a_rank_that_ends_is_named_where_its_neighbour_meets_an_error_of_the_backend(tmp_path: Path) -> None:
    """In a group of the user's own, about which no rank knows anything."""
    first, second, third, _ = (one.get("killed beside") for one in run(tmp_path, "killed beside"))
    assert third.kind == "RuntimeError" and "gloo/" in third.text
    assert "\nfsdp: rank 3 has ended" in third.text
    for one in (first, second):
        assert (one.kind, one.rank) == ("PeerFailed", 3)


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "culprit"), [("context 0", 0), ("context 3", 3), ("stage late", LATE[1])])
def test_a_rank_that_fails_where_no_parameter_is_a_dtensor_is_named_by_all(
    name: str, culprit: int, ranks: list[dict[str, Any]]
) -> None:
    """In context parallelism the group is a part of the data dimension."""
    for rank, one in enumerate(ranks):
        told, seconds = one[name]
        assert (told.kind, told.rank) == (("Mine", None) if rank == culprit else ("PeerFailed", culprit))
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_wait_for_each_other_for_one_that_failed_in_the_loss_do_the_step_again(ranks: list[dict[str, Any]]) -> None:
    """Each waits in another group, of experts or of all."""
    model = experts.make()
    losses = [[model(experts.batch(step, rank)).square().mean() for step in range(STEPS)] for rank in range(4)]
    (sum(map(sum, losses)) / 4).backward()  # type: ignore[arg-type, union-attr]
    for rank, one in enumerate(ranks):
        (told,) = one["experts"].told
        assert told[:1] + told[2:] == (("Mine", None, None, "") if rank == 3 else ("PeerFailed", 3, None, RESTARTED))
        assert one["experts"].seconds[0] < 5
        assert one["experts"].losses == pytest.approx([loss.item() for loss in losses[rank]])
        for gradient, parameter in zip(one["experts"].weights, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.gloo
def test_a_rank_of_a_pipeline_that_is_killed_is_named_on_all_stages(tmp_path: Path) -> None:
    for one in run(tmp_path, "stage killed")[:3]:
        told, seconds = one["stage killed"]
        assert (told.kind, told.rank) == ("PeerFailed", 3) and seconds < 5
        assert told.text.startswith("rank 3 has ended")


@pytest.mark.gloo
def test_a_step_of_a_pipeline_that_failed_is_done_again_if_no_stage_has_completed_it(ranks: list[dict[str, Any]]) -> None:
    """Each rank waits for another stage, or for its own, whose gradients are reduced after the last micro-batch."""
    *failed, whole = STAGED
    for rank, one in enumerate(ranks):
        assert not one[whole].told and len(one[whole].weights) == 12
        for name, stage in zip(failed, STAGES, strict=True):
            last = one[name].told[-1]
            if stage == LATE:
                assert last.kind == "WorldError" and "load a checkpoint" in last.text
                continue
            assert len(one[name].told) == 1 and one[name].seconds[0] < 5
            assert (last.kind, last.rank) == (("Mine", None) if rank == stage[1] else ("PeerFailed", stage[1]))
            assert one[name].losses == one[whole].losses
            assert all(map(torch.equal, one[name].weights, one[whole].weights))


@pytest.mark.gloo
def test_a_rank_that_wraps_otherwise_is_named_by_all(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        for name, what in (("disagrees", "reshard_policy=ReshardPolicy.AFTER_BACKWARD"), ("leaves out", "dtensors=False")):
            told, seconds = one[name]
            assert told.kind == "ShardingError" and f"but rank 3 has {what}" in told.text
            assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_call_different_collectives_of_tensor_parallelism_are_named_by_all(tmp_path: Path) -> None:
    for one in run(tmp_path, "calls another"):
        told, seconds = one["calls another"]
        assert told.kind == "WorldError" and "of communicator 'routed'" in told.text
        assert "rank 3 called barrier('mesh_tp')" in told.text and "allreduce('mesh_tp'), which rank 2 followed" in told.text
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_wait_for_each_other_across_dimensions_are_named_by_all(tmp_path: Path) -> None:
    """And not where one of them is only slow."""
    for one in run(tmp_path, "is slow", "crosses"):
        assert one["is slow"] == []
        found, seconds = one["crosses"]
        assert found.kind == "WorldError" and found.text.startswith("Deadlock: nobody can go on.")
        for rank, neighbour in ((0, 1), (3, 2)):
            call = rf"Rank {rank} waits for allreduce\('mesh_tp'\), operation \d+ of communicator 'routed'"
            assert re.search(rf"{call}, which rank {neighbour} did not call", found.text)
        for rank, peer in ((1, 3), (2, 0)):
            assert re.search(rf"Rank {rank} waits for all_gather\('0', [^.]*'shard', which rank {peer} did", found.text)
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_wait_for_each_other_across_replicas_are_named_by_all(tmp_path: Path) -> None:
    for one in run(tmp_path, "evaluates alone"):
        found, seconds = one["evaluates alone"]
        assert found.kind == "WorldError" and found.text.startswith("Deadlock: nobody can go on.")
        assert re.search(r"Rank 2 waits for [^.]*'world', which rank 3 did not call", found.text)
        assert re.search(r"Rank 3 waits for all_gather\('0', [^.]*'shard', which rank 2 did not call", found.text)
        assert "Rank 0" not in found.text and "Rank 1" not in found.text, "they wait as well, and nobody waits for them"
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_wait_for_each_other_across_stages_are_named_by_all(tmp_path: Path) -> None:
    for one in run(tmp_path, "stage evaluates alone"):
        found, seconds = one["stage evaluates alone"]
        assert found.kind == "WorldError" and found.text.startswith("Deadlock: nobody can go on.")
        first = r"(recv of mesh_pp, operation 8|allreduce\('mesh_pp'\), operation 3)"  # the latter since torch 2.15
        assert re.search(rf"Rank 3 waits for {first} of communicator '[^']*', which rank 1 did not call", found.text)
        assert re.search(r"Rank 1 waits for all_reduce\('norm of gradients', [^.]*, which rank 3 did not call", found.text)
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_wait_for_messages_of_each_other_are_named_by_both(tmp_path: Path) -> None:
    for rank, one in enumerate(run(tmp_path, "stages receive")):
        found, seconds = one["stages receive"]
        assert found.kind == "WorldError" and found.text.startswith("Deadlock: nobody can go on.")
        other = (rank + 2) % 4
        call = f"recv of mesh_pp, operation 1 of communicator 'messages {other} to {rank}'"
        assert f"Rank {rank} waits for {call}, which rank {other} did not call." in found.text
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_of_replicas_do_a_step_again_after_two_failures_of_one_of_them(tmp_path: Path) -> None:
    for rank, one in enumerate(run(tmp_path, "fails twice")):
        assert [found.reason for found, _ in one["fails twice"]] == ["" if rank == 2 else "Mine: no"] * 2
        assert all(seconds < 5 for _, seconds in one["fails twice"])


@pytest.mark.gloo
def test_a_rank_that_waits_for_one_that_disagrees_with_others_gets_their_error(tmp_path: Path) -> None:
    for one in run(tmp_path, "disagrees beside"):
        found, seconds = one["disagrees beside"]
        assert found.kind == "WorldError"
        assert re.match(r"The ranks disagree on [^:]*'world': rank 1 called gather_objects\('save'\)", found.text)
        assert seconds < 5


@pytest.mark.gloo
def test_ranks_that_may_be_a_step_apart_do_not_go_on(tmp_path: Path) -> None:
    """Those of one coordinate of tensor parallelism have completed a backward that failed on one of another."""
    for rank, one in enumerate(run(tmp_path, "apart")):
        first, seconds, again = one["apart"]
        assert first[0] == ("Mine" if rank == 0 else "PeerFailed") and (rank == 0 or first.rank == 0)
        assert seconds < 5
        assert again.kind == "WorldError" and "rank 1 has completed a backward that rank 0 has abandoned" in again.text
