"""`fsdp.plan` compares choices, recommends one, and refuses what it cannot plan for in a sentence."""

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import fsdp
from fsdp.building.auto_units import auto_units
from fsdp.commands.main import main
from fsdp.commands.planning.command import bytes_of
from fsdp.commands.planning.shapes import SHAPES, Decoder
from fsdp.commands.rehearsal.clock import COPIES, Clock
from fsdp.commands.rehearsal.hardware import DEVICES, NETWORKS, Cluster, Device, Link
from fsdp.commands.rehearsal.rehearse import Rehearsal
from tests.commands.rehearsal.models import MODELS, Block, Language, tokens

GPT = MODELS["GPT"]
FAST = Device("test", 2**30, 1e12, 1e12, 1e12, Link(1e9, 1e-6))


def plan(**changed: Any) -> fsdp.Plan:
    options: dict[str, Any] = {
        "inputs": tokens,
        "per_host": 2,
        "device": FAST,
        "network": Link(1e8, 1e-5),
        "reserve": 0,
    } | changed
    return fsdp.plan(options.pop("model", GPT.build), options.pop("world_size", 4), **options)


def test_the_fastest_choice_that_fits_is_recommended() -> None:
    found = plan(units={"blocks": {Block}})
    titles = [one.choice.title for one in found.candidates]
    assert len(titles) == 8 and len(set(titles)) == 8
    seconds = [one.rehearsal.seconds for one in found.candidates if one.rehearsal]
    assert seconds == sorted(seconds)
    assert found.best is found.candidates[0]
    text = str(found)
    assert f"Recommended: {titles[0]}" in text and f"Second: {titles[1]}" in text


def test_what_does_not_fit_comes_after_what_fits_and_says_how_much_is_missing() -> None:
    peaks = sorted(one.rehearsal.peak for one in plan(units={"blocks": {Block}}).candidates if one.rehearsal)
    found = plan(units={"blocks": {Block}}, memory=peaks[2])
    fits = [found.fits(one) for one in found.candidates]
    assert fits == sorted(fits, reverse=True) and sum(fits) >= 3
    none = plan(units={"blocks": {Block}}, memory=peaks[0] - 1024, offload=[False])
    assert none.best is None
    assert "Nothing fits." in str(none) and "it needs 1.00 KiB more" in str(none)


def one_of(**changed: Any) -> Rehearsal:
    """The rehearsal of one choice."""
    (found,) = plan(**{"strategies": ["FULL_SHARD"], "units": {"blocks": {Block}}, "checkpointing": [False]} | changed).candidates
    assert found.rehearsal is not None
    return found.rehearsal


def test_an_offload_policy_moves_shards_gradients_and_optimizer_state_to_the_host() -> None:
    plain, offloaded = one_of(), one_of(offload=[True])
    assert not plain.host_held and plain.host_peak == 0
    shards = plain.held["shards"]
    assert offloaded.host_held["shards"] == shards and offloaded.host_held["gradients"] == shards
    # AdamW: two averages, and a number for each parameter
    assert 2 * shards <= offloaded.host_held["optimizer state"] == plain.held["optimizer state"]
    assert not {"shards", "gradients", "optimizer state"} & offloaded.held.keys()
    # reduced gradients are copied to the host one by one
    assert offloaded.engine_peak <= plain.engine_peak - shards
    assert offloaded.collectives == plain.collectives


def test_copies_from_and_to_the_host_take_time() -> None:
    def seconds(link: Link) -> Rehearsal:
        return one_of(offload=[True], optimizer=None, device=replace(FAST, host_link=link))

    fast, slow = seconds(Link(1e12, 0.0)), seconds(Link(1e5, 0.0))
    assert COPIES not in fast.exposed or fast.exposed[COPIES] < 1e-4
    # every gather copies the shard to the device, and gradients come back after the last of them
    copied = 3 * fast.host_held["shards"] / 1e5
    assert 0.5 * copied < slow.seconds - fast.seconds < 1.2 * copied
    # an optimizer on the host is slower where the memory of the host is
    steps = [one_of(offload=[True], device=replace(FAST, host_bandwidth=bandwidth)).computing for bandwidth in (1e10, 1e6)]
    assert steps[1] > steps[0] + 6 * fast.host_held["shards"] / 1e6


def test_the_step_of_the_optimizer_takes_time_by_the_elements_of_a_rank() -> None:
    def added(size: int) -> float:
        return one_of(world_size=size).computing - one_of(world_size=size, optimizer=None).computing

    assert added(8) == pytest.approx(added(2) / 4, rel=0.1) and added(8) > 0


