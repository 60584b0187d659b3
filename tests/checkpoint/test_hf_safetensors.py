"""Weights as safetensors: exact names, limited files, every rank its own rows."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint import hf_safetensors
from tests.support.models import CASES, Case, local, make_net, wrap
from tests.support.ranks import on_ranks
from tests.support.states import STATEFUL, assert_same_state, refused_whole, shifted

safetensors = pytest.importorskip("safetensors.torch")


def read_all(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(safetensors.load_file(file))
    return found


def export(case: Case, size: int, path: Path, **options: Any) -> None:
    def fn(rank: int) -> None:
        model = wrap(case)
        model.load_state_dict(shifted(case))
        fsdp.export_safetensors(model, path, **options)

    fsdp.simulate(size, fn)


@STATEFUL
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("limit", ["5GB", 300])
def test_any_world_writes_what_any_other_reads(case: Case, size: int, limit: int | str, tmp_path: Path) -> None:
    export(case, size, tmp_path / "a", max_shard_size=limit)
    found, wanted = read_all(tmp_path / "a"), shifted(case)
    ties = {name for name, _ in case.model().named_parameters(remove_duplicate=False)} - {
        name for name, _ in case.model().named_parameters()
    }
    assert set(found) == set(wanted) - ties
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in found)

    def load(rank: int) -> dict[str, Tensor]:
        model = wrap(case)
        fsdp.load_safetensors(model, tmp_path / "a")
        return fsdp.full_state_dict(model)

    assert_same_state(fsdp.simulate(2, load)[0], wanted)


def test_files_are_limited_and_the_index_names_each_tensor_once(tmp_path: Path) -> None:
    export(CASES["net"], 2, tmp_path / "a", max_shard_size="0.000000001TB")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    state = make_net().state_dict()
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    for file in files:
        assert sum(state[name].nbytes for name, where in index["weight_map"].items() if where == file) <= 1000
        assert set(safetensors.load_file(tmp_path / "a" / file)) == {
            n for n, where in index["weight_map"].items() if where == file
        }


def test_no_rank_holds_more_than_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[int, int] = {}
    real = hf_safetensors.Writer.take

    def take(writer: hf_safetensors.Writer, name: str, tensor: Tensor) -> None:
        real(writer, name, tensor)
        now = sum(one.nbytes for there in writer._held.values() for one in there.values())
        held[id(writer)] = max(held.get(id(writer), 0), now)

    monkeypatch.setattr(hf_safetensors.Writer, "take", take)
    export(CASES["net"], 3, tmp_path / "a", max_shard_size=600)
    largest = max(t.nbytes for t in make_net().state_dict().values())
    assert len(held) == 3 and 0 < max(held.values()) <= max(600, largest)


def test_each_rank_reads_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(CASES["net"], 1, tmp_path / "a")
    read: list[tuple[int, int, int]] = []
    real = hf_safetensors._read

    class Noted:
        """A slice that notes how much is read of it."""

        def __init__(self, there: Any) -> None:
            self.there, self.numel = there, 0

        def __getitem__(self, key: Any) -> Tensor:
            found: Tensor = self.there[key]
            self.numel += found.numel()
            return found

    def noted(there: Any, piece: Any) -> Tensor:
        given = Noted(there)
        result = real(given, piece)
        part = piece.placement.part
        read.append((given.numel, local(piece.parameter).numel(), part.shape[0] if len(piece.shape) == 1 else piece.shape[-1]))
        return result

    monkeypatch.setattr(hf_safetensors, "_read", noted)
    fsdp.simulate(3, lambda rank: fsdp.load_safetensors(wrap(CASES["net"]), tmp_path / "a"))
    assert read and any(own == 0 for _, own, _ in read)
    for found, own, row in read:
        assert own <= found <= own + 2 * row


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    export(CASES["net"], 2, tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model.safetensors"]


def test_a_file_of_plain_torch_is_loaded(tmp_path: Path) -> None:
    safetensors.save_file(
        {name: t.to(torch.bfloat16) for name, t in make_net().state_dict().items()}, tmp_path / "plain.safetensors"
    )

    def fn(rank: int) -> dict[str, Tensor]:
        model = wrap(CASES["net"])
        fsdp.load_safetensors(model, tmp_path / "plain.safetensors")
        return fsdp.full_state_dict(model, rank0_only=False)

    for state in fsdp.simulate(2, fn):
        assert_same_state(state, {name: t.to(torch.bfloat16).float() for name, t in make_net().state_dict().items()})


INDEXES = ["{", "{}", "[]", '{"weight_map": 1}', "", "[" * 100_000]


def write_text(text: str, folder: Path) -> None:
    (folder / hf_safetensors.INDEX).write_text(text)


@on_ranks(2)
def test_a_buffer_without_elements_keeps_its_dimensions(rank: int, tmp_path: Path) -> None:
    model = make_net()
    model.register_buffer("memory", torch.empty(0, 4))
    fsdp.fully_shard(model)
    fsdp.export_safetensors(model, tmp_path / "a")
    fsdp.load_safetensors(model, tmp_path / "a")
    assert model.memory.shape == (0, 4)


@pytest.mark.parametrize("write", [lambda model, path: fsdp.save(path, model), fsdp.export_safetensors], ids=["save", "export"])
def test_a_sparse_buffer_is_refused_by_name(write: Callable[[nn.Module, Path], object], tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = make_net()
        model.register_buffer("graph", torch.eye(3).to_sparse())
        with pytest.raises(fsdp.ShardingError, match=r"'graph' is a tensor of layout torch\.sparse_coo, which these files"):
            write(fsdp.fully_shard(model), tmp_path / "a")

    fsdp.simulate(2, fn)
    assert list(tmp_path.iterdir()) == []


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "make", "text"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), make_net, "model.safetensors is missing"),
        (cut, make_net, "model.safetensors is damaged"),
        (lambda folder: None, lambda: nn.Sequential(make_net()), r"Missing key\(s\): \['0.scale'"),
        (lambda folder: None, lambda: type(make_net())(width=9), r"has shape \(8,.*the model has \(9,"),
        *((partial(write_text, text), make_net, rf"{hf_safetensors.INDEX} is damaged; get it again") for text in INDEXES),
    ],
    ids=["missing", "cut", "names", "shapes", *(text[:9] for text in INDEXES)],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    damage: Callable[[Path], Any], make: Callable[[], nn.Module], text: str, tmp_path: Path
) -> None:
    export(CASES["net"], 2, tmp_path / "a")
    damage(tmp_path / "a")

    def fn(rank: int) -> None:
        model = fsdp.fully_shard(make())
        with refused_whole(model, text):
            fsdp.load_safetensors(model, tmp_path / "a")

    fsdp.simulate(2, fn)


@pytest.mark.parametrize("limit", [0, -5, "5", "many GB", 1.5, "1.2.3GB", "GB", True])
def test_a_size_that_is_none_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(fsdp.ShardingError, match=r"max_shard_size is .* give bytes, or text such as '5GB'"):
        export(CASES["net"], 1, tmp_path / "a", max_shard_size=limit)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("safetensors", "numpy"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(fsdp.ShardingError, match=rf"needs the package {package}: pip install {package}\."):
                export(CASES["net"], 1, tmp_path / "a")
