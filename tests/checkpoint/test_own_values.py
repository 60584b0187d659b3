"""What is not sharded, and each rank has in a version of its own: saved as such, and loaded by a stated rule."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fsdp
from fsdp.checkpoint import own_values
from fsdp.checkpoint.dcp import StoredCheckpoint
from fsdp.commands.convert import convert, describe
from tests.support.models import Block, Case, local, own_batches, train
from tests.support.optimizers import assert_same
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Codebook(nn.Module):
    """A codebook that follows the data of this rank, and extra state whose keys follow them too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3, 8))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("fixed", torch.arange(4.0))
        self.register_buffer("queue", torch.zeros(0, 8))
        self.words: dict[str, Any] = {"none": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            flat = x.detach().reshape(-1, 8)
            self.codes.lerp_(flat[:3], 0.3)
            self.seen += int(flat[0, 0] > 0) + 1
            self.queue = torch.cat([self.queue, flat[: 1 + int((flat[:4] > 0).sum()) % 5]])
            self.words = {f"{len(self.queue)} words": int(self.seen), "last": flat[0].clone()}
        return x + self.codes.mean(0) * 0.1

    def get_extra_state(self) -> dict[str, Any]:
        return self.words

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state


class Normed(nn.Module):
    """Running statistics, a codebook, and a layer of each rank's own when it is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(3)
        self.codebook, self.block, self.own, self.leave = Codebook(), Block(8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.codebook(self.norm(torch.tanh(self.enter(x)))))
        return self.leave(x + self.own(x) if getattr(self, "uses_own", True) else x)


CASE = Case(Normed, {Block})


def make(ignored: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = CASE.model()
    if ignored:
        options["ignored_modules"] = {net.own}
    model = fsdp.fully_shard(net, auto_wrap_policy=CASE.policy, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(rank: int, steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(**options)
    train(model, own_batches(CASE, rank, steps), lambda _: optimizer)
    return model, optimizer


def save_trained(rank: int, path: Path, **options: Any) -> dict[str, Any]:
    """Save what was trained, and return what this rank has of its own."""
    model, optimizer = trained(rank, **options)
    fsdp.save(path, model, optimizer)
    return unsharded_of(model)


def unsharded_of(model: nn.Module) -> dict[str, Any]:
    """What this rank has of its own: buffers, extra state, parameters of the ignored module."""
    own = {f"own.{name}": p.detach().clone() for name, p in model.own.named_parameters()}
    return {**{name: b.clone() for name, b in model.named_buffers()}, **own, "words": dict(model.codebook.words)}


ALIKE: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "sharded": (3, False, {}),
    "in the background": (2, True, {}),
    "replicated": (2, False, {"sharding_strategy": "NO_SHARD"}),
    "on a mesh": (4, False, {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}),
    "with an ignored module": (2, False, {"ignored": True}),
}


@pytest.mark.parametrize(("size", "in_background", "options"), ALIKE.values(), ids=ALIKE)
def test_a_run_resumes_with_each_ranks_own_to_the_bit(
    size: int, in_background: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    def fn(rank: int) -> dict[str, Any]:
        model, optimizer = trained(rank, **options)
        fsdp.save(tmp_path / "a", model, optimizer, async_=in_background)
        saved = unsharded_of(model)
        batches = own_batches(CASE, rank, 5)[2:]
        train(model, batches, lambda _: optimizer)

        resumed, again = make(**options)
        with torch.no_grad():
            for buffer in resumed.buffers():
                buffer.zero_()
        resumed.codebook.queue = torch.zeros_like(saved["codebook.queue"])
        fsdp.load(tmp_path / "a", resumed, again)
        assert_same(unsharded_of(resumed), saved)
        train(resumed, batches, lambda _: again)
        assert_same(unsharded_of(resumed), unsharded_of(model))
        for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(local(one), local(other))
            assert_same(dict(again.state[other]), dict(optimizer.state[one]))
        return saved

    by_rank = fsdp.simulate(size, fn)
    for name in ("norm.running_mean", "codebook.codes"):
        assert not torch.equal(by_rank[0][name], by_rank[1][name]), "the ranks had the same, and nothing was tested"
    shapes = {tuple(found["codebook.queue"].shape) for found in by_rank}
    assert len(shapes) > 1, "the ranks had buffers of one shape"
    assert len({tuple(found["words"]) for found in by_rank}) > 1, "the ranks had extra state with the same keys"


@pytest.mark.parametrize("loading", [1, 3])
def test_on_another_number_of_ranks_everybody_gets_rank_0s(loading: int, tmp_path: Path) -> None:
    wanted = fsdp.simulate(2, lambda rank: save_trained(rank, tmp_path / "a"))[0]

    def load(rank: int) -> None:
        model, optimizer = make()
        model.codebook.queue = torch.ones_like(wanted["codebook.queue"])
        fsdp.load(tmp_path / "a", model, optimizer)
        found = unsharded_of(model)
        own = {name for name in wanted if name.startswith("own.")}  # sharded here
        assert_same({n: v for n, v in found.items() if n not in own}, {n: v for n, v in wanted.items() if n not in own})

    fsdp.simulate(loading, load)


def test_what_is_equal_is_there_once(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model, optimizer = make()
        train(model, own_batches(CASE, 0), lambda _: optimizer)  # the same data on every rank
        fsdp.save(tmp_path / "equal", model, optimizer)
        train(model, own_batches(CASE, rank), lambda _: optimizer)
        fsdp.save(tmp_path / "different", model, optimizer)

    fsdp.simulate(3, fn)
    assert not [path for path in StoredCheckpoint(tmp_path / "equal").paths.values() if path[0] == own_values.PART]
    own = [path for path in StoredCheckpoint(tmp_path / "different").paths.values() if path[0] == own_values.PART]
    assert {path[1] for path in own} == {"1", "2"}, "rank 0's versions are the plain ones"
    names = {path[3] for path in own}
    assert {"norm.running_mean", "norm.running_var", "codebook.codes"} <= names
    assert not names & {"codebook.fixed", "norm.num_batches_tracked", "norm.weight"}


def test_other_readers_find_rank_0s(tmp_path: Path) -> None:
    def fn(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = trained(rank)
        fsdp.save(tmp_path / "a", model, optimizer)
        fsdp.export_safetensors(model, tmp_path / "exported", max_shard_size=100)
        return fsdp.full_state_dict(model), {n: b.clone() for n, b in model.named_buffers()}

    full, buffers = fsdp.simulate(3, fn)[0]
    assert_same({name: full[name] for name in buffers}, buffers)
    plain = CASE.model()
    plain.codebook.queue = torch.zeros_like(buffers["codebook.queue"])
    state = {name: value for name, value in plain.state_dict().items() if isinstance(value, Tensor)}
    dcp.load({"model": state}, checkpoint_id=tmp_path / "a")
    assert_same(state, {name: full[name] for name in state})
    safetensors = pytest.importorskip("safetensors.torch")
    convert(tmp_path / "a", tmp_path / "converted", "safetensors", 10**9)
    for folder in ("exported", "converted"):
        files = [safetensors.load_file(file) for file in sorted((tmp_path / folder).glob("*.safetensors"))]
        found = {name: tensor for file in files for name, tensor in file.items()}
        assert folder == "converted" or len(files) > 5, "one rank wrote all of the buffers"
        assert_same({name: found[name] for name in buffers}, buffers)


def test_a_conversion_keeps_every_version(tmp_path: Path) -> None:
    by_rank = fsdp.simulate(2, lambda rank: save_trained(rank, tmp_path / "a"))
    convert(tmp_path / "a", tmp_path / "a.pt", "torch", 10**9)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found["model"]["codebook.codes"], by_rank[0]["codebook.codes"])
    assert torch.equal(found["own"]["1"]["model"]["codebook.codes"], by_rank[1]["codebook.codes"])
    assert any(line.startswith("own: ") for line in describe(tmp_path / "a"))


@pytest.mark.parametrize(
    ("written", "of_ranks"), [("2026-11-22", [1, 1]), ("2026-11-22", [1] * 3), ("2026-11-26", [0, 1]), ("2026-11-26", [0] * 3)]
)
def test_a_checkpoint_that_an_earlier_version_wrote_is_loaded(written: str, of_ranks: list[int], tmp_path: Path) -> None:
    """Two ranks wrote it. full.pt has their full state dicts and the buffers of each. The first format kept one rank's."""
    shutil.unpack_archive(Path(__file__).parent / "stored" / f"{written}.tar.xz", tmp_path, filter="data")
    full = torch.load(tmp_path / "full.pt", weights_only=True)

    def load(rank: int) -> dict[str, Tensor]:
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), auto_wrap_policy={nn.Linear})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fsdp.load(tmp_path / "checkpoint", model, optimizer)
        found = fsdp.full_state_dict(model, rank0_only=False)
        assert_same(*({name: one[name] for name, _ in model.named_parameters()} for one in (found, full["model"])))
        assert_same(fsdp.full_optim_state_dict(model, optimizer, rank0_only=False), full["optimizer"])
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    for found, rank in zip(fsdp.simulate(len(of_ranks), load), of_ranks, strict=True):
        assert_same(found, full["buffers"][rank])


