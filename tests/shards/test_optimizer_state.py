"""The state dict of an optimizer of sharded parameters, by itself and by torch's functions for state dicts."""

import copy
import io
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fsdp
from fsdp.checkpoint.dcp import ReadPlan, StoredCheckpoint, WritePlan
from fsdp.shards.shard_tensor import ShardTensor, plain
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict.model_view import ModelView
from tests.support.everything import EVERYTHING, some
from tests.support.models import CASES, Case, own_batches, train, wrap
from tests.support.optimizers import trained
from tests.support.ranks import on_ranks
from tests.support.states import assert_same_state, everything

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}
SAVED = ["net", "tied", "odd", "net as one unit"]


class Scale(nn.Module):
    """One number, which lies on one rank. The others hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


SCALE = Case(Scale, None)


def write(folder: Path, model: nn.Module, state: dict[str, Any]) -> None:
    """What torch's `dcp.save` does, over the simulated world."""
    comm = ModelView(model, "test").world_comm
    folder.mkdir(exist_ok=True)
    WritePlan(folder, folder, state, comm).write(comm, lambda _: None)


def read(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What torch's `dcp.load` does, with a planner that allows a partial load. Tensors are filled in place."""
    flat, paths = flatten_state_dict(state)
    there = StoredCheckpoint(folder).paths
    targets = {key: value if isinstance(value, Tensor) else None for key, value in flat.items() if key in there}
    return unflatten_state_dict(ReadPlan(StoredCheckpoint(folder), targets).read(), paths)


class TestDistributedCheckpoint:
    @pytest.mark.parametrize("case", SAVED)
    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    @pytest.mark.parametrize(("size", "others"), some((2, (2, 3)), (3, (2, 1))))
    def test_model_and_optimizer_come_back_to_the_bit_by_torchs_functions(
        self, case: str, name: str, size: int, others: tuple[int, ...], tmp_path: Path
    ) -> None:
        def save(rank: int) -> dict[str, Any]:
            model, optimizer = trained(CASES[case], rank, OPTIMIZERS[name])
            weights, state = get_state_dict(model, optimizer)
            write(tmp_path / "a", model, {"model": weights, "optim": state})
            return everything(model, optimizer)

        def load(rank: int) -> dict[str, Any]:
            model = wrap(CASES[case])
            optimizer = OPTIMIZERS[name](model.parameters())
            weights, state = get_state_dict(model, optimizer)
            found = read(tmp_path / "a", {"model": weights, "optim": state})
            options = StateDictOptions(strict=case != "odd")  # of a frozen and an unused parameter there is no state
            found["optim"]["state"] = {**{key: {} for key in state["state"]}, **found["optim"]["state"]}
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=options)
            return everything(model, optimizer)

        wanted = fsdp.simulate(size, save)[0]
        for found in chain(*(fsdp.simulate(other, load) for other in others)):
            assert found.keys() == wanted.keys()
            assert_same_state({key: found[key] for key in wanted}, wanted)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_their_own_state_dicts_are_loaded_in_place_on_another_number_of_ranks(self, name: str, tmp_path: Path) -> None:
        case = CASES["net"]

        def save(rank: int) -> dict[str, Any]:
            model, optimizer = trained(case, rank, OPTIMIZERS[name])
            write(tmp_path / "a", model, {"model": model.state_dict(), "optim": optimizer.state_dict()})
            return everything(model, optimizer)

        def load(rank: int) -> dict[str, Any]:
            model, optimizer = trained(case, rank, OPTIMIZERS[name], steps=1)
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            read(tmp_path / "a", state)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optim"])
            return everything(model, optimizer)

        wanted = fsdp.simulate(2, save)[0]
        assert_same_state(fsdp.simulate(3, load)[2], wanted)

    @on_ranks(2)
    def test_state_that_an_optimizer_makes_without_a_step_can_be_saved_and_loaded(self, rank: int) -> None:
        optimizers = [OPTIMIZERS["Adagrad"](wrap(CASES["net"]).parameters()) for _ in range(2)]
        state = optimizers[0].state_dict()
        assert all(isinstance(kept["sum"], ShardedValue) for kept in state["state"].values())
        state["state"][1]["sum"].local.fill_(3.0)
        optimizers[1].load_state_dict(state)
        for number, kept in optimizers[1].state_dict()["state"].items():
            assert torch.equal(kept["sum"].local, state["state"][number]["sum"].local)

    @on_ranks(2)
    def test_a_shard_by_itself_is_refused(self, rank: int, tmp_path: Path) -> None:
        model, optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])
        shard = next(iter(optimizer.state.values()))["exp_avg"]
        text = r"'scale', .*|'enter.weight', of which this rank holds .* cannot be given to torch's Distributed Checkpoint"
        with pytest.raises(fsdp.ShardingError, match=text):
            write(tmp_path / "a", model, {"mean": shard})
        with pytest.raises(fsdp.ShardingError, match=text):
            shard.__create_chunk_list__()
        with pytest.raises(fsdp.ShardingError, match=text):
            StateDictStager().stage({"mean": shard})

    @on_ranks(2)
    def test_a_background_save_copies_the_values(self, rank: int) -> None:
        optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])[1]
        state = optimizer.state_dict()
        before = {n: {k: v.local.clone() for k, v in kept.items() if k != "step"} for n, kept in state["state"].items()}
        staged = StateDictStager().stage(state)
        for kept in optimizer.state.values():
            kept.get("exp_avg", torch.zeros(1)).zero_()
        for number, kept in before.items():
            for key, one in kept.items():
                assert torch.equal(staged["state"][number][key].local, one)


