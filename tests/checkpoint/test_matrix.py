"""Checkpoints between this engine, torch's FSDP2 and one process, over one dimension and over several, on four ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp.compat import fully_shard as dropin
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of

FULL = StateDictOptions(full_state_dict=True)
State = dict[str, Tensor]
"""Full values of the model and of the optimizer, by name."""


class Block(nn.Module):
    """Layers for tensor parallelism, an odd number of rows, and experts. Its forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.odd, self.experts = nn.Linear(6, 5), nn.Linear(3, 4, bias=False)
        self.register_buffer("seen", torch.arange(3.0))


def make(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), nn.Linear(6, 2))


def spread(model: nn.Sequential, mesh: Any) -> None:
    parallelize_module(model[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": ColwiseParallel()})


def native(model: nn.Sequential, mesh: Any, **options: Any) -> None:
    fsdp.fully_shard(model, mesh=mesh, auto_wrap_policy={Block}, **options)


def by(api: Any) -> Callable[..., None]:
    def wrap(model: nn.Sequential, mesh: Any, **_: Any) -> None:
        api(model[0], mesh=mesh)
        api(model, mesh=mesh)

    return wrap


def data_parallel(model: nn.Sequential, wrap: Any) -> None:
    wrap(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


def two_dimensions(model: nn.Sequential, wrap: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    spread(model, mesh["tp"])
    wrap(model, mesh["dp"])


def tensor_parallel_alone(model: nn.Sequential, wrap: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    spread(model, mesh["tp"])
    wrap(model, mesh["dp"])


def replicas(model: nn.Sequential, wrap: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "dp", "tp"))
    spread(model, mesh["tp"])
    wrap(model, mesh["replica", "dp"], sharding_strategy="HYBRID_SHARD")


def experts(model: nn.Sequential, wrap: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    everyone = mesh["edp", "ep"]._flatten("dp")
    inner: Any = model[0].experts
    inner.weight = nn.Parameter(distribute_tensor(inner.weight.data, mesh["ep"], [Shard(0)]))
    {native: fsdp.fully_shard, ours: dropin.fully_shard, theirs: torch_fsdp.fully_shard}[wrap](inner, mesh=mesh["edp"])
    wrap(model, everyone)


ours, theirs = by(dropin.fully_shard), by(torch_fsdp.fully_shard)
OURS: dict[str, tuple[Any, Any]] = {
    "ours dp4": (data_parallel, native),
    "ours dp2 x tp2": (two_dimensions, native),
    "ours tp4": (tensor_parallel_alone, native),
    "ours hybrid x tp": (replicas, native),
    "ours dp x ep": (experts, native),
    "drop-in dp2 x tp2": (two_dimensions, ours),
    "drop-in dp x ep": (experts, ours),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "plain": (lambda model, wrap: None, None),
    "FSDP2 dp4": (data_parallel, theirs),
    "FSDP2 dp2 x tp2": (two_dimensions, theirs),
    "FSDP2 dp x ep": (experts, theirs),
}
ALL = {**OURS, **OTHERS}
PAIRS = [
    (source, kind)
    for number, kind in enumerate(ALL)
    for other, source in enumerate(ALL)
    if (source in OURS or kind in OURS) and (EVERYTHING or kind == source or (number + other) % 3 == 0)
]
"""Who saves, and who loads that. In the default tests each saves for some others, and loads from some others and from itself."""


def build(kind: str, seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model that is distributed so, and its optimizer after a step."""
    model = make(seed)
    distribute, wrap = ALL[kind]
    distribute(model, wrap)
    return stepped(model)


def stepped(model: nn.Sequential) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The model and its optimizer after a step whose gradients are the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    weights, state = get_state_dict(model, optimizer, options=FULL)
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, kept in state["state"].items():
        found |= {f"{name} {key}": torch.as_tensor(value).clone() for key, value in kept.items()}
    return found


def differences(found: State, wanted: State) -> list[str]:
    names = sorted(found.keys() ^ wanted.keys())
    return names + [name for name in found.keys() & wanted.keys() if not torch.equal(found[name], wanted[name])]


def stages_in_one_checkpoint(folder: Path) -> list[str]:
    """What is wrong after each rank has saved its stage of a pipeline, under the names of the whole model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, wrong = mesh["pp"].get_local_rank(), []
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        weights, state = get_state_dict(model, optimizer, options=flat)
        dcp.load(loaded := {"model": weights, "optimizer": state}, checkpoint_id=folder / "stages")
        found = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(model, optimizer, **found, options=flat)
        return full_of(model, optimizer)

    def stage(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = make(seed)
        model[1 - place] = nn.Identity()
        fsdp.fully_shard(model, mesh=mesh["dp"])
        return stepped(model)

    weights, state = get_state_dict(*stage(0), options=flat)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "stages")
    wanted = full_of(*stepped(make(0)))
    wrong += differences(load(*stepped(make(1))), wanted)
    mine = {name: tensor for name, tensor in wanted.items() if name.startswith(f"{place}.")}
    return wrong + differences(load(*stage(1)), mine)


def run(rank: int, size: int, folder: Path) -> dict[str, list[str]]:
    wrong: dict[str, list[str]] = {}
    saved: dict[str, State] = {}
    for seed, kind in enumerate(ALL):
        model, optimizer = build(kind, seed)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / kind)
        if kind in OURS:
            fsdp.save(folder / f"{kind} by us", model, optimizer)
        # what one process has: the numbers that all others must find
        saved[kind] = full_of(*build("plain", seed))
        if kind in OURS:
            wrong[f"{kind} in full"] = differences(full_of(model, optimizer), saved[kind])
    for number, kind in enumerate(ALL):
        model, optimizer = build(kind, 100 + number)
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        for source in (source for source, loads in PAIRS if loads == kind):
            dcp.load(loaded, checkpoint_id=folder / source)
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            wrong[f"{source} -> {kind}"] = differences(full_of(model, optimizer), saved[source])
            if kind in OURS:
                by_us = f"{source} by us" if source in OURS else source
                for parameter in model.parameters():
                    parameter.data.zero_() if kind == "ours dp4" else parameter.detach().zero_()
                fsdp.load(folder / by_us, model, optimizer)
                wrong[f"{by_us} -> {kind} by us"] = differences(full_of(model, optimizer), saved[source])
    wrong["stages"] = stages_in_one_checkpoint(folder)
    return {name: names for name, names in wrong.items() if names} | {"compared": [*map(str, [len(wrong)])]}


@pytest.mark.gloo
def test_what_each_distribution_saves_each_other_loads_to_the_bit(tmp_path: Path) -> None:
    for result in results_of(run, 4, tmp_path, seconds=240):
        assert result.pop("compared") == ["190" if EVERYTHING else "77"]
        assert not result, sorted(result.items())[:5]
