"""The strategy of Lightning's Fabric."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies import FSDPStrategy as TheirStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from torch import nn

from fsdp.api.wrap import no_sync
from fsdp.compat.frameworks.lightning_common import (
    FULL,
    checked_options,
    load_folder,
    move_to_device,
    numbered,
    refuse_later_methods,
    refuse_precision,
    save_folder,
    shard,
    with_mesh,
)
from fsdp.errors import ShardingError
from fsdp.runtime.registry import unit_ref_of
from fsdp.state_dict.full_state import full_state_dict, load_full_state_dict
from fsdp.state_dict.optim_state import full_optim_state_dict, load_full_optim_state_dict

State = Mapping[str, Any]
Filters = Mapping[str, Callable[[str, Any], bool]]


class FabricFSDPStrategy(DDPStrategy):
    """Train the modules of a Fabric script fully sharded: `Fabric(strategy=FabricFSDPStrategy(auto_wrap_policy={Block}))`.

    `fabric.setup` shards each module in place. Optimizers may be made before or after it. The arguments are those of
    `FSDPStrategy`, but for `sync_each_backward`, which a script says with `fabric.no_backward_sync`.

    Raises:
        ShardingError: an option is unknown or refused.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        state_dict_type: str = FULL,
        **options: Any,
    ) -> None:
        self._options = checked_options(type(self).__name__, state_dict_type, options, TheirStrategy)
        refuse_later_methods(self, DDPStrategy)
        self._state_dict_type = state_dict_type
        self._modules: list[nn.Module] = []
        refuse_precision(type(self).__name__, precision)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Precision:
        """Lightning's plugin for a precision."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        refuse_precision(type(self).__name__, plugin)
        self._precision = plugin

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules on the device, or with `empty_init` on the meta device, to get memory unit by unit."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else self.root_device)
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Move what is not sharded yet."""
        move_to_device(module, self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place. Communicates."""
        self._modules.append(module)
        return shard(module, with_mesh(self._options, self.num_nodes, self.num_processes))

    # checkpoints --------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state dict on rank 0, and an empty one on other ranks."""
        return full_state_dict(module) if unit_ref_of(module) is not None else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a full state dict."""
        if unit_ref_of(module) is None:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            load_full_state_dict(module, state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state by number on rank 0."""
        return numbered(full_optim_state_dict(self._module_of(optimizer), optimizer))

    def _module_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The module whose parameters an optimizer steps.

        Raises:
            ShardingError: there is none.
        """
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._modules:
            if wanted <= {id(parameter) for parameter in module.parameters()}:
                return module
        raise ShardingError(
            "save or load: the parameters of an optimizer are not those of one module that fabric.setup has sharded; make an "
            "optimizer for each module."
        )

    def save_checkpoint(self, path: str | Path, state: State, storage_options: Any = None, filter: Filters | None = None) -> None:
        """Save `state` as a file, or as a folder that `fsdp.save` writes. Communicates.

        Raises:
            ShardingError: on every rank; the path is taken, or a folder cannot hold `state`.
        """
        path = Path(self.broadcast(path))
        if self._state_dict_type == FULL:
            if self.broadcast(path.is_dir()):
                raise ShardingError(f"save: {path} is a folder; remove it, or give state_dict_type='sharded'.")
            super().save_checkpoint(path, dict(state), storage_options, dict(filter or {}))
            return
        if storage_options is not None or filter:
            raise ShardingError("save: a folder is written by fsdp.save, which takes neither storage_options nor a filter.")
        module, optimizers, rest = _parts("save", state)
        extra = {key: value.state_dict() if isinstance(value, _Stateful) else value for key, value in rest.items()}
        save_folder(path, module, optimizers, extra)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder into the objects of `state`, and return what was not asked for. Communicates."""
        path = self.broadcast(path)
        if self.broadcast(Path(path).is_dir()):
            return self._load_folder(Path(path), state, strict)
        if not isinstance(state, dict):
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return rest
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        _validate_keys_for_strict_loading(state.keys(), checkpoint.keys(), strict=strict)
        for key in [key for key in state if key in checkpoint]:
            self._load_value(key, state, checkpoint.pop(key), strict)
        return checkpoint

    def _load_value(self, key: str, state: dict[str, Any], value: Any, strict: bool) -> None:
        match state[key]:
            case nn.Module() as module:
                self.load_module_state_dict(module, value, strict)
            case torch.optim.Optimizer() as optimizer:
                load_full_optim_state_dict(self._module_of(optimizer), optimizer, value)
            case _Stateful() as stateful:
                stateful.load_state_dict(value)
            case _:
                state[key] = value

    def _load_folder(self, path: Path, state: Any, strict: bool) -> dict[str, Any]:
        state = {"model": state} if isinstance(state, nn.Module) else state
        if not isinstance(state, dict):
            raise ShardingError(f"load: {path} is a folder; give state={{'model': model, ...}}, into which it is read.")
        module, optimizers, rest = _parts("load", state)
        extra = dict(load_folder(path, module, optimizers, strict))
        _validate_keys_for_strict_loading(rest.keys(), extra.keys(), strict=strict)
        for key in [key for key in rest if key in extra]:
            self._load_value(key, state, extra.pop(key), strict)
        return extra


def _parts(what: str, state: State) -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]:
    """The sharded module of a state, its optimizers, and all else.

    Raises:
        ShardingError: there is not one sharded module.
    """
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(modules) != 1 or unit_ref_of(modules[0]) is None:
        raise ShardingError(
            f"{what}: a folder holds one sharded module, and the state has {len(modules)} modules; call it for each with a path "
            "of its own, or give state_dict_type='full'."
        )
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    rest = {key: value for key, value in state.items() if not isinstance(value, (nn.Module, torch.optim.Optimizer))}
    return modules[0], optimizers, rest


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()
