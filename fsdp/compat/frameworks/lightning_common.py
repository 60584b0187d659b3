"""What both strategies of Lightning share: options, devices, and checkpoints as folders."""

import inspect
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.plugins import precision as fabric_plugins
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.plugins import precision as trainer_plugins
from torch import nn

from fsdp.api.wrap import fully_shard
from fsdp.building.choose_units import is_bare_container
from fsdp.building.peer_options import PEER_OPTIONS, refused_options, remedies_for
from fsdp.checkpoint.atomic_folder import not_written
from fsdp.checkpoint.load import Loaded, load
from fsdp.checkpoint.manifest import NAME as MANIFEST
from fsdp.checkpoint.save import save
from fsdp.comm.agreement import agree_and_gather, agree_on_refusals
from fsdp.compat.shared.newer_peers import refuse_unknown_argument, refusing
from fsdp.config import MeshKind, find_strategy
from fsdp.errors import ShardingError
from fsdp.runtime.registry import engines_in, unit_ref_of
from fsdp.state_dict.optim_state import FullOptimState

FULL: Final = "full"
SHARDED: Final = "sharded"
_OPTIONS: Final = tuple(name for name in inspect.signature(fully_shard).parameters if name != "module")
INHERITED: Final = {
    # of both
    *("accelerator", "all_gather", "backward", "barrier", "batch_to_device", "broadcast", "checkpoint_io"),
    *("distributed_sampler_kwargs", "global_rank", "is_global_zero", "launcher", "local_rank", "node_rank", "num_nodes"),
    *("num_processes", "optimizer_step", "parallel_devices", "process_dataloader", "process_group_backend"),
    *("reduce_boolean_decision", "register_strategies", "root_device", "setup_environment", "world_size"),
    # of the Trainer's
    *("configure_ddp", "connect", "determine_ddp_device_ids", "handles_gradient_accumulation", "is_distributed"),
    *("lightning_module", "lightning_restore_optimizer", "model", "on_exception", "on_predict_end", "on_predict_start"),
    *("on_test_end", "on_test_start", "on_train_batch_start", "on_train_end", "on_train_start", "on_validation_end"),
    *("on_validation_start", "optimizers", "post_backward", "post_training_step", "pre_backward", "reduce"),
    *("remove_checkpoint", "set_world_ranks", "setup_distributed", "setup_optimizers", "setup_precision_plugin"),
    # of Fabric's
    *("all_reduce", "clip_gradients_norm", "clip_gradients_value", "setup_module_and_optimizers", "setup_optimizer"),
    *("teardown", "tensor_init_context"),
}
"""What the strategies take from Lightning's DDPStrategy as it is."""
_FOREIGN_PLUGINS: Final = tuple(
    kind for plugins in (fabric_plugins, trainer_plugins) for kind in (plugins.FSDPPrecision, plugins.DeepSpeedPrecision)
)
_TORCH_METADATA: Final = "meta.pt"
"""The file by which a folder of Lightning's own FSDPStrategy is known."""


def checked_options(strategy: str, state_dict_type: str, options: dict[str, Any], theirs: type) -> dict[str, Any]:
    """The options for `fully_shard`. Parameters and buffers of rank 0 are broadcast unless the user says otherwise.

    `theirs`: Lightning's own strategy, whose arguments may be given with their default values.

    Raises:
        ShardingError: an option is unknown, or Lightning could not work with its value.
    """
    if state_dict_type not in (FULL, SHARDED):
        raise ShardingError(f"{strategy}: state_dict_type must be {FULL!r} or {SHARDED!r}, not {state_dict_type!r}.")
    for name in [name for name in options if name not in (*_OPTIONS, *PEER_OPTIONS)]:
        if refuse_unknown_argument(strategy, name, options[name], theirs.__init__):  # type: ignore[misc]  # of this very class
            del options[name]
    foreign = {name: value for name, value in options.items() if name not in _OPTIONS}
    if refused := refused_options(foreign):
        raise ShardingError(
            f"{strategy}: unknown option{'s' if len(refused) > 1 else ''} {remedies_for(refused, _OPTIONS)}. The options are "
            f"those of Lightning's DDPStrategy for processes, state_dict_type, and those of fully_shard: {', '.join(_OPTIONS)}."
        )
    if options.get("plain_shards"):
        raise ShardingError(
            f"{strategy}: plain_shards=True would let Lightning clip by the norm of each rank's part; leave it out, so that "
            "norms are taken over all ranks."
        )
    return {"sync_module_states": True, **options}


