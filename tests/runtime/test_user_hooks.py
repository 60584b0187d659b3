"""Every kind of hook a user can set: called as often as on the plain module, in the same order, with the same values.

Hooks on modules and on activations see what this rank computes, so they are compared with a plain module on this rank's data.
`docs/reference/hooks.md` is the table.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as global_hooks

import fsdp
from tests.patterns import checkpointing as ways
from tests.support.models import Block, Net, gradients_of, join_all, loss_of
from tests.support.ranks import on_ranks

RANKS = 2
STEPS = 2
X = 4, 6
MODULES = ("", "blocks.0", "blocks.1.up", "enter")
"""The root, a unit, a module inside a unit, and one of the root's own."""


class Heard:
    """What hooks were called with, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Tensor]]] = []

    def note(self, name: str, *values: Any) -> None:
        self.calls.append((name, [value.detach().clone() for value in flat(values)]))


def flat(values: Any) -> list[Tensor]:
    """The tensors in arguments and results of hooks."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return flat(list(values.values()))
    return [one for value in values or () for one in flat(value)] if isinstance(values, list | tuple) else []


Set = Callable[[nn.Module, Heard], Any]


def each(method: str, hook: Callable[..., Any], **options: Any) -> Set:
    """Set a hook on each of MODULES by one of their methods; it is given a name and what hears, before its arguments."""

    def set_them(model: nn.Module, heard: Heard) -> None:
        for name in MODULES:
            getattr(model.get_submodule(name), method)(partial(hook, f"{method} {name}", heard), **options)

    return set_them


def listen(name: str, heard: Heard, module: nn.Module, *values: Any) -> None:
    heard.note(name, *values)


def change(name: str, heard: Heard, module: nn.Module, *values: Any) -> Any:
    """Half of the last argument, as the hook that it is would return it."""
    heard.note(name, *values)
    return values[-1] * 0.5 if isinstance(values[-1], Tensor) else tuple(None if one is None else one * 0.5 for one in values[-1])


def change_inputs(name: str, heard: Heard, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
    heard.note(name, args, kwargs)
    return (args[0] * 2, *args[1:]), kwargs


def on_activations(name: str, heard: Heard, module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: heard.note(f"{name}: tensor", gradient))
    if args[0].requires_grad:
        args[0].register_hook(lambda gradient: heard.note(f"{name}: input", gradient))


def scaled_activations(name: str, heard: Heard, module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 0.5)


def on_nodes(name: str, heard: Heard, module: nn.Module, args: Any, output: Tensor) -> None:
    node = output.grad_fn
    assert node is not None
    node.register_prehook(lambda grads: heard.note(f"{name}: before the node", grads))
    node.register_hook(lambda inputs, outputs: heard.note(f"{name}: after the node", outputs))


def on_accumulation(name: str, heard: Heard, module: nn.Module, args: Any) -> None:
    """In the manner of data-parallel reducers: on the node that accumulates into the parameter that computes."""
    for key, parameter in module.named_parameters(recurse=isinstance(module, Block)):  # of the root, only its own are whole
        view = parameter.expand_as(parameter)
        assert view.grad_fn is not None
        node = view.grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients, key=key: heard.note(f"{name}: {key} comes", gradients))
        node.register_hook(lambda inputs, outputs, key=key: heard.note(f"{name}: {key} came", outputs))


ON_MODULES: dict[str, Set] = {
    "forward pre-hooks": each("register_forward_pre_hook", listen),
    "forward pre-hooks with kwargs that change inputs": each("register_forward_pre_hook", change_inputs, with_kwargs=True),
    "forward pre-hooks that come first": each("register_forward_pre_hook", listen, prepend=True),
    "forward hooks": each("register_forward_hook", listen),
    "forward hooks that change outputs": each("register_forward_hook", change),
    "forward hooks with kwargs": each("register_forward_hook", listen, with_kwargs=True),
    "forward hooks that come first": each("register_forward_hook", listen, prepend=True),
    "forward hooks that are always called": each("register_forward_hook", listen, always_call=True),
    "full backward pre-hooks": each("register_full_backward_pre_hook", listen),
    "full backward pre-hooks that change gradients": each("register_full_backward_pre_hook", change),
    "full backward hooks": each("register_full_backward_hook", listen),
    "tensor hooks on activations": each("register_forward_hook", on_activations),
    "tensor hooks that change gradients of activations": each("register_forward_hook", scaled_activations),
    "hooks on nodes behind outputs": each("register_forward_hook", on_nodes),
    "hooks on the nodes that accumulate, inside a forward": each("register_forward_pre_hook", on_accumulation),
}