def test_offload_is_compared_where_nothing_fits_without() -> None:
    choice: dict[str, Any] = {"strategies": ["FULL_SHARD"], "units": {"blocks": {Block}}, "checkpointing": [False]}
    peak = one_of().peak
    assert len(plan(**choice, memory=peak).candidates) == 1
    found = plan(**choice, memory=peak - 1)
    assert [one.choice.title for one in found.candidates] == ["FULL_SHARD, offloaded", "FULL_SHARD"]
    assert found.best is not None and found.best.choice.offload
    assert "of host memory: shards" in str(found)
    assert json.loads(found.to_json())["candidates"][0]["host_held"]["shards"] > 0


def test_the_smallest_number_of_ranks_that_fits_is_found() -> None:
    peaks = {size: one_of(world_size=size).peak for size in (2, 4, 6, 8)}
    assert peaks[2] > peaks[4] > peaks[6] > peaks[8]
    choice: dict[str, Any] = {"strategies": ["FULL_SHARD"], "units": {"blocks": {Block}}, "checkpointing": [False]}
    found = plan(**choice, offload=[False], memory=peaks[6], max_ranks=16)
    assert found.fewest is not None and found.fewest.ranks == 6 and found.fewest.peak == peaks[6]
    assert "The smallest number of ranks that fits is 6: FULL_SHARD" in str(found)
    none = plan(**choice, offload=[False], memory=1024, max_ranks=8)
    assert none.fewest is not None and none.fewest.ranks is None
    assert "Up to 8 ranks nothing fits: FULL_SHARD needs" in str(none)


def test_checkpointing_holds_less_and_computes_more() -> None:
    one, other = one_of(), one_of(checkpointing=[True])
    assert other.held["activations"] < one.held["activations"]
    assert other.computing > one.computing


def test_a_slower_link_between_hosts_makes_the_hybrid_strategy_the_faster_one() -> None:
    def seconds(network: Link) -> dict[str, float]:
        found = plan(network=network, strategies=["FULL_SHARD", "HYBRID_SHARD"], checkpointing=[False], units={"b": {Block}})
        return {one.choice.strategy: one.rehearsal.seconds for one in found.candidates if one.rehearsal}

    slow = seconds(Link(1e6, 1e-5))
    assert slow["HYBRID_SHARD"] < slow["FULL_SHARD"]


def test_links_inside_a_host_and_between_hosts_carry_at_the_same_time() -> None:
    clock = Clock(Cluster(FAST, Link(1e9, 0.0), per_host=2))
    ends = [clock.launch(ranks, 1e9) for ranks in ((0, 1), (0, 2), (0, 1), (0, 2, 4))]
    inside, between = FAST.link.latency, 0.0
    assert ends == pytest.approx([1 + inside, 1 + between, 2 + 2 * inside, 2 + between])
    assert clock.latency == pytest.approx(2 * inside)


@pytest.mark.parametrize(
    ("ranks", "bandwidth"),
    [
        ((0, 1, 2, 3), 1e9),  # inside a host
        ((0, 4), 1e8),  # one rank on each host
        ((0, 1, 4, 5), 2e8),  # both links of a host together
        (tuple(range(8)), 4e8),
        (tuple(range(64)), 4e8),
    ],
)
def test_the_ranks_of_a_host_share_their_links_to_other_hosts(ranks: tuple[int, ...], bandwidth: float) -> None:
    assert Cluster(FAST, Link(1e8, 0.0), per_host=4).link_of(ranks).bandwidth == bandwidth
    assert Cluster(FAST, Link(8e8, 0.0), per_host=4).link_of((0, 1, 4, 5)).bandwidth == FAST.link.bandwidth


# choices of units that nobody named ---------------------------------------------------------


