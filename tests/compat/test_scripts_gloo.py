"""What training code in public repositories calls, with torch's classes and with the drop-in modules: the same results."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import distribute_tensor

import fsdp.compat
from fsdp.compat import fully_shard as ours2
from tests.support.processes import results_of

CPU: Final = torch.device("cpu")


class Adapted(nn.Module):
    """A layer with an adapter beside it, as in recipes for LoRA."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def on_meta(api: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(Adapted(), Adapted())
    for layer in model:
        api.fully_shard(layer)
    return api.fully_shard(model)


def loaded(model: Any, given: dict[str, torch.Tensor]) -> list[str]:
    """Load full values with assign=True, as torchtune does; return the names that are on the meta device afterwards."""
    shown = model.state_dict()
    shards = {n: nn.Parameter(distribute_tensor(v, shown[n].device_mesh, shown[n].placements)) for n, v in given.items()}
    model.load_state_dict(shards, strict=False, assign=True)
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def trained(model: Any) -> list[Any]:
    """The dtypes of parameters, and the weights after a step."""
    before = [parameter.dtype for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 16).view(2, 8).to(before[0]) + dist.get_rank()
    model(x).square().mean().backward()
    optimizer.step()
    return [*before, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def children_get_memory(api: Any) -> list[Any]:
    """torchtune: the adapters of a meta model get memory one by one; the base is loaded."""
    torch.manual_seed(0)
    base = {n: v for n, v in nn.Sequential(Adapted(), Adapted()).state_dict().items() if ".base." in n}
    model = on_meta(api)
    parameters = [*model.parameters()]
    seen: list[Any] = []
    for layer in model:
        for child in (layer.down, layer.up):
            child.to_empty(device="cpu")
            nn.init.constant_(child.weight, 0.1)
        seen.append([name for name, parameter in model.named_parameters() if parameter.is_meta])
    if api is ours2:  # a model of torch's cannot be used after such a refusal
        try:
            model(torch.ones(2, 8))
        except RuntimeError as refusal:
            assert "['0.base.weight', '0.base.bias']" in str(refusal), refusal
    seen.append(loaded(model, base))
    if api is ours2:
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    return [*seen, *trained(model)]


def two_loads(api: Any) -> list[Any]:
    """torchtune: two loads with assign=True and strict=False, of the adapters and of the base, and one more of both."""
    torch.manual_seed(0)
    full = nn.Sequential(Adapted(), Adapted()).state_dict()
    model = on_meta(api)
    seen: list[Any] = [loaded(model, {n: v for n, v in full.items() if (".base." in n) is base}) for base in (False, True)]
    again = loaded(model, {n: v + 1 for n, v in full.items()})
    return [*seen, again, *trained(model)]


def loads_of_another_dtype(api: Any) -> list[Any]:
    """With assign=True the parameters get the dtype of what is loaded, on the meta device and with memory."""
    torch.manual_seed(0)
    full = {n: v.double() for n, v in nn.Sequential(Adapted(), Adapted()).state_dict().items()}
    model = on_meta(api)
    seen: list[Any] = [loaded(model, {n: v.bfloat16() for n, v in full.items()}), *(p.dtype for p in model.parameters())]
    return [*seen, loaded(model, full), *trained(model)]


def layer_of_another_dtype(api: Any) -> list[Any]:
    """A layer inside a unit is converted, and back."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model[0].base.to(torch.bfloat16)
    seen = [parameter.dtype for parameter in model.parameters()]
    model[0].base.float()
    return [*seen, *trained(model)]


BY_FSDP2: Final[dict[str, Callable[[Any], list[Any]]]] = {
    one.__name__: one for one in (children_get_memory, two_loads, loads_of_another_dtype, layer_of_another_dtype)
}


FULL: Final = StateDictOptions(full_state_dict=True)


def by_fsdp1(**options: Any) -> Any:
    """A model of two instances, of torch's class or of ours, whichever `torch.distributed.fsdp` has."""
    torch.manual_seed(0)
    options = {"device_id": CPU, "use_orig_params": True, **options}
    inner = torch_fsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.Tanh()), **options)
    return torch_fsdp.FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(12, 5)), **options)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 16).view(2, 8) + dist.get_rank()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: Any) -> list[Any]:
    return [*get_model_state_dict(model, options=FULL).values()]


