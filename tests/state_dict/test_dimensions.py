"""Full state, checkpoints, averages and scalers of models that lie on several meshes: tensor parallelism, experts, replicas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp
from fsdp.compat.fully_shard import fully_shard
from fsdp.shards.dtensors import part_of
from tests.building import test_experts as experts
from tests.support.ranks import on_ranks, refused_everywhere

KINDS = ["tensor parallel", "replicas", "experts", "experts by placements", "experts and tensor parallel", "dtensors", "columns"]
"""The last two are on one mesh: shards as DTensors, cut between rows and along the last dimension."""
BESIDE = ["a unit beside tensor parallel", "a unit beside replicas"]
"""A unit of which tensor parallelism has spread nothing was wrapped by itself, so that its shards are no DTensors."""
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(2))

    def reset_parameters(self) -> None:
        self.seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


def plain(kind: str) -> nn.Sequential:
    if kind.startswith("experts"):
        return experts.make()
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 6))


def ranks_of(kind: str) -> int:
    return 8 if kind.endswith("replicas") else 4


def groups_of(kind: str) -> int:
    """How many ranks get data of their own."""
    return 2 if kind.endswith("tensor parallel") else 4


def build(
    kind: str,
    model: nn.Sequential | None = None,
    *,
    before_wrapping: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> nn.Sequential:
    model = model or plain(kind)
    if kind in ("experts", "experts by placements"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        experts.distribute(model, mesh)
        before_wrapping(model)
        if kind == "experts":
            experts.wrap(model, mesh, **options)
        else:
            experts.wrap_by("placements", model, mesh, **options)
        return model
    if kind == "experts and tensor parallel":
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("edp", "ep", "tp"))
        for block in model[:2]:
            parallelize_module(block, mesh["tp"], {"router": ColwiseParallel(output_layouts=Replicate())})
        experts.distribute(model, mesh)
        before_wrapping(model)
        experts.wrap(model, mesh, **options)
        return model
    if kind in ("dtensors", "columns"):
        before_wrapping(model)
        choose = (lambda p: Shard(p.dim() - 1)) if kind == "columns" else None
        return fsdp.fully_shard(model, auto_wrap_policy={Block}, dtensors=True, shard_placement_fn=choose, **options)
    is_hybrid = kind.endswith("replicas")
    shape, names = ((2, 2, 2), ("replica", "dp", "tp")) if is_hybrid else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data, strategy = (mesh["replica", "dp"], "HYBRID_SHARD") if is_hybrid else (mesh["dp"], "FULL_SHARD")
    before_wrapping(model)
    if kind in BESIDE:
        fsdp.fully_shard(model[2], mesh=data, sharding_strategy=strategy)
    return fsdp.fully_shard(model, mesh=data, auto_wrap_policy={Block}, **{"sharding_strategy": strategy, **options})


def batch(step: int, group: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + group))


def group_here(kind: str) -> int:
    return dist.get_rank() * groups_of(kind) // ranks_of(kind)


def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(batch(number, group_here(kind))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(kind: str, steps: int = 2, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = build(kind, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        step(kind, model, optimizer, number)
    return model, optimizer


def alone(kind: str, steps: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The same in one process."""
    model = plain(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_alone(kind, model, optimizer, steps)
    return model, optimizer


def train_alone(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        for group in range(groups_of(kind)):
            (model(batch(number, group)).square().mean() / groups_of(kind)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(found: dict[str, Any], wanted: dict[str, Any], most: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        one = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert one.shape == tensor.shape, name
        assert float((one.detach() - tensor).abs().max()) <= most * max(float(tensor.abs().max()), 1e-3), name


def full(model: nn.Module) -> dict[str, Any]:
    return fsdp.full_state_dict(model, rank0_only=False)


def on_all(kind: str, program: Callable[[], Any]) -> list[Any]:
    return fsdp.simulate(ranks_of(kind), lambda rank: program())


@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_a_checkpoint_is_trained_on(kind: str, tmp_path: Path) -> None:
    wanted, after = alone(kind)[0].state_dict(), alone(kind, 3)[0].state_dict()

    def program() -> bool:
        fsdp.save(tmp_path / "saved", *trained(kind), extra={"step": 2})
        model, optimizer = trained(kind, 0)
        assert fsdp.load(tmp_path / "saved", model, optimizer) == {"step": 2}
        same(full(model), wanted)
        step(kind, model, optimizer, 2)
        same(full(model), after)
        return bool(fsdp.full_state_dict(model))

    assert on_all(kind, program) == [True] + [False] * (ranks_of(kind) - 1)


@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_full_states_are_given_and_taken(kind: str) -> None:
    one, its_optimizer = alone(kind)
    wanted, after = one.state_dict(), alone(kind, 3)[0].state_dict()
    state: Any = get_optimizer_state_dict(one, its_optimizer)

    def program() -> None:
        model, optimizer = trained(kind)
        found: Any = fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        for name, kept in state["state"].items():
            same(found["state"][name], kept, 1e-3)
        is_first = dist.get_rank() == 0
        for given in (True, is_first):
            model, optimizer = trained(kind, 0)
            fsdp.load_full_state_dict(model, wanted if given else None)
            fsdp.load_full_optim_state_dict(model, optimizer, state if given else None)
            step(kind, model, optimizer, 2)
            same(full(model), after)
        model.load_state_dict(wanted)
        same(full(model), wanted, 0.0)
        streamed = {name: tensor.clone() for name, tensor in fsdp.iter_full_params(model)}
        same(streamed, {name: wanted[name] for name, _ in one.named_parameters()}, 0.0)

    on_all(kind, program)


@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_weights_are_exported_and_read_by_other_meshes(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def program() -> None:
        model, _ = trained(kind)
        fsdp.export_safetensors(model, tmp_path / "exported")
        other = build(kind)
        fsdp.load_safetensors(other, tmp_path / "exported")
        same(full(other), full(model), 0.0)

    on_all(kind, program)
    same(load_file(tmp_path / "exported" / "model.safetensors"), alone(kind)[0].state_dict())


@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_averages_of_weights(kind: str, tmp_path: Path) -> None:
    before, after = plain(kind).state_dict(), alone(kind, 1)[0].state_dict()
    wanted = {name: (before[name] + after[name]) / 2 for name in before}

    def program() -> None:
        model, optimizer = trained(kind, 0)
        average = fsdp.EMA(model, 0.5)
        step(kind, model, optimizer, 0)
        average.update()
        fsdp.save(tmp_path / "saved", model, ema=average)
        loaded = [average.state_dict(), {"averages": wanted, "updates": 1}]
        for number in range(3):
            other = build(kind)
            again = fsdp.EMA(other, 0.5)
            if number == 2:
                fsdp.load(tmp_path / "saved", other, ema=again)
            else:
                again.load_state_dict(loaded[number])
            with again.averaged_weights():
                same(full(other), wanted)

    on_all(kind, program)


@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_gradients_are_saved_in_the_middle_of_a_step(kind: str, tmp_path: Path) -> None:
    def program() -> None:
        model, optimizer = trained(kind)
        model(batch(5, group_here(kind))).square().mean().backward()
        fsdp.save(tmp_path / "saved", model, optimizer, accumulated=True)
        other = build(kind)
        fsdp.load(tmp_path / "saved", other)
        wanted = {name: fsdp.full_tensor(p.grad) for name, p in model.named_parameters()}
        same({name: fsdp.full_tensor(p.grad) for name, p in other.named_parameters()}, wanted, 0.0)

    on_all(kind, program)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, *BESIDE])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: str, is_ours: bool) -> None:
    def program() -> float:
        model, optimizer = trained(kind, 0)
        before = {name: tensor.clone() for name, tensor in full(model).items()}
        scaler: Any = fsdp.ShardedGradScaler(model) if is_ours else torch.amp.GradScaler("cpu")
        scaler.scale(model(batch(0, group_here(kind))).square().mean()).backward()
        if dist.get_rank() == ranks_of(kind) - 1:
            distributed = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
            most = max(gradient.device_mesh.ndim for gradient in distributed)
            gradients = [gradient.to_local() for gradient in distributed if gradient.device_mesh.ndim == most]
            next(one for one in gradients if one.numel()).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        same(full(model), before, 0.0)
        return float(scaler.get_scale())

    assert set(on_all(kind, program)) == {2.0**15}


def test_ranks_of_tensor_parallelism_that_begin_differently_are_refused() -> None:
    def values(rank: int) -> None:
        model = plain("tensor parallel")
        with torch.no_grad():
            model[2].weight.add_(rank % 2)
        build("tensor parallel", model)

    refused_everywhere(4, values, "ranks 0 and 1 of the meshes begin with different values of '2.weight', which")

    def seeds(rank: int) -> None:
        with torch.device("meta"):
            model = plain("tensor parallel")
        torch.manual_seed(rank)
        build("tensor parallel", model)

    refused_everywhere(4, seeds, "begin with different values of '2.weight', which tensor parallelism does not cut")
    different = lambda rank: build("tensor parallel", prefetch=rank % 2)  # noqa: E731
    refused_everywhere(4, different, "rank 0 has prefetch=0, but rank 1 has prefetch=1")


@on_ranks(4, refuses="'exp_avg' of parameter '0.up.weight' is an ordinary tensor of shape (2, 6)")
def test_state_that_is_no_dtensor_beside_one_is_refused(rank: int) -> None:
    model, optimizer = trained("tensor parallel", 1)
    optimizer.state[model[0].up.weight]["exp_avg"] = torch.zeros(2, 6)
    fsdp.full_optim_state_dict(model, optimizer)


@on_ranks(4)
def test_a_matrix_without_rows_on_some_ranks_is_sharded(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(0)
    same(full(model), nn.Sequential(nn.Linear(6, 5)).state_dict(), 0.0)


def in_one_process(kind: str, power: float) -> tuple[float, dict[str, Tensor]]:
    model = plain(kind)
    for group in range(groups_of(kind)):
        (model(batch(0, group)).square().mean() / groups_of(kind)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, power)
    return float(norm), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def clip_by_torch(model: nn.Module, most: float, power: float) -> Tensor:
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), most, power)
    return norm.full_tensor()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        *((kind, clip_by_torch) for kind in ("tensor parallel", "replicas")),
        *((kind, fsdp.clip_grad_norm_) for kind in [*KINDS, *BESIDE]),
    ],
)
def test_each_element_counts_once_in_the_norm(kind: str, clip: Callable[[nn.Module, float, float], Tensor]) -> None:
    expected = {power: in_one_process(kind, power) for power in (1.0, 2.0, float("inf"))}

    def program() -> tuple[float, ...]:
        model, norms = build(kind), []
        for power, (norm, gradients) in expected.items():
            model.zero_grad()
            model(batch(0, group_here(kind))).square().mean().backward()
            norms.append(float(clip(model, 0.01, power)))
            assert norms[-1] == pytest.approx(norm, rel=1e-6)
            same({name: p.grad for name, p in model.named_parameters()}, gradients, 1e-5)
        return tuple(norms)

    assert len(set(on_all(kind, program))) == 1


