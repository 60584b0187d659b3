"""Small models with torch's parallel styles, and what makes of them a job over data and tensor parallelism."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import fsdp
from fsdp.commands.planning.shapes import Block, Decoder, Shape, parallelize_decoder
from fsdp.commands.rehearsal.hardware import DEVICES, NETWORKS, Cluster
from fsdp.commands.rehearsal.rehearse import Batch, Dimensions, Job
from tests.commands.rehearsal.models import WIDTH, Language, LlamaBlock


def parallelize_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    """Perceptrons by columns and by rows. All ranks have all tokens."""
    assert isinstance(model, Language)
    for block in model.blocks:
        layers = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], layers)
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})


class Experts(nn.Module):
    """Each expert is a matrix, and takes as many tokens as the others. With a group, each rank has some of the experts."""

    def __init__(self, width: int = WIDTH, count: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)
        self.group: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return self._compute(tokens, self.weight)
        ranks = dist.get_world_size(self.group)
        parts = [tokens.shape[0] // ranks] * ranks
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        # of each rank the tokens of the experts here, then those of each expert together
        arrived = all_to_all_single_autograd(tokens, parts, parts, self.group).unflatten(0, (ranks, weight.shape[0], -1))
        computed = self._compute(arrived.transpose(0, 1).flatten(0, 2), weight).unflatten(0, (weight.shape[0], ranks, -1))
        return all_to_all_single_autograd(computed.transpose(0, 1).flatten(0, 2), parts, parts, self.group)

    def _compute(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(tokens.unflatten(0, (weight.shape[0], -1)), weight).flatten(0, 1)


class Mixture(nn.Module):
    """A perceptron beside experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.shared(y) + self.experts(y.flatten(0, 1)).view_as(x)


def parallelize_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Experts on some ranks each, and the head by columns if ranks share layers."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.group = mesh.get_group("ep")
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh["ep"], [Shard(0)]))
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})


class Parallel(NamedTuple):
    """A model that torch's styles spread, its inputs and its units."""

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, DeviceMesh], None]
    units: set[type[nn.Module]]
    loss: Callable[[Tensor], Tensor]
    loss_parallel: bool = False

    def inputs(self, rows: int = 2) -> Tensor:
        """Rows of 16 tokens."""
        return torch.zeros(rows, 16, dtype=torch.long)

    def around(self) -> AbstractContextManager[None]:
        """What a process computes under: ranks that are threads must not enter it one by one."""
        return loss_parallel() if self.loss_parallel else nullcontext()


SMALL: Final = Shape(blocks=3, width=WIDTH, hidden=96, heads=8, key_heads=4, vocabulary=104)
PARALLEL: Final = {
    "perceptrons": Parallel(
        lambda: Language(LlamaBlock), parallelize_llama, {LlamaBlock}, lambda out: out.float().square().mean()
    ),
    "experts": Parallel(lambda: Language(Mixture), parallelize_experts, {Mixture}, lambda out: out.float().square().mean()),
    "sequences": Parallel(lambda: Decoder(SMALL), parallelize_decoder, {Block}, lambda out: out, loss_parallel=True),
}


def job_of(case: Parallel, size: int, micro_batches: int = 1, rows: int = 2) -> Job:
    """As the plan makes it, on processors."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return case.build()

    return Job(
        build,
        lambda: Batch((case.inputs(rows).to("meta"),)),
        case.loss,
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        size,
        Cluster(DEVICES["cpu"], NETWORKS["ethernet-10"], per_host=4),
        micro_batches,
        case.parallelize,
        case.loss_parallel,
    )


def options_of(case: Parallel, strategy: str, size: int, dimensions: Dimensions, **more: Any) -> dict[str, Any]:
    mesh = {"mesh": (2, size // dimensions.tp // 2)} if strategy == "HYBRID_SHARD" else {}
    return {"sharding_strategy": strategy, "auto_wrap_policy": case.units, **mesh, **more}


class Training:
    """A job on a rank, as users write it."""

    def __init__(self, case: Parallel, size: int, dimensions: Dimensions, options: dict[str, Any], rows: int = 2) -> None:
        torch.manual_seed(0)
        self.case, self.inputs = case, case.inputs(rows)
        sizes = dimensions.sizes(size, options.get("mesh"))
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.model = case.build()
        case.parallelize(self.model, mesh)
        if dimensions.ep > 1:
            own = {name: value for name, value in options.items() if name != "auto_wrap_policy"}
            for module in self.model.modules():
                if isinstance(module, Experts):
                    fsdp.fully_shard(module, **{**own, "mesh": mesh["edp"]})
            data = mesh["edp", "ep"]._flatten("dp")
        else:
            data = mesh[tuple(name for name in sizes if name != "tp")]
        fsdp.fully_shard(self.model, **{**options, "mesh": data})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def step(self, micro_batches: int = 1) -> None:
        """A step, after which the gradients are still there."""
        self.model.zero_grad()
        for number in range(micro_batches):
            kept = fsdp.no_sync(self.model) if number < micro_batches - 1 else nullcontext()
            with kept:
                self.case.loss(self.model(self.inputs)).backward()
        self.optimizer.step()
