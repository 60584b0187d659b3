"""Other engines for parallel training: found below a module that is to be sharded, and refused around one that is sharded.

[Note: how other engines are refused]
No other engine asks a module whether it may be wrapped. But each looks something up on the module before it communicates:
DistributedDataParallel iterates over the names to ignore, torch's FSDP and `replicate` look for their name in a registry, and
DataParallel calls a method for each replica. The module of a unit has an object in these places that raises. `replicate` around a
module that contains a sharded one leaves the sharded parameters out.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from torch import nn

from fsdp.comm.open_communicators import COMPOSABLE_REGISTRY
from fsdp.errors import ShardingError

_COMPOSABLE: Final = ("fully_shard", "replicate")
"""The names under which torch's composable functions register."""
_WRAPPERS: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""torch's own classes, whatever those names are bound to later."""

_PLACES: Final = (COMPOSABLE_REGISTRY, "_ddp_params_and_buffers_to_ignore", "_replicate_for_data_parallel")
"""The attributes in which other engines look something up."""


def other_engine(module: nn.Module) -> str | None:
    """The name of the engine that has wrapped `module`, if there is one."""
    if any(base in _WRAPPERS for base in type(module).__mro__):
        return f"torch's {type(module).__name__}"
    if any(f"{base.__module__}.".startswith("torch.distributed.fsdp.") for base in type(module).__mro__):
        return "torch's FSDP"
    registry = module.__dict__.get(COMPOSABLE_REGISTRY, {})
    found = [name for name in registry.keys() if name in _COMPOSABLE]  # noqa: SIM118  # `in` and `iter` raise in ours
    return f"torch's {found[0]}" if found else None


def refuse_other_engines(module: nn.Module, name: str | None = None) -> None:
    """From now on, let every other engine that would wrap `module` raise before it communicates.

    `name`: the class that the error names; None stands for that of the module, or of the one that it wraps.
    """
    shown = name or type(getattr(module, "module", module)).__name__
    refusal = _ShardedAlready(module.__dict__.get(COMPOSABLE_REGISTRY, {}), shown)
    for place in _PLACES:
        module.__dict__[place] = refusal


def accept_other_engines(module: nn.Module) -> None:
    """Undo `refuse_other_engines`."""
    registry = module.__dict__.get(COMPOSABLE_REGISTRY)
    for place in _PLACES:
        module.__dict__.pop(place, None)
    if isinstance(registry, _ShardedAlready) and registry.keys():
        module.__dict__[COMPOSABLE_REGISTRY] = dict(registry.items())


class _ShardedAlready(dict[str, Any]):
    """The registry of a unit's module. It raises when another engine uses it. See [Note: how other engines are refused]."""

    def __init__(self, registry: dict[str, Any], name: str) -> None:
        super().__init__(registry)
        self.name = name
        """The class of the module, for the error."""

    def __deepcopy__(self, memo: object) -> "_ShardedAlready":
        return self

    def __contains__(self, name: object) -> bool:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_composable" and caller.f_back and caller.f_back.f_code.co_name != "_get_ignored_modules":
            return name == "replicate"  # torch's FSDP walks over any model to list its own modules; here are none
        if caller.f_code.co_name == "_is_fully_sharded" and caller.f_back and caller.f_back.f_code.co_name != "replicate":
            return True  # `replicate` around a module that contains this one leaves out what is sharded
        if name in _COMPOSABLE:
            self._refuse()
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __call__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ShardingError(
            f"{self.name} is sharded by fsdp, which averages its gradients over the ranks already; train it as it is, without "
            "DistributedDataParallel, DataParallel, replicate or torch's FSDP around it (in a trainer, switch its wrapping off; "
            "to wrap it anew, call fsdp.unwrap first)."
        )
