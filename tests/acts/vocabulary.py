"""What a user may do between two hooks of the engine. Each act is one function for a plain model and for a wrapped one.

Rule 1: an act changes one thing, so that a refusal leaves nothing half done.
Rule 2: it finds parameters by name when it runs, as code that walks over `named_parameters()` does.
Rule 3: what it reads it gives to `Player.read`; the values of the plain player are compared.
"""

import copy
import gc
import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from tests.acts.players import WIDTH, Player, Raised, clean

FORKED: Final = 10.0
"""Seconds after which a forked process that says nothing hangs."""
Act = Callable[[Player, int], object]
"""The number says in which block: 0 or 1."""


def weight_of(at: Player, block: int) -> nn.Parameter:
    return at.parameters()[f"blocks.{block}.linear.weight"]


def unit_of(at: Player, block: int) -> nn.Module:
    """What the model calls: the block, or the wrapper around it."""
    return at.net.blocks[block]


ACTS: Final[dict[str, Act]] = {
    "freeze a parameter": lambda at, block: weight_of(at, block).requires_grad_(False),
    "freeze the model": lambda at, _: at.model.requires_grad_(False),
    "train a frozen parameter": lambda at, block: at.parameters()[f"blocks.{block}.gain"].requires_grad_(True),
    "change a weight through .data": lambda at, block: weight_of(at, block).data.mul_(0.9),
    "change a weight through .detach()": lambda at, block: weight_of(at, block).detach().mul_(0.9),
    "initialise a weight": lambda at, block: nn.init.constant_(weight_of(at, block), 0.25),
    "model.eval()": lambda at, _: at.model.eval(),
    "model.train()": lambda at, _: at.model.train(),
    "eval() of one module": lambda at, block: unit_of(at, block).eval(),
    "change a buffer in place": lambda at, block: at.blocks[block].scale.mul_(0.9),
    "add a tensor hook": lambda at, block: at.handles.append(weight_of(at, block).register_hook(lambda gradient: gradient * 0.5)),
    "read the names of the state dict": lambda at, _: at.read("names", sorted(clean(name) for name in at.model.state_dict())),
    "save and load the optimizer's state": lambda at, _: at.optimizer.load_state_dict(copy.deepcopy(at.optimizer.state_dict())),
    "model.to('cpu')": lambda at, _: at.model.to("cpu"),
    "convert the model": lambda at, _: at.model.to(torch.float32 if at.dtype is torch.float64 else torch.float64),
    "convert one unit": lambda at, block: unit_of(at, block).to(at.dtype),
    "optimizer.step()": lambda at, _: at.optimizer.step(),
    "optimizer.zero_grad()": lambda at, _: at.optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda at, _: at.optimizer.zero_grad(set_to_none=False),
    "evaluate the model": lambda at, _: at.read("outputs", at.evaluate(904)),
    "evaluate one module": lambda at, block: at.read("outputs", at.evaluate(905, unit_of(at, block))),
    "a complete forward and backward": lambda at, _: at.backward(at.loss(at.model(at.data(992)))),
    "a forward whose output is dropped": lambda at, _: at.read(
        "outputs", [output.detach() for output in at.outputs(at.model(at.data(991)))]
    ),
    "read which parameters have a gradient": lambda at, _: at.read(
        "there", [name for name, parameter in at.parameters().items() if parameter.grad is not None]
    ),
    "add a forward hook": lambda at, block: at.handles.append(
        at.blocks[block].register_forward_hook(lambda module, args, output: output * 0.9)
    ),
    "add a forward pre-hook": lambda at, block: at.handles.append(
        at.blocks[block].register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
    ),
    "add a post-accumulate hook": lambda at, block: at.handles.append(
        weight_of(at, block).register_post_accumulate_grad_hook(_halve)
    ),
    "add a full backward pre-hook": lambda at, block: at.handles.append(
        at.blocks[block].register_full_backward_pre_hook(lambda module, out: (out[0] * 0.9,))
    ),
    "call the model in a forked process": lambda at, _: at.read(
        "outputs", [output.to(at.dtype) for output in in_a_fork(lambda: at.evaluate(989))]
    ),
}
"""By name. Those of more than one expression are entered below."""


def act(name: str) -> Callable[[Act], Act]:
    def enter(do: Act) -> Act:
        assert name not in ACTS, f"two acts are called {name!r}"
        ACTS[name] = do
        return do

    return enter