class TestTorchsOptions:
    @pytest.mark.parametrize("size", [2, 3])
    @on_ranks("size")
    def test_flattened_and_on_the_host(self, rank: int, size: int) -> None:
        model, optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])
        wanted = everything(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        assert any(isinstance(value, ShardedValue) for value in state.values())
        train(model, own_batches(CASES["net"], rank, 1), lambda _: optimizer)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        found = everything(model, optimizer)
        assert_same_state({k: v for k, v in found.items() if ":" in k}, {k: v for k, v in wanted.items() if ":" in k})

    @pytest.mark.parametrize("ignored", [False, True])
    @on_ranks(2)
    def test_full_weights_are_loaded_on_every_rank(self, rank: int, ignored: bool) -> None:
        case = CASES["net"]
        model, _ = trained(case, rank, OPTIMIZERS["AdamW"])
        weights = fsdp.full_state_dict(model, rank0_only=False)
        other = wrap(case)
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=ignored)
        set_model_state_dict(other, dict(weights), options=options)
        assert_same_state(fsdp.full_state_dict(other, rank0_only=False), weights)

    @pytest.mark.parametrize(
        ("case", "name", "size", "strategy"),
        [
            *(
                (case, name, size, "FULL_SHARD")
                for case in [*SAVED, "scale"]
                for name in (OPTIMIZERS if EVERYTHING else ["AdamW", "Adagrad"])
                for size in some(3, 2)
            ),
            *(("net", "AdamW", 4, strategy) for strategy in ("NO_SHARD", "HYBRID_SHARD")),
        ],
    )
    @on_ranks("size")
    def test_full_state_is_gathered_and_loaded(self, rank: int, case: str, name: str, size: int, strategy: str) -> None:
        chosen = CASES.get(case, SCALE)
        options = StateDictOptions(full_state_dict=True, strict=case != "odd")  # of a frozen parameter there is no state
        mesh = {"mesh": (2, 2)} if strategy == "HYBRID_SHARD" else {}
        model, optimizer = trained(chosen, rank, OPTIMIZERS[name], sharding_strategy=strategy, **mesh)
        weights, state = get_state_dict(model, optimizer, options=options)
        wanted = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        assert_same_state(dict(weights), fsdp.full_state_dict(model, rank0_only=False))
        assert state["param_groups"] == wanted["param_groups"]
        # of a parameter without elements ours has no state
        assert {key for key, kept in state["state"].items() if kept and key != "empty"} == set(wanted["state"])
        for key, kept in wanted["state"].items():
            assert_same_state(dict(sorted(state["state"][key].items())), dict(sorted(kept.items())))
        assert not any(isinstance(one, ShardTensor | ShardedValue) for kept in state["state"].values() for one in kept.values())
        other = wrap(chosen)
        other_optimizer = OPTIMIZERS[name](other.parameters())
        for _ in range(2):
            given = copy.deepcopy(state)
            set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=given, options=options)
        before, after = everything(model, optimizer), everything(other, other_optimizer)
        assert_same_state({key: after[key] for key in before}, before)

    def test_a_rank_that_asks_alone_for_full_state_is_named(self) -> None:
        def fn(rank: int) -> str:
            model, optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])
            try:
                if rank == 0:
                    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
                else:
                    fsdp.full_state_dict(model)
            except fsdp.errors.WorldError as told:
                return str(told)
            return "nothing"

        for told in fsdp.simulate(2, fn):
            assert "get_optimizer_state_dict" in told

    @on_ranks(2)
    def test_full_state_is_flattened(self, rank: int) -> None:
        model, optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True, cpu_offload=True)
        found = get_optimizer_state_dict(model, optimizer, options=options)
        wanted = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        # with cpu_offload, torch gives the full state to rank 0 alone
        for name, kept in wanted.items() if rank == 0 else ():
            for key, value in kept.items():
                assert torch.equal(torch.as_tensor(found.pop(f"state.{name}.{key}")), torch.as_tensor(value))
        assert all(key.startswith("param_groups.") for key in found)

    @on_ranks(2)
    def test_what_has_no_full_form_is_refused_on_every_rank(self, rank: int) -> None:
        options = StateDictOptions(full_state_dict=True)

        def refused(text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            with pytest.raises(fsdp.ShardingError, match=f"full_state_dict=True: {text}"):
                get_optimizer_state_dict(model, optimizer, options=options)

        model = fsdp.fully_shard(nn.Linear(4, 4, bias=False))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        kept = optimizer.state[model.weight]
        refused_as = {
            "'histogram' of parameter 'weight' has shape \\(3,\\) on each rank": ("histogram", torch.ones(3)),
            "'step' of parameter 'weight' differs between ranks": ("step", torch.tensor(1.0 + rank)),
            "'seen' of parameter 'weight' is a set": ("seen", {1}),
        }
        for text, (key, value) in refused_as.items():
            before, kept[key] = kept.get(key), value
            refused(text, model, optimizer)
            kept[key] = before
            if before is None:
                del kept[key]
        if rank == 1:
            del kept["exp_avg"]
        refused(r"'exp_avg' of parameter 'weight' is missing on ranks \[1\]", model, optimizer)

    @on_ranks(2)
    def test_full_weights_are_refused_inside_a_forward(self, rank: int) -> None:
        class Curious(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                get_model_state_dict(self, options=StateDictOptions(full_state_dict=True))
                return super().forward(x)

        model = fsdp.fully_shard(Curious(4, 4))
        with pytest.raises(fsdp.ShardingError, match="get_model_state_dict: call it outside any"):
            model(torch.ones(4))

    @on_ranks(2)
    def test_missing_names_are_refused_or_left_alone(self, rank: int) -> None:
        model, optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])
        wanted = everything(model, optimizer)
        weights, state = get_state_dict(model, optimizer)
        del weights["enter.weight"]
        with pytest.raises(fsdp.ShardingError, match="Missing key"):
            set_state_dict(model, optimizer, model_state_dict=dict(weights), optim_state_dict=state)
        loose = StateDictOptions(strict=False)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=loose)
        assert_same_state(everything(model, optimizer), wanted)