def make() -> Net:
    torch.manual_seed(5)
    return Net(blocks=2)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(X, generator=torch.Generator().manual_seed(10 * step + rank))


Around = Callable[[Heard], AbstractContextManager[Any]]


def run(
    rank: int,
    set_hooks: Set,
    sharded: bool,
    before: bool = False,
    around: Around = lambda heard: nullcontext(),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Heard, nn.Module]:
    """Some steps with hooks, set before or after wrapping. Weights stay: the ranks of the plain module do not talk."""
    heard, model = Heard(), make()
    if before or not sharded:
        set_hooks(model, heard)
    if sharded:
        fsdp.fully_shard(model, auto_wrap_policy={Block}, **options)
        if not before:
            set_hooks(model, heard)
    for step in range(STEPS):
        model.zero_grad()
        with around(heard):
            loss = loss_of(model(data(rank, step)))
        loss.backward()
    return heard, model


def assert_heard_alike(found: Heard, wanted: Heard) -> None:
    assert wanted.calls, "nothing is compared"
    assert [name for name, _ in found.calls] == [name for name, _ in wanted.calls]
    for (name, values), (_, others) in zip(found.calls, wanted.calls, strict=True):
        assert len(values) == len(others), name
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@cache
def mean_gradients(set_hooks: Set) -> dict[str, Tensor]:
    """Of the last step, over plain replicas."""
    replicas = [gradients_of(run(rank, set_hooks, sharded=False)[1]) for rank in range(RANKS)]
    return {name: torch.stack([one[name] for one in replicas]).mean(0) for name in replicas[0]}  # type: ignore[misc]