# requires_grad ----------------------------------------------------------------------------------


@act("thaw what was trained")
def _(at: Player, block: int) -> None:
    for name in at.trained:
        at.parameters()[name].requires_grad_(True)


@act("freeze a parameter and thaw it")
def _(at: Player, block: int) -> None:
    weight_of(at, block).requires_grad_(False)
    weight_of(at, block).requires_grad_(True)


@act("evaluate with the model frozen, and thaw it")
def _(at: Player, block: int) -> None:
    trained = [p for p in at.model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        at.read("outputs", at.evaluate(901))
    finally:
        for p in trained:
            p.requires_grad_(True)


@act("call the model frozen, thaw it")
def _(at: Player, block: int) -> None:
    trained = [name for name, p in at.parameters().items() if p.requires_grad]
    at.model.requires_grad_(False)
    try:
        at.read("outputs", [output.detach() for output in at.outputs(at.model(at.data(996)))])
    finally:
        for name in trained:
            at.parameters()[name].requires_grad_(True)


# p.data -----------------------------------------------------------------------------------------


@act("replace p.data")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    weight.data = weight.data * 0.5


@act("replace p.data, evaluate, put it back")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    kept = weight.data
    weight.data = torch.zeros_like(kept)
    try:
        at.read("outputs", at.evaluate(902))
    finally:
        weight_of(at, block).data = kept


@act("replace p.data, keep the old one")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    kept = weight.data
    weight.data = kept * 0.5
    at.kept.setdefault(f"data of {block}", kept)


@act("put the kept p.data back")
def _(at: Player, block: int) -> None:
    if f"data of {block}" in at.kept:
        weight_of(at, block).data = at.kept[f"data of {block}"]
        del at.kept[f"data of {block}"]


# p.grad -----------------------------------------------------------------------------------------


@act("set p.grad to ones")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    weight.grad = torch.ones_like(weight)


@act("replace p.grad by its half")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    if weight.grad is not None:
        weight.grad = weight.grad * 0.5


@act("scale p.grad in place")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    if weight.grad is not None:
        weight.grad.mul_(0.5)


@act("scale p.grad.data in place")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    if weight.grad is not None:
        weight.grad.data.mul_(0.5)


@act("zero p.grad in place")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    if weight.grad is not None:
        weight.grad.zero_()


@act("delete p.grad")
def _(at: Player, block: int) -> None:
    weight_of(at, block).grad = None


@act("put a kept p.grad in again")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    kept, weight.grad = weight.grad, None
    weight.grad = kept


@act("set p.grad_dtype")
def _(at: Player, block: int) -> None:
    weight_of(at, block).grad_dtype = torch.float32 if at.dtype is torch.float64 else torch.float64


# weights and buffers ----------------------------------------------------------------------------


@act("change a weight in place")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    weight_of(at, block).mul_(0.9)


@act("change a weight of the root in place")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    at.parameters()["head.weight" if block else "enter.weight"].mul_(0.9)


@act("look a row up with max_norm")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    # the norm of the row becomes at most 0.3
    nn.functional.embedding(torch.tensor([3]), weight_of(at, block), max_norm=0.3)


@act("add the gradient to a weight")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    if weight.grad is not None:
        weight.add_(weight.grad, alpha=0.1)


@act("replace a buffer")
def _(at: Player, block: int) -> None:
    at.blocks[block].scale = at.blocks[block].scale * 0.9


# hooks ------------------------------------------------------------------------------------------


def _halve(parameter: Tensor) -> None:
    if parameter.requires_grad:  # see Player.trains
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@act("add a full backward hook")
def _(at: Player, block: int) -> None:
    hook = at.blocks[block].register_full_backward_hook(lambda module, into, out: (into[0] * 0.9,))
    at.handles.append(hook)


@act("add a hook to every module")
def _(at: Player, block: int) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 0.9 if module is at.blocks[block] else None

    at.handles.append(nn.modules.module.register_module_forward_hook(hook))


@act("remove the last hook")
def _(at: Player, block: int) -> None:
    if at.handles:
        at.handles.pop().remove()


# reads ------------------------------------------------------------------------------------------


def _shapes(tensor: Tensor) -> tuple[Any, ...]:
    first = tensor.size(0), tensor.stride(0)
    return tuple(tensor.shape), tuple(tensor.size()), tuple(tensor.stride()), tensor.ndim, tensor.dim(), *first


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tensor.numel(), torch.numel(tensor), tensor.nelement(), tensor.nbytes, len(tensor)


def _kinds(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.element_size(), tensor.is_floating_point(), tensor.layout


@act("read p.shape")
def _(at: Player, block: int) -> None:
    for name, parameter in at.parameters().items():
        at.read(name, _shapes(parameter))


@act("read the size of p")
def _(at: Player, block: int) -> None:
    for name, parameter in at.parameters().items():
        at.read(name, _sizes(parameter))


@act("read p.data.shape")
def _(at: Player, block: int) -> None:
    for name, parameter in at.parameters().items():
        at.read(name, (_shapes(parameter.data), _sizes(parameter.data)))


@act("read p.grad.shape")
def _(at: Player, block: int) -> None:
    gradient = weight_of(at, block).grad
    if gradient is not None:
        at.read("shape", (_shapes(gradient), _sizes(gradient)))


@act("read the shapes of the optimizer's state")
def _(at: Player, block: int) -> None:
    states = [at.optimizer.state[p].get("momentum_buffer") for p in at.optimizer.param_groups[0]["params"]]
    at.read("state", [state if state is None else (_shapes(state), _sizes(state)) for state in states])


@act("read device and dtype")
def _(at: Player, block: int) -> None:
    for name, parameter in at.parameters().items():
        at.read(name, (_kinds(parameter), parameter.requires_grad, parameter.is_leaf))


def number(result: Any) -> float:
    """A result as its value in full: of a DTensor, torch's `float` gives this rank's share."""
    return float(result.full_tensor() if hasattr(result, "full_tensor") else result)


def largest(tensor: Tensor) -> float:
    """torch's `max` of a DTensor fails on a rank that holds nothing of it, and the others wait for that rank."""
    return number((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).abs().max())


@act("read the value of a weight")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    at.read("norm", (number(weight.norm()), number(weight.sum()), largest(weight), bool(number((weight > 9).any()))))


@act("read the value of a gradient")
def _(at: Player, block: int) -> None:
    gradient = weight_of(at, block).grad
    if gradient is not None and not (at.replicated and at.local_gradients):
        at.read("norm", (number(gradient.norm()), number(gradient.sum()), largest(gradient)))


@act("read a gradient of the root")
def _(at: Player, block: int) -> None:
    gradient = at.parameters()["head.weight" if block else "enter.weight"].grad
    if gradient is not None and not (at.replicated and at.local_gradients):
        at.read("norm", number(gradient.norm()))


@act("read the norm of every gradient")
def _(at: Player, block: int) -> None:
    if not (at.replicated and at.local_gradients):
        at.read("norms", [number(p.grad.norm()) for p in at.parameters().values() if p.grad is not None])


@act("make state by the shape of p")
def _(at: Player, block: int) -> None:
    weight = weight_of(at, block)
    made = torch.zeros_like(weight), weight.new_zeros(weight.shape)
    at.read("shapes", [_shapes(one) for one in made])
    with torch.no_grad():
        at.read("sums", [number((one + weight).sum()) for one in made])


# state dicts ------------------------------------------------------------------------------------


@act("keep a copy of the state dict")
def _(at: Player, block: int) -> None:
    at.kept["state"] = copy.deepcopy(at.model.state_dict())


@act("load the kept state dict")
def _(at: Player, block: int) -> None:
    if "state" in at.kept:
        at.model.load_state_dict(at.kept["state"])


@act("load a part of the kept state dict")
def _(at: Player, block: int) -> None:
    state = at.kept.get("state", {})
    at.model.load_state_dict(
        {name: value for name, value in state.items() if f"blocks.{block}.linear" in clean(name)}, strict=False
    )


@act("load the kept state dict with assign=True")
def _(at: Player, block: int) -> None:
    if "state" in at.kept:
        at.model.load_state_dict(at.kept["state"], assign=True)


# modules ----------------------------------------------------------------------------------------


def _linear(at: Player) -> nn.Linear:
    new = nn.Linear(WIDTH, WIDTH).to(at.dtype)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view(parameter.shape))
    return new


@act("replace a module inside a unit")
def _(at: Player, block: int) -> None:
    at.blocks[block].linear = _linear(at)


@act("add a module that is not called")
def _(at: Player, block: int) -> None:
    at.blocks[block].added = nn.Tanh()


@act("add a module that has parameters")
def _(at: Player, block: int) -> None:
    at.blocks[block].added = _linear(at)


@act("replace a parameter")
def _(at: Player, block: int) -> None:
    at.blocks[block].linear.bias = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=at.dtype))


