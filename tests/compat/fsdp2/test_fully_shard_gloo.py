"""A script with torch's FSDP2 and with fsdp.compat.fully_shard over gloo processes: the same losses and states."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp.compat import fully_shard as ours
from fsdp.runtime.registry import unit_ref_of
from tests.compat.fsdp2.test_fully_shard import Net
from tests.support.processes import results_of

FULL = StateDictOptions(full_state_dict=True)


def script(api: Any, rank: int) -> dict[str, Any]:
    """What a user's script does with FSDP2."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(), offload_policy=api.OffloadPolicy())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(4):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + rank)
            tokens = torch.randint(0, 7, (3, 5), generator=generator)
            model.set_requires_gradient_sync(micro == 1)
            model.set_is_last_backward(micro == 1)
            model.set_reshard_after_backward(micro == 1)
            if micro:
                model.blocks[0].unshard(async_op=True).wait()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        losses.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        again = distribute_tensor(parameter.full_tensor().detach(), parameter.device_mesh, parameter.placements)
        assert torch.equal(again.to_local(), parameter.to_local())
    state = get_model_state_dict(model, options=FULL)
    set_model_state_dict(model, copy.deepcopy(state), options=FULL)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=FULL)
    return {"losses": losses, "state": state, "optimizer": of_optimizer, "class": type(model).__name__}


def converted(api: Any, rank: int, late: bool) -> list[Any]:
    """Gradients and weights of a model that gets float64 after wrapping, or its memory (`late`)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    seen: list[Any] = []
    hooked: list[Any] = []
    values = copy.deepcopy(model.state_dict())
    if late:
        model.to("meta")
    elif api is ours:
        model[0].weight.register_hook(lambda grad: hooked.append((tuple(grad.shape), grad.dtype)))
    api.fully_shard(model[0])
    api.fully_shard(model)
    parameters = [*model.parameters()]
    if late:
        assert all(p.is_meta for p in parameters)
        model.to_empty(device="cpu")
        places = {name: (p.device_mesh, p.placements) for name, p in model.state_dict().items()}
        model.load_state_dict({name: distribute_tensor(value, *places[name]) for name, value in values.items()})
    else:
        if api is ours:  # torch's converts before the first forward only
            parameters[2].register_post_accumulate_grad_hook(lambda p: hooked.append((tuple(p.shape), p.grad.dtype)))
            model(torch.ones(2, 5)).sum().backward()
            before = [p.grad.full_tensor() for p in parameters]  # type: ignore[union-attr]
        model.double()
        if api is ours:
            assert all(torch.equal(p.grad.full_tensor(), g.double()) for p, g in zip(parameters, before, strict=True))  # type: ignore[union-attr]
            model.zero_grad()
    x = torch.arange(10.0, dtype=parameters[0].dtype if late else torch.float64).view(2, 5) / 10 + rank
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for parameter in model.parameters():
        seen += [parameter.dtype, parameter.grad.dtype, parameter.grad.full_tensor(), parameter.full_tensor().detach()]  # type: ignore
    if api is ours:
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        both = [((1, 3), torch.float32), ((3, 5), torch.float32), ((1, 3), torch.float64), ((3, 5), torch.float64)]
        assert late or sorted(map(str, hooked)) == sorted(map(str, both)), hooked
    return seen


def precise(api: Any, rank: int) -> list[torch.Tensor]:
    """Gradients of a model with each policy of mixed precision, by its fields: the dtypes of parameters and of reductions."""
    found: list[torch.Tensor] = []
    policies: list[dict[str, Any]] = [
        {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        for param_dtype in (torch.bfloat16, None)
        for reduce_dtype in (None, torch.float32, torch.bfloat16)
    ]
    if hasattr(api.MixedPrecisionPolicy, "param_dtype_override_fn"):  # since torch 2.15
        policies += [{**one, "param_dtype_override_fn": lambda p: torch.float32 if p.ndim == 1 else None} for one in policies[:3]]
    for fields in policies:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4, bias=False))
        policy = api.MixedPrecisionPolicy(**fields, cast_forward_inputs="param_dtype_override_fn" not in fields)
        for layer in (model[1], model[3]):
            api.fully_shard(layer, mp_policy=policy)
        if "param_dtype_override_fn" in fields:  # the layer of one dtype casts by itself
            model[1].forward = lambda x, norm=model[1]: nn.functional.layer_norm(
                x.float(), (16,), norm.weight, norm.bias
            ).bfloat16()
            model[0].forward = lambda x, first=model[0]: nn.functional.linear(x.bfloat16(), first.weight) + first.bias.bfloat16()
        api.fully_shard(model, mp_policy=policy)
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))).float().square().mean().backward()
        found += [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert len(found) == 5 * len(policies)
    return found


def reduced_by_hand(api: Any, rank: int) -> list[Any]:
    """Gradients of modules with divisors and with hooks after the reduction of their own, and what these hooks got."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 4)), []

    def hook(reduced: torch.Tensor) -> None:
        seen.extend([reduced.dtype, reduced.dim()])
        torch.distributed.all_reduce(reduced)

    policy = api.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    api.fully_shard(model[0], mp_policy=policy)
    model[0].set_gradient_divide_factor(4.0)  # before a root is wrapped around it
    model[0].set_all_reduce_hook(hook)
    api.fully_shard(model[1], mp_policy=policy)
    api.fully_shard(model, mp_policy=policy)
    model.set_gradient_divide_factor(0.5)
    model[1].set_all_reduce_hook(hook)
    for module in (model[0], model):  # torch: gloo has no other operation with a factor
        module.set_force_sum_reduction_for_comms(True)
    for step in range(3):
        if step == 2:
            model[0].set_all_reduce_hook(None)
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()
        seen += [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert len(seen) == 5 * 2 + 3 * 6
    return seen


class Collectives(TorchDispatchMode):
    """Counts the collectives that are launched inside: torch's own by operator, those of this engine by communicator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.launched: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._record(self.launch)
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._record(None)
        super().__exit__(*problem)

    def _record(self, recorder: Any) -> None:
        ref = unit_ref_of(self._model)
        for comm in () if ref is None else ref.engine.comms.each().values():
            comm.recorder = recorder

    def launch(self, kind: str, label: str, received: int, launch: Callable[[], Any]) -> Any:
        self.launched[kind] += 1
        return launch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.launched["all_gather" if "gather" in func._opname else func._opname.strip("_").removesuffix("_base")] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Twelve parameters, as in a transformer's block; some have odd numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.LayerNorm(5), nn.LayerNorm(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def launched(fully_shard: Callable[..., Any], rank: int) -> Counter[str]:
    """The collectives of one training step of eight blocks and a head."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8)), nn.Linear(5, 3))
    for block in model[:8]:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):  # the first step has the order of the collectives to learn
        model(x).square().mean().backward()
    with Collectives(model) as collectives:
        model(x).square().mean().backward()
    return collectives.launched


