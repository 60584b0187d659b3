"""Real processes over gloo: the gradients and weights of one process, and bitwise those of the simulated world.

One start of W processes runs every program; the tests look at what came out.
"""

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from fsdp.debug.error_notes import MARK
from tests.equivalence.compressed_programs import STEPS as COMPRESSED_STEPS
from tests.equivalence.gloo_programs import ALONE, BF16, DISAGREE, EXACT, FOUR, HOOKS, LIMIT, OTHERS, SGD, TRAININGS, trained
from tests.equivalence.unheard_programs import UNHEARD
from tests.support.everything import EVERYTHING
from tests.support.models import CASES, Case, assert_close, assert_trained_alike, join, joined, loss_of, reference, train
from tests.support.processes import beside_each_other, end_all, start_rank

pytestmark = pytest.mark.gloo

PROGRAMS = "tests.equivalence.gloo_programs"
CASE_OF = {
    "hybrid": "net in layers",
    "hybrid over a mesh": "odd",
    "NO_SHARD, four": "tied",
    "twenty steps in float64": "net in float64",
    "reshard": "net in layers",
    "deep prefetch": "net in layers",
    "delayed": "net in layers",
    "delayed, deterministic": "net in layers",
    "tied": "tied",
    "recurrent": "recurrent",
    "odd": "odd",
    "large": "large",
    "in pieces": "net in layers",
    "shared": "net in layers",
    "on three streams": "net in layers",
    "sparse": "sparse",
}
STEPS = {"twenty steps in float64": 20}
MICRO = {"no_sync": 3, "hybrid, no_sync": 3, "SHARD_GRADIENTS": 3}


def run(size: int, folder: Path, *names: str) -> list[dict[str, Any]]:
    """The results of every rank. If one fails the others are ended, and what all of them printed is shown."""
    ranks = [
        # LOCAL_RANK as torchrun sets it; a DeviceMesh reads it
        start_rank(PROGRAMS, rank, size, folder, *names, output=folder / f"{rank}.txt", LOCAL_RANK=str(rank))
        for rank in range(size)
    ]
    until = time.monotonic() + 2 * LIMIT  # they end themselves after LIMIT seconds, and print their stacks
    try:
        while time.monotonic() < until and not any(one.poll() for one in ranks) and any(one.poll() is None for one in ranks):
            time.sleep(0.02)
    finally:
        end_all(ranks)
    if any(one.returncode for one in ranks):
        printed = [f"rank {rank}:\n{(folder / f'{rank}.txt').read_text()}" for rank in range(size)]
        raise AssertionError("\n".join(["a rank failed, or did not end in time", *printed]))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


SIZES = [2, 3] if EVERYTHING else [3]


@pytest.fixture(scope="module", params=SIZES, ids=[f"{size} processes" for size in SIZES])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(4, tmp_path_factory.mktemp("ranks"), *FOUR)


@pytest.mark.parametrize("name", FOUR)
def test_training_on_a_mesh_is_that_of_one_process(name: str, four_ranks: list[dict[str, Any]]) -> None:
    # shards are held twice where the mesh has a second dimension; over one of them alone there are two trainings
    rows = [four_ranks[:2], four_ranks[2:]] if name == "a mesh of one dimension" else [four_ranks]
    case = CASES[CASE_OF.get(name, "net")]
    for number, row in enumerate(rows):
        found = joined([one[name] for one in row], case.model())
        batches = _batches(case, range(number * len(row), (number + 1) * len(row)), MICRO.get(name, 1))
        assert_trained_alike(found, train(case.model(), batches, SGD))


def _batches(case: Case, ranks: Sequence[int], micro: int) -> list[list[torch.Tensor]]:
    """Of three steps, what these ranks see."""
    return [[case.batch(rank, step * micro + m) for rank in ranks for m in range(micro)] for step in range(3)]


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[CASE_OF.get(name, "net")]
    found = joined([one[name] for one in ranks], case.model())
    wanted = reference(case, len(ranks), STEPS.get(name, 3), MICRO.get(name, 1), optimizer=SGD)
    assert_trained_alike(found, wanted, within=1e-13 if case.dtype is torch.float64 else 1e-6)


def test_twenty_steps_in_fp32_end_at_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    """Gradients are compared in float64, where rounding cannot grow to 1e-6 on the way."""
    case = CASES["net"]
    found = joined([one["twenty steps"] for one in ranks], case.model())
    wanted = reference(case, len(ranks), 20, optimizer=SGD)
    assert_close({**found.weights}, {**wanted.weights}, within=1e-6)


