"""`fsdp.plan` compares products of data, tensor and expert parallelism, and refuses what it cannot plan for in a sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp
from fsdp.commands.main import main
from fsdp.commands.planning.shapes import SHAPES, Decoder, parallelize_decoder
from fsdp.commands.rehearsal.hardware import Device, Link
from fsdp.commands.rehearsal.rehearse import Dimensions, Rehearsal
from tests.commands.rehearsal.models import Language, LlamaBlock, tokens
from tests.commands.rehearsal.parallel_models import SMALL, Mixture, parallelize_experts, parallelize_llama

FAST = Device("test", 2**30, 1e12, 1e12, 1e12, Link(1e9, 1e-6))


def llama() -> nn.Module:
    """A model, as the command imports one."""
    return Language(LlamaBlock)


def rows(shared_by: int) -> Tensor:
    """The micro-batch of so many ranks."""
    return tokens().repeat(shared_by, 1)


def plan(model: Callable[[], nn.Module] = llama, **changed: Any) -> fsdp.Plan:
    options: dict[str, Any] = {
        "inputs": tokens,
        "optimizer": "sgd",
        "per_host": 4,
        "device": FAST,
        "network": Link(1e8, 1e-5),
        "reserve": 0,
        "strategies": ["FULL_SHARD"],
        "units": {"blocks": {LlamaBlock, Mixture}},
        "checkpointing": [False],
        "parallelize": parallelize_llama,
        "tp": [1, 2],
        "offload": [False],
        **changed,
    }
    return fsdp.plan(model, options.pop("world_size", 8), **options)


def by_size(found: fsdp.Plan) -> dict[int, Rehearsal]:
    """The rehearsal of each size of tensor parallelism."""
    return {one.choice.dimensions.tp: one.rehearsal for one in found.candidates if one.rehearsal}


def test_every_product_is_compared_and_named() -> None:
    found = plan(strategies=["NO_SHARD", "FULL_SHARD", "HYBRID_SHARD"], tp=[1, 2, 4])
    assert sorted(one.choice.title for one in found.candidates) == [
        "FULL_SHARD",
        "FULL_SHARD x tp 2",
        "FULL_SHARD x tp 4",
        "HYBRID_SHARD 2 x 2 x tp 2",
        "HYBRID_SHARD 2 x 4",
        "NO_SHARD",
    ]
    assert {one["title"]: one["tp"] for one in json.loads(found.to_json())["candidates"]}["FULL_SHARD x tp 4"] == 4


def test_a_product_is_chosen_where_data_parallelism_alone_does_not_fit() -> None:
    peaks = {tp: one.peak for tp, one in by_size(plan(inputs=rows)).items()}
    assert peaks[2] < peaks[1]
    found = plan(inputs=rows, memory=peaks[1] - 1)
    assert found.best is not None and found.best.choice.dimensions == Dimensions(tp=2)
    text = str(found)
    assert "Recommended: FULL_SHARD x tp 2" in text
    assert "init_device_mesh(device, (4, 2), mesh_dim_names=('dp', 'tp')), for parallelize(model, mesh)" in text
    assert 'Then the model is sharded over mesh["dp"].' in text


def test_a_step_of_every_choice_has_as_much_data() -> None:
    more, larger = (by_size(plan(inputs=inputs, optimizer=None)) for inputs in (tokens, rows))
    assert more[1].collectives == larger[1].collectives and more[1].saved == larger[1].saved
    collectives = [sum(one.label == "tp" for one in found[2].collectives) for found in (more, larger)]
    assert collectives[0] == 2 * collectives[1]
    received = [sum(one.received for one in found[2].collectives if one.label == "tp") for found in (more, larger)]
    assert received[0] == received[1]
    assert larger[2].saved > more[2].saved
    assert "ranks that share it by tp take tp times the micro-batches, one after another." in str(plan())
    assert "ranks that share it by tp take tp times the rows in a micro-batch." in str(plan(inputs=rows))
    assert "by tp" not in str(plan(tp=[1], parallelize=None))


def test_ranks_that_share_a_layer_are_on_one_host_where_it_has_enough() -> None:
    inside, across = (by_size(plan(tp=[4], per_host=per_host, network=Link(1e6, 1e-4)))[4] for per_host in (4, 2))
    assert inside.exposed["tp"] < across.exposed["tp"] / 2
    assert inside.collectives == across.collectives


def test_only_reduced_gradients_are_copied_to_the_host() -> None:
    def copied(**changed: Any) -> float:
        slow = replace(FAST, host_link=Link(1e5, 0.0))
        (one,) = by_size(plan(tp=[2], offload=[True], optimizer=None, device=slow, **changed)).values()
        return one.seconds * 1e5 / one.host_held["shards"]

    # a shard goes to the device for the forward and for the backward, and its gradient comes back
    assert 2.0 < copied() < 4.0
    assert copied(inputs=lambda shared_by: rows(64 * shared_by)) < copied() + 1


def test_the_smallest_number_of_ranks_is_a_multiple_of_those_that_share_layers() -> None:
    peak = by_size(plan(tp=[4], optimizer="adamw", world_size=8))[4].peak
    found = plan(tp=[4], optimizer="adamw", memory=peak, max_ranks=16)
    assert found.fewest is not None and found.fewest.ranks == 8 and found.fewest.title == "FULL_SHARD x tp 4"


def test_experts_on_some_ranks_each_are_compared() -> None:
    experts: dict[str, Any] = {"model": lambda: Language(Mixture), "tp": [1], "parallelize": parallelize_experts}
    found = plan(**experts, ep=[1, 2, 4])
    assert [one.choice.title for one in sorted(found.candidates, key=lambda one: one.choice.dimensions)] == [
        "FULL_SHARD",
        "FULL_SHARD x ep 2",
        "FULL_SHARD x ep 4",
    ]
    gathered = {
        one.choice.dimensions.ep: sum(each.received for each in one.rehearsal.collectives if each.kind == "all_gather")
        for one in found.candidates
        if one.rehearsal
    }
    assert gathered[4] < gathered[2] < gathered[1]
    only = str(plan(**experts, ep=[2]))
    assert "(4, 2), mesh_dim_names=('edp', 'ep')" in only
    assert 'experts are sharded over mesh["edp"], and the model over mesh["edp", "ep"]._flatten("dp")' in only


def cut(model: nn.Module, number: int, count: int) -> nn.Module:
    """A stage of a `Language`."""
    assert isinstance(model, Language)
    layers = [model.embedding, *model.blocks, model.head]
    return nn.Sequential(*layers[len(layers) * number // count : len(layers) * (number + 1) // count])


def test_stages_of_a_pipeline_are_compared() -> None:
    found = plan(tp=[1], pp=[1, 2], parallelize=None, stages=cut, loss=lambda output: output.float().square().mean())
    assert {one.choice.title for one in found.candidates} == {"FULL_SHARD", "FULL_SHARD x pp 2"}
    assert "A pipeline runs 1F1B over pp times the micro-batches" in str(found)
    listed = {one["title"]: one for one in json.loads(found.to_json())["candidates"]}
    assert len(listed["FULL_SHARD x pp 2"]["stages"]) == 2 and not listed["FULL_SHARD"]["stages"]
    only = str(plan(tp=[2], pp=[2], stages=cut, parallelize=lambda *_: None))
    assert "(2, 2, 2), mesh_dim_names=('pp', 'dp', 'tp')" in only
    assert 'Then each stage is sharded over mesh["dp"].' in only and "Stage 1: " in only


def fails(model: nn.Module, mesh: DeviceMesh) -> None:
    raise KeyError("no such layer")


class Returns(nn.Sequential):
    """Returns text."""

    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return "text"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a size that does not divide the ranks": ({"tp": [3]}, "tp is 3; give sizes that divide 8 ranks"),
    "no size": ({"ep": [0]}, "ep is 0; give sizes"),
    "sizes without a function": ({"parallelize": None}, "parallelize belongs to tp and ep"),
    "a function without sizes": ({"tp": [1]}, "parallelize belongs to tp and ep"),
    "stages without sizes": ({"stages": cut}, "stages belongs to pp"),
    "stages that fail": (
        {"tp": [1], "parallelize": None, "pp": [2], "stages": lambda *_: [][0]},
        r"stages failed for stage 0 of 2 \(IndexError",
    ),
    "a stage without parameters": (
        {"tp": [1], "parallelize": None, "pp": [2], "stages": lambda *_: nn.ReLU()},
        "stages returned ReLU for stage 0 of 2; return a module that has parameters",
    ),
    "a stage that returns no tensor": (
        {"tp": [1], "parallelize": None, "pp": [2], "stages": lambda model, *_: Returns(model)},
        "a stage that is not the last one returned str; return ordinary tensors",
    ),
    "a product of more ranks": ({"tp": [4], "ep": [4]}, "no product of tp, ep and pp divides 8 ranks"),
    "only what has no other dimension": (
        {"strategies": ["NO_SHARD"], "tp": [2]},
        "NO_SHARD has no tensor and expert parallelism",
    ),
    "a function that fails": ({"tp": [2], "parallelize": fails}, r"parallelize failed on DeviceMesh\(.*tp=2.*KeyError"),
    "no experts": ({"tp": [1], "ep": [2], "parallelize": lambda model, mesh: None}, 'spread no parameter over mesh."ep"'),
    "heads that cannot be divided": (
        {
            "model": lambda: Decoder(SMALL),
            "tp": [8],
            "parallelize": parallelize_decoder,
            "units": {"all": None},
            "loss_parallel": True,
        },
        "8 ranks do not divide 4 heads of keys",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused_in_a_sentence(case: str) -> None:
    changed, said = REFUSED[case]
    with pytest.raises(fsdp.ShardingError, match=f"^plan: .*{said}"):
        plan(**changed)


class Sends(nn.Linear):
    """Sends its input to the next rank, as rings of context parallelism do."""

    def forward(self, x: Tensor) -> Tensor:
        (sent,) = torch.ops._c10d_functional.batch_p2p_ops(["isend"], [1], [0], [x], "0")
        return super().forward(sent)


def test_what_is_sent_between_two_ranks_is_refused() -> None:
    with pytest.raises(fsdp.ShardingError, match=r"torch's batch_p2p_ops is not counted; a plan counts all_reduce"):
        plan(lambda: Sends(8, 8), inputs=lambda: torch.zeros(2, 8), tp=[2], parallelize=lambda *_: None, units={"all": None})


class Exchanges(nn.Linear):
    """Calls collectives of torch that are not functional."""

    def forward(self, x: Tensor) -> Tensor:
        arrived = torch.empty_like(x)
        dist.all_to_all_single(arrived, x)
        dist.all_reduce(arrived)
        return super().forward(arrived)


def test_other_collectives_of_torch_are_counted() -> None:
    (found,) = by_size(
        plan(lambda: Exchanges(8, 8), inputs=lambda: torch.zeros(16, 8), tp=[2], parallelize=lambda *_: None, units={"all": None})
    ).values()
    count = 16 * 8 * 4
    # two micro-batches among eight ranks, and in a ring a sum passes everything twice
    counted = [(one.kind, one.received) for one in found.collectives if one.label == "torch"]
    assert counted == 2 * [("all_to_all", count * 7 // 8), ("all_reduce", 2 * count * 7 // 8)]


def test_the_command_compares_sizes_of_a_built_in_shape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # two blocks are rehearsed sooner than twelve
    monkeypatch.setitem(SHAPES, "decoder-125m", replace(SHAPES["decoder-125m"], blocks=2))
    command = ["plan", "decoder-125m", "--world-size", "4", "--length", "64", "--strategies", "FULL_SHARD", "--units", "Block"]
    assert main([*command, "--tp", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert "FULL_SHARD x tp 2, checkpointed" in printed and "tp times the rows" in printed
    assert main([*command, "--pp", "2"]) == 0
    assert "Recommended: FULL_SHARD x pp 2" in capsys.readouterr().out
    assert main([*command, "--ep", "2"]) == 1
    assert "decoder-125m has no experts; leave out --ep" in capsys.readouterr().err


def test_the_command_takes_a_function_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    here = "tests.commands.planning.test_dimensions"
    command = ["plan", f"{here}:llama", "--inputs", f"{here}:rows", "--world-size", "4", "--strategies", "FULL_SHARD"]
    assert main([*command, "--tp", "2"]) == 1
    assert "--tp and --ep need --parallelize package.module:function" in capsys.readouterr().err
    assert main([*command, "--pp", "2"]) == 1
    assert "--pp needs --stages package.module:function" in capsys.readouterr().err
    assert main([*command, "--pp", "2", "--stages", f"{here}:cut"]) == 0
    assert "FULL_SHARD x pp 2" in capsys.readouterr().out
    parallelize = "tests.commands.rehearsal.parallel_models:parallelize_llama"
    assert main([*command, "--tp", "2", "--parallelize", parallelize]) == 0
    assert "Recommended: FULL_SHARD x tp 2" in capsys.readouterr().out


def test_a_loss_over_a_divided_vocabulary_is_counted() -> None:
    decoder: dict[str, Any] = {"model": lambda: Decoder(SMALL), "parallelize": parallelize_decoder, "units": {"all": None}}
    (divided,) = by_size(plan(**decoder, tp=[2], inputs=rows, loss_parallel=True)).values()
    # the logits' largest one and the sum, and the loss of each token
    tokens_of_two = 4 * 23
    assert [one.received for one in divided.collectives if one.kind == "all_reduce"].count(4 * tokens_of_two) == 3
    with pytest.raises(fsdp.ShardingError, match=r"got mixed torch\.Tensor and DTensor"):
        plan(**decoder, tp=[2], inputs=rows)