def replicated_outside(api: Any, rank: int) -> list[float]:
    """The losses of a model whose blocks are sharded, while `replicate` averages the gradients of the rest."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        api.fully_shard(block)
    replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refusal_of_an_early_optimizer() -> str:
    """What the step of an optimizer says that was made before wrapping, and keeps lists, of which nobody knows a part."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    optimizer.zero_grad()
    ours.fully_shard(model)
    try:
        optimizer.step(closure)
    except ValueError as refusal:
        return str(refusal)
    return ""


def run(rank: int, size: int, folder: Path) -> Any:
    results: dict[str, Any] = {
        "torch": script(torch_fsdp, rank),
        "ours": script(ours, rank),
        "refusal": refusal_of_an_early_optimizer(),
    }
    results["launched"] = {
        "torch": launched(torch_fsdp.fully_shard, rank),
        "ours": launched(ours.fully_shard, rank),
        "native": launched(fsdp.fully_shard, rank),
    }
    results["precise"] = {"torch": precise(torch_fsdp, rank), "ours": precise(ours, rank)}
    results["by hand"] = {"torch": reduced_by_hand(torch_fsdp, rank), "ours": reduced_by_hand(ours, rank)}
    results["replicated outside"] = {"torch": replicated_outside(torch_fsdp, rank), "ours": replicated_outside(ours, rank)}
    for late in (False, True):
        results[f"late={late}"] = {"torch": converted(torch_fsdp, rank, late), "ours": converted(ours, rank, late)}
    return results


@pytest.mark.gloo
def test_a_script_of_fsdp2_gives_the_same_losses(tmp_path: Path) -> None:
    results = results_of(run, 2, tmp_path)
    for result in results:
        launched = result["launched"]
        assert launched["torch"] == {"all_gather": 2 * 8 + 1, "reduce_scatter": 8 + 1}
        # the ranks ask each other once a step which parameters have gradients
        assert launched["ours"] == launched["native"] == launched["torch"] + Counter(all_reduce=1)
        assert result["refusal"].startswith("LBFGS was made before the module was wrapped with DTensors")
        assert result["ours"].pop("class") == result["torch"].pop("class") == "FSDPNet"
        torch.testing.assert_close(result["ours"]["losses"], result["torch"]["losses"])
        torch.testing.assert_close(result["ours"]["state"], result["torch"]["state"])
        torch.testing.assert_close(result["ours"]["optimizer"]["state"], result["torch"]["optimizer"]["state"])
        torch.testing.assert_close(result["replicated outside"]["ours"], result["replicated outside"]["torch"])
        for what in ("precise", "late=False", "late=True", "by hand"):
            for mine, theirs in zip(result[what]["ours"], result[what]["torch"], strict=True):
                assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, what
