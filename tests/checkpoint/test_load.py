"""`save` and `load`: other numbers of ranks, other wrappings, plain torch, exact resumption, housekeeping."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import fsdp
from fsdp.checkpoint.dcp import StoredCheckpoint
from fsdp.checkpoint.manifest import NAME, read_manifest
from tests.support.everything import some
from tests.support.models import CASES, Block, Case, Net, make_net, own_batches, train, wrap
from tests.support.optimizers import OPTIMIZERS, ROWS, RowStatistics, assert_same, in_groups, trained, wrapped
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FULL = StateDictOptions(full_state_dict=True)


def save_trained(
    rank: int, case: Case, path: Path, in_background: bool = False, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = trained(case, rank, in_groups, **options)
    fsdp.save(path, model, optimizer, extra={"rank": rank}, async_=in_background)
    return fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer)


def loaded(rank: int, case: Case, path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    options = {"auto_wrap_policy": case.policy, **options}
    model = fsdp.fully_shard(case.model(), **options)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    optimizer = in_groups(model.parameters())
    extra = fsdp.load(path, model, optimizer)
    return fsdp.full_state_dict(model), fsdp.full_optim_state_dict(model, optimizer), extra


@pytest.mark.parametrize(
    ("case", "saving", "loading"),
    [
        *((name, *sizes) for name in CASES for sizes in some((3, 2), (1, 2))),
        ("net", 1, 2),
        ("net", 2, 2),
        ("tied", 4, 8),
        ("odd", 8, 1),
    ],
)
def test_a_checkpoint_goes_from_one_world_into_another(case: str, saving: int, loading: int, tmp_path: Path) -> None:
    weights, state = fsdp.simulate(saving, partial(save_trained, case=CASES[case], path=tmp_path / "a"))[0]
    by_rank = fsdp.simulate(loading, partial(loaded, case=CASES[case], path=tmp_path / "a"))
    assert_same(by_rank[0][:2], (weights, state))
    assert [extra["rank"] for *_, extra in by_rank] == ([*range(loading)] if saving == loading else [0] * loading)


@given(
    saving=st.integers(1, 4),
    loading=st.integers(1, 4),
    width=st.integers(1, 12),
    blocks=st.integers(1, 2),
    policies=st.lists(st.sampled_from([None, (Block,), (nn.Linear,), (nn.Linear, nn.LayerNorm)]), min_size=2, max_size=2),
    strategies=st.lists(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]), min_size=2, max_size=2),
)
@settings(max_examples=8)
def test_property_any_cut_becomes_any_other(
    saving: int,
    loading: int,
    width: int,
    blocks: int,
    policies: list[Any],
    strategies: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    first, second = (Case(partial(Net, blocks, width), None if policy is None else set(policy)) for policy in policies)

    def options(size: int, strategy: str) -> dict[str, Any]:
        mesh = {"mesh": (2, size // 2) if size % 2 == 0 else (1, size)} if strategy == "HYBRID_SHARD" else {}
        return {"sharding_strategy": strategy, **mesh}

    weights, state = fsdp.simulate(saving, partial(save_trained, case=first, path=path, **options(saving, strategies[0])))[0]
    found = fsdp.simulate(loading, partial(loaded, case=second, path=path, **options(loading, strategies[1])))[0]
    assert_same(found[:2], (weights, state))


class TestPlainTorch:
    def test_distributed_checkpoint_loads_it_without_a_process_group(self, tmp_path: Path) -> None:
        case = CASES["net"]
        weights, state = fsdp.simulate(3, partial(save_trained, case=case, path=tmp_path / "a"))[0]
        plain = make_net()
        optimizer = in_groups(plain.parameters())
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # so that there is state to load into
        nested = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer, options=FULL)}
        dcp.load(nested, checkpoint_id=tmp_path / "a")
        plain.load_state_dict(nested["model"])
        set_optimizer_state_dict(plain, optimizer, nested["optimizer"], options=FULL)
        assert_same(dict(plain.state_dict()), weights)
        assert_same(get_optimizer_state_dict(plain, optimizer, options=FULL)["state"], state["state"])

    def test_it_becomes_one_file_of_torch_save(self, tmp_path: Path) -> None:
        weights, _ = fsdp.simulate(3, partial(save_trained, case=CASES["tied"], path=tmp_path / "a"))[0]
        dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
        assert_same(dict(torch.load(tmp_path / "a.pt", weights_only=True)["model"]), weights)

    def test_what_distributed_checkpoint_saved_of_a_plain_model_is_loaded(self, tmp_path: Path) -> None:
        case = CASES["net"]
        plain = case.model()
        optimizer = in_groups(plain.parameters())
        train(plain, own_batches(case, 0), lambda _: optimizer)
        state = get_optimizer_state_dict(plain, optimizer, options=FULL)
        dcp.save({"model": plain.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "a")
        found, found_state, extra = fsdp.simulate(2, partial(loaded, case=case, path=tmp_path / "a"))[0]
        assert_same(found, dict(plain.state_dict()))
        assert_same(found_state["state"], state["state"])
        assert extra == {}

    def test_a_file_of_torch_save_goes_in_and_comes_out(self, tmp_path: Path) -> None:
        case = CASES["tied"]
        plain = case.model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        train(plain, own_batches(case, 0), lambda _: optimizer)
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")

        def fn(rank: int) -> None:
            given = torch.load(tmp_path / "plain.pt", weights_only=True) if rank == 0 else {}
            model = wrap(case)
            mine = torch.optim.AdamW(model.parameters())
            fsdp.load_full_state_dict(model, given.get("model"))
            fsdp.load_full_optim_state_dict(model, mine, given.get("optimizer"))
            out = {"model": fsdp.full_state_dict(model), "optimizer": fsdp.full_optim_state_dict(model, mine)}
            if rank == 0:
                torch.save(out, tmp_path / "sharded.pt")

        fsdp.simulate(3, fn)
        found = torch.load(tmp_path / "sharded.pt", weights_only=True)
        assert_same(found["model"], dict(plain.state_dict()))
        assert_same(found["optimizer"]["state"], get_optimizer_state_dict(plain, optimizer, options=FULL)["state"])


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), RowStatistics], ids=[*OPTIMIZERS, "number a row"])
def test_the_state_of_any_optimizer_goes_through_a_checkpoint(make: Any, tmp_path: Path) -> None:
    case = ROWS if make is RowStatistics else CASES["odd"]

    def save(rank: int) -> dict[str, Any]:
        model, optimizer = trained(case, rank, make)
        fsdp.save(tmp_path / "a", model, optimizer)
        return fsdp.full_optim_state_dict(model, optimizer)

    def load(rank: int) -> dict[str, Any]:
        model, optimizer = wrapped(case, make)
        fsdp.load(tmp_path / "a", model, optimizer)
        assert all(p.shape.numel() or p not in optimizer.state for p in model.parameters()), "state was invented"
        return fsdp.full_optim_state_dict(model, optimizer)

    wanted = fsdp.simulate(3, save)[0]
    assert wanted["state"]
    assert_same(fsdp.simulate(2, load)[0], wanted)


def test_options_that_are_tensors_come_back_where_the_optimizer_has_its_own(tmp_path: Path) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.01))

    def fn(rank: int) -> None:
        model, optimizer = trained(CASES["net"], rank, make)
        optimizer.param_groups[0]["lr"].fill_(0.5)
        fsdp.save(tmp_path / "a", model, optimizer)
        for device in ("cpu", "meta"):
            other, again = wrapped(CASES["net"], make)
            again.param_groups[0]["lr"] = again.param_groups[0]["lr"].to(device)
            fsdp.load(tmp_path / "a", other, again)
            assert again.param_groups[0]["lr"].device.type == device
            assert device == "meta" or again.param_groups[0]["lr"] == 0.5
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert_same(again.state[two], optimizer.state[one])

    fsdp.simulate(2, fn)


def test_flattened_optimizer_state_is_refused(tmp_path: Path) -> None:
    plain, adam = CASES["net"].model(), torch.optim.Adam
    optimizer = adam(plain.parameters())
    state = get_optimizer_state_dict(plain, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": plain.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "a")

    def load(rank: int) -> None:
        with pytest.raises(
            fsdp.ShardingError, match=r"load .*a: its optimizer state is flattened; load it with torch's dcp.load"
        ):
            fsdp.load(tmp_path / "a", *wrapped(CASES["net"], adam))

    fsdp.simulate(2, load)


class ColumnStatistics(torch.optim.SGD):
    """An optimizer of a user, into whose state the test writes."""


def test_statistics_over_one_ranks_rows_come_back_on_as_many_ranks_only(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model, optimizer = trained(ROWS, rank, ColumnStatistics)
        for parameter in model.parameters():
            optimizer.state[parameter]["col_var"] = fsdp.to_local(parameter).detach().mean(dim=0, keepdim=True)
        fsdp.save(tmp_path / "a", model, optimizer)
        other, again = wrapped(ROWS, ColumnStatistics)
        fsdp.load(tmp_path / "a", other, again)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(again.state[two], optimizer.state[one])

    def load(rank: int) -> None:
        model = wrap(ROWS)
        text = r"'col_var' of parameter '0.weight' is a statistic over each rank's own part, saved by 2 ranks"
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.load(tmp_path / "a", model, ColumnStatistics(model.parameters()))
        fsdp.load(tmp_path / "a", model)

    fsdp.simulate(2, save)
    fsdp.simulate(3, load)


def test_the_newest_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        for step in range(4):
            fsdp.save(tmp_path / "run" / str(step), model, keep_last=2)

    assert fsdp.latest(tmp_path / "run") is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".9.incomplete-00000000").mkdir()
    (tmp_path / "run" / "notes").mkdir()
    fsdp.simulate(2, fn)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "3", "notes"]
    assert fsdp.latest(tmp_path / "run") == tmp_path / "run" / "3"


def test_a_damaged_checkpoint_counts_as_none_that_is_kept(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        for step in range(3):
            fsdp.save(tmp_path / str(step), model, keep_last=2)
            if rank == 0 and step == 1:
                next((tmp_path / "1").glob("*.distcp")).unlink()

    fsdp.simulate(2, fn)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize("path", ["disk {}/a", "step {}"])
def test_a_path_that_is_another_folder_on_another_rank_is_refused(path: str, tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        with pytest.raises(fsdp.ShardingError, match=r"save: .*1.* is another folder on this rank than on rank 0; give a path"):
            fsdp.save(tmp_path / path.format(rank), wrap(CASES["net"]))

    fsdp.simulate(2, fn)
    assert not [path for path in tmp_path.rglob("*") if path.name != "disk 0"], "but for the folder around it"


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["cut", "a list", "nested"])
def test_a_damaged_manifest_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(fsdp.ShardingError, match=f"{NAME} is damaged"):
        read_manifest(tmp_path)


def test_what_cannot_be_saved_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = wrap(CASES["net"])
        with pytest.raises(fsdp.ShardingError, match="extra holds something that only unpickling would bring back"):
            fsdp.save(tmp_path / "a", model, extra={"thing": Path("x") if rank == 1 else 1})
        for wrong in ({"keep_last": 0}, {"keep_last": 2.5}, {"keep_last": True}, {"keep_last": "2"}, {"extra": 5}, {"ema": 5}):
            ((name, value),) = wrong.items()
            with pytest.raises(fsdp.ShardingError, match=f"save: {name} is {value!r}; give"):
                fsdp.save(tmp_path / "a", model, **wrong)  # type: ignore[arg-type]
        for call in (lambda: fsdp.save(None, model), lambda: fsdp.load(5, model), lambda: fsdp.latest(5)):  # type: ignore[arg-type]
            with pytest.raises(fsdp.ShardingError, match=r"(path|folder) is (None|5); give the name of a folder"):
                call()
        with fsdp.summon_full_params(model), pytest.raises(fsdp.ShardingError, match="save: call it outside any forward"):
            fsdp.save(tmp_path / "a", model)

    fsdp.simulate(2, fn)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["optimizer", "ema", "accumulated", "async_"])
@on_ranks(3)
def test_an_option_that_some_ranks_give_is_refused_by_name(rank: int, option: str, tmp_path: Path) -> None:
    model, optimizer = trained(CASES["net"], rank, in_groups)
    given = {"optimizer": optimizer, "ema": fsdp.EMA(model)}.get(option, True)
    with pytest.raises(fsdp.ShardingError, match=f"save: {option} is given on ranks 0, 2 alone; give it on every rank"):
        fsdp.save(tmp_path / "a", model, **({option: given} if rank != 1 else {}))
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_several_optimizers_are_refused(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained(CASES["net"], rank, in_groups)
    with pytest.raises(fsdp.ShardingError, match="save: the optimizer is a list; give one optimizer"):
        fsdp.save(tmp_path / "a", model, [optimizer, optimizer])


def test_every_rank_writes_its_own_parts_and_nothing_twice(tmp_path: Path) -> None:
    fsdp.simulate(2, lambda rank: fsdp.save(tmp_path / "a", wrap(CASES["net in float64"])))
    files = {path.name: path.stat().st_size for path in (tmp_path / "a").glob("*.distcp")}
    assert len(files) == 2
    held = sum(t.nbytes for t in CASES["net in float64"].model().state_dict().values())
    tensors = 2 * len(CASES["net"].model().state_dict())
    assert held < sum(files.values()) < held + 3000 * tensors, "torch adds less than 3 kB to each box"


@pytest.mark.parametrize("in_background", [False, True])
def test_files_are_limited_and_all_of_them_are_read(in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp.checkpoint.dcp.FILE_BYTES", 300)
    case = CASES["net"]
    wanted = fsdp.simulate(2, partial(save_trained, case=case, path=tmp_path / "a", in_background=in_background))[0]
    tensors: dict[str, int] = {}
    for index, info in StoredCheckpoint(tmp_path / "a").metadata.storage_data.items():
        stored = StoredCheckpoint(tmp_path / "a").tensor(index.fqn)
        if stored is not None:
            (chunk,) = (one for one in stored.chunks if tuple(one.offsets) == tuple(index.offset))
            size = torch.Size(chunk.sizes).numel() * stored.properties.dtype.itemsize
            tensors.setdefault(info.relative_path, 0)
            tensors[info.relative_path] += size
    largest = max(t.nbytes for t in case.model().state_dict().values())
    assert len(tensors) > 6 and max(tensors.values()) <= max(300, largest)
    assert_same(fsdp.simulate(3, partial(loaded, case=case, path=tmp_path / "a"))[0][:2], wanted)
    (tmp_path / "a" / sorted(tensors)[-1]).unlink()
    with pytest.warns(UserWarning, match="is missing"):
        assert fsdp.latest(tmp_path) is None