@act("deepcopy the model, and evaluate the copy")
def _(at: Player, block: int) -> None:
    other = copy.deepcopy(at.model)
    at.read("outputs of the copy", at.evaluate(903, other))


@act("deepcopy a parameter")
def _(at: Player, block: int) -> None:
    at.kept["copy"] = copy.deepcopy(weight_of(at, block))


# the optimizer ----------------------------------------------------------------------------------


@act("add a parameter group")
def _(at: Player, block: int) -> None:
    gain = at.parameters()[f"blocks.{block}.gain"]
    at.optimizer.add_param_group({"params": [gain], "lr": 0.1})
    gain.requires_grad_(True)


@act("clip the gradients")
def _(at: Player, block: int) -> None:
    if at.plain:
        nn.utils.clip_grad_norm_(at.model.parameters(), 0.01)
    else:
        fsdp.clip_grad_norm_(at.model, 0.01)


# passes -----------------------------------------------------------------------------------------


@act("enter no_sync and leave it")
def _(at: Player, block: int) -> None:
    at.synchronise(False)
    at.synchronise(True)


def in_a_fork(compute: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
    """What a process that is forked from this one computes, or its error."""
    into, out = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()  # a process group that is garbage waits in its destructor for threads that a fork has not
        try:
            os.write(out, json.dumps([None, [output.tolist() for output in compute()]]).encode())
        except fsdp.ShardingError as refusal:
            os.write(out, json.dumps([str(refusal), []]).encode())
        finally:
            os._exit(0)
    os.close(out)
    has_answered, _, _ = select.select([into], [], [], FORKED)
    if not has_answered:
        os.kill(child, signal.SIGKILL)
    with open(into, "rb") as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if not said:
        raise TimeoutError(f"a forked process that calls the model does not answer: {os.waitstatus_to_exitcode(status)}")
    refusal, outputs = json.loads(said)
    if refusal is not None:
        raise fsdp.ShardingError(refusal)
    return [torch.tensor(values) for values in outputs]


@act("evaluate in inference mode")
def _(at: Player, block: int) -> None:
    with torch.inference_mode():
        at.read("outputs", [output.clone() for output in at.outputs(at.model(at.data(990)))])


@act("make and wrap a model in inference mode")
def _(at: Player, block: int) -> None:
    with torch.inference_mode():
        at.read("outputs of another model", [output.clone() for output in at.outputs(at.another(None)(at.data(994)))])


@act("make and wrap a model whose embedding has max_norm")
@torch.no_grad()
def _(at: Player, block: int) -> None:
    other = at.another(0.3)
    at.read("outputs of another model", at.outputs(other(at.data(997))))
    # the rows that were looked up are smaller from now on
    next(m for m in other.modules() if isinstance(m, nn.Embedding)).max_norm = None
    at.read("outputs of another model", at.outputs(other(at.data(997))))


@act("raise")
def _(at: Player, block: int) -> None:
    raise Raised


@act("raise and catch")
def _(at: Player, block: int) -> None:
    try:
        raise Raised
    except Raised:
        pass


@act("a forward that fails, caught")
def _(at: Player, block: int) -> None:
    def fail() -> None:
        raise Raised

    before = at.blocks[block].during
    at.blocks[block].during = fail
    try:
        with torch.no_grad():
            at.model(at.data(993))
    except Raised as failure:
        at.caught(failure)
    finally:
        at.blocks[block].during = before


FIRST: Final = {
    "thaw what was trained": "freeze a parameter",
    "put the kept p.data back": "replace p.data, keep the old one",
    "remove the last hook": "add a tensor hook",
    "load the kept state dict": "keep a copy of the state dict",
    "load a part of the kept state dict": "keep a copy of the state dict",
    "load the kept state dict with assign=True": "keep a copy of the state dict",
}
"""Acts that need another one before them."""