@pytest.mark.parametrize("name", ["twenty steps in float64", "odd", "large", "no_sync"])
def test_the_simulated_world_computes_the_same_bits(name: str, ranks: list[dict[str, Any]]) -> None:
    simulated = fsdp.simulate(len(ranks), TRAININGS[name])
    for one, other in zip(ranks, simulated, strict=True):
        assert_trained_alike(one[name], other, within=0)


def test_deterministic_sums_have_the_same_bits_under_every_strategy_and_in_the_simulated_world(
    four_ranks: list[dict[str, Any]],
) -> None:
    case = CASES["net"]
    full, hybrid, replicated = (
        joined([one[name] for one in four_ranks[:held]], case.model())
        for name, held in (("deterministic", 4), ("deterministic, hybrid", 2), ("deterministic, NO_SHARD", 1))
    )
    assert_trained_alike(hybrid, full, within=0)
    assert_trained_alike(replicated, full, within=0)
    for one, other in zip(four_ranks, fsdp.simulate(4, FOUR["deterministic"]), strict=True):
        assert_trained_alike(one["deterministic"], other, within=0)


def test_ranks_that_finish_first_serve_the_others(ranks: list[dict[str, Any]]) -> None:
    case, size = CASES["net"], len(ranks)
    plain = case.model()
    optimizer = SGD(plain.parameters())
    for step in range(size):
        optimizer.zero_grad()
        for rank in range(step, size):
            (loss_of(plain(case.batch(rank, step))) / (size - step)).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    for one, other in zip(ranks, fsdp.simulate(size, OTHERS["uneven"]), strict=True):
        assert_close({name: one["uneven"][name] for name in wanted}, {**wanted})
        assert all(torch.equal(one["uneven"][name], other[name]) for name in wanted)


