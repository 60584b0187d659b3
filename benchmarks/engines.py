"""The contenders, their options, and how each of them trains the same model.

Rule 1: every peer runs with the best options we could find for it on this device, and they are stated in `options`.
Rule 2: a contender differs from another in this file only. Model, data, optimizer and loop are the same for all.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Unit = type[nn.Module]

TITLES: Mapping[str, str] = {
    "bare": "bare",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp1_orig": "FSDP1, original parameters",
    "fsdp2": "FSDP2",
    "fsdp2_prefetch": "FSDP2, prefetching",
    "fsdp2_last_kept": "FSDP2, last unit kept",
    "fairscale": "fairscale",
    "ours": "ours",
    "ours_last_kept": "ours, last unit kept",
    "ours_prefetch_2": "ours, prefetch=2",
    "ours_no_shard": "ours, NO_SHARD",
    "ours_auto": 'ours, units "auto"',
    "ours_sharing": "ours, shared collectives",
    "ours_hybrid": "ours, HYBRID_SHARD",
    "fsdp2_hsdp": "FSDP2, HSDP",
    "door_ddp": "ours, by DDP's name",
    "door_fsdp1": "ours, by FSDP1's names",
    "door_fsdp2": "ours, by FSDP2's names",
    "ours_over_nccl": "ours, the backend reduces",
    "door_fsdp2_over_nccl": "ours, by FSDP2's names, the backend reduces",
}
"""As they are called on the page."""


class Bare:
    """The module itself, and what plain torch would do with it. `device` is the type of the one it is on."""

    def __init__(
        self,
        name: str = "bare",
        options: str = "the module itself: the same local work, no communication",
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.options = options
        self.device = device

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False) -> nn.Module:
        """What the training loop calls; `half` is bf16, mixed. May change `module`: each gets a copy of its own."""
        return _autocast(module, self.device) if half else module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients are accumulated and not reduced."""
        return nullcontext()

    def clip(self, model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """This rank's part of it."""
        return model.state_dict()


def _autocast(module: nn.Module, device: str) -> nn.Module:
    module.forward = torch.autocast(device, torch.bfloat16)(module.forward)  # type: ignore[method-assign]
    return module


def _current(device: str) -> torch.device:
    """The device of this type that work goes to now."""
    return torch.device(device) if device == "cpu" else torch.device(device, torch.get_device_module(device).current_device())


class DDP(Bare):
    def __init__(self, device: str = "cpu", name: str = "ddp") -> None:
        options = "gradient_as_bucket_view=True, broadcast_buffers=False; bf16: autocast around the forward"
        super().__init__(name, options, device)

    @property
    def engine(self) -> Any:
        """The class that wraps."""
        return nn.parallel.DistributedDataParallel

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        module = _autocast(module, self.device) if half else module
        return self.engine(module, gradient_as_bucket_view=True, broadcast_buffers=False, **options)  # type: ignore[no-any-return]

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[no-any-return]


class Wrapping(Bare):
    """An engine whose wrapper has methods for these."""

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[no-any-return]

    def clip(self, model: Any) -> Tensor:
        return model.clip_grad_norm_(1.0)  # type: ignore[no-any-return]


# FSDP1's and FSDP2's options were chosen by trying the others on both benchmarks. Added host time, twelve tensors per
# unit: FSDP1 683 to 699 µs as below (forward_prefetch on or off, either way round from run to run), 766 to 798 with
# limit_all_gathers; FSDP2 1,185 µs as below, 1,243 with explicit forward prefetch, 1,253 with explicit backward
# prefetch too. Over gloo none of them differed by more than the machine's noise. On CUDA nothing was tried: there both
# run with torch's defaults, of which limit_all_gathers=True keeps FSDP1 from gathering far ahead of what computes.
class FSDP1(Wrapping):
    def __init__(self, name: str, use_orig_params: bool, device: str = "cpu") -> None:
        way = "use_orig_params=True" if use_orig_params else "flat parameters"
        self.limit_all_gathers = device != "cpu"
        prefetch = f"BACKWARD_PRE, forward_prefetch=False, limit_all_gathers={self.limit_all_gathers}"
        super().__init__(name, f"FULL_SHARD, {prefetch}, {way}; bf16: MixedPrecision(bfloat16, reduce_dtype=float32)", device)
        self.use_orig_params = use_orig_params

    @property
    def names(self) -> Any:
        """The module from which a program imports the engine's names."""
        import torch.distributed.fsdp

        return torch.distributed.fsdp

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False) -> nn.Module:
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        names = self.names
        return names.FullyShardedDataParallel(  # type: ignore[no-any-return]
            module,
            sharding_strategy=names.ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({unit}),
            mixed_precision=names.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None,
            backward_prefetch=names.BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=False,
            limit_all_gathers=self.limit_all_gathers,
            use_orig_params=self.use_orig_params,
            device_id=_current(self.device),
        )

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        names = self.names
        with names.FullyShardedDataParallel.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT):
            return model.state_dict()


