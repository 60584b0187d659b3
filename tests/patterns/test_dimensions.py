"""Patterns over two dimensions: the linear layers of each program are column parallel over two ranks, and two such pairs shard.

Every sixteenth pattern runs; if all is asked for (see tests/support/everything.py), every one.
"""

from typing import Any, Final
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp
from tests.patterns.every import PATTERNS
from tests.patterns.harness import AVERAGE_ONLY, Outcome, Pattern, UnitRef, assert_noted_alike, reference
from tests.support.everything import EVERYTHING
from tests.support.models import assert_close

WITHIN: Final = 2e-5
"""How far gradients and weights may be off: column parallel layers add in another order, and some programs take many steps."""

_SECOND: Final = "torch's styles have no second derivatives: replicas of models that are not sharded differ as much"
_MIXED: Final = "the program computes with a weight and an ordinary tensor, which torch refuses where the weight is a DTensor"
_ROUNDED: Final = "products in bf16 are rounded in another order"
_OBJECTS: Final = "parameters that are DTensors are other objects than before wrapping"
_TIED: Final = "torch's styles make two weights of a tied one"
_COMPILED: Final = "the simulated process group is not known to torch's compiler"
WITHOUT: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            *("a gradient penalty over a leaf", "a gradient penalty over an interpolation"),
            *("a gradient penalty in the step of a discriminator", "a gradient penalty with D(real) as its own forward"),
            *("a gradient penalty every other step", "a physics-informed loss, in units", "a physics-informed loss, in one unit"),
            *("third derivatives, in units", "third derivatives, in one unit"),
            "forces that are trained: create_graph inside a forward",
        ),
        _SECOND,
    ),
    **dict.fromkeys(
        (
            "a parent that reads the weight of a child that is a unit",
            "a reentrant checkpoint around a method that reads a weight of another unit",
            "a reentrant checkpoint around a method that reads a frozen weight of another unit",
            "a non-reentrant checkpoint around a method that reads a weight of another unit",
            "a non-reentrant checkpoint around a method that reads a frozen weight of another unit",
            "a gradient penalty through replays that read another unit's weight",
            "a meta-device model and param_init_fn",
        ),
        _MIXED,
    ),
    **dict.fromkeys(
        (
            *("a frozen bf16 base with fp32 adapters", "autocast", "autocast over two forwards"),
            *(
                "reentrant checkpoints around frozen bases with adapters",
                "non-reentrant checkpoints around frozen bases with adapters",
            ),
        ),
        _ROUNDED,
    ),
    **dict.fromkeys(("the optimizer steps in hooks set before wrapping", "an optimizer built before wrapping"), _OBJECTS),
    **dict.fromkeys(
        (
            *("a weight tied inside a unit", "a weight tied across two units of one unit"),
            "a weight tied across two units of the root",
        ),
        _TIED,
    ),
    **dict.fromkeys(
        ("torch.compile of modules inside units", "torch.compile of units", "torch.compile of the whole model"), _COMPILED
    ),
    **dict.fromkeys(
        (
            *("third derivatives, of elementwise parameters", "a model without parameters", "LSTMs"),
            *("a meta-device model that initialises itself", "a pickled state_dict of a sharded model"),
            "a unit called twice on an input without gradient, used differently by the ranks",
        ),
        "no linear layer of it can be column parallel, or only shards that are no DTensors refuse what it does",
    ),
    **dict.fromkeys(
        ("parameters of no size, no dimension, and of odd sizes", "a frozen base of uint8, dequantised in the forward"),
        "a parameter without dimensions cannot be a DTensor that is cut",
    ),
    "outputs that are edited in place between units": "torch refuses it for an output of its styles",
    "spectral norm in the old way": "torch refuses one of its operators for DTensors",
    "weights replaced through .data in their own forward": "`.data` of a DTensor does not reach its values, in torch either",
    "full backward hooks on modules inside units": "torch's styles put hooks of their own on the layers that the hooks are on",
    "an ODE solver with an adjoint around units": "it is refused in the backward, by the refusal of torch.autograd.grad",
}
"""The programs that are left out, and why."""


class Spread(UnitRef):
    """One rank whose model is tensor parallel, beside those that have its data dimension's coordinate."""

    def __init__(self, of: Pattern, mesh: DeviceMesh) -> None:
        super().__init__(of, mesh["dp"].get_local_rank(), mesh["dp"].size(), {"mesh": mesh["dp"], "dtensors": True})
        self._mesh = mesh

    def shard(self, module: nn.Module, policy: Any = None, **options: Any) -> Any:
        for one in module.modules():
            if type(one) is nn.Linear and one.out_features % 2 == 0 and not isinstance(one.weight, DTensor):
                parallelize_module(one, self._mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        return super().shard(module, policy, **options)

    def snapshot(self) -> None:
        self.outcome.steps.append({name: None if p.grad is None else _full(p.grad) for name, p in self.parameters()})

    def finish(self) -> Outcome:
        outcome = super().finish()
        outcome.weights = {name: _full(p) for name, p in self.parameters()}
        return outcome


def _full(tensor: Tensor) -> Tensor:
    """The value over both dimensions; of a parameter that is not sharded its own."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def perform(of: Pattern) -> Outcome:
    """The program on one of four ranks."""
    torch.manual_seed(0)
    run = Spread(of, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    for said in of.program(run):
        if said is not AVERAGE_ONLY:
            run.snapshot()
    return run.finish()


def _runs(name: str) -> bool:
    return name not in WITHOUT and not PATTERNS[name].disagrees and (EVERYTHING or crc32(name.encode()) % 16 == 0)


@pytest.mark.parametrize("name", [name for name in PATTERNS if _runs(name)])
# torch says so of reentrant checkpoints inside others
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_pattern_over_two_dimensions(name: str) -> None:
    of, plain = PATTERNS[name], reference(name, 2)
    for rank, found in enumerate(fsdp.simulate(4, lambda rank: perform(of))):
        wanted = plain[rank // 2]
        assert bool(found.refusals) == bool(of.refused)
        assert [name for name, _ in found.notes] == [name for name, _ in wanted.notes]
        for (what, value), (_, other) in zip(found.notes, wanted.notes, strict=True):
            assert_noted_alike(f"note {what!r} of rank {rank}", value, other, max(of.notes_within, WITHIN))
        for step, wanted_step in zip(found.steps, wanted.steps, strict=True):
            assert_close(step, wanted_step, max(of.within, WITHIN))
        assert_close(found.weights, wanted.weights, max(of.within, WITHIN))
        assert found.at_rest and all(floor == now for floor, now in found.resting)


def test_what_is_left_out_is_a_pattern() -> None:
    assert WITHOUT.keys() <= PATTERNS.keys()
