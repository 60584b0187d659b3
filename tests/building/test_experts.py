"""Units that some ranks of their root share: experts, each on a part of the ranks, with a mesh of its own."""

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fsdp
from fsdp.compat.fully_shard import fully_shard
from fsdp.runtime.registry import engines_in
from tests.support.ranks import on_ranks

WIDTH, EXPERTS, TOKENS = 6, 4, 5


class Experts(nn.Module):
    """Each expert has a matrix. With a mesh, each rank has some of them, and tokens travel to the rank of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.group: Any = None

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """`tokens` (N, D), `chosen` (N,): the expert of each."""
        if self.group is None:
            return self._compute(tokens, chosen, self.up, self.down)
        ranks, mine = dist.get_world_size(self.group), dist.get_rank(self.group)
        per = EXPERTS // ranks
        order = torch.argsort(chosen // per, stable=True)
        counts = torch.bincount(chosen // per, minlength=ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.tolist(), arriving.tolist()
        experts = torch.empty(sum(received), dtype=chosen.dtype)
        dist.all_to_all_single(experts, chosen[order], received, sent, group=self.group)
        here = all_to_all_single_autograd(tokens[order], received, sent, self.group)
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        computed = self._compute(here, experts - mine * per, up, down)
        back = all_to_all_single_autograd(computed, sent, received, self.group)
        return back[torch.argsort(order)]

    def _compute(self, tokens: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = [torch.relu(token @ up[e]) @ down[e] for token, e in zip(tokens, chosen.tolist(), strict=True)]
        return torch.stack(rows) if rows else tokens * 1  # a rank without a token uses no expert


class Block(nn.Module):
    """A router sends each token to two experts."""

    def __init__(self, usable: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()
        self._usable = usable

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, chosen = self.router(hidden)[:, : self._usable].softmax(-1).topk(2, -1)
        for k in range(2):
            x = x + weights[:, k : k + 1] * self.experts(hidden, chosen[:, k])
        return x


def make(usable: int = EXPERTS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(usable), Block(usable), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def distribute(model: nn.Sequential, mesh: DeviceMesh, placement: Any = None) -> None:
    for block in model[:2]:
        block.experts.group = mesh.get_group("ep")
        for name in ("up", "down"):
            whole = getattr(block.experts, name).data
            setattr(block.experts, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [placement or Shard(0)])))


def prepared(shape: tuple[int, int] = (2, 2), usable: int = EXPERTS) -> tuple[nn.Sequential, DeviceMesh]:
    """A model whose experts are distributed, and the mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("edp", "ep"))
    model = make(usable)
    distribute(model, mesh)
    return model, mesh