def test_a_damaged_own_version_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    fsdp.simulate(2, lambda rank: save_trained(rank, tmp_path / "a"))
    stored = StoredCheckpoint(tmp_path / "a")
    ((_, info),) = (item for item in stored.metadata.storage_data.items() if item[0].fqn == "own.1.model.codebook.codes")
    with open(tmp_path / "a" / info.relative_path, "r+b") as file:
        file.seek(info.offset + info.length // 2)
        file.write(b"damage")

    def stored_shape(key: str) -> torch.Size:
        found = stored.tensor(key) if key in stored.paths else stored.tensor("model.codebook.queue")
        assert found is not None
        return found.size

    def load(rank: int) -> None:
        model, _ = make()
        model.codebook.queue = torch.zeros(stored_shape(f"own.{rank}.model.codebook.queue"))
        with pytest.raises(fsdp.ShardingError, match="is damaged between bytes"):
            fsdp.load(tmp_path / "a", model)
        assert not model.norm.running_mean.any()

    fsdp.simulate(2, load)


@pytest.mark.parametrize(("size", "ignored"), [(1, True), (3, True), (2, False)], ids=["fewer", "more", "sharded now"])
def test_a_parameter_that_each_rank_trained_for_itself_is_not_lost(size: int, ignored: bool, tmp_path: Path) -> None:
    fsdp.simulate(2, lambda rank: save_trained(rank, tmp_path / "a", ignored=True))
    text = r"parameter 'own\.\w+' was not sharded, and each of the 2 ranks that saved it may have trained its own; load it on as"

    def load(rank: int) -> None:
        model, optimizer = make(ignored)
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.load(tmp_path / "a", model, optimizer)
        assert not optimizer.state

    fsdp.simulate(size, load)
    # what the error proposes
    convert(tmp_path / "a", tmp_path / "a.pt", "torch", 10**9)
    given = torch.load(tmp_path / "a.pt", weights_only=True)

    def load_full(rank: int) -> Tensor:
        model, _ = make(ignored)
        model.codebook.queue = torch.zeros_like(given["model"]["codebook.queue"])
        fsdp.load_full_state_dict(model, given["model"] if rank == 0 else None)
        return fsdp.full_state_dict(model, rank0_only=False)["own.weight"]

    assert all(torch.equal(found, given["model"]["own.weight"]) for found in fsdp.simulate(size, load_full))


@pytest.mark.parametrize("idle", [0, 1])
@on_ranks(2)
def test_state_of_an_ignored_parameter_that_one_rank_never_stepped_stays_that_ranks(rank: int, idle: int, tmp_path: Path) -> None:
    model, optimizer = make(ignored=True)
    model.uses_own = rank != idle
    train(model, own_batches(CASE, rank), lambda _: optimizer)
    state = fsdp.full_optim_state_dict(model, optimizer)
    assert rank != 0 or ("own.weight" in state["state"]) == (idle != 0)
    fsdp.save(tmp_path / "a", model, optimizer)
    other, again = make(ignored=True)
    other.codebook.queue = torch.zeros_like(model.codebook.queue)
    fsdp.load(tmp_path / "a", other, again)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(dict(again.state[two]), dict(optimizer.state[one]))
    assert bool(again.state[other.own.weight]) == (rank != idle)


def test_a_value_that_no_checksum_can_be_made_of_is_notified_to_every_rank(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model, _ = make()
        if rank == 1:
            model.codebook.words = {"function": lambda: None}
        with pytest.raises(Exception, match=r"local object '.*<lambda>'"):  # Pythons differ in the words before it
            fsdp.save(tmp_path / "a", model)

    fsdp.simulate(2, fn)
    assert not list(tmp_path.iterdir())


VALUES: dict[str, Any] = {
    "a matrix": torch.arange(6.0).view(2, 3),
    "another": torch.arange(6.0).view(2, 3) + 1,
    "of another shape": torch.arange(6.0).view(3, 2),
    "of another dtype": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "zeros": torch.zeros(2, 3),
    "negative zeros": -torch.zeros(2, 3),
    "bf16": torch.arange(6.0).view(2, 3).bfloat16(),
    "complex": torch.tensor([1 + 2j]),
    "its conjugate": torch.tensor([1 + 2j]).conj(),
    "empty": torch.zeros(0, 3),
    "empty in another way": torch.zeros(3, 0),
    "without dimensions": torch.tensor(1.0),
    "sparse": torch.eye(3).to_sparse(),
    "a list": [torch.arange(6.0), 1],
    "another list": [torch.arange(6.0), 2],
    "a dict": {"a": torch.arange(6.0), "b": {"c": 1}},
    "another dict": {"a": torch.arange(6.0), "b": {"c": 2}},
    "a number": 1,
    "a truth": True,
    "text": "1",
    "nothing": None,
}


def test_no_two_values_have_the_same_checksum() -> None:
    assert len({own_values._checksum(value) for value in VALUES.values()}) == len(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_have_the_same_checksum(name: str) -> None:
    assert own_values._checksum(VALUES[name]) == own_values._checksum(copy.deepcopy(VALUES[name]))


def test_a_checksum_is_of_the_values_and_not_of_the_memory_around_them() -> None:
    checksum, matrix = own_values._checksum, torch.arange(6.0).view(2, 3)
    assert checksum(matrix) == checksum(matrix.t().contiguous().t()) == checksum(torch.cat([matrix, matrix])[:2])
    assert checksum(nn.Parameter(matrix)) == checksum(matrix)
    assert checksum([matrix]) == checksum([matrix.t().contiguous().t()])
    assert checksum(torch.tensor([1 - 2j])) == checksum(torch.tensor([1 + 2j]).conj())
