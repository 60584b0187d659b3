"""Calls besides training, of models that lie on several meshes: tensor parallelism, experts, replicas."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp
from tests.state_dict import test_dimensions as dims
from tests.state_dict.test_dimensions import KINDS, batch, build, full, group_here, groups_of, on_all, plain, same, trained
from tests.support.everything import EVERYTHING
from tests.support.processes import results_of


def value(tensor: Tensor) -> Tensor:
    """The full value of what is a DTensor, or an ordinary tensor."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def shown(model: nn.Module) -> dict[str, Tensor]:
    return {name: value(p) for name, p in model.named_parameters()}


def out(kind: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(batch(9, group_here(kind)))
    return found


def loss_of(kind: str, model: nn.Module, group: int) -> Tensor:
    loss: Tensor = model(batch(0, group)).square().mean()
    return loss


def refused(text: str) -> Any:
    return pytest.raises(fsdp.ShardingError, match=text)


def check_summon(kind: str) -> None:
    """Full parameters inside, which are written back; shards again afterwards, which train on."""
    fsdp.fully_shard(nn.Linear(2, 2))  # its hooks on steps of optimizers come first
    model, optimizer = trained(kind, 1)
    objects, before = dict(model.named_parameters()), shown(model)
    model(batch(0, group_here(kind))).square().mean().backward()
    gradients = {name: value(p.grad).clone() for name, p in objects.items() if p.grad is not None}
    with fsdp.summon_full_params(model), torch.no_grad():
        same(shown(model), before, 0.0)
        for parameter in model.parameters():
            assert parameter.grad is None
            assert not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1, "as a forward sees it"
            assert fsdp.full_tensor(parameter).shape == parameter.shape
            parameter.mul_(0.5)
        inside = out(kind, model)
        made_inside = torch.optim.SGD(model.parameters(), lr=0.1)
    halves = {name: tensor * 0.5 for name, tensor in before.items()}
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in objects.items()}
    same(shown(model), halves, 0.0)
    same({name: value(p.grad) for name, p in objects.items() if p.grad is not None}, gradients, 0.0)
    torch.testing.assert_close(out(kind, model), inside)
    with refused("SGD was made inside summon_full_params, of parameters that existed there alone"):
        made_inside.step()
    with fsdp.summon_full_params(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    same(shown(model), halves, 0.0)
    optimizer.step()
    assert not torch.equal(shown(model)["0.norm.weight"], halves["0.norm.weight"])


def check_what_a_summon_refuses(kind: str) -> None:
    model = build(kind)
    before = shown(model)
    with refused(r"LayerNorm.weight in unit '0' was replaced by another parameter"), fsdp.summon_full_params(model):
        model[0].norm.weight = nn.Parameter(torch.zeros(6))
    same(shown(model), before, 0.0)
    if kind != "tensor parallel":
        return
    with refused(r"'0.up.weight' became .* by `.data = x`; it is a DTensor"), fsdp.summon_full_params(model):
        model[0].up.weight.data = model[0].up.weight.data * 2
    same(shown(model), before, 0.0)


def check_sync(kind: str) -> None:
    """All ranks begin with rank 0's values."""
    model, rank = plain(kind), torch.distributed.get_rank()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # when experts are wrapped, over one rank, nothing says that tensor parallelism has a dimension of its own
            tensor.add_(rank // 2 if kind == "experts and tensor parallel" else rank)
    model = build(kind, model, sync_module_states=True)
    same(shown(model), dict(plain(kind).named_parameters()), 0.0)


def check_unwrap(kind: str) -> None:
    """The parameters as they were before wrapping, with the values and gradients of now."""
    model, optimizer = trained(kind, 1)
    sharded = dict(model.named_parameters())
    calls: list[str] = []
    sharded["0.norm.weight"].register_post_accumulate_grad_hook(lambda p: calls.append("hook"))
    sharded["0.norm.weight"].tag = 7  # type: ignore[attr-defined]
    model(batch(0, group_here(kind))).square().mean().backward()
    values, gradients = shown(model), {name: value(p.grad) for name, p in sharded.items()}
    before, called = out(kind, model), len(calls)
    if spread_before(kind):
        with pytest.raises(fsdp.ShardingError, match="rank 0 alone would have a part of them; leave out rank0_only"):
            fsdp.unwrap(model, rank0_only=True)
    assert fsdp.unwrap(model) is model
    for module in model.modules():
        assert type(module._parameters) is dict
        assert not any(name.startswith("_fsdp") for name in module.__dict__)
    parameters = dict(model.named_parameters())
    assert {name for name, p in parameters.items() if isinstance(p, DTensor)} == spread_before(kind)
    assert all(p.device_mesh.ndim == 1 for p in parameters.values() if isinstance(p, DTensor))
    same(parameters, values, 0.0)
    same({name: p.grad for name, p in parameters.items()}, gradients, 0.0)
    assert parameters["0.norm.weight"].tag == 7  # type: ignore[attr-defined]
    torch.testing.assert_close(out(kind, model), before)
    with pytest.raises(fsdp.ShardingError, match="was made for the shards of a module that has been unwrapped"):
        optimizer.step()
    model(batch(0, group_here(kind))).square().mean().backward()
    assert len(calls) == called + 1
    torch.optim.AdamW(parameters.values(), lr=0.01, foreach=False).step()


def spread_before(kind: str) -> set[str]:
    """The names of the parameters that are DTensors before they are sharded over the data dimension."""
    layers = ["experts", *["router"] * kind.endswith("tensor parallel")] if kind.startswith("experts") else ["up", "down"]
    if kind in ("dtensors", "columns"):
        return set()
    return {name for name, _ in plain(kind).named_parameters() if any(f".{layer}." in name for layer in layers)}


def penalties(kind: str, term: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor]) -> None:
    """The gradients with a term on the weights are those of one process."""
    wanted = plain(kind)
    for group in range(groups_of(kind)):
        loss = loss_of(kind, wanted, group) + 0.1 * sum(alone(p) for p in wanted.parameters())
        (loss / groups_of(kind)).backward()
    model = build(kind)
    loss = loss_of(kind, model, group_here(kind)) + 0.1 * sum(term(p) for p in model.parameters())
    loss.backward()
    found = {name: value(p.grad) for name, p in model.named_parameters()}
    same(found, {name: p.grad for name, p in wanted.named_parameters()}, 1e-5)


def check_to_local(kind: str) -> None:
    penalties(kind, lambda p: fsdp.to_local(p).pow(4).sum(), lambda p: p.pow(4).sum())


def check_full_tensor(kind: str) -> None:
    norm = lambda p: p.pow(2).sum().add(1).sqrt()  # noqa: E731
    penalties(kind, lambda p: norm(fsdp.full_tensor(p)), norm)


def check_full_parameters(kind: str) -> None:
    wanted = plain(kind)
    for group in range(groups_of(kind)):
        ((loss_of(kind, wanted, group) + 0.1 * term(wanted)) / groups_of(kind)).backward()
    model = build(kind)
    with fsdp.full_parameters(model):
        (loss_of(kind, model, group_here(kind)) + 0.1 * term(model)).backward()
        norms = torch.stack([p.detach().norm() for p in model.parameters()])
    torch.testing.assert_close(norms, torch.stack([p.detach().norm() for p in wanted.parameters()]))
    found = {name: value(p.grad) for name, p in model.named_parameters()}
    same(found, {name: p.grad for name, p in wanted.named_parameters()}, 1e-5)


def term(model: nn.Module) -> Tensor:
    """A norm over all weights, and one over pairs of rows."""
    found: Tensor = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum().sqrt()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            found = found + (parameter @ parameter.T).square().mean()
    return found


def check_copy(kind: str) -> None:
    """A copy of the model and its optimizer trains as the original does, and apart from it."""
    model, optimizer = trained(kind, 1)
    memo = {id(group): group for module in model.modules() if (group := getattr(module, "group", None)) is not None}
    copied, its_optimizer = copy.deepcopy((model, optimizer), memo)
    assert not {*map(id, model.parameters())} & {*map(id, copied.parameters())}
    same(shown(copied), shown(model), 0.0)
    for number in (1, 2):
        dims.step(kind, copied, its_optimizer, number)
    same(full(copied), dims.alone(kind, 3)[0].state_dict())
    same(full(model), dims.alone(kind, 1)[0].state_dict())
    again = copy.deepcopy(copied, memo)
    same(full(again), full(copied), 0.0)


def check_an_optimizer_from_before(kind: str) -> None:
    """An optimizer that was made before wrapping, and may have stepped, goes on with the shards and its part of the state."""
    for steps_before in (0, 1):
        made: list[torch.optim.Optimizer] = []

        def make_optimizer(model: nn.Module, steps: int = steps_before, made: list[torch.optim.Optimizer] = made) -> None:
            made.append(torch.optim.AdamW(model.parameters(), lr=0.01))
            for _ in range(steps):
                for parameter in model.parameters():
                    parameter.grad = parameter.detach().clone()
                made[-1].step()
                made[-1].zero_grad()

        model = build(kind, before_wrapping=make_optimizer)
        (optimizer,) = made
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [*map(id, model.parameters())]
        for number in range(2):
            dims.step(kind, model, optimizer, number)
        wanted = plain(kind)
        make_optimizer(wanted)
        dims.train_alone(kind, wanted, made[-1], 2)
        same(full(model), wanted.state_dict())


CHECKS: dict[str, Callable[[str], None]] = {
    "summon": check_summon,
    "refused in a summon": check_what_a_summon_refuses,
    "sync_module_states": check_sync,
    "unwrap": check_unwrap,
    "to_local": check_to_local,
    "full_tensor": check_full_tensor,
    "full_parameters": check_full_parameters,
    "deepcopy": check_copy,
    "an optimizer from before": check_an_optimizer_from_before,
}


OVER_GLOO = ["tensor parallel", "experts"] if EVERYTHING else ["tensor parallel"]
"""All checks of these run over gloo, and not on simulated ranks as well."""


def run(rank: int, size: int, folder: Path) -> int:
    """Return how many checks have passed."""
    checks = [(check, kind) for kind in OVER_GLOO for check in CHECKS.values()]
    for check, kind in checks:
        check(kind)
    return len(checks)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OVER_GLOO])
def test_it_works_over_several_meshes(kind: str, name: str) -> None:
    on_all(kind, lambda: CHECKS[name](kind))


@pytest.mark.gloo
def test_it_works_over_gloo(tmp_path: Path) -> None:
    assert results_of(run, 4, tmp_path) == [len(OVER_GLOO) * len(CHECKS)] * 4
