"""`state_dict()` and `load_state_dict()` of sharded models: plain names, this rank's parts, torch's Distributed Checkpoint."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import MetadataIndex

import fsdp
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP1
from fsdp.shards.sharded_value import ShardedValue
from tests.support.models import CASES, Block, Case, Net, make_net, weights_of, world_log, wrap
from tests.support.ranks import on_ranks, refusals
from tests.support.states import STATEFUL, assert_same_state, assert_state, refused_whole, shifted


def put_together(by_rank: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What Distributed Checkpoint would write: the boxes of every rank, in their places. They must tile each tensor."""
    full: dict[str, Tensor] = {}
    for name, first in by_rank[0].items():
        if not isinstance(first, ShardedValue):
            full[name] = first
            continue
        full[name] = torch.empty(first.shape, dtype=first.dtype)
        written = torch.zeros(first.shape)
        for values in by_rank:
            value = values[name]
            items = value.__create_write_items__(name, value)
            assert [item.tensor_data.chunk for item in items] == value.__create_chunk_list__()
            for item in items:
                chunk = item.tensor_data.chunk
                box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                full[name][box] = value.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
                written[box] += 1
        assert bool((written == 1).all()), name
    return full


class TestStateDict:
    @STATEFUL
    @pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_the_chunks_of_all_ranks_are_the_plain_modules_state(self, case: Case, in_place: bool, size: int) -> None:
        def fn(rank: int) -> dict[str, Any]:
            model = wrap(case, in_place)
            before = len(world_log())
            state = model.state_dict()
            assert len(world_log()) == before, "it communicates"
            return state

        assert_same_state(put_together(fsdp.simulate(size, fn)), dict(case.model().state_dict()))

    @on_ranks(2)
    def test_the_values_are_the_shards_themselves(self, rank: int) -> None:
        model = wrap(CASES["net"])
        state = model.state_dict()
        for name, p in model.named_parameters():
            assert state[name].local.data_ptr() == p.data_ptr()
            assert state[name].local._version == p._version

    def test_a_parameter_without_elements_is_written_by_one_rank(self) -> None:
        chunks = fsdp.simulate(3, lambda rank: wrap(CASES["odd"]).state_dict()["empty"].__create_chunk_list__())
        assert [*map(len, chunks)] == [1, 0, 0]

    @pytest.mark.parametrize(
        "save",
        [
            lambda state: torch.save(state, io.BytesIO()),
            lambda state: pickle.dumps(state["enter.weight"]),
            lambda state: state["enter.weight"].sum(),
            lambda state: torch.equal(state["enter.weight"], torch.zeros(8, 6)),
        ],
        ids=["torch.save", "pickle", "sum", "equal"],
    )
    @on_ranks(2)
    def test_no_fragment_is_taken_for_the_full_tensor(self, rank: int, save: Callable[[Any], Any]) -> None:
        with pytest.raises(fsdp.ShardingError, match=r"'enter.weight'.*fsdp.full_state_dict\(model\)"):
            save(wrap(CASES["net"]).state_dict())

    @on_ranks(2)
    def test_the_package_safetensors_is_notified_what_to_write(self, rank: int, tmp_path: Path) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        model = wrap(CASES["net"])
        text = r"'enter.weight' has no memory as a full tensor: .* call fsdp.export_safetensors\(model, folder\) on every rank"
        for save in (safetensors.save_file, lambda state, path: state["enter.weight"].storage()):
            with pytest.raises(fsdp.ShardingError, match=text):
                save(dict(model.state_dict()), tmp_path / "a")
        full = fsdp.full_state_dict(model)
        if rank == 0:
            safetensors.save_file(full, tmp_path / "a")
            found = safetensors.load_file(tmp_path / "a")
            assert_same_state({name: found[name] for name in full}, full)

    def test_what_is_not_sharded_comes_along_as_it_is(self) -> None:
        def fn(rank: int) -> dict[str, Any]:
            net = make_net()
            net.blocks[2].requires_grad_(False)
            model = fsdp.fully_shard(net, auto_wrap_policy={Block}, ignored_modules={net.leave})
            state = model.state_dict()
            assert type(state["leave.weight"]) is Tensor and type(state["scale"]) is Tensor
            assert isinstance(state["blocks.2.up.weight"], ShardedValue)
            model.load_state_dict(shifted(CASES["net"]))
            assert_same_state(fsdp.full_state_dict(model, rank0_only=False), shifted(CASES["net"]))
            return model.state_dict()

        assert_same_state(put_together(fsdp.simulate(2, fn)), shifted(CASES["net"]))

    @on_ranks(1)
    def test_keep_vars_is_refused(self, rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match=r"keep_vars=True.*named_parameters"):
            wrap(CASES["net"]).state_dict(keep_vars=True)

    @on_ranks(2)
    def test_inside_a_summon_it_is_full(self, rank: int) -> None:
        model = wrap(CASES["net"])
        with fsdp.summon_full_params(model):
            found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert_same_state(found, dict(make_net().state_dict()))

    @on_ranks(2)
    def test_names_do_not_show_checkpoint_wrappers(self, rank: int) -> None:
        net = make_net()
        net.blocks[1] = checkpoint_wrapper(net.blocks[1])
        model = fsdp.fully_shard(net, auto_wrap_policy={Block})
        assert list(model.state_dict()) == list(make_net().state_dict())
        model.load_state_dict({name: tensor + 1 for name, tensor in make_net().state_dict().items()})
        assert_same_state(fsdp.full_state_dict(model, rank0_only=False), {n: t + 1 for n, t in make_net().state_dict().items()})

    @on_ranks(2)
    def test_a_part_under_a_made_up_name_is_refused(self, rank: int) -> None:
        class Renamed(nn.Linear):
            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                destination[prefix + "kernel"] = self.weight.detach()

        model = fsdp.fully_shard(Renamed(4, 4))
        with pytest.raises(fsdp.ShardingError, match="'kernel' in the state dict of unit 'Renamed'"):
            model.state_dict()