@pytest.mark.parametrize(("name", "options"), [("delayed", {}), ("delayed, deterministic", {"reduction": EXACT})])
def test_random_delays_change_no_bit(name: str, options: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    simulated = fsdp.simulate(len(ranks), lambda rank: trained("net in layers", rank, prefetch=2, **options))
    for one, other in zip(ranks, simulated, strict=True):
        assert_trained_alike(one[name], other, within=0)


def test_bf16_computes_the_same_bits_too_and_stays_near_fp32(ranks: list[dict[str, Any]]) -> None:
    """Near: 40 roundings of 2^-9, as derived in test_precision."""
    simulated = fsdp.simulate(len(ranks), OTHERS["bf16"])
    for one, other in zip(ranks, simulated, strict=True):
        assert_trained_alike(one["bf16"], other, within=0)
    plain = reference(CASES["net"], len(ranks), optimizer=SGD)
    found = joined([one["bf16"] for one in ranks], CASES["net"].model())
    assert_close(found.gradients[0], plain.gradients[0], within=40 * 2**-9)
    assert BF16.reduce_dtype is torch.float32


WITHIN = {"fp16_compress_hook": 3 * 2**-11, "fp16_compress_wrapper": 3 * 2**-11, "powerSGD_hook": 1e-5}
"""Two roundings to half precision and one of a sum; PowerSGD makes a matrix orthogonal in fp32."""


@pytest.mark.parametrize("name", HOOKS)
def test_the_hooks_of_torch_do_what_they_do_under_ddp(name: str, ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        ours, theirs = ({key: pair[side] for key, pair in one["hooked"][name].items()} for side in (0, 1))
        assert_close(ours, theirs, within=WITHIN.get(name, 1e-6))


def distances(ranks: list[dict[str, Any]], hook: str, which: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By parameter: how far a compressed average is off in each element, and the whole gradients of each rank."""
    found = [one["compressed"][hook] for one in ranks]
    steps = COMPRESSED_STEPS if which == "total" else 1
    for name, gradient in found[0].own.items():
        unsharded = torch.stack([one.own[name] for one in found]).double()
        joined_up = join([getattr(one, which)[name] for one in found], gradient.shape)
        assert joined_up is not None
        yield (joined_up.double() - steps * unsharded.mean(0)).abs(), unsharded


ROUNDING = 1 + 1e-4
"""Beside what is derived: sums in fp32."""


def test_a_reduction_in_bf16_is_off_by_one_rounding_of_each_rank(ranks: list[dict[str, Any]]) -> None:
    for off, unsharded in distances(ranks, "bf16", "first"):
        # half of the distance of neighbours that have 8 bits; and what gradients in fp32 are good for
        assert bool((off <= 2**-8 * unsharded.abs().mean(0) + 1e-6 * unsharded.abs().max()).all())
    assert max(float(off.max()) for off, _ in distances(ranks, "bf16", "first")) > 0, "nothing was compressed"


@pytest.mark.parametrize("hook", ["int8", "int8, error feedback"])
def test_a_reduction_in_int8_is_off_by_half_a_level_of_each_rank(hook: str, ranks: list[dict[str, Any]]) -> None:
    bound = int8_bound(ranks)
    worst = max(float(off.max()) for off, _ in distances(ranks, hook, "first"))
    assert 0 < worst <= ROUNDING * bound


def int8_bound(ranks: list[dict[str, Any]]) -> float:
    """A block's largest value is at most that of all; of each rank, then the mean."""
    largest = [max(float(one.abs().max()) for one in rank["compressed"]["int8"].own.values()) for rank in ranks]
    return sum(largest) / len(largest) / 254


def test_with_error_feedback_the_sum_over_steps_is_off_by_no_more_than_one_step(ranks: list[dict[str, Any]]) -> None:
    """What one step loses goes with the next. What the last one lost may be half a level of a block with what was lost before."""
    bound = ROUNDING * (1 + 1 / 254) * int8_bound(ranks)
    with_feedback = max(float(off.max()) for off, _ in distances(ranks, "int8, error feedback", "total"))
    without = max(float(off.max()) for off, _ in distances(ranks, "int8", "total"))
    assert with_feedback <= bound
    # the same is lost in each step
    first = max(float(off.max()) for off, _ in distances(ranks, "int8", "first"))
    assert without == pytest.approx(COMPRESSED_STEPS * first, rel=1e-2)
    assert without > bound


def test_what_compressed_reductions_receive(ranks: list[dict[str, Any]]) -> None:
    """Exactly two bytes an element, and one with four bytes for every block that is begun."""
    for one in ranks:
        others = len(ranks) - 1
        chunks = one["compressed"]["bf16"].chunks
        assert one["compressed"]["bf16"].received == others * 2 * sum(chunks)
        assert one["compressed"]["int8"].received == others * sum(-(-chunk // 256) * 260 for chunk in chunks)


def test_compression_for_shards_is_refused_where_there_are_none(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        said = one["compressed under NO_SHARD"]
        assert "the communication hook must come to" in said or "has no chunk for each of 3 ranks" in said


def test_the_norm_is_global_and_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    case, size = CASES["net"], len(ranks)
    plain = case.model()
    for name, gradient in reference(case, size, 1, optimizer=SGD).gradients[0].items():
        plain.get_parameter(name).grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert {one["clipped"][0] for one in ranks} == {ranks[0]["clipped"][0]}
    assert ranks[0]["clipped"][0] == pytest.approx(float(norm), rel=1e-6)
    found = joined([one["clipped"][1] for one in ranks], plain)
    assert_close(found.gradients[0], {name: p.grad for name, p in plain.named_parameters()}, within=2e-6)


def test_the_full_state_is_the_plain_one_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    plain = reference(CASES["tied"], len(ranks), optimizer=SGD)
    for one in ranks:
        assert list(one["state"]) == list(CASES["tied"].model().state_dict())
        assert_close({name: one["state"][name] for name in plain.weights}, {**plain.weights})


def test_a_model_built_differently_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    said = "rank 0 has parameter 'enter.weight' (8, 6) torch.float32, but rank 1 has parameter 'enter.weight' (9, 6)"
    assert all(said in one["built differently"] for one in ranks)


BRANCHES = ("all_gather('one'", "all_gather('other'"), ("one", "other")
SWAPPED = ("all_gather('blocks.0'", "all_gather('blocks.2'"), ("blocks.0", "blocks.2")
DISAGREEMENTS = {
    "other units, of one size": BRANCHES,
    "other units, of two sizes": BRANCHES,
    "swapped order": SWAPPED,
    "swapped order, in the first step": SWAPPED,
    "other branch by shape": BRANCHES,
    # who saves is in no unit
    "one more batch, while the others save": (("gather_objects('full_state_dict'", "all_gather('Net'"), ("", "Net")),
}
"""The two calls, and the units in which the others and rank 1 wait."""
ENDS = "one more batch, and the others end"
OF_THREE = ["other units, of one size", "other units, of two sizes", "swapped order", ENDS]


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes. Two of them do all else that two do, too; they end in the last program."""
    names = {2: (*UNHEARD, *ALONE, *DISAGREE), 3: OF_THREE}
    starts = {str(size): partial(run, size, tmp_path_factory.mktemp("ranks"), *names[size]) for size in names}
    return {int(size): ended.result() for size, ended in beside_each_other(starts).items()}


@pytest.mark.parametrize(
    ("program", "size"), [(name, size) for name in DISAGREEMENTS for size in (2, 3) if size == 2 or name in OF_THREE]
)
def test_ranks_that_disagree_get_an_error_and_nothing_is_mixed(
    program: str, size: int, disagreeing: dict[int, list[dict[str, Any]]]
) -> None:
    """Over gloo the parameters of units of one size would be mixed without a word, and a process with two sizes would abort.

    The time-out of the group is that of the whole program, which ends it.
    """
    calls, waited_in = DISAGREEMENTS[program]
    found = [one[program] for one in disagreeing[size]]
    for rank, (kind, message, note) in enumerate(found):
        assert kind == "WorldError"
        assert "The ranks disagree on operation" in message
        assert all(call in message for call in calls)
        if unit := waited_in[rank == 1]:
            tells_where(note, unit, rank, size)


@pytest.mark.parametrize("program", ALONE)
def test_who_is_alone_in_a_call_between_steps_is_notified(program: str, disagreeing: dict[int, list[dict[str, Any]]]) -> None:
    """Object collectives are checked before they are launched as well, and so is what connects the ranks."""
    call = program.removeprefix("alone in ").removesuffix(" with async_")
    for kind, message, _ in (one[program] for one in disagreeing[2]):
        assert kind == "WorldError"
        assert f"rank 0 called gather_objects('{call}" in message
        assert "where the agreed schedule has all_gather('Net'" in message and "which rank 1 followed" in message
        assert message.endswith("If a rank has fewer batches than the others, train inside fsdp.join.")


def test_a_shard_that_one_rank_alone_reads_is_an_error_on_every_rank(disagreeing: dict[int, list[dict[str, Any]]]) -> None:
    """Its gradient comes late, and the other rank does not know that it must look for it."""
    found = [one["a shard on one rank only"] for one in disagreeing[2]]
    for kind, message, note in found:
        assert kind == "WorldError" or (kind == "PeerFailed" and "with WorldError" in message)
        assert "Rank 0 waits for reduce_scatter('layer'" in message
        assert "which rank 1 did not call" in message
        assert note.startswith(MARK)
    assert any(kind == "WorldError" for kind, *_ in found)


def tells_where(note: str, unit: str, rank: int, size: int) -> None:
    """It names the unit, and has the story."""
    first, root, *rows = note.splitlines()
    assert first.startswith(f"{MARK} {unit!r}, ") and first.endswith(f", on rank {rank} of {size}")
    assert root.startswith("root '") and f"', rank {rank} of {size}, backward " in root
    assert any(row.split()[:1] == [unit] for row in rows)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_with_one_more_batch_gets_an_error_when_the_others_have_ended(
    size: int, disagreeing: dict[int, list[dict[str, Any]]]
) -> None:
    for rank, one in enumerate(disagreeing[size]):
        kind, message, note = one[ENDS]
        if rank == 1:
            assert kind == "PeerFailed"
            # between the end of its group and that of the process it is still there
            assert re.match(r"(rank [02]|each of the ranks 0, 2) (has ended|does not answer)", message), message
            tells_where(note, "Net", 1, size)
        else:
            assert not kind


def test_a_rank_that_fails_ends_the_others_and_shows_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "1.pt").mkdir()
    with pytest.raises(AssertionError, match=r"(?s)a rank failed.*rank 1:.*Is a directory"):
        run(2, tmp_path, "built differently")


def test_steps_of_several_forwards_go_on_after_what_no_hook_sees(disagreeing: dict[int, list[dict[str, Any]]]) -> None:
    ranks = disagreeing[2]
    told = {name: [one[name][0] for one in ranks] for name in UNHEARD}
    assert told.pop("two losses, of which one fails") in ([1, 0], [1, 1])
    assert told.pop("two models, between which a backward fails") == [0, 1]
    assert all(counts == [0, 0] for counts in told.values())
    for one in ranks:
        assert all(weight.isfinite().all() for name in UNHEARD for weight in one[name][1].values())