def assert_mean(by_rank: list[dict[str, Tensor | None]], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(join_all(by_rank, wanted), wanted, rtol=1e-5, atol=1e-6)


def nothing(model: nn.Module, heard: Heard) -> None:
    """No hook."""


ENTER_HAS_NO_GRADIENT = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
"""Of its input; torch says so of the plain module too."""


@ENTER_HAS_NO_GRADIENT
@pytest.mark.parametrize("before", [True, False], ids=["set before wrapping", "set after wrapping"])
@pytest.mark.parametrize("kind", ON_MODULES)
def test_on_modules_and_activations(kind: str, before: bool) -> None:
    def one_rank(rank: int) -> dict[str, Tensor | None]:
        heard, model = run(rank, ON_MODULES[kind], True, before)
        if kind != "tensor hooks that change gradients of activations":
            assert_heard_alike(heard, run(rank, ON_MODULES[kind], False)[0])
        return gradients_of(model)

    assert_mean(fsdp.simulate(RANKS, one_rank), mean_gradients(ON_MODULES[kind]))


@pytest.mark.parametrize("parts", [lambda: [ways.Ways(ways.nested, True)], lambda: [nn.Unflatten(1, (1, 4)), ways.Block(4)]])
@on_ranks(RANKS)
def test_on_one_rank_alone_add_no_gather(rank: int, parts: Callable[[], list[nn.Module]]) -> None:
    """They see inputs of a checkpoint inside another one, or a view. Ranks that gather otherwise get an error."""
    model = nn.Sequential(nn.Linear(4, 4), *parts())
    fsdp.fully_shard(model, auto_wrap_policy={ways.Block})
    for module in model.modules() if rank == 0 else ():
        module.register_forward_hook(lambda *_: None)
    model(torch.randn(2, 4)).sum().backward()


class Stop(Exception):
    """Raised inside a forward."""


@on_ranks(RANKS)
def test_forward_hooks_that_are_always_called_are_called_when_a_forward_fails(rank: int) -> None:
    def calls(rank: int, sharded: bool) -> list[str]:
        def stop(*_: Any) -> None:
            raise Stop

        heard, model = Heard(), make()
        if sharded:
            fsdp.fully_shard(model, auto_wrap_policy={Block})
        ON_MODULES["forward hooks that are always called"](model, heard)
        handle = model.blocks[1].up.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(data(rank, 0))
        handle.remove()
        loss_of(model(data(rank, 0))).backward()
        return [name for name, _ in heard.calls]

    assert calls(rank, True) == calls(rank, False)
    assert calls(rank, True)[:2] == ["register_forward_hook enter", "register_forward_hook blocks.0"]


# hooks that hold for every module --------------------------------------------------------------------------------


def name_of(module: nn.Module) -> str:
    return type(module).__name__


GLOBAL: dict[str, Callable[[Heard], Any]] = {
    "forward pre-hooks": lambda heard: global_hooks.register_module_forward_pre_hook(
        lambda module, args: heard.note(f"before {name_of(module)}", args)
    ),
    "forward hooks": lambda heard: global_hooks.register_module_forward_hook(
        lambda module, args, output: heard.note(f"after {name_of(module)}", args, output)
    ),
    "forward hooks with kwargs that are always called": lambda heard: global_hooks.register_module_forward_hook(
        lambda module, args, kwargs, output: heard.note(f"after {name_of(module)}", args, output),
        with_kwargs=True,
        always_call=True,
    ),
    "full backward pre-hooks": lambda heard: global_hooks.register_module_full_backward_pre_hook(
        lambda module, gradients: heard.note(f"before the backward of {name_of(module)}", gradients)
    ),
    "full backward hooks": lambda heard: global_hooks.register_module_full_backward_hook(
        lambda module, inputs, outputs: heard.note(f"after the backward of {name_of(module)}", inputs, outputs)
    ),
}


@ENTER_HAS_NO_GRADIENT
@pytest.mark.parametrize("kind", GLOBAL)
def test_for_every_module(kind: str) -> None:
    """One rank: they hear the modules of every thread."""

    def trained(sharded: bool) -> Heard:
        heard, model = Heard(), make()
        if sharded:
            fsdp.fully_shard(model, auto_wrap_policy={Block})
        handle = GLOBAL[kind](heard)
        try:
            for step in range(STEPS):
                loss_of(model(data(0, step))).backward()
        finally:
            handle.remove()
        return heard

    fsdp.simulate(1, lambda rank: assert_heard_alike(trained(True), trained(False)))


# hooks on what autograd saves -------------------------------------------------------------------------------------


@contextmanager
def noting(heard: Heard, copies: bool) -> Iterator[None]:
    """Pack copies, or the very tensors, whose memory goes and comes back."""

    def pack(tensor: Tensor) -> Tensor:
        heard.note("packed", tensor)
        return tensor.clone() if copies else tensor

    def unpack(tensor: Tensor) -> Tensor:
        heard.note("unpacked", tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


SAVED: dict[str, Around] = {
    "that note": partial(noting, copies=False),
    "that copy": partial(noting, copies=True),
}


@pytest.mark.parametrize("kind", SAVED)
def test_on_saved_tensors(kind: str) -> None:
    def one_rank(rank: int) -> dict[str, Tensor | None]:
        heard, model = run(rank, nothing, True, around=SAVED[kind])
        assert_heard_alike(heard, run(rank, nothing, False, around=SAVED[kind])[0])
        return gradients_of(model)

    by_rank = fsdp.simulate(1, one_rank)
    assert by_rank[0]["enter.weight"] is not None


def test_saved_tensors_may_wait_in_the_memory_of_the_host() -> None:
    def one_rank(rank: int) -> dict[str, Tensor | None]:
        return gradients_of(run(rank, nothing, True, around=lambda heard: torch.autograd.graph.save_on_cpu())[1])

    assert_mean(fsdp.simulate(RANKS, one_rank), mean_gradients(nothing))


# hooks on parameters ----------------------------------------------------------------------------------------------

PARAMETERS = ("enter.weight", "blocks.0.norm.weight", "blocks.1.up.weight", "leave.bias")


def on_parameters(model: nn.Module, heard: Heard) -> None:
    for name in PARAMETERS:
        model.get_parameter(name).register_hook(lambda gradient, name=name: heard.note(name, gradient))


@on_ranks(RANKS)
def test_on_parameters_before_wrapping_see_the_unsharded_gradient_of_this_rank_once_a_backward(rank: int) -> None:
    found = run(rank, on_parameters, True, before=True)[0]
    assert_heard_alike(found, run(rank, on_parameters, False)[0])
    assert sorted(name for name, _ in found.calls) == sorted(PARAMETERS * STEPS)


def test_on_parameters_before_wrapping_may_change_the_gradient() -> None:
    def halve(model: nn.Module, heard: Heard) -> None:
        for name in PARAMETERS:
            model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)

    by_rank = fsdp.simulate(RANKS, lambda rank: gradients_of(run(rank, halve, True, before=True)[1]))
    assert_mean(by_rank, mean_gradients(halve))


def parts_heard(by_rank: list[Heard]) -> dict[str, Tensor | None]:
    """What hooks on shards were given in the last step, put together over the ranks."""
    last = [dict.fromkeys(PARAMETERS) | {name: values[0] for name, values in heard.calls} for heard in by_rank]
    return join_all(last, {name: make().get_parameter(name) for name in PARAMETERS})


def assert_once_a_backward(by_rank: list[Heard]) -> None:
    """Hooks on shards were called once in each backward, or never where the rank holds nothing, with its part of the mean."""
    wanted = mean_gradients(nothing)
    torch.testing.assert_close(parts_heard(by_rank), {name: wanted[name] for name in PARAMETERS}, rtol=1e-5, atol=1e-6)
    for heard in by_rank:
        names = [name for name, _ in heard.calls]
        assert all(names.count(name) == STEPS for name in names)


def test_on_parameters_after_wrapping_see_this_ranks_part_of_the_reduced_gradient_once_a_backward() -> None:
    by_rank = fsdp.simulate(RANKS, lambda rank: run(rank, on_parameters, True)[0])
    assert_once_a_backward(by_rank)


def after_accumulation(model: nn.Module, heard: Heard) -> None:
    def note(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        heard.note(name, parameter.grad)

    for name in PARAMETERS:
        model.get_parameter(name).register_post_accumulate_grad_hook(partial(note, name=name))


@pytest.mark.parametrize("before", [True, False], ids=["set before wrapping", "set after wrapping"])
def test_after_accumulation_see_this_ranks_part_of_the_reduced_gradient_once_a_backward(before: bool) -> None:
    by_rank = fsdp.simulate(RANKS, lambda rank: run(rank, after_accumulation, True, before)[0])
    assert_once_a_backward(by_rank)


def test_after_accumulation_see_what_has_accumulated_and_tensor_hooks_what_was_added() -> None:
    def one_rank(rank: int) -> tuple[Heard, Heard]:
        added, accumulated, model = Heard(), Heard(), fsdp.fully_shard(make(), auto_wrap_policy={Block})
        on_parameters(model, added)
        after_accumulation(model, accumulated)
        for _ in range(2):
            loss_of(model(data(rank, 0))).backward()
        return added, accumulated

    added, accumulated = (list(heard) for heard in zip(*fsdp.simulate(RANKS, one_rank), strict=True))
    once, twice = parts_heard(added), parts_heard(accumulated)
    torch.testing.assert_close(twice, {name: 2 * one for name, one in once.items()}, rtol=1e-5, atol=1e-6)  # type: ignore[operator]


@on_ranks(RANKS)
def test_a_hook_that_is_removed_is_not_called(rank: int) -> None:
    calls: list[str] = []
    model = make()
    early = model.get_parameter("enter.weight").register_hook(lambda gradient: calls.append("before wrapping"))
    fsdp.fully_shard(model, auto_wrap_policy={Block})
    parameter = model.get_parameter("enter.weight")
    late = parameter.register_hook(lambda gradient: calls.append("after wrapping"))
    last = parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append("after accumulation"))
    for handle in (early, late, last):
        handle.remove()
    loss_of(model(data(rank, 0))).backward()
    assert not calls


def on_the_accumulating_node(model: nn.Module, heard: Heard) -> None:
    heard.kept = []  # type: ignore[attr-defined]
    for name in PARAMETERS:
        parameter = model.get_parameter(name)
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        heard.kept.append(node)  # type: ignore[attr-defined]
        node.register_prehook(lambda outputs, name=name: heard.note(f"before {name}", outputs))
        node.register_hook(lambda inputs, outputs, name=name: heard.note(name, (*inputs, *outputs)))


@on_ranks(RANKS)
def test_on_the_accumulating_node_before_wrapping_see_the_unsharded_gradient_of_this_rank_once_a_backward(rank: int) -> None:
    """Beside hooks on the tensor itself, which hear of each gradient once, as on the plain module."""

    def both(model: nn.Module, heard: Heard) -> None:
        on_the_accumulating_node(model, heard)
        on_parameters(model, heard)

    found, model = run(rank, both, True, before=True)
    assert_heard_alike(found, run(rank, both, False)[0])
    assert len(found.calls) == 3 * len(PARAMETERS) * STEPS
    assert all(p.requires_grad for p in model.parameters())


@on_ranks(RANKS)
def test_on_the_accumulating_node_of_a_shard_are_refused_at_the_first_forward(rank: int) -> None:
    """After wrapping, outside a forward: into that node nothing accumulates."""
    model = fsdp.fully_shard(make(), auto_wrap_policy={Block})
    heard = Heard()
    on_the_accumulating_node(model, heard)
    with pytest.raises(fsdp.ShardingError, match=r"keeps the node .* of 'enter\.weight'"):
        model(data(rank, 0))
    heard.kept.clear()  # type: ignore[attr-defined]
    loss_of(model(data(rank, 0))).backward()
    assert not heard.calls


@on_ranks(RANKS)
def test_on_the_accumulating_node_do_not_step_an_optimizer(rank: int) -> None:
    """What they would step with is the gradient of the backward before."""
    model = make()
    parameter = model.enter.weight
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_hook(lambda *_: optimizer.step())
    fsdp.fully_shard(model, sharding_strategy="NO_SHARD")
    with pytest.raises(fsdp.ShardingError, match=r"SGD\.step: inside a backward the gradient of 'enter\.weight'"):
        loss_of(model(data(rank, 0))).backward()
    handle.remove()
    handle = node.register_hook(lambda *_: (parameter.detach().add_(1), None)[1])  # a step by hand
    with pytest.raises(fsdp.ShardingError, match=r"hook on the node .* of 'enter\.weight' changed the parameter"):
        loss_of(model(data(rank, 0))).backward()
    handle.remove()
    loss_of(model(data(rank, 0))).backward()


@on_ranks(RANKS)
def test_of_several_parameters_before_wrapping_run_or_are_refused(rank: int) -> None:
    heard: list[Any] = []
    model = make()
    register_multi_grad_hook(tuple(model.parameters()), heard.append, mode="any")
    fsdp.fully_shard(model, auto_wrap_policy={Block})
    loss_of(model(data(rank, 0))).backward()
    assert len(heard) == 1
    model = make()
    handle = register_multi_grad_hook(tuple(model.parameters()), heard.append, mode="all")
    fsdp.fully_shard(model, auto_wrap_policy={Block})
    with pytest.raises(fsdp.ShardingError, match=r"register_multi_grad_hook was set on 'enter\.weight'"):
        model(data(rank, 0))
    handle.remove()
    loss_of(model(data(rank, 0))).backward()
    assert len(heard) == 1


@pytest.mark.parametrize("options", [{}, {"dtensors": True}, {"plain_shards": True}], ids=str)
@on_ranks(RANKS)
def test_of_several_shards_are_refused(rank: int, options: dict[str, Any]) -> None:
    model = fsdp.fully_shard(make(), auto_wrap_policy={Block}, **options)
    register_multi_grad_hook(tuple(model.parameters()), lambda _: None)
    with pytest.raises(fsdp.ShardingError, match=r"register_multi_grad_hook was set on 'enter\.weight'.*which never comes"):
        model(data(rank, 0))


# all together, however it is sharded ------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {"sharding_strategy": name} for name in ("SHARD_GRAD_OP", "SHARD_GRADIENTS", "SHARD_OPTIMIZER", "NO_SHARD")},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "mesh": (1, RANKS)},
}