class FSDP2(Bare):
    def __init__(self, device: str = "cpu", name: str = "fsdp2") -> None:
        super().__init__(
            name,
            f"fully_shard on a {device.upper()} mesh: units reshard_after_forward=True, root as by default; "
            "bf16: MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)",
            device,
        )

    @property
    def fully_shard(self) -> Any:
        """The function that wraps."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, mesh: Any = None) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        fully_shard = self.fully_shard
        mesh = mesh or init_device_mesh(self.device, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for child in module.modules():
            if isinstance(child, unit):
                fully_shard(child, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        return fully_shard(module, mesh=mesh, mp_policy=precision)  # type: ignore[no-any-return]

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)


class Fairscale(Wrapping):
    """Its streams are those of CUDA, also where nothing else is."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(
            "fairscale",
            "reshard_after_forward=True, flatten_parameters=True, bucket_cap_mb=0 (large units go by themselves anyway, and the "
            "fake group refuses the shape of a bucket); bf16: mixed_precision=True, compute_dtype=bfloat16, "
            "fp32_reduce_scatter=True",
            device,
        )

    def missing(self) -> str | None:
        if self.device != "cuda" or not torch.cuda.is_available():
            return "fairscale needs a CUDA device"
        return None if importlib.util.find_spec("fairscale") else "fairscale is not installed"

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False) -> nn.Module:
        from fairscale.nn import FullyShardedDataParallel

        options: dict[str, Any] = {"bucket_cap_mb": 0, "compute_device": _current(self.device)}
        if half:
            options |= {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, unit):
                    setattr(parent, name, FullyShardedDataParallel(child, **options))
        return FullyShardedDataParallel(module, **options)  # type: ignore[no-any-return]

    def state_dict(self, model: Any) -> dict[str, Any]:
        return model.local_state_dict()  # type: ignore[no-any-return]


class Ours(Wrapping):
    """Imported where it is used: the peers can be measured without it. Works on the device where the module is."""

    def __init__(self, name: str, options: str, units: Literal["by hand", "auto", "one"] = "by hand", **given: Any) -> None:
        super().__init__(name, f"{options}; bf16: MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)")
        self.units = units
        self.given = given

    def missing(self) -> str | None:
        try:
            from fsdp import FullyShardedDataParallel  # noqa: F401
        except ImportError as reason:
            return f"fsdp.FullyShardedDataParallel cannot be imported: {reason}"
        return None

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        import fsdp

        precision = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None
        policy = {"by hand": {unit}, "auto": "auto", "one": None}[self.units]
        options = {**self.given, **options, "auto_wrap_policy": policy}
        return fsdp.FullyShardedDataParallel(module, mp_policy=precision, **options)


class Sharing(Ours):
    """Small units share collectives."""

    def wrap(self, module: nn.Module, unit: Unit, half: bool = False, **options: Any) -> nn.Module:
        import fsdp

        return super().wrap(module, unit, half, reduction=fsdp.ReductionPolicy(coalesce_cap_mb=1), **options)


class DoorOfDDP(DDP):
    """This engine by the names of a peer, with the peer's own options."""

    @property
    def engine(self) -> Any:
        from fsdp.compat.ddp import DistributedDataParallel

        return DistributedDataParallel


class DoorOfFSDP1(FSDP1):
    """The same."""

    @property
    def names(self) -> Any:
        import fsdp.compat.torch_fsdp

        return fsdp.compat.torch_fsdp


class DoorOfFSDP2(FSDP2):
    """The same."""

    @property
    def fully_shard(self) -> Any:
        from fsdp.compat.fully_shard import fully_shard

        return fully_shard


def contenders(device: str = "cpu") -> dict[str, Bare]:
    """Everybody, with their options for a type of device."""
    everybody = (
        Bare(device=device),
        DDP(device),
        FSDP1("fsdp1", use_orig_params=False, device=device),
        FSDP1("fsdp1_orig", use_orig_params=True, device=device),
        FSDP2(device),
        Fairscale(device),
        Ours("ours", "FullyShardedDataParallel(module, auto_wrap_policy={unit}), all else as by default"),
        Ours(
            "ours_no_shard",
            'FullyShardedDataParallel(module, sharding_strategy="NO_SHARD"): nothing is gathered, so units would only cost',
            units="one",
            sharding_strategy="NO_SHARD",
        ),
        Ours("ours_auto", 'FullyShardedDataParallel(module, auto_wrap_policy="auto")', units="auto"),
        Sharing("ours_sharing", "as ours, reduction=ReductionPolicy(coalesce_cap_mb=1)"),
        DoorOfDDP(device, "door_ddp"),
        DoorOfFSDP1("door_fsdp1", use_orig_params=True, device=device),
        DoorOfFSDP2(device, "door_fsdp2"),
    )
    return {one.name: one for one in everybody}


CONTENDERS: Mapping[str, Bare] = contenders()


def choose(
    requested: Sequence[str] | None, available: Sequence[str], engines: Mapping[str, Bare] = CONTENDERS
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Who runs, in the order of `available`, and who does not with the reason.

    Without a request everybody runs who can run here. A contender asked for by name that cannot run ends the
    program: a comparison that silently lost a member is worse than none.
    """
    skipped = {}
    for name in requested or available:
        if name not in available:
            raise SystemExit(f"unknown contender {name!r}: choose from {', '.join(available)}")
    for name in requested or available:
        reason = engines[name].missing()
        if reason is not None:
            skipped[name] = reason
            if requested:
                raise SystemExit(f"{name}: {reason}")
            print(f"{name} is left out: {reason}", file=sys.stderr)
    names = tuple(name for name in available if name in (requested or available) and name not in skipped)
    return names, skipped


def turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """The number of the repeat and the contender whose turn it is. Each contender has one turn in every repeat."""
    for repeat in range(repeats):
        start = repeat % len(names)  # another begins each time, so that nobody always follows the same neighbour
        for name in (*names[start:], *names[:start]):
            yield repeat, name