def refuse_later_methods(strategy: object, base: type) -> None:
    """From now on, refuse by name what a later Lightning has given to `base`, from which the class of `strategy` inherits."""
    kinds = type(strategy).__mro__
    own = {name for kind in kinds[: kinds.index(base)] for name in vars(kind)}
    for name in dir(base):
        if not name.startswith("_") and name not in own | INHERITED and callable(getattr(base, name)):
            setattr(strategy, name, refusing(f"{type(strategy).__name__}.{name}"))


def with_mesh(options: Mapping[str, Any], num_nodes: int, num_processes: int) -> Mapping[str, Any]:
    """The options, with HYBRID_SHARD that shards inside a host and replicates between hosts if they name no ranks.

    `num_nodes`, `num_processes`: hosts, and processes of one host.
    """
    is_hybrid = find_strategy(options.get("sharding_strategy", "FULL_SHARD")).mesh_kind is MeshKind.HYBRID
    has_ranks = options.get("mesh") is not None or options.get("process_group") is not None
    return {**options, "mesh": (num_nodes, num_processes)} if is_hybrid and not has_ranks else options


def refuse_precision(strategy: str, plugin: Precision | None) -> None:
    """Raises:
    ShardingError: the plugin belongs to another engine.
    """
    if isinstance(plugin, _FOREIGN_PLUGINS):
        raise ShardingError(
            f"{strategy}: {type(plugin).__name__} belongs to another engine; give Lightning precision='bf16-mixed' or another "
            "of its names, or give the strategy mp_policy=fsdp.MixedPrecisionPolicy(...)."
        )


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move what is not sharded yet. Tensors on the meta device get their memory when the module is sharded."""
    _move(module, device)
    _update_properties(module, device=device)


def _move(module: nn.Module, device: torch.device) -> None:
    if unit_ref_of(module) is None:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
        for child in module.children():
            _move(child, device)


def shard(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Shard `module` in place, unless it is sharded already."""
    return module if unit_ref_of(module) is not None else fully_shard(module, **options)


def shard_children(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Shard each child of `module` as a root of its own. A list or dict of modules stands for those in it.

    Raises:
        ShardingError: `module` has parameters besides those of its children.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ShardingError(
            f"{type(module).__name__} has the parameter {own[0]!r} itself and optimizes manually; with manual optimization its "
            "children are sharded one by one, so move the parameter into a module with a forward of its own."
        )
    for child in module.children():
        if is_bare_container(child):
            shard_children(child, options)
        elif next(child.parameters(), None) is not None:
            shard(child, options)


def numbered(state: FullOptimState) -> dict[str, Any]:
    """A full optimizer state with numbers in place of names, as an unsharded optimizer over the same parameters has it."""
    if not state:
        return {}
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: kept for name, kept in state["state"].items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }


def save_folder(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any]) -> None:
    """Save a folder with `fsdp.save`. What stands at `path` already is replaced when the new folder is complete. Communicates.

    Raises:
        ShardingError: on every rank; there are several optimizers, or `fsdp.save` refuses.
    """
    comm = engines_in(model, "save_checkpoint")[0].comms.world_comm
    if len(optimizers) > 1:
        raise ShardingError(
            f"save_checkpoint: a folder holds the state of one optimizer, and there are {len(optimizers)}; give "
            "state_dict_type='full', which keeps any number."
        )
    optimizer = optimizers[0] if optimizers else None
    suffix = agree_and_gather(comm, "save_checkpoint", lambda: uuid.uuid4().hex[:8] if path.exists() else "")[0]
    if not suffix:
        save(path, model, optimizer, extra=extra)
        return
    working = path.with_name(f".{path.name}.{suffix}")
    save(working, model, optimizer, extra=extra)
    agree_on_refusals(comm, "save_checkpoint", lambda: _replace(path, working) if comm.rank == 0 else None)


def _replace(path: Path, working: Path) -> None:
    """Rename `working` to `path`, and remove what was there. A crash in between leaves both under hidden names."""
    old = path.with_name(f"{working.name}.old")
    with not_written("save_checkpoint", path):
        path.rename(old)
        working.rename(path)
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def load_folder(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], strict: bool) -> Loaded:
    """Load what `save_folder` wrote, and return its extra. Communicates.

    Raises:
        ShardingError: on every rank; there are several optimizers, another engine wrote the folder, or `fsdp.load` refuses.
    """
    if len(optimizers) > 1:
        raise ShardingError(f"load_checkpoint: {path} is a folder, which holds one optimizer, and there are {len(optimizers)}.")
    if (path / _TORCH_METADATA).exists() and not (path / MANIFEST).exists():
        raise ShardingError(
            f"load_checkpoint: {path} was written by Lightning's own FSDPStrategy; make a file of it with `python -m "
            "lightning.pytorch.utilities.consolidate_checkpoint`, which can be loaded."
        )
    return load(path, model, optimizers[0] if optimizers else None, strict=strict)