class TestStateMadeBeforeWrapping:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("case", ["net", "tied", "odd"])
    @pytest.mark.parametrize("look", ["step", "save"])
    def test_it_is_cut_to_this_ranks_parts(self, name: str, case: str, look: str) -> None:
        chosen = CASES[case]
        plain_model = chosen.model()
        plain_optimizer = OPTIMIZERS[name](plain_model.parameters())
        train(plain_model, own_batches(chosen, 0, 2), lambda _: plain_optimizer)
        keys = [name for name, p in plain_model.named_parameters() if plain_optimizer.state.get(p)]

        def fn(rank: int) -> dict[str, Any]:
            model = chosen.model()
            optimizer = OPTIMIZERS[name](model.parameters())
            train(model, own_batches(chosen, 0, 2), lambda _: optimizer)
            model = fsdp.fully_shard(model, auto_wrap_policy=chosen.policy)
            if look == "step":
                train(model, own_batches(chosen, 0, 1), lambda _: optimizer)
            return everything(model, optimizer)

        if look == "step":
            train(plain_model, own_batches(chosen, 0, 1), lambda _: plain_optimizer)
        found = fsdp.simulate(2, fn)[1]
        for parameter_name, p in plain_model.named_parameters():
            if parameter_name in keys and p.numel():
                for key, value in plain_optimizer.state[p].items():
                    torch.testing.assert_close(found[f"{parameter_name}: {key}"], torch.as_tensor(value))
        for weight_name, tensor in plain_model.state_dict().items():
            torch.testing.assert_close(found[weight_name], tensor)

    @on_ranks(2)
    def test_what_does_not_fit_is_refused_at_the_next_step(self, rank: int) -> None:
        model = wrap(CASES["net"])
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        p = model.enter.weight
        optimizer.state[p] = {"step": torch.ones(()), "exp_avg": torch.zeros(3, 6), "exp_avg_sq": torch.zeros(3, 6)}
        p.grad = torch.zeros_like(p)
        text = r"state 'exp_avg' of 'enter.weight'.* has shape \(3, 6\), which is neither.*fsdp.load_full_optim_state_dict"
        with pytest.raises(fsdp.ShardingError, match=text):
            optimizer.step()


