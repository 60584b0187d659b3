"""Training patterns on simulated ranks that compute on the pretend accelerator."""

from typing import Any, Final

import torch
from torch import Tensor, nn

import fsdp
from tests.patterns.harness import AVERAGE_ONLY, PATTERNS, Outcome, Pattern, UnitRef, compare, perform
from tests.support.accelerator.device import NAME, Scheduler
from tests.support.accelerator.world import run

_SPARSE = "torch has no sparse tensors of a device type that it does not ship"
_LSTM = "torch takes a fused LSTM for device types other than the CPU, which the CPU does not have"
_AUTOCAST = "it names the CPU to torch.autocast"
NOT_HERE: Final = {
    "autocast": _AUTOCAST,
    "autocast over two forwards": _AUTOCAST,
    "a backward inside a backward of torch.autograd.grad": "its hook makes tensors in a thread of autograd",
    "an embedding with sparse gradients": _SPARSE,
    "LSTMs": _LSTM,
    "an LSTM inside a unit, called step by step": _LSTM,
}
"""Patterns that this device type cannot run, and why."""
WITHIN_ROUNDING: Final = {
    "a gradient penalty in the step of a discriminator": "autograd orders the nodes of two threads by what each has done before",
    "MultiheadAttention whose out_proj is a unit": "torch takes a fused attention on the CPU",
    "MultiheadAttention that is a unit": "torch takes a fused attention on the CPU",
}
"""Patterns whose results differ from the host's in the last bits, and why. They are compared as every run of a pattern is."""


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "shared collectives": {"reduction": fsdp.ReductionPolicy(coalesce_cap_mb=1)},
    "uneven paths": {"uneven_paths": True},
}
"""Options of `fully_shard` under which patterns run."""


class _DeviceRun(UnitRef):
    """One simulated rank on its pretend device."""

    def __init__(self, of: Pattern, rank: int, size: int, options: dict[str, Any]) -> None:
        super().__init__(of, rank, size, options)
        self._device = torch.device(NAME, rank)

    def shard(self, module: nn.Module, policy: Any = None, **options: Any) -> Any:
        if not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
            module = module.to(self._device)
        return super().shard(module, policy, **options)

    def data(self, number: int, *shape: int) -> Tensor:
        return super().data(number, *shape).to(self._device)

    def tokens(self, number: int, *shape: int, vocabulary: int) -> Tensor:
        return super().tokens(number, *shape, vocabulary=vocabulary).to(self._device)


def difference(name: str, scheduler: Scheduler, seed: int, options: str = "default") -> str | None:
    """Run a pattern on two ranks, on the host and on the accelerator. Return the first value whose bits differ, if any does."""
    of, chosen = PATTERNS[name], OPTIONS[options]
    wanted = [_on_host(one) for one in fsdp.simulate(2, lambda rank: perform(of, rank, 2, **chosen))]
    found = run(2, lambda rank: _perform(of, rank, chosen), scheduler, seed)
    if name in WITHIN_ROUNDING:
        compare(of, found)
        return None
    return _first_difference(found, wanted)


def _perform(of: Pattern, rank: int, options: dict[str, Any]) -> Outcome:
    with torch.device(NAME, rank):
        torch.manual_seed(0)
        device_run = _DeviceRun(of, rank, 2, options)
        for said in of.program(device_run):
            if said is not AVERAGE_ONLY:
                device_run.snapshot()
        return _on_host(device_run.finish())


def _on_host(found: Outcome) -> Outcome:
    found.steps = [{name: None if g is None else g.cpu() for name, g in step.items()} for step in found.steps]
    found.weights = {name: weight.cpu() for name, weight in found.weights.items()}
    found.notes = [(name, None if noted is None else noted.cpu()) for name, noted in found.notes]
    return found


def _first_difference(found: list[Outcome], wanted: list[Outcome]) -> str | None:
    for rank, (here, there) in enumerate(zip(found, wanted, strict=True)):
        values, others = dict(_values(here)), dict(_values(there))
        assert values.keys() == others.keys() and values, "a pattern left nothing to compare"
        for name, value in values.items():
            if not _are_equal(value, others[name]):
                return f"{name} of rank {rank}"
    return None


def _values(outcome: Outcome) -> list[tuple[str, Tensor | None]]:
    steps = [(f"gradient {name} of step {i}", g) for i, step in enumerate(outcome.steps) for name, g in step.items()]
    notes = [(f"note {number} ({name})", value) for number, (name, value) in enumerate(outcome.notes)]
    return [*steps, *((f"weight {name}", value) for name, value in outcome.weights.items()), *notes]


def _are_equal(value: Tensor | None, other: Tensor | None) -> bool:
    if value is None or other is None:
        return value is other
    return value.dtype is other.dtype and torch.equal(value, other)