def every_listener(model: nn.Module, heard: Heard) -> None:
    for kind, set_hooks in ON_MODULES.items():
        if "change" not in kind:
            set_hooks(model, heard)
    on_parameters(model, heard)


@ENTER_HAS_NO_GRADIENT
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(RANKS)
def test_every_kind_at_once_under_every_strategy(rank: int, strategy: str) -> None:
    found = run(rank, every_listener, True, before=True, options=STRATEGIES[strategy])[0]
    assert_heard_alike(found, run(rank, every_listener, False)[0])


# the page ---------------------------------------------------------------------------------------------------------


@cache
def page() -> str:
    return (Path(__file__).parents[2] / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")


def test_the_page_names_tests_that_exist() -> None:
    named = {word.strip("`") for word in page().split() if word.startswith("`test_") and word.endswith("`")}
    assert named
    assert not [name for name in named if name not in globals()]


def _set_flag(parameter: nn.Parameter, called: list[str]) -> None:
    parameter.requires_grad = False


LATE = {
    "requires_grad": _set_flag,
    "requires_grad_": lambda parameter, called: parameter.requires_grad_(False),
    "detach_": lambda parameter, called: parameter.detach_(),
    "register_hook": lambda parameter, called: parameter.register_hook(lambda gradient: called.append("hook")),
    "register_post_accumulate_grad_hook": lambda parameter, called: parameter.register_post_accumulate_grad_hook(
        lambda p: called.append("hook")
    ),
}


@pytest.mark.parametrize("how", LATE)
def test_what_is_set_between_two_steps_is_seen_by_the_next(how: str) -> None:
    """Nobody looks at flags and hooks while no shard says that one was set."""

    def on_rank(rank: int) -> tuple[bool, list[str]]:
        torch.manual_seed(0)
        model, called = fsdp.fully_shard(nn.Linear(4, 4)), list[str]()
        for number in range(3):
            if number == 2:
                LATE[how](model.weight, called)
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
        return model.weight.grad is None, called

    hooks = how.startswith("register")
    assert fsdp.simulate(2, on_rank) == [(not hooks, ["hook"] * hooks)] * 2