class TestLoadStateDict:
    @on_ranks(2)
    def test_values_local_parts_and_full_tensors_are_loaded(self, rank: int) -> None:
        case = CASES["net"]
        model, optimizer = trained(case, rank, OPTIMIZERS["AdamW"])
        wanted = everything(model, optimizer)
        values = optimizer.state_dict()
        assert all(isinstance(kept["exp_avg"], ShardedValue) for kept in values["state"].values() if kept)
        parts = {**values, "state": {n: {k: plain(v) for k, v in kept.items()} for n, kept in local(optimizer).items()}}
        full = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        names = [name for name, _ in model.named_parameters()]
        numbered = {**values, "state": {names.index(name): kept for name, kept in full["state"].items()}}
        for given in (values, parts, numbered, {**values, "state": local(optimizer)}):
            for stepped in (False, True):
                again = OPTIMIZERS["AdamW"](model.parameters())
                if stepped:
                    fsdp.full_optim_state_dict(model, again)  # sets the hooks
                again.load_state_dict(copy.deepcopy(given))
                assert_same_state(everything(model, again), wanted)

    def test_another_cut_is_refused_before_anything_is_loaded(self) -> None:
        case = CASES["net"]
        by_two = fsdp.simulate(2, lambda rank: trained(case, rank, OPTIMIZERS["AdamW"])[1].state_dict())

        def fn(rank: int) -> None:
            model, optimizer = trained(case, rank, OPTIMIZERS["AdamW"], steps=1)
            wanted = everything(model, optimizer)
            text = r"the optimizer's state '.*' of '.*' was cut in another way.*fsdp.load"
            with pytest.raises(fsdp.ShardingError, match=text):
                optimizer.load_state_dict(by_two[1])
            assert_same_state(everything(model, optimizer), wanted)

        fsdp.simulate(3, fn)

    @on_ranks(2)
    def test_a_state_dict_and_a_shard_cannot_be_pickled(self, rank: int) -> None:
        optimizer = trained(CASES["net"], rank, OPTIMIZERS["AdamW"])[1]
        shard = next(iter(optimizer.state.values()))["exp_avg"]
        for one in (optimizer.state_dict(), optimizer, shard):
            with pytest.raises(fsdp.ShardingError, match=r"cannot be pickled: this rank holds.*fsdp.full_optim_state_dict"):
                torch.save(one, io.BytesIO())


def local(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The shards themselves, by number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: dict(optimizer.state[p]) for number, p in enumerate(parameters) if optimizer.state.get(p)}


@pytest.mark.parametrize("dtensors", [False, True])
@on_ranks(2)
def test_an_optimizer_that_keeps_parts_is_refused_inside_summon_full_params(rank: int, dtensors: bool) -> None:
    model = fsdp.fully_shard(nn.Linear(4, 4), dtensors=dtensors)
    stateless, optimizer = (OPTIMIZERS[kind](model.parameters()) for kind in ("SGD", "AdamW"))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    wanted, given = everything(model, optimizer), optimizer.state_dict()
    with fsdp.summon_full_params(model):
        for act in (optimizer.step, *([] if dtensors else [lambda: optimizer.load_state_dict(given)])):
            with pytest.raises(fsdp.ShardingError, match=r"full value of 'weight'.*leave summon_full_params first"):
                act()
        if not dtensors:
            stateless.step()
    assert_same_state(everything(model, optimizer), wanted)
    optimizer.load_state_dict(given)
    optimizer.step()