class TestLoadStateDict:
    @STATEFUL
    @pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
    @on_ranks(3)
    def test_full_values_are_loaded_without_communication(self, rank: int, case: Case, in_place: bool) -> None:
        model = wrap(case, in_place)
        before = len(world_log())
        assert not any(model.load_state_dict(shifted(case)))
        assert len(world_log()) == before
        assert_state(model, shifted(case))

    @STATEFUL
    @on_ranks(2)
    def test_sharded_values_are_loaded_into_an_equal_model(self, rank: int, case: Case) -> None:
        model, other = wrap(case), wrap(case)
        model.load_state_dict(shifted(case))
        best = copy.deepcopy(model.state_dict())
        model.load_state_dict(case.model().state_dict())
        other.load_state_dict(best)
        assert_state(other, shifted(case))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda state: state.pop("leave.bias"), r"Missing key\(s\): \['leave.bias'\]. Unexpected key\(s\): none"),
            (lambda state: state.update(more=torch.ones(1)), r"Missing key\(s\): none. Unexpected key\(s\): \['more'\]"),
            (lambda state: state.update({"leave.bias": torch.ones(3)}), r"'leave.bias' has shape \(3,\), the model has \(2,\)"),
            (lambda state: state.update(scale=torch.ones(3)), r"'scale' has shape \(3,\), the model has \(8,\)"),
            (
                lambda state: state.update({"leave.bias": torch.ones(2, dtype=torch.float64)}),
                r"'leave.bias' is torch.float64, the model has torch.float32.*\.to\(torch.float32\)",
            ),
        ],
        ids=["missing", "unexpected", "shape", "shape of a buffer", "dtype"],
    )
    @pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
    @on_ranks(2)
    def test_what_does_not_fit_is_named_and_nothing_is_loaded(
        self, rank: int, change: Callable[[dict[str, Tensor]], object], text: str, in_place: bool
    ) -> None:
        model, state = wrap(CASES["net"], in_place), shifted(CASES["net"])
        change(state)
        with refused_whole(model, text):
            model.load_state_dict(state)

    @on_ranks(2)
    def test_narrower_values_are_widened(self, rank: int) -> None:
        model = wrap(CASES["net"])
        half = {name: tensor.to(torch.bfloat16) for name, tensor in make_net().state_dict().items()}
        model.load_state_dict(half)
        assert_same_state(fsdp.full_state_dict(model, rank0_only=False), {name: t.float() for name, t in half.items()})

    def test_parts_of_another_cut_are_refused(self) -> None:
        one = fsdp.simulate(2, lambda rank: wrap(CASES["net"]).state_dict())[1]
        (said,) = refusals(1, lambda rank: wrap(CASES["net"]).load_state_dict(one))
        assert re.search(r"'enter.weight' was cut in another way.*fsdp.load", said)

    @on_ranks(1)
    def test_assign_is_refused(self, rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match="assign=True would replace its shards"):
            wrap(CASES["net"]).load_state_dict(shifted(CASES["net"]), assign=True)

    @pytest.mark.parametrize("wrapper", [lambda model: fsdp.fully_shard(model, auto_wrap_policy={Block}), FSDP1])
    @on_ranks(2)
    def test_a_state_dict_that_a_plain_model_was_assigned_is_loaded(self, rank: int, wrapper: Any) -> None:
        state = make_net().state_dict()
        make_net().load_state_dict(state, assign=True)
        model = wrapper(make_net())
        parameters = [*model.parameters()]
        model.load_state_dict(state)
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))

    @on_ranks(2)
    def test_a_module_that_takes_other_names_still_does(self, rank: int) -> None:
        class Renaming(Net):
            def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
                if prefix + "size" in state_dict:
                    state_dict[prefix + "scale"] = state_dict.pop(prefix + "size")
                super()._load_from_state_dict(state_dict, prefix, *rest)

        model = fsdp.fully_shard(Renaming(), auto_wrap_policy={Block})
        state = shifted(CASES["net"])
        state["size"] = state.pop("scale")
        model.load_state_dict(state)
        assert_same_state(fsdp.full_state_dict(model, rank0_only=False), shifted(CASES["net"]))

    @on_ranks(2)
    def test_a_model_with_two_roots_is_checked_as_one(self, rank: int) -> None:
        def make() -> nn.Module:
            return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3), "c": nn.Linear(2, 2)})

        model = make()
        fsdp.fully_shard(model["a"])
        fsdp.fully_shard(model["b"])
        state = {name: torch.full_like(tensor, 2) for name, tensor in make().state_dict().items()}
        model.load_state_dict(state)
        assert all(bool((p == 2).all()) for p in weights_of(model).values())
        wrong = {**{name: tensor + 1 for name, tensor in state.items()}, "b.bias": torch.ones(7)}
        with refused_whole(model, r"'b.bias' has shape \(7,\)"):
            model.load_state_dict(wrong)


class Renames(nn.Module):
    """Its state dict has a weight under another name; when asked, and then without an earlier entry."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.asked = nn.Parameter(torch.ones(8)), False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "alias"] = self.weight.detach() if self.asked else torch.zeros(1)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop("0.weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@on_ranks(2)
def test_a_part_under_a_made_up_name_is_found_wherever_it_stands_in_a_state_dict(rank: int) -> None:
    """Also where other entries were there before, or went."""
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), Renames()), auto_wrap_policy={Renames})
    first = model.state_dict()
    model[1].asked = True
    for ask in (model.state_dict, lambda: model.state_dict(destination=first), model[1].state_dict):
        with pytest.raises(fsdp.ShardingError, match=r"'(1\.)?alias' in the state dict of unit '1' is this rank's part"):
            ask()


@on_ranks(2)
def test_a_module_may_remove_entries_that_were_there_before(rank: int) -> None:
    """As adapters do that save themselves alone."""

    class Adapter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_state_dict_post_hook(self.alone)

        @staticmethod
        def alone(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in [name for name in state_dict if not name.startswith(prefix)]:
                del state_dict[name]

    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Adapter()), auto_wrap_policy={Adapter})
    assert list(model.state_dict()) == ["2.weight", "2.bias"]
