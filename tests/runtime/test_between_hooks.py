"""What a user does between two hooks of the engine: right as in plain torch, or refused by a sentence before anything moves.

Each single act at each moment is in tests/acts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.compat.ddp import DistributedDataParallel
from fsdp.compat.fully_shard import fully_shard
from fsdp.compat.torch_fsdp import FullyShardedDataParallel
from fsdp.runtime.registry import unit_ref_of
from tests.runtime import forks
from tests.support.models import assert_close, assert_grads_as_plain, join_all, local
from tests.support.processes import results_of
from tests.support.ranks import on_ranks

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD")


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.second, x, use_reentrant=False) if self.checkpointed else self.second(x)
        return self.last(torch.tanh(x))


def natively(strategy: str) -> Callable[[nn.Module], nn.Module]:
    return lambda net: fsdp.fully_shard(net, auto_wrap_policy={nn.Linear}, sharding_strategy=strategy)


def by_fsdp1(net: nn.Module) -> nn.Module:
    for name, child in list(net.named_children()):
        setattr(net, name, FullyShardedDataParallel(child, use_orig_params=True))
    return FullyShardedDataParallel(net, use_orig_params=True)


def by_fsdp2(net: nn.Module) -> nn.Module:
    for child in net.children():
        fully_shard(child)
    return fully_shard(net)


DOORS: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    **{strategy: natively(strategy) for strategy in STRATEGIES},
    "FSDP1": by_fsdp1,
    "FSDP2": by_fsdp2,
    "DDP": DistributedDataParallel,
}


def data(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def of_one_process(model: nn.Module, ranks: int, program: Callable[[nn.Module, list[Tensor]], Any]) -> Any:
    return program(model, [data(rank) for rank in range(ranks)])


def gradients(model: nn.Module) -> list[bool]:
    return [p.grad is not None for p in model.parameters()]


def stepped(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, DistributedDataParallel):
        return {name: value.clone() for name, value in model.module.state_dict().items()}
    return fsdp.full_state_dict(model, rank0_only=False)


# requires_grad --------------------------------------------------------------------------


def policy_and_reference(model: nn.Module, batches: list[Tensor]) -> None:
    """As DPO does with peft: the reference is the same model with its adapters off."""
    outputs = [model(x) for x in batches]
    model.requires_grad_(False)
    with torch.no_grad():
        references = [model(x) for x in batches]
    model.requires_grad_(True)
    pairs = zip(outputs, references, strict=True)
    torch.stack([(one - other + 1).square().mean() for one, other in pairs]).mean().backward()
    stepped(model)


def critic_then_frozen(model: nn.Module, batches: list[Tensor]) -> None:
    """As a GAN does that computes D(real) before it freezes D for the step of the generator."""
    real = torch.stack([model(x).square().mean() for x in batches]).mean()
    model.requires_grad_(False)
    fake = batches[0].clone().requires_grad_()
    model(fake).sum().backward()
    assert fake.grad is not None
    model.requires_grad_(True)
    real.backward()
    stepped(model)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("program", [policy_and_reference, critic_then_frozen])
@pytest.mark.parametrize("door", DOORS)
def test_parameters_that_are_frozen_for_a_while_get_their_gradients(door: str, program: Any, checkpointed: bool) -> None:
    plain = Net(checkpointed)
    program(plain, [data(0), data(1)])

    def fn(rank: int) -> dict[str, Tensor]:
        model = DOORS[door](Net(checkpointed))
        program(model, [data(rank)])
        return weights(model)

    for found in fsdp.simulate(2, fn):
        assert_close(found, dict(plain.state_dict()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_is_frozen_when_its_gradient_arrives_gets_none(strategy: str) -> None:
    def program(model: nn.Module, batches: list[Tensor]) -> list[bool]:
        loss = torch.stack([model(x).square().mean() for x in batches]).mean()
        model.second.requires_grad_(False)
        loss.backward()
        return gradients(model)

    wanted = program(Net(), [data(0), data(1)])
    assert wanted == [True, True, False, False, True, True]
    assert fsdp.simulate(2, lambda rank: program(natively(strategy)(Net()), [data(rank)])) == [wanted] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_inside_a_forward_is_frozen_outside_and_can_be_trained_again(strategy: str) -> None:
    def program(model: nn.Module, x: Tensor) -> list[Any]:
        handle = model.second.register_forward_pre_hook(lambda module, args: (module.weight.requires_grad_(False), None)[1])
        model(x).sum().backward()
        handle.remove()
        found: list[Any] = [[p.requires_grad for p in model.parameters()], gradients(model)]
        model.zero_grad()
        model.requires_grad_(True)
        model(x).sum().backward()
        return [*found, gradients(model)]

    wanted = program(Net(), data(0))
    assert fsdp.simulate(2, lambda rank: program(natively(strategy)(Net()), data(rank))) == [wanted] * 2


# gradients that are kept under no_sync -----------------------------------------------------


@contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with fsdp.no_sync(model):
            yield


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_may_have_the_backward_that_reduces_what_no_sync_has_kept(by_name: bool) -> None:
    def train(model: nn.Module, parts: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            loss = model(parts[1]).square().mean()
            loss.backward()
            return loss

        def unsynchronised() -> None:
            with unsynced(model) if unit_ref_of(model) else nullcontext():
                model(parts[0]).square().mean().backward()

        for _ in range(2):
            unsynchronised()
            optimizer.step(**{"closure": closure}) if by_name else optimizer.step(closure)
            optimizer.zero_grad()
        if unit_ref_of(model):
            unsynchronised()
            with pytest.raises(fsdp.ShardingError, match=r"AdamW\.step: the gradient of '.*' is kept under no_sync"):
                optimizer.step(unsynchronised)
            optimizer.zero_grad()
        return weights(model) if unit_ref_of(model) else {name: p.detach() for name, p in model.named_parameters()}

    plain = train(Net(), [torch.cat([data(0), data(1)]), torch.cat([data(2), data(3)])])
    for found in fsdp.simulate(2, lambda rank: train(natively("FULL_SHARD")(Net()), [data(rank), data(2 + rank)])):
        assert_close(found, plain)


READS: Final[dict[str, Callable[[nn.Parameter], Any]]] = {
    "a perturbation": lambda p: p.add_(p.grad, alpha=0.1),
    "a norm": lambda p: p.grad.norm(),
    "scaling": lambda p: p.grad.mul_(0.5),
    "scaling by .data": lambda p: p.grad.data.mul_(0.5),
    "lists": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "a copy": lambda p: p.grad.clone(),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRADIENTS"])
@pytest.mark.parametrize("read", READS)
def test_a_gradient_that_is_kept_under_no_sync_is_not_read(read: str, strategy: str) -> None:
    def program(model: nn.Module, batches: list[Tensor]) -> None:
        for x in batches:
            (model(x).square().mean() / len(batches)).backward()

    plain = Net()
    program(plain, [data(0), data(1), data(0), data(1)])

    def fn(rank: int) -> None:
        model = natively(strategy)(Net())
        with fsdp.no_sync(model):
            (model(data(rank)).square().mean() / 2).backward()
        with torch.no_grad(), pytest.raises(fsdp.ShardingError, match=r"kept under no_sync: it is not reduced"):
            READS[read](model.first.weight)
        (model(data(rank)).square().mean() / 2).backward()
        found = {name: fsdp.full_tensor(p.grad) for name, p in model.named_parameters()}
        assert_close(found, {name: p.grad for name, p in plain.named_parameters()})
        assert float(model.first.weight.grad.norm()) > 0

    fsdp.simulate(2, fn)


@pytest.mark.parametrize("zero", [lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_kept_can_be_zeroed_and_then_steps_go_on(strategy: str, zero: Callable[[nn.Module], None]) -> None:
    plain = Net()
    stepped_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in (data(0), data(1)):
        (plain(x).square().mean() / 2).backward()
    stepped_plain.step()

    def fn(rank: int) -> dict[str, Tensor]:
        model = natively(strategy)(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fsdp.no_sync(model):
            model(data(rank)).sum().backward()
        zero(model)
        optimizer.step()
        model(data(rank)).square().mean().backward()
        optimizer.step()
        return fsdp.full_state_dict(model, rank0_only=False)

    for found in fsdp.simulate(2, fn):
        assert_close(found, dict(plain.state_dict()))


# inside a backward ----------------------------------------------------------------------------


class Hooked(nn.Module):
    """Three layers, with a hook on the activation behind the first."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        x.register_hook(lambda gradient: [self.act(), None][1])
        return self.head(self.second(torch.tanh(x)))


