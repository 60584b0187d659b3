"""The strategy of Lightning's Trainer."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies import FSDPStrategy as TheirStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp.wrap import enable_wrap

from fsdp.api.wrap import FullyShardedDataParallel, no_sync
from fsdp.compat.frameworks.lightning_common import (
    FULL,
    SHARDED,
    checked_options,
    load_folder,
    move_to_device,
    numbered,
    refuse_later_methods,
    refuse_precision,
    save_folder,
    shard,
    shard_children,
    with_mesh,
)
from fsdp.errors import ShardingError
from fsdp.runtime.registry import unit_ref_of
from fsdp.state_dict.full_state import full_state_dict, load_full_state_dict
from fsdp.state_dict.optim_state import full_optim_state_dict, load_full_optim_state_dict


class FSDPStrategy(DDPStrategy):
    """Train a LightningModule fully sharded: `Trainer(strategy=FSDPStrategy(auto_wrap_policy={Block}))`.

    The LightningModule is sharded in place after `configure_model`, as one unit and those that `auto_wrap_policy` chooses, or
    that `configure_model` wrapped. Each of its steps runs as its forward. With manual optimization each of its children is
    sharded by itself instead, because weights change within a step. The module stays sharded after `fit`.

    Args:
        accelerator: set by the Trainer, as are `parallel_devices`, `cluster_environment` and `precision_plugin`.
        checkpoint_io: what reads and writes files.
        process_group_backend: the backend of torch.distributed. Default None: NCCL on GPUs, gloo on CPUs.
        timeout: the time-out of its collectives.
        start_method: how processes are started, as for Lightning's DDPStrategy.
        state_dict_type: what a checkpoint is. "full" is a file with the weights and the optimizer state of an unsharded model,
            which any strategy loads. "sharded" is a folder that `fsdp.save` writes and `fsdp.load` reads, on any number of
            ranks. Both are loaded, whichever is given. Default "full".
        sync_each_backward: False keeps gradients unsharded while batches are accumulated, and reduces them once: less
            communication, and as much memory as the full gradients. Default True.
        **options: those of `fsdp.fully_shard`. `sync_module_states` is True if it is not given.

    Raises:
        ShardingError: an option is unknown or refused.
    """

    strategy_name = "fsdp_engine"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        state_dict_type: str = FULL,
        sync_each_backward: bool = True,
        **options: Any,
    ) -> None:
        self._options = checked_options(type(self).__name__, state_dict_type, options, TheirStrategy)
        refuse_later_methods(self, DDPStrategy)
        self._state_dict_type = state_dict_type
        self._sync_each_backward = sync_each_backward
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's plugin for a precision."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        refuse_precision(type(self).__name__, plugin)
        self._precision_plugin = plugin

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into shards."""
        return True

    @property
    def _ranked_options(self) -> Mapping[str, Any]:
        return with_mesh(self._options, self.num_nodes, self.num_processes)

    # from a module to shards --------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make tensors on the device, or with `empty_init` on the meta device, to get memory unit by unit."""
        with torch.device("meta") if empty_init else self.root_device, self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let torch's `wrap` make units inside `configure_model`."""
        with enable_wrap(wrapper_cls=self._wrap):
            yield

    def _wrap(self, module: nn.Module) -> nn.Module:
        move_to_device(module, self.root_device)
        return FullyShardedDataParallel(module, **self._ranked_options)

    def setup(self, trainer: Trainer) -> None:
        """Shard the LightningModule, then make its optimizers."""
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self._layer_sync.apply(self._module)  # in place, as the module has no wrapper
        Strategy.setup(self, trainer)

    def model_to_device(self) -> None:
        """Move what is not sharded yet."""
        move_to_device(self._module, self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._module.automatic_optimization:
            return shard(model, self._ranked_options)
        # a manual step computes, goes backward and updates weights in turn, which cannot happen inside one forward
        shard_children(model, self._ranked_options)
        return model

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the Trainer connects the module before it sets up the strategy"
        return self.lightning_module

    # steps --------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step as the forward of the module."""
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step as the forward of the module."""
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step as the forward of the module."""
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step as the forward of the module."""
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **kwargs)

    def _as_forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if unit_ref_of(self._module) is None:
            return getattr(self._module, step)(*args, **kwargs)
        return self._forward_redirection(self._module, self._module, step, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Around the backwards of all accumulated batches but the last."""
        return nullcontext() if self._sync_each_backward else no_sync(self._module)

    # checkpoints --------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state dict on rank 0, and an empty one on other ranks. A folder is written from the module itself."""
        return full_state_dict(self._module) if self._state_dict_type == FULL else {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state by number on rank 0. A folder is written from the optimizer itself."""
        if self._state_dict_type == SHARDED:
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return numbered(full_optim_state_dict(self._module, optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save what the Trainer collected, as a file or as a folder. Communicates.

        Raises:
            ShardingError: on every rank; a hook has put values into the state dicts of a folder, or the path is taken.
        """
        path = Path(self.broadcast(filepath))
        if self._state_dict_type == FULL:
            if self.broadcast(path.is_dir()):
                raise ShardingError(f"save_checkpoint: {path} is a folder; remove it, or give state_dict_type='sharded'.")
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise ShardingError("save_checkpoint: a folder is written by fsdp.save, which takes no storage_options.")
        extra = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        if checkpoint["state_dict"] or any(extra.get("optimizer_states", ())):
            raise ShardingError(
                "save_checkpoint: on_save_checkpoint has put values into 'state_dict' or 'optimizer_states', which a folder does "
                "not take from there; put them under another name, or give state_dict_type='full'."
            )
        save_folder(path, self._module, self.optimizers if "optimizer_states" in extra else [], extra)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the module and its optimizer, or read a file. Communicates.

        Returns:
            The checkpoint. That of a folder has an empty state dict.
        """
        path = self.broadcast(checkpoint_path)
        if not self.broadcast(Path(path).is_dir()):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return checkpoint
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        extra = load_folder(Path(path), self._module, self.optimizers if fitting else [], self._module.strict_loading)
        return {"state_dict": {}, **extra}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the full state dict of a file. A folder is loaded already."""
        if checkpoint["state_dict"]:
            load_full_state_dict(self._module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the full optimizer states of a file. A folder is loaded already.

        Raises:
            ShardingError: on every rank; the number of optimizers is another.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ShardingError(
                f"load_checkpoint: the checkpoint has {len(states)} optimizers, and configure_optimizers makes "
                f"{len(self.optimizers)}; resume with the same ones."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if state:
                load_full_optim_state_dict(self._module, optimizer, state)

    def teardown(self) -> None:
        """Leave the group. The module stays sharded and on its device, where Lightning's strategies move it to the CPU."""
        assert self.cluster_environment is not None and self.accelerator is not None, "the Trainer set them"
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()