@on_ranks(4, refuses="of a list of shards and DTensors: to clip the gradients of both, call fsdp.clip_grad_norm_")
def test_torchs_clip_takes_no_shards_beside_dtensors(rank: int) -> None:
    model = build("a unit beside tensor parallel")
    model(batch(0, 0)).square().mean().backward()
    nn.utils.clip_grad_norm_([*model.parameters()][::-1], 1.0)


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [[1, 0], [3, 2]], [[0, 1], [3, 2]], [[2, 3], [0, 1]]])
@on_ranks(4, refuses="which do not ascend, and checkpoints of torch would mix up its parts")
def test_ranks_ascend_where_shards_are_dtensors(rank: int, order: list[Any]) -> None:
    mesh, model = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp")[: torch.tensor(order).ndim]), plain("dtensors")
    if mesh.ndim > 1:
        parallelize_module(model[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"], dtensors=mesh.ndim == 1)


@pytest.mark.parametrize(("order", "dtensors"), [([[2, 3], [0, 1]], True), ([[0, 2], [1, 3]], False)])
@on_ranks(4)
def test_replicas_may_be_in_any_order(rank: int, order: list[list[int]], dtensors: bool, tmp_path: Path) -> None:
    mesh, model = DeviceMesh("cpu", order, mesh_dim_names=("replica", "dp")), plain("dtensors")
    fsdp.fully_shard(model, mesh=mesh, sharding_strategy="HYBRID_SHARD", dtensors=dtensors)
    fsdp.save(tmp_path / "it", model)
    nn.init.zeros_(model[2].weight)
    fsdp.load(tmp_path / "it", model)
    same(full(model), plain("dtensors").state_dict(), 0.0)


@on_ranks(4)
def test_torch_says_where_parts_are_that_it_has_cut(rank: int) -> None:
    mesh, shape = init_device_mesh("cpu", (2, 2)), (8,)
    for placements in ((Shard(0), _StridedShard(0, split_factor=2)), (Shard(0), Replicate()), (Replicate(), Shard(0))):
        wanted = compute_local_shape_and_global_offset(shape, mesh, placements)
        assert part_of(compute_local_shape_and_global_offset, shape, mesh, placements) == wanted


@pytest.mark.parametrize(("saves", "loads", "rows"), [((4, 2), (4, 2), 9), ((3, 2), (2, 3), 7), ((2, 3), (3, 2), 13)])
def test_unequal_parts_that_are_cut_once_more_are_saved(
    saves: tuple[int, int], loads: tuple[int, int], rows: int, tmp_path: Path
) -> None:
    def model(shape: tuple[int, int], value: Tensor) -> nn.Sequential:
        mesh, found = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), nn.Sequential(nn.Linear(1, rows))
        nn.init.zeros_(found[0].bias)
        found[0].weight.data.copy_(value)
        parallelize_module(found, mesh["tp"], {"0": ColwiseParallel()})
        return fsdp.fully_shard(found, mesh=mesh["dp"])

    wanted = torch.arange(1.0, rows + 1).view(rows, 1)
    fsdp.simulate(saves[0] * saves[1], lambda rank: fsdp.save(tmp_path / "it", model(saves, wanted)))

    def program(rank: int) -> Tensor:
        into = model(loads, torch.zeros(rows, 1))
        fsdp.load(tmp_path / "it", into)
        return fsdp.full_tensor(into[0].weight).detach()

    assert all(torch.equal(found, wanted) for found in fsdp.simulate(loads[0] * loads[1], program))


@on_ranks(8, refuses="over one dimension of the device mesh, and some over another one")
def test_tensor_parallelism_is_over_the_same_dimension_everywhere(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "a", "b"))
    model = plain("tensor parallel")
    for block, name in zip(model[:2], "ab", strict=True):
        parallelize_module(block, mesh[name], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"])


@on_ranks(2)
def test_a_mesh_of_one_rank_is_not_joined_with_itself(rank: int) -> None:
    model, mesh = plain("dtensors"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    fsdp.fully_shard(model[0], mesh=mesh["dp"], dtensors=True)
    fsdp.fully_shard(model, mesh=mesh["dp"])
    assert {p.device_mesh for p in model.parameters()} == {mesh["dp"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks(4)
def test_dtensors_that_are_in_no_unit_are_full_in_full_states(rank: int, everywhere: bool, tmp_path: Path) -> None:
    def make(factor: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = plain("tensor parallel")
        model[1].up.register_buffer("scale", torch.arange(8.0) * factor)
        parallelize_module(model[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fsdp.fully_shard(model, mesh=mesh["dp"], ignored_modules={model[1].down})

    model, others = make(1), [make(2), make(2)]
    state = full(model)
    assert torch.equal(state["1.up.scale"], torch.arange(8.0))
    fsdp.load_full_state_dict(others[0], {name: one + 1 for name, one in state.items()} if everywhere or rank == 0 else None)
    same(full(others[0]), {name: one + 1 for name, one in state.items()}, 0.0)
    fsdp.export_safetensors(others[0], tmp_path / "a")
    fsdp.load_safetensors(others[1], tmp_path / "a")
    same(full(others[1]), full(others[0]), 0.0)


@on_ranks(4)
def test_what_tensor_parallelism_has_not_cut_lies_on_its_mesh_too(rank: int) -> None:
    model, door = build("tensor parallel"), plain("tensor parallel")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(door, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    for module in (door[0], door[1], door):
        fully_shard(module, mesh=mesh["dp"])
    mine, torchs = model.state_dict(), door.state_dict()
    assert {p.device_mesh for p in model.parameters()} == {mesh}  # type: ignore[attr-defined]
    assert mine["2.weight"].placements == (Shard(0), Replicate())
    # FSDP2 has them on the mesh of the data alone
    assert (torchs["2.weight"].device_mesh, torchs["2.weight"].placements) == (mesh["dp"], (Shard(0),))
    for target, source in ((model, torchs), (door, mine)):
        target.load_state_dict({name: one + 1 for name, one in source.items()})
        same(full(target), {name: one + 1 for name, one in plain("tensor parallel").state_dict().items()}, 0.0)
        target.load_state_dict(source)
    for other, placement in ((mesh["dp"], Shard(1)), (mesh["tp"], Shard(0))):
        given = {**mine, "2.weight": distribute_tensor(torch.zeros(6, 6), other, [placement])}
        with pytest.raises(fsdp.ShardingError, match=r"'2\.weight' is a DTensor: give what"):
            model.load_state_dict(given)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2)])
def test_parameters_without_elements_on_a_rank_count_nothing_there(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    model(batch(0, 0)).square().mean().backward()
    wanted = [float(nn.utils.get_total_norm([p.grad for p in model.parameters()], power)) for power in (2.0, float("inf"))]  # type: ignore[misc]

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
        fsdp.fully_shard(model, mesh=mesh["dp"])
        model(batch(0, 0)).square().mean().backward()
        return [float(fsdp.clip_grad_norm_(model, 1e9, power)) for power in (2.0, float("inf"))]

    for found in fsdp.simulate(4, program):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("power", [2.0, float("inf")])
def test_the_norm_is_over_all_stages_of_a_pipeline(power: float) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(6, 3 + number) for number in range(4)]
    for number, stage in enumerate(stages):
        for group in range(2):
            (stage(batch(number, group)).square().mean() / 2).backward()
    gradients = [p.grad for stage in stages for p in stage.parameters()]
    norm = float(nn.utils.clip_grad_norm_([p for stage in stages for p in stage.parameters()], 0.01, power))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        torch.manual_seed(0)
        every = [nn.Linear(6, 3 + number) for number in range(4)]
        numbers = [mesh["pp"].get_local_rank(), mesh["pp"].get_local_rank() + 2]
        mine = [fsdp.fully_shard(every[number], mesh=mesh["dp"]) for number in numbers]
        for number, stage in zip(numbers, mine, strict=True):
            stage(batch(number, mesh["dp"].get_local_rank())).square().mean().backward()
        assert float(fsdp.clip_grad_norm_(mine, 0.01, power, pp_mesh=mesh["pp"])) == pytest.approx(norm, rel=1e-6)
        for number, stage in zip(numbers, mine, strict=True):
            wanted = gradients[2 * number : 2 * number + 2]
            for p, gradient in zip(stage.parameters(), wanted, strict=True):
                torch.testing.assert_close(fsdp.full_tensor(p.grad), gradient)

    fsdp.simulate(4, program)
    with pytest.raises(fsdp.ShardingError, match="clip_grad_norm_ takes a model, or a list"):
        fsdp.clip_grad_norm_([], 1.0)