@pytest.mark.parametrize("door", sorted(DOORS.keys() - {"FSDP1"}))  # through which a rank without elements has no gradient
@on_ranks(2)
def test_what_a_hook_of_an_activation_freezes_or_thaws_is_as_in_plain_torch_or_refused(rank: int, door: str) -> None:
    got: list[list[bool]] = []
    for wrap in (lambda net: net, DOORS[door]):
        model = wrap(nn.Sequential(Hooked(), nn.Linear(1, 1)))
        net = next(one for one in model.modules() if isinstance(one, Hooked))
        for trains in (True, False):
            loss = model(torch.ones(2, 4)).sum()
            net.requires_grad_(not trains)
            net.act = lambda net=net, trains=trains: net.enter.requires_grad_(trains)
            loss.backward()
            got.append([p.grad is not None for p in model.parameters()])
            model.zero_grad()
            net.requires_grad_(True)
    assert got[2:] == got[:2]
    held = net.head.weight
    net.act = lambda: held.requires_grad_(False)
    with pytest.raises(fsdp.ShardingError, match="was set to False in a hook of this backward"):
        model(torch.ones(2, 4)).sum().backward()
    net.act = Hooked.act
    model(torch.ones(2, 4)).sum().backward()
    assert held.grad is None


EARLY: Final[dict[str, Callable[[nn.Parameter, Any], object]]] = {
    "reads it": lambda p, net: p.grad,
    "removes it": lambda p, net: setattr(p, "grad", None),
    "replaces it": lambda p, net: setattr(p, "grad", torch.ones_like(p)),
    "reads what the module shows": lambda p, net: [one.grad for one in net.parameters()],
    "sets a hook": lambda p, net: p.register_hook(lambda gradient: None),
    "sets a late hook": lambda p, net: p.register_post_accumulate_grad_hook(lambda parameter: None),
}