def wide() -> nn.Module:
    """Eight layers of which "auto" makes units."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def compared(latency: float, **changed: Any) -> fsdp.Plan:
    options: dict[str, Any] = {"strategies": ["FULL_SHARD"], "optimizer": None, "offload": [False], **changed}
    device = replace(FAST, link=Link(1e11, latency))
    return plan(model=wide, inputs=lambda: torch.zeros(2, 512), world_size=2, device=device, **options)


def test_larger_units_are_compared_where_latencies_are_most_of_a_step() -> None:
    assert [one.choice.title for one in compared(0.0, checkpointing=[False]).candidates] == ["FULL_SHARD"]
    found = compared(1e-2, checkpointing=[False])
    assert [one.choice.title for one in found.candidates] == ["FULL_SHARD, one unit", "FULL_SHARD"]
    assert "FULL_SHARD, one unit" in str(found) and found.candidates[0].rehearsal is not None
    # one gather, one reduction, and one exchange of which gradients came
    assert found.candidates[0].rehearsal.seconds == pytest.approx(3e-2, rel=0.1)
    # one unit cannot be checkpointed
    assert [one.choice.title for one in compared(1e-2, checkpointing=[True]).candidates] == ["FULL_SHARD, checkpointed"]


def test_units_of_a_policy_of_fsdp1_are_recomputed_as_others_are() -> None:
    as_function = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    plans = [plan(units={"blocks": policy}) for policy in ({Block}, ModuleWrapPolicy({Block}), as_function)]
    wanted, *found = ([one.rehearsal for one in made.candidates] for made in plans)
    assert found == [wanted] * 2


def test_larger_units_below_the_size_of_the_model_are_compared_too() -> None:
    pairs: dict[str, Any] = {"model": lambda: nn.Sequential(*(nn.Sequential(*wide()[:2]) for _ in range(6)))}
    device = replace(FAST, link=Link(1e11, 1e-2))
    found = plan(
        **pairs, inputs=lambda: torch.zeros(2, 512), world_size=2, device=device, strategies=["FULL_SHARD"], checkpointing=[False]
    )
    assert {one.choice.units: one.rehearsal.units for one in found.candidates if one.rehearsal} == {
        "auto": 13,
        "of at most 1/3": 7,
        "one unit": 1,
    }


def test_smaller_units_are_compared_where_those_of_auto_do_not_fit() -> None:
    def blocks() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(8))) for _ in range(8)))

    def planned(**changed: Any) -> fsdp.Plan:
        options: dict[str, Any] = {"strategies": ["FULL_SHARD"], "checkpointing": [False], "offload": [False], **changed}
        return plan(model=blocks, inputs=lambda: torch.zeros(1, 192), world_size=2, optimizer=None, **options)

    (auto,) = planned().candidates
    assert auto.rehearsal is not None and auto.rehearsal.units == 9
    found = planned(memory=auto.rehearsal.peak - 2**20)
    best = found.best
    assert best is not None and best.choice.title == "FULL_SHARD, units of at most 1/32"
    assert best.rehearsal is not None and best.rehearsal.units == 65
    assert "Its 64 inner units are chosen by name" in str(found)
    listed = json.loads(found.to_json())["candidates"][0]["unit_names"]
    assert len(listed) == 64 and listed[0] == "0.0"

    def train(rank: int) -> int:
        model = fsdp.fully_shard(blocks(), **best.choice.options)
        model(torch.ones(1, 192)).sum().backward()
        return fsdp.memory_bytes(model, peak=True)

    assert fsdp.simulate(2, train)[0] < auto.rehearsal.engine_peak


def test_a_model_is_planned_for_without_being_changed() -> None:
    model = GPT.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given, made = plan(model=model, checkpointing=[False]), plan(checkpointing=[False])
    assert [one.rehearsal for one in given.candidates] == [one.rehearsal for one in made.candidates]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_what_the_engine_refuses_is_listed_with_its_reason() -> None:
    found = plan(units={"blocks": {Block}}, checkpointing=[False], options={"reshard_after_forward": True})
    refused = {one.choice.strategy: one.refusal for one in found.candidates if one.rehearsal is None}
    assert "NO_SHARD" in refused and "reshard_after_forward" in refused["NO_SHARD"]
    assert "NO_SHARD: refused:" in str(found)


class Reads(nn.Linear):
    """Reads a value in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def fails() -> nn.Module:
    raise OSError("no weights here")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one rank": ({"world_size": 1}, "world_size is 1; give the number of ranks, at least 2"),
    "no ranks on a host": ({"per_host": 0}, "per_host is 0"),
    "no micro-batch": ({"micro_batches": 0}, "micro_batches is 0"),
    "an unknown device": ({"device": "h900"}, "there is no device 'h900' in the table; give one of a100-40"),
    "an unknown network": ({"network": "tin cans"}, "there is no network 'tin cans'"),
    "an unknown optimizer": ({"optimizer": "adamm"}, "there is no optimizer 'adamm'"),
    "no model": ({"model": 7}, "give a model or a function that makes one, not 7"),
    "a function that fails": ({"model": fails}, r"cannot be made on the meta device \(OSError: no weights here\)"),
    "a function that makes something else": ({"model": lambda: 7}, "returned int, not an nn.Module"),
    "no number of ranks at most": ({"max_ranks": 1}, "max_ranks is 1; give a number of ranks, at least 2"),
    "only a mesh of fixed hosts": ({"strategies": ["HYBRID_SHARD"], "max_ranks": 8}, "a strategy that spreads over all ranks"),
    "no choice": ({"strategies": ["HYBRID_SHARD"], "world_size": 2}, "no choice is left for 2 ranks"),
    "a model that reads values": (
        {"model": lambda: Reads(4, 4), "inputs": lambda: torch.zeros(1, 4), "checkpointing": [False]},
        "every choice is refused; the first one because a forward on the meta device failed .*item",
    ),
    "a loss that fails": ({"loss": lambda output: output.logits}, r"the loss of Tensor, .* failed \(AttributeError: .*logits"),
    "a loss that is no number": ({"loss": lambda output: 3.0}, "a backward from float, the loss, on the meta device failed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_a_sentence(name: str) -> None:
    changed, said = REFUSED[name]
    with pytest.raises(fsdp.ShardingError, match=said):
        plan(**changed)


def test_every_number_of_the_tables_has_a_source() -> None:
    for device in DEVICES.values():
        assert device.link.source and (device.source.startswith("https://") or device.source.startswith("assumed"))
        assert 0 < device.flops <= device.half_flops
    assert all(link.source for link in NETWORKS.values())


# the command ------------------------------------------------------------------------------


def test_the_command_writes_a_table_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", ModuleType("plotly"))
    monkeypatch.setitem(sys.modules, "plotly.offline", SimpleNamespace(get_plotlyjs=lambda: "/* plotly.js */"))
    arguments = ["plan", "decoder-125m", "--world-size", "4", "--per-host", "2", "--length", "64", "--strategies", "FULL_SHARD"]
    assert main([*arguments, "--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    printed = capsys.readouterr().out
    assert "162,220,800 parameters on 4 ranks, 2 on a host; h100, 80.00 GiB for each rank" in printed
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["recommended"] == "FULL_SHARD, one unit"
    assert {one["title"] for one in content["candidates"]} >= {"FULL_SHARD", "FULL_SHARD, checkpointed"}
    assert all(one["fits"] for one in content["candidates"])
    page = (tmp_path / "plan.html").read_text()
    assert "/* plotly.js */" in page and "http://" not in page and "https://" not in page
    assert "Peak memory of a rank by kind" in page
    arguments[1:2] = ["tests.commands.planning.test_plan:small", "--inputs", "tests.commands.rehearsal.models:tokens"]
    arguments.remove("--length")
    arguments.remove("64")
    assert main([*arguments, "--memory", "1KiB", "--max-ranks", "4"]) == 1
    printed = capsys.readouterr().out
    assert "Nothing fits." in printed and "FULL_SHARD, offloaded" in printed and "Up to 4 ranks nothing fits" in printed


def test_a_function_of_ones_own_is_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["plan", "tests.commands.planning.test_plan:small", "--world-size", "2", "--strategies", "FULL_SHARD"]
    assert main(target) == 1
    assert "says nothing about its inputs; give --inputs package.module:function" in capsys.readouterr().err
    assert main([*target, "--inputs", "tests.commands.rehearsal.models:tokens", "--batch", "8"]) == 1
    assert "--batch is for inputs that the plan makes, and --inputs makes its own" in capsys.readouterr().err
    assert main([*target, "--inputs", "tests.commands.rehearsal.models:tokens"]) == 0


def test_units_of_ones_own_are_compared_beside_auto(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests.commands.planning.test_plan:small", "--inputs", "tests.commands.rehearsal.models:tokens"]
    command += ["--world-size", "2", "--strategies", "FULL_SHARD", "--units"]
    assert main([*command, "Block", "Block,Embedding", "auto"]) == 0
    printed = capsys.readouterr().out
    assert all(f"FULL_SHARD, units {name} " in printed for name in ("Block", "Block,Embedding", "auto"))
    assert main([*command, "Blok"]) == 1
    assert "no module of a class 'Blok'; its classes are Block, Embedding, GELU" in capsys.readouterr().err


def small() -> nn.Module:
    """A target of the command."""
    return Language(Block, blocks=1)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere:function", "cannot be imported (No module named 'nowhere')"),
        ("tests.commands.planning.test_plan:absent", "cannot be imported"),
        ("decoder", "names no function"),
        ("absent.json", "absent.json"),
    ],
)
def test_a_target_that_does_not_exist_is_named(target: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--world-size", "2"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 << 30), ("1.5 GB", 1_500_000_000), ("7B", 7), ("2kib", 2048), ("3MB", 3_000_000), ("0", 0)]
)
def test_bytes_are_read_with_their_unit(text: str, count: int) -> None:
    assert bytes_of("--memory", text) == count


@pytest.mark.parametrize(
    ("text", "said"), [("much", "--memory is 'much'; give a number"), ("80", "'80', without a unit; give 80GiB, 80GB or 80B")]
)
def test_bytes_without_a_number_or_a_unit_are_refused(text: str, said: str) -> None:
    with pytest.raises(fsdp.ShardingError, match=said):
        bytes_of("--memory", text)


@pytest.mark.parametrize(("option", "value"), [("--batch", "-1"), ("--length", "0")])
def test_a_number_of_rows_or_tokens_below_one_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "decoder-125m", "--world-size", "2", option, value]) == 1
    assert f"plan: {option} is {value}; give a number, at least 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--html", "plan.html", "plan --html needs the package plotly"),
        ("--json", "absent/plan.json", "plan: absent/plan.json: there is no folder absent; make it first."),
        ("--json", ".", "plan: . is a folder; give the name of a file."),
        ("--inputs", "tokens", "plan: --inputs tokens names no function; give package.module:function."),
        ("--memory", "-1GiB", "plan: --memory is '-1GiB'; give a number with its unit, as in 80GiB."),
    ],
)
def test_what_is_missing_is_named_before_the_work(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("fsdp.commands.planning.command.plan", lambda *_, **__: pytest.fail("it has begun to work"))
    assert main(["plan", "decoder-125m", "--world-size", "2", option, value]) == 1
    assert said in capsys.readouterr().err


# what is assumed --------------------------------------------------------------------------


def test_the_memory_is_not_planned_to_the_last_byte() -> None:
    device = replace(FAST, memory=2**30)
    only: dict[str, Any] = {"strategies": ["FULL_SHARD"], "units": {"blocks": {Block}}, "checkpointing": [False]}
    only["offload"] = [False]
    found = plan(**only, device=device, reserve=None)
    assert found.usable == 2**30 - int(0.06 * 2**30)
    assert "61.44 MiB of each device are left free, for the context" in str(found)
    peak = found.candidates[0].rehearsal.peak if found.candidates[0].rehearsal else 0
    assert plan(**only, memory=peak, reserve=0).best is not None
    tight = plan(**only, memory=peak, reserve=1024)
    assert tight.best is None and "it needs 1.00 KiB more" in str(tight)
    assert json.loads(tight.to_json())["reserve"] == 1024
    assert plan(device="cpu", reserve=None).reserve == 0
    with pytest.raises(fsdp.ShardingError, match=r"the reserve of 1\.00 KiB leaves nothing of 1\.00 KiB of memory"):
        plan(memory=1024, reserve=1024)


def text_of(**changed: Any) -> str:
    """The plan of one choice, in words."""
    return str(plan(**{"strategies": ["FULL_SHARD"], "units": {"all": None}, "checkpointing": [False]} | changed))


def test_the_dtypes_of_everything_are_stated() -> None:
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    default, lower = text_of(), text_of(mp_policy=policy)
    assert "Parameters and gradients float32, optimizer state float32; computing in float32, reducing in float32." in default
    assert "optimizer state float32; computing in bfloat16, reducing in float32." in lower
    counted = "Products in float32 are counted as TF32"
    assert counted in default and counted not in lower
    half = text_of(model=lambda: GPT.build().bfloat16())
    assert "Parameters and gradients bfloat16, optimizer state bfloat16; computing in bfloat16" in half
    assert "The optimizer rounds its state and every update to 16 bits" in half
    whole = text_of(model=lambda: GPT.build().bfloat16(), params=torch.float32)
    assert "optimizer state float32" in whole and "rounds" not in whole
    assert "no optimizer state" in text_of(optimizer=None)
    assert "A micro-batch of (2, 24) int64." in default
    assert "The backward begins at the sum of what the model returns" in default
    named = text_of(device="h100", network="ib-ndr")
    assert "(matrix products: 50% of it; memory: 80%)" in named and "400 Gbit/s for each rank (reached: 80%)" in named
    assert "The backward begins" not in text_of(loss=lambda output: output.square().mean())


def test_what_a_plan_cannot_see_is_said() -> None:
    class Cast(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    class Recurrent(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    inputs = lambda: torch.zeros(2, 3, 8)  # noqa: E731
    assert "The model uses torch.autocast, which does nothing here" in text_of(model=lambda: Cast(8, 8), inputs=inputs)
    assert "Recurrent layers are counted step by step" in text_of(model=lambda: Recurrent(8, 8), inputs=inputs)
    assert not re.search("autocast|Recurrent", text_of())


def test_the_kernel_of_attention_is_said_and_can_be_chosen() -> None:
    attention: dict[str, Any] = {"model": lambda: Decoder(replace(SHAPES["decoder-125m"], blocks=2)), "checkpointing": [False]}
    attention |= {"inputs": lambda: torch.zeros(1, 512, dtype=torch.long), "strategies": ["FULL_SHARD"]}
    fused, other = (plan(**attention, attention=kind).candidates[0].rehearsal for kind in ("auto", "math"))
    assert fused is not None and other is not None
    # a matrix of float32 for each of 12 heads in both blocks, kept by the softmax
    assert other.saved - fused.saved > 0.9 * 2 * 12 * 512 * 512 * 4
    assert other.computing > fused.computing
    assert "Attention by a fused kernel in 2 calls." in str(plan(**attention))
    assert "Attention by math in 2 calls." in str(plan(**attention, attention="math"))
    with pytest.raises(fsdp.ShardingError, match="attention is 'fast'; give one of auto, flash, math"):
        plan(attention="fast")


def test_activations_of_a_built_in_shape_are_counted() -> None:
    shape = replace(SHAPES["decoder-125m"], blocks=4)
    found = plan(model=lambda: Decoder(shape), inputs=lambda: torch.zeros(2, 256, dtype=torch.long), strategies=["FULL_SHARD"])
    saved = {one.choice.checkpointing: one.rehearsal.saved for one in found.candidates if one.rehearsal}
    # what goes into each block, and the logits
    assert saved[True] > 4 * 2 * 256 * 768 * 4 + 2 * 255 * 50304 * 4
    assert saved[False] > saved[True] + 4 * 2 * 256 * (4 * 768 + 3 * 2048) * 4


def test_a_choice_that_changes_nothing_is_not_listed() -> None:
    found = plan(model=lambda: nn.Sequential(nn.Linear(8, 8)), inputs=lambda: torch.zeros(1, 8), strategies=["FULL_SHARD"])
    assert [one.choice.title for one in found.candidates] == ["FULL_SHARD"]


def test_checkpointing_has_its_price_beside_the_recommendation() -> None:
    blocks: dict[str, Any] = {"units": {"blocks": {Block}}, "strategies": ["FULL_SHARD"], "offload": [False]}
    peaks = {one.choice.checkpointing: one.rehearsal.peak for one in plan(**blocks).candidates if one.rehearsal}
    found = str(plan(**blocks, inputs=lambda: tokens().repeat(64, 1)))
    assert "Recommended: FULL_SHARD:" in found and "Checkpointing computes" not in found
    assert peaks[True] < peaks[False]
    short = str(plan(**blocks, memory=peaks[False] - 1))
    assert "Recommended: FULL_SHARD, checkpointed" in short and re.search(r"Checkpointing computes \d+% more\.", short)


# units chosen by size ---------------------------------------------------------------------


def names_of(model: nn.Module) -> list[str]:
    chosen = auto_units(model, ())
    return [name for name, module in model.named_modules() if id(module) in chosen]


def test_equal_blocks_become_units_and_a_small_rest_stays_with_the_root() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"blocks": nn.ModuleList(Block(512) for _ in range(12)), "norm": nn.LayerNorm(512), "head": nn.Linear(512, 9)}
        )
    assert names_of(model) == [f"blocks.{number}" for number in range(12)]


def test_a_hundred_tiny_layers_are_one_unit() -> None:
    assert names_of(nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))) == []


def test_a_huge_block_is_divided_and_what_uses_inner_weights_is_not() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 4)
        model = nn.Sequential(layer, nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)))
    assert names_of(model) == ["0", "1.0", "1.2"]


def test_auto_trains_as_any_other_choice_of_units() -> None:
    def train(shards: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        if shards:
            fsdp.fully_shard(model, auto_wrap_policy="auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            loss = model(torch.ones(2, 512)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert not shards or fsdp.story(model).count("IDLE") == 7
        return found

    expected = train(False)
    for found in fsdp.simulate(2, lambda rank: train(True)):
        assert found == pytest.approx(expected, rel=1e-5)