def wrap(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> None:
    everyone = mesh["edp", "ep"]._flatten("dp")
    for block in model[:2]:
        fsdp.fully_shard(block.experts, mesh=mesh["edp"], **options)
        fsdp.fully_shard(block, mesh=everyone, **options)
    fsdp.fully_shard(model, mesh=everyone, **options)


def policy_of(mesh: DeviceMesh) -> CustomPolicy:
    return CustomPolicy(lambda module: {"mesh": mesh["edp"]} if isinstance(module, Experts) else isinstance(module, Block))


def placement_of(mesh: DeviceMesh, model: nn.Module) -> Callable[[nn.Parameter], Any]:
    """As FSDP2's `ShardPlacementResult`, which older versions of torch do not have."""
    experts = {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    there = SimpleNamespace(placement=Shard(0), mesh_info=SimpleNamespace(mesh=mesh["edp"]))
    return lambda parameter: there if id(parameter) in experts else None


def wrap_by(options: str, model: nn.Sequential, mesh: DeviceMesh, **others: Any) -> None:
    everyone = mesh["edp", "ep"]._flatten("dp")
    if options == "policy":
        fsdp.fully_shard(model, mesh=everyone, auto_wrap_policy=policy_of(mesh), **others)
    elif options == "policy without a mesh of the root":
        fsdp.fully_shard(model, auto_wrap_policy=policy_of(mesh), **others)
    else:
        choose = placement_of(mesh, model)
        fsdp.fully_shard(model, mesh=everyone, auto_wrap_policy={Block}, shard_placement_fn=choose, **others)


def value(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, data: Callable[[int], list[Tensor]], clip: Callable[[], Any]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found: dict[str, Any] = {"norms": []}
    for step in range(3):
        batches = data(step)
        for one in batches:
            (model(one).square().mean() / len(batches)).backward()
        if not step:
            found["grads"] = {name: value(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found["norms"].append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: value(p).detach().clone() for name, p in model.named_parameters()}
    return found


@cache
def train_alone(ranks: int, usable: int) -> dict[str, Any]:
    model = make(usable)
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # noqa: E731
    return train(model, lambda step: [batch(step, rank) for rank in range(ranks)], clip)


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-6)
    # AdamW divides a gradient by its own size, so that weights differ more than gradients, and later norms follow the weights
    assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-5)
    for kind, most in (("grads", 1e-6), ("weights", 2e-5)):
        for name, tensor in wanted[kind].items():
            # a gradient that no token has made is zeros where the ranks have a bucket, and None in one process
            assert float((found[kind][name] - tensor).abs().max()) <= most * float(tensor.abs().max() or 1), (kind, name)


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER"]
MESHES = [((2, 2), 4), ((2, 2), 2), ((1, 2), 4), ((2, 1), 4), ((1, 4), 3), ((3, 2), 4)]
"""Shapes (edp, ep), and to how many experts tokens are sent."""


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@pytest.mark.parametrize(("shape", "usable"), MESHES)
def test_experts_on_a_part_of_the_ranks_equal_one_process(strategy: str, shape: tuple[int, int], usable: int) -> None:
    check(strategy, shape, usable, seed=usable)


def check_seed(seed: int) -> None:
    """The same with what a seed chooses, and in its order of ranks."""
    chosen = random.Random(seed)
    check(chosen.choice(STRATEGIES), *chosen.choice(MESHES), seed=seed)


def check(strategy: str, shape: tuple[int, int], usable: int, seed: int) -> None:
    def wraps(model: nn.Sequential, mesh: DeviceMesh) -> None:
        wrap(model, mesh, sharding_strategy=strategy)
        # with one coordinate of the mesh for each rank a unit is cut over nobody, and its gradients are averaged all the same
        assert shape[0] > 1 or all(p.to_local().numel() * shape[1] == p.numel() for p in model[0].experts.parameters())

    check_wrapped(wraps, shape, usable, seed)


def check_wrapped(
    wraps: Callable[[nn.Sequential, DeviceMesh], None], shape: tuple[int, int] = (2, 2), usable: int = EXPERTS, seed: int = 0
) -> None:
    """Compare a model that `wraps` has wrapped over a mesh of this shape with one process."""

    def program(rank: int) -> dict[str, Any]:
        model, mesh = prepared(shape, usable)
        wraps(model, mesh)
        return train(model, lambda step: [batch(step, rank)], lambda: fsdp.clip_grad_norm_(model, 0.05))

    ranks = shape[0] * shape[1]
    for found in fsdp.simulate(ranks, program, seed=seed):
        close(found, train_alone(ranks, usable))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", ["policy", "policy without a mesh of the root", "placements"])
@pytest.mark.parametrize(("shape", "usable"), [((2, 2), 2), ((1, 2), 4), ((3, 2), 4)])
def test_experts_by_options_equal_one_process(options: str, strategy: str, shape: tuple[int, int], usable: int) -> None:
    """With placements, the parameters of a block are a unit, and those of its experts a flat buffer of it over other ranks."""

    def wraps(model: nn.Sequential, mesh: DeviceMesh) -> None:
        wrap_by(options, model, mesh, sharding_strategy=strategy, reduction=fsdp.ReductionPolicy(coalesce_cap_mb=1))
        assert model[0].experts.up.device_mesh.mesh_dim_names == ("edp", "ep")

    check_wrapped(wraps, shape, usable, seed=usable)


@on_ranks(4)
def test_buffers_of_one_unit_have_the_ranks_of_their_mesh(rank: int) -> None:
    model, mesh = prepared()
    wrap_by("placements", model, mesh)
    model(batch(0, rank)).square().mean().backward()
    (engine,) = engines_in(model, "test")
    assert [[len(flat.comm.ranks) for flat in unit.flats] for unit in engine.units] == [[4], [4, 2], [4, 2]]
    found = {name: list(comm.recent()) for name, comm in engine.comms.each().items()}
    assert [call for call in found["inner shard"] if "all_gather" in call] == [f"all_gather {unit}" for unit in "0110"]
    assert found["inner reduce"] == ["reduce_scatter 1", "reduce_scatter 0"]


@on_ranks(4)
def test_a_mesh_that_cannot_be_that_of_some_parameters_is_refused(rank: int) -> None:
    def refused(text: str, model: nn.Module, policy: Any, **options: Any) -> None:
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.fully_shard(model, auto_wrap_policy=policy, **options)
        assert not any(hasattr(module, "_fsdp_sharded") for module in model.modules())

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    everyone, policy = mesh["edp", "ep"]._flatten("dp"), policy_of(mesh)
    model = make()
    refused(r"nothing says what the others have in place of '0.experts.up': make it a DTensor", model, policy, mesh=everyone)
    distribute(model, mesh)
    hybrid = {"mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    refused(r"'0.experts.up' is to be cut over .*none with \"HYBRID_SHARD\"", model, policy, **hybrid)
    refused(r"was wrapped over a part of the ranks; leave out uneven_paths", model, policy, mesh=everyone, uneven_paths=True)
    no_mesh = CustomPolicy(lambda module: {"mesh": (2, 2)} if isinstance(module, Experts) else False)
    refused(r"is to be cut over \(2, 2\): give a DeviceMesh of one dimension", model, no_mesh, mesh=everyone)
    more = CustomPolicy(lambda module: {"mesh": mesh["edp"], "prefetch": 2} if isinstance(module, Experts) else False)
    refused(r"units of one call have the same but for mesh", model, more, mesh=everyone)
    one_rank = CustomPolicy(lambda module: {"mesh": mesh["edp"]} if isinstance(module, Experts) and rank else False)
    refused(r"cannot be joined with|rank 0 could not wrap its module", model, one_rank, mesh=everyone)
    fsdp.fully_shard(model[0].experts, mesh=mesh["edp"])
    with pytest.raises(fsdp.ShardingError, match=r"gives '0.experts' a mesh, and it was wrapped before"):
        fsdp.fully_shard(model, mesh=everyone, auto_wrap_policy=policy)


def test_a_root_around_buffers_of_several_meshes_takes_them_in() -> None:
    def wraps(model: nn.Sequential, mesh: DeviceMesh) -> None:
        everyone = mesh["edp", "ep"]._flatten("dp")
        for block in model[:2]:
            fully_shard(block, mesh=everyone, shard_placement_fn=placement_of(mesh, block))
        fully_shard(model, mesh=everyone)

    check_wrapped(wraps)


def test_experts_by_the_names_of_fsdp2_need_no_factor() -> None:
    def wraps(model: nn.Sequential, mesh: DeviceMesh) -> None:
        everyone = mesh["edp", "ep"]._flatten("dp")
        for block in model[:2]:
            fully_shard(block.experts, mesh=mesh["edp"])
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)

    check_wrapped(wraps)


@on_ranks(4)
def test_the_collectives_of_experts_are_among_those_who_share_them(rank: int) -> None:
    model, mesh = prepared()
    wrap(model, mesh)
    model(batch(0, rank)).square().mean().backward()
    (engine,) = engines_in(model, "test")
    found = {name: list(comm.recent()) for name, comm in engine.comms.each().items()}
    assert [call for call in found["inner shard"] if "gather_objects" not in call] == [
        # each block calls its experts twice
        *["all_gather 0.experts"] * 2,
        *["all_gather 1.experts"] * 3,
        "all_gather 0.experts",
    ]
    assert found["inner reduce"] == ["reduce_scatter 1.experts", "reduce_scatter 0.experts"]
    assert not any("experts" in call for name in ("shard", "reduce") for call in found[name])


@pytest.mark.parametrize("name", ["up", "down", "scale"])
@on_ranks(4)
def test_what_the_other_ranks_have_must_be_known(rank: int, name: str) -> None:
    model, mesh = prepared()
    setattr(model[0].experts, name, nn.Parameter(torch.ones(EXPERTS)))
    fsdp.fully_shard(model[0].experts, mesh=mesh["edp"])
    with pytest.raises(fsdp.ShardingError, match=f"the others have in place of '{name}': make it a DTensor over"):
        fsdp.fully_shard(model, mesh=mesh["edp", "ep"]._flatten("dp"))


@on_ranks(4)
def test_a_mesh_with_the_names_of_another_is_no_part_of_it(rank: int) -> None:
    model, mesh = prepared()
    root = init_device_mesh("cpu", (4,), mesh_dim_names=("edp",))
    for block in model[:2]:
        fsdp.fully_shard(block.experts, mesh=mesh["edp"])
    fsdp.fully_shard(model, mesh=root)
    assert model[2].weight.device_mesh == root
    torch.testing.assert_close(fsdp.full_state_dict(model, rank0_only=False), make().state_dict(), rtol=0, atol=0)


@on_ranks(4, refuses="with a strategy that shares the work in another way; wrap all units")
def test_experts_are_sharded_as_the_rest_is(rank: int) -> None:
    model, mesh = prepared()
    fsdp.fully_shard(model[0].experts, mesh=mesh["edp"])
    fsdp.fully_shard(model, mesh=mesh, sharding_strategy="HYBRID_SHARD")


@pytest.mark.parametrize("options", [{"uneven_paths": True}, {"broadcast_buffers": True}])
@on_ranks(4, refuses="was wrapped over a part of the ranks; leave out uneven_paths and broadcast_buffers")
def test_what_needs_the_same_units_on_all_ranks_is_refused(rank: int, options: dict[str, Any]) -> None:
    model, mesh = prepared()
    fsdp.fully_shard(model[0].experts, mesh=mesh["edp"])
    fsdp.fully_shard(model, mesh=mesh["edp", "ep"]._flatten("dp"), **options)


@pytest.mark.parametrize("call", ["hook", "join"])
@on_ranks(4, refuses="shared by a part of the ranks")
def test_what_is_not_defined_for_a_part_of_the_ranks_is_refused(rank: int, call: str) -> None:
    model, mesh = prepared()
    wrap(model, mesh)
    if call == "hook":
        fsdp.register_comm_hook(model, None, lambda state, bucket: None)
    else:
        with fsdp.join(model, lambda: None):
            pass


@on_ranks(4)
def test_the_hooks_of_tensor_parallelism_are_taken_for_no_hooks_of_the_user(rank: int) -> None:
    """A hook that looks at what these hooks see costs time, and makes intermediate results outputs of compiled graphs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)))
    parallelize_module(model[0], mesh["tp"], {"0": SequenceParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"], auto_wrap_policy={nn.Sequential})
    before = [len(module._forward_hooks) for module in model[0]]
    model(torch.ones(1, 2, 6)).sum().backward()
    assert before == [1, 1, 1] == [len(module._forward_hooks) for module in model[0]]
    for set_hook, hooks in (
        (lambda: model[0][1].register_forward_hook(lambda module, args, output: None), 3),
        (lambda: model[0][1].register_forward_hook(lambda module, args, output: None, prepend=True), 3),
        (lambda: model[0][1].register_forward_pre_hook({}.setdefault), 2),
    ):
        handle = set_hook()
        model(torch.ones(1, 2, 6)).sum().backward()
        assert len(model[0][1]._forward_hooks) == hooks
        handle.remove()
        model(torch.ones(1, 2, 6)).sum().backward()
        assert [len(module._forward_hooks) for module in model[0]] == before


@on_ranks(4)
def test_a_gradient_that_is_replicated_over_the_experts_ranks_counts_once(rank: int) -> None:
    """A parameter of the experts' unit that all of them share, such as a scale: a DTensor with Replicate()."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    torch.manual_seed(1)
    for module in model:
        weight = distribute_tensor(torch.randn(2, 2), mesh["ep"], [Replicate()])
        module.weight = nn.Parameter(weight)
        fsdp.fully_shard(module, mesh=mesh["edp"])
    fsdp.fully_shard(model, mesh=mesh["edp", "ep"]._flatten("dp"))
    here = float(rank // 2 + 1)  # replicated: the same on the ranks of the experts
    x = DTensor.from_local(torch.full((1, 2), here), mesh["ep"], [Replicate()], run_check=False)
    model(x).sum().backward()
    norm = fsdp.clip_grad_norm_(model, 1e9)
    squares = sum(float(p.grad.full_tensor().square().sum()) for p in model.parameters())
    assert float(norm) == pytest.approx(squares**0.5)