@pytest.mark.parametrize("act", EARLY)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_gradient_that_has_come_is_refused_until_it_is_reduced(rank: int, door: str, act: str) -> None:
    model = DOORS[door](nn.Sequential(Hooked(), nn.Linear(1, 1)))
    net = next(one for one in model.modules() if isinstance(one, Hooked))
    came, comes = net.head.weight, net.enter.weight
    kinds, x = [*map(type, model.parameters())], torch.ones(2, 4)
    model(x).sum().backward()
    before = [comes.grad, came.grad]
    net.act = lambda: (comes.grad, EARLY[act](came, net))
    with pytest.raises(fsdp.ShardingError, match=r"`\.grad` of .*weight' inside a backward, where its gradient has come"):
        model(x).sum().backward()
    assert [*map(type, model.parameters())] == kinds
    assert comes.grad is before[0] and came.grad is before[1]
    net.act = lambda: [comes.grad, came.shape, came.requires_grad]
    with getattr(model, "no_sync", lambda: fsdp.no_sync(model))() if door not in ("FSDP2", "DDP") else nullcontext():
        model(x).sum().backward()
    assert [*map(type, model.parameters())] == kinds


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_hook_sees_the_gradient_of_before_of_its_own_parameter_and_may_remove_itself(strategy: str) -> None:
    def program(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
        weight = next(p for name, p in model.named_parameters() if name == "second.weight")
        seen: list[bool] = []

        def hook(gradient: Tensor) -> Tensor:
            seen.append(weight.grad is None)
            if weight.grad is not None:
                weight.grad.mul_(0.5)
                handle.remove()
            return 3 * gradient

        handle = weight.register_hook(hook)
        for x in inputs * 3:
            model(x).sum().backward()
        assert seen == [True, False]
        return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    wanted = program(Net(), [data(0)])
    assert_close(join_all(fsdp.simulate(2, lambda rank: program(natively(strategy)(Net()), [data(0)])), wanted), wanted)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_hook_that_is_removed_before_it_has_run_is_refused(rank: int, door: str, late: bool) -> None:
    model = DOORS[door](nn.Sequential(Hooked(), nn.Linear(1, 1)))
    net = next(one for one in model.modules() if isinstance(one, Hooked))
    weight = net.head.weight
    register = weight.register_post_accumulate_grad_hook if late else weight.register_hook
    net.act = register(lambda tensor: None).remove
    with pytest.raises(fsdp.ShardingError, match=r"a hook of .* was removed inside a backward"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_parameter_that_an_optimizer_gets_inside_a_forward_is_refused_before_its_step(rank: int, strategy: str) -> None:
    model = natively(strategy)(Net())
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    optimizer.step()

    def add(module: nn.Module, args: Any) -> None:
        optimizer.add_param_group({"params": [module.weight]})

    handle = model.second.register_forward_pre_hook(add)
    model(data(rank)).sum().backward()
    handle.remove()
    with pytest.raises(fsdp.ShardingError, match=r"was given a parameter of unit 'second' inside its forward"):
        optimizer.step()


# p.data --------------------------------------------------------------------------------------


def swapped_in(model: nn.Module, value: float) -> list[Tensor]:
    """Point every parameter at other memory, as averages of weights are swapped in; return what they pointed at."""
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.full_like(p.data, value)
    return kept


def put_back(model: nn.Module, kept: list[Tensor]) -> None:
    for p, data in zip(model.parameters(), kept, strict=True):
        p.data = data


def around_an_evaluation(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        kept = swapped_in(model, 0.1)
        with torch.no_grad():
            found += [model(x).sum().item() for x in batches[:1]]
        put_back(model, kept)
        torch.stack([model(x).square().mean() for x in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def between_forward_and_backward(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.stack([model(x).square().mean() for x in batches]).mean()
    kept = swapped_in(model, 0.1)
    with torch.no_grad():
        found = model(batches[0]).sum().item()
    put_back(model, kept)
    loss.backward()
    optimizer.step()
    return [found]


def trained_in_other_memory(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    """The parameters share the memory of what they were pointed at, and what they pointed at before keeps its values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = swapped_in(model, 0.1)
    others = [p.data for p in model.parameters()]
    for _ in range(3):
        torch.stack([model(x).square().mean() for x in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for other in others:
            other.mul_(2)
        found = model(batches[0]).sum().item()
    put_back(model, kept)
    with torch.no_grad():
        return [found, model(batches[0]).sum().item()]


def by_full_tensors(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    for p in model.parameters():
        p.data = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / p.numel()
    with torch.no_grad():
        return [model(batches[0]).sum().item()]


PROGRAMS: Final = (around_an_evaluation, between_forward_and_backward, trained_in_other_memory)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("door", [*STRATEGIES, "FSDP1", "DDP"])
def test_weights_that_are_swapped_by_data_are_those_of_plain_torch(door: str, program: Any, size: int) -> None:
    plain = Net()
    wanted = program(plain, [data(rank) for rank in range(size)])

    def fn(rank: int) -> tuple[list[Any], dict[str, Tensor]]:
        torch.manual_seed(rank)
        model = DOORS[door](Net())
        return program(model, [data(rank)]), weights(model)

    results = fsdp.simulate(size, fn)
    assert results[0][0] == pytest.approx(wanted, rel=1e-4)
    for _, found in results:
        assert_close(found, dict(plain.state_dict()))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_is_pointed_at_a_full_tensor_is_a_part_of_it(strategy: str, size: int) -> None:
    plain = Net()
    wanted = by_full_tensors(plain, [data(0)])

    def fn(rank: int) -> list[Any]:
        model = natively(strategy)(Net())
        found = by_full_tensors(model, [data(0)])
        assert_close(weights(model), dict(plain.state_dict()))
        return found

    for found in fsdp.simulate(size, fn):
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_swapped_in_a_forward_are_used_by_the_next_units(strategy: str) -> None:
    def program(model: nn.Module, x: Tensor) -> float:
        def swap(module: nn.Module, args: Any) -> None:
            for p in list(model.parameters())[4:]:
                p.data = torch.full_like(p.data, 0.1)

        model(x)
        handle = next(module for name, module in model.named_modules() if name.endswith("first")).register_forward_pre_hook(swap)
        with torch.no_grad():
            found = model(x).sum().item()
        handle.remove()
        return found

    wanted = program(Net(), data(0))
    assert fsdp.simulate(2, lambda rank: program(natively(strategy)(Net()), data(0))) == [pytest.approx(wanted)] * 2


# processes, modes and options of torch ---------------------------------------------------------


@pytest.mark.gloo
def test_a_process_that_was_forked_from_a_rank_may_hold_the_model_and_gets_an_error_when_it_uses_it(tmp_path: Path) -> None:
    for held, used, without_a_unit in results_of("tests.runtime.forks", 2, tmp_path):
        assert len(without_a_unit) == len(forks.WITHOUT_A_UNIT)
        for said in without_a_unit:
            assert said.startswith("ShardingError: a collective is called in a process that was forked from a rank")
        assert held == ["nothing"] * len(forks.STRATEGIES)
        assert len(used) == len(forks.STRATEGIES) * len(forks.USES) + 1
        for said in used:
            assert said.startswith("ShardingError: unit '") and "was forked from a rank" in said


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_of_inference_mode_can_be_used_and_trained(size: int, strategy: str, made: bool, wrapped: bool) -> None:
    plain = Net()
    with torch.no_grad():
        wanted = plain(data(0)).sum().item()
    torch.stack([plain(data(rank)).square().mean() for rank in range(size)]).mean().backward()
    stepped(plain)

    def fn(rank: int) -> float:
        with torch.inference_mode(made):
            model = Net()
        with torch.inference_mode(wrapped):
            model = natively(strategy)(model)
        with torch.inference_mode():
            found: float = model(data(0)).sum().item()
        model(data(rank)).square().mean().backward()
        stepped(model)
        assert_close(weights(model), dict(plain.state_dict()))
        return found

    assert fsdp.simulate(size, fn) == [pytest.approx(wanted)] * size


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_gradient_of_another_dtype_is_refused_when_the_model_is_wrapped(rank: int, door: str) -> None:
    net = Net().bfloat16()
    net.second.weight.grad_dtype = torch.float32
    with pytest.raises(fsdp.ShardingError, match=r"weight' has grad_dtype torch\.float32"):
        DOORS[door](net)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_an_embedding_that_renormalises_is_refused_among_several_ranks(rank: int, door: str, make: Any) -> None:
    net = nn.Sequential(make(4, 8, max_norm=1.0), nn.Linear(8, 1))
    with pytest.raises(fsdp.ShardingError, match=r"max_norm=1\.0\) changes in its forward the rows that this rank looks up"):
        DOORS[door](net)


def test_an_embedding_may_renormalise_on_one_rank_and_by_hand() -> None:
    def alone(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Embedding(4, 8, max_norm=1.0))
        with torch.no_grad():
            model.weight.mul_(10)
        model(torch.tensor([0, 3]))
        return fsdp.full_state_dict(model)["weight"].norm(dim=1)

    assert torch.allclose(fsdp.simulate(1, alone)[0][[0, 3]], torch.ones(2), atol=1e-4)

    def by_hand(rank: int) -> Tensor:
        model = fsdp.fully_shard(nn.Embedding(4, 8))
        weight = model.weight
        with torch.no_grad():
            weight.mul_(10)
            norm = weight.norm(dim=1, keepdim=True)
            weight.mul_((1.0 / (norm + 1e-7)).clamp(max=1))
        return fsdp.full_state_dict(model, rank0_only=False)["weight"].norm(dim=1)

    for found in fsdp.simulate(2, by_hand):
        assert torch.allclose(found, torch.ones(4), atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_a_change_through_data_of_a_unit_that_is_gathered_ahead_is_used(strategy: str) -> None:
    def program(model: nn.Module, x: Tensor) -> list[float]:
        later = [p for name, p in model.named_parameters() if name.startswith("last")]

        def change(module: nn.Module, args: Any) -> None:
            for p in later:
                p.data.mul_(0.5)
                torch._foreach_add_([p.data], 0.1)

        found = [model(x).sum().item()]
        handle = model.first.register_forward_pre_hook(change)
        with torch.no_grad():
            found.append(model(x).sum().item())
        model(x).sum().backward()
        handle.remove()
        return [*found, *(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)]

    wanted = program(Net(), data(0))
    for found in fsdp.simulate(2, lambda rank: program(natively(strategy)(Net()), data(0))):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("size")
def test_guard_mode_refuses_a_change_through_data_of_a_copy(rank: int, strategy: str, size: int) -> None:
    model: Any = fsdp.fully_shard(Net(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, guard=True)
    handle = model.first.register_forward_pre_hook(lambda module, args: model.last.weight.data.mul_(0.5).size() and None)
    with pytest.raises(fsdp.ShardingError, match=r"'last.weight' was read .* changed there in place, which reaches a copy only"):
        model(data(rank))
    handle.remove()
    model.first.register_forward_pre_hook(lambda module, args: model.last.weight.data.add(1).size() and None)
    model(data(rank)).sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_function_reads_a_parameter_as_a_module_does(strategy: str) -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + penalty(self.last)

    def penalty(module: nn.Module) -> Tensor:
        return sum(module._parameters[name].square().sum() for name in ("weight", "bias"))  # type: ignore[union-attr, return-value]

    options: dict[str, Any] = {"auto_wrap_policy": {nn.Linear}, "sharding_strategy": strategy}
    assert_grads_as_plain(Reads, lambda model: model(data(0)).sum().backward(), **options)


@on_ranks(2)
def test_a_hook_stays_one_after_the_backward_of_another_model_in_it(rank: int) -> None:
    model, other = natively("FULL_SHARD")(Net()), natively("FULL_SHARD")(Net())
    next(other.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    other(data(rank))

    def reset(p: Tensor) -> None:
        with torch.enable_grad():
            other(data(rank)).sum().backward()
        model.last.bias.data.fill_(7)

    next(model.parameters()).register_post_accumulate_grad_hook(reset)
    model(data(rank)).sum().backward()
    assert fsdp.full_tensor(model.last.bias).tolist() == [7]


def _after_another_read(last: nn.Linear) -> None:
    weight, _ = last.weight, last.bias
    weight.mul_(0.5)


def _of_a_view_after_another_read(last: nn.Linear) -> None:
    weight, _ = last.weight.detach(), last.weight
    weight[0].mul_(0.5)


def _after_a_call(last: nn.Linear) -> None:
    weight = last.weight
    last(weight)
    weight.lerp_(torch.ones_like(weight), 0.5)


def _in_inference_mode(last: nn.Linear) -> None:
    with torch.inference_mode():
        last.weight.mul_(0.5)


@pytest.mark.parametrize("change", [_after_another_read, _of_a_view_after_another_read, _after_a_call, _in_inference_mode])
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_change_of_a_copy_is_refused_as_long_as_the_copy_lives(
    rank: int, strategy: str, guard: bool, change: Callable[[nn.Linear], None]
) -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                change(self.last)
            return super().forward(x)

    model = fsdp.fully_shard(Reads(), auto_wrap_policy={nn.Linear}, sharding_strategy=strategy, guard=guard)
    with pytest.raises(fsdp.ShardingError, match=r"'last.weight' was read .* changed there in place, which reaches a copy only"):
        model(data(rank))
        model(data(rank))


SET: Final[dict[str, Callable[[nn.Parameter], object]]] = {
    "data = ": lambda p: setattr(p, "data", torch.zeros_like(p)),
    "grad = ": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "requires_grad = ": lambda p: setattr(p, "requires_grad", False),
    "requires_grad_: ": lambda p: p.requires_grad_(False),
    "register_hook: ": lambda p: p.register_hook(lambda gradient: gradient * 0.5),
}


@pytest.mark.parametrize("what", SET)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_what_a_recompute_sets_on_the_copy_of_a_parameter_of_another_unit_is_refused(rank: int, strategy: str, what: str) -> None:
    model = natively(strategy)(Net(checkpointed=True))

    def act(module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            SET[what](model.first.weight)

    handle = model.second.register_forward_pre_hook(act)
    before = {name: value.clone() for name, value in fsdp.full_state_dict(model, rank0_only=False).items()}
    with pytest.raises(fsdp.ShardingError, match=f"^{what}.*'first.weight' is read outside the forward of its unit"):
        model(data(rank)).sum().backward()
    handle.remove()
    for name, value in fsdp.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, before[name])
    model.zero_grad()
    model(data(0)).sum().backward()
    net = Net()
    net(data(0)).sum().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1)
    assert float(fsdp.clip_grad_norm_(model, 1)) == pytest.approx(float(norm), rel=1e-5)