def checkpoint_into_flat_parameters() -> list[Any]:
    """OLMo: every flat parameter is filled with NaN, and the ranges that this rank has are copied from a full state."""
    model = by_fsdp1()
    saved = {name: value + 1 for name, value in get_model_state_dict(model, options=FULL).items()}
    instances = {name: one for name, one in model.named_modules() if isinstance(one, torch_fsdp.FullyShardedDataParallel)}
    with torch.no_grad():
        for one in instances.values():
            for flat in one.params:
                flat.fill_(torch.nan)
        for path, one in instances.items():
            for flat in one.params:
                assert flat._is_flat_param and isinstance(flat, torch_fsdp.FlatParameter)
                for fqn, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
                    if info.in_shard:
                        name = f"{path}.{fqn}".replace("_fsdp_wrapped_module.", "").lstrip(".")
                        part = saved[name].flatten()[info.intra_param_start_idx : info.intra_param_end_idx + 1]
                        flat[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard].copy_(part)
    return values_of(model)


def teacher_is_resharded() -> list[Any]:
    """DINOv2: a teacher under SHARD_GRAD_OP, whose weights are averaged in place, is resharded between its forwards."""
    teacher = by_fsdp1(sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP)
    instances = torch_fsdp.FullyShardedDataParallel.fsdp_modules(teacher)
    outputs = []
    with torch.no_grad():
        for _ in range(3):
            outputs.append(teacher(torch.ones(2, 8)))
            for one in instances:
                _reshard(one, one._handle, True)
            torch._foreach_mul_([flat for one in instances for flat in one.params], 1.5)
    return [*outputs, *values_of(teacher)]


def optimizer_whose_states_torch_patches() -> list[Any]:
    """`optimizer.state_dict()` and `load_state_dict()` are torch's functions for state dicts."""
    seen: list[Any] = []
    model = by_fsdp1()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _patch_optimizer_state_dict(model, optimizers=optimizer, options=FULL)  # type: ignore[arg-type]
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for name in sorted(state["state"]):
        seen += [name, *(state["state"][name][key].clone() for key in ("exp_avg", "exp_avg_sq", "step"))]
    step(model, optimizer)
    optimizer.load_state_dict(state)
    step(model, optimizer)
    return [*seen, *values_of(model)]


def adapters_alone() -> list[Any]:
    """A full state that names some parameters only, with strict=False."""
    model = by_fsdp1()
    for given in ({"1.bias": torch.ones(5)}, {"0.0.weight": torch.ones(12, 8)}):
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, strict=False))
    return values_of(model)


def adapters_alone_from_rank_0() -> list[Any]:
    """The same, given by rank 0 alone."""
    model = by_fsdp1()
    given = {"0.0.weight": torch.ones(12, 8)} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    return values_of(model)


def instance_by_instance() -> list[Any]:
    """verl: an inner instance is summoned by itself; torch takes it for outermost then, so it is told that it is not."""
    model = by_fsdp1()
    inner = model[0]
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(inner, writeback=False):
        seen = [value.detach().clone() for value in inner.parameters()]
    inner._is_root = False
    step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return [*seen, model.check_is_root(), inner.check_is_root(), *values_of(model)]


BY_FSDP1: Final[dict[str, Callable[[], list[Any]]]] = {
    one.__name__: one
    for one in (
        checkpoint_into_flat_parameters,
        teacher_is_resharded,
        optimizer_whose_states_torch_patches,
        adapters_alone,
        adapters_alone_from_rank_0,
        instance_by_instance,
    )
}


def run(rank: int, size: int, folder: Path) -> Any:
    results = {name: (case(torch_fsdp), case(ours2)) for name, case in BY_FSDP2.items()}
    theirs = {name: case() for name, case in BY_FSDP1.items()}
    with fsdp.compat.install("torch_fsdp"):
        results |= {name: (theirs[name], case()) for name, case in BY_FSDP1.items()}
    return results


@pytest.mark.gloo
def test_public_training_code_gets_what_torch_gives(tmp_path: Path) -> None:
    for result in results_of(run, 2, tmp_path):
        for name, (theirs, mine) in result.items():
            assert len(theirs) == len(mine), name
            for want, found in zip(theirs, mine, strict=True):
                if isinstance(want, torch.Tensor):
                    torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")
                else:
                    assert found == want, name
