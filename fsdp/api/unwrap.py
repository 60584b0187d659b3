"""Back from a sharded model to a plain one."""

from collections.abc import Iterable

from torch import nn

from fsdp.api.forward_methods import unregister_forward_methods
from fsdp.api.wrap import FullyShardedDataParallel
from fsdp.autograd.pytree import MANAGED
from fsdp.building.attach import detach, forget
from fsdp.building.dissolve import dissolve, refuse_losses
from fsdp.comm.agreement import agree_on_refusals
from fsdp.errors import ShardingError
from fsdp.params.module_tree import IGNORED
from fsdp.params.shown_params import show_plainly
from fsdp.runtime.engine import Engine
from fsdp.runtime.registry import KEEPS_ENGINE, collective_call, units_in
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import agree_on_gradients


@collective_call
def unwrap(model: nn.Module, rank0_only: bool = False) -> nn.Module:
    """Turn a sharded model back into the plain one, in place, and return it: ordinary full parameters, no hooks, no engine.

    The Parameter objects stay, with their attributes and the user's hooks, and `.grad` is the full gradient. Where shards are
    DTensors, the parameters are new objects with these; one that tensor parallelism has cut is a DTensor as before wrapping. A
    `FullyShardedDataParallel` inside the model is replaced by its module, and the one outside by what is returned. Buffers are
    this rank's own. The state of an optimizer is still that of shards, and the optimizer's next step is refused: take
    `full_optim_state_dict` before. With `rank0_only`, the other ranks get the model on the meta device: shapes without memory.
    Communicates: every rank must call it alike.

    Memory: the full model on every rank, and the shards of one unit. With `rank0_only`, on the other ranks one parameter.

    Raises:
        ShardingError: on every rank; inside a forward, a backward or a summon, or inside `fsdp.join`, gradients are kept
            under `no_sync`, `model` contains no unit or is only a part of a root, or a parameter has a gradient on some ranks
            only; or a module of another engine's door cannot do without its engine. Nothing was changed.
    """
    model_view = ModelView(model, "unwrap")
    engines, world_comm = model_view.engines, model_view.world_comm
    agree_on_refusals(world_comm, "unwrap", lambda: _refuse(model, engines, rank0_only))
    has_grad = agree_on_gradients(model_view.units, world_comm, "unwrap")
    refs = units_in(model, "unwrap")
    modules = list(model.modules())
    detach(refs)
    for ref in refs:
        dissolve(ref.unit, has_grad, keeps=not rank0_only or world_comm.rank == 0)
    for ref in refs:
        for module in ref.unit.modules:
            unregister_forward_methods(module)
        forget(ref)
    for module in modules:
        show_plainly(module)
        for name in (*MANAGED, IGNORED):
            module.__dict__.pop(name, None)
        for name, child in module._modules.items():
            if isinstance(child, FullyShardedDataParallel):
                module._modules[name] = _without_wrapper(child)
    plain = _without_wrapper(model)
    assert plain is not None, "a wrapper has a module"
    return plain


def _refuse(model: nn.Module, engines: Iterable[Engine], rank0_only: bool) -> None:
    for engine in engines:
        refuse_losses(engine, "unwrap")
        if rank0_only and any(flat.tensor_parallel for unit in engine.units for flat in unit.flats):
            raise ShardingError(
                f"unwrap: parameters of {engine.units[0].name!r} are DTensors over other dimensions, and rank 0 alone would have "
                "a part of them; leave out rank0_only, or take full_state_dict(model)."
            )
    for module in model.modules():
        instead = getattr(type(module), KEEPS_ENGINE, None)
        if instead is not None:
            raise ShardingError(f"unwrap: a {type(module).__name__} cannot do without its engine; {instead}.")


def _without_wrapper(module: nn.Module | None) -> nn.Module | None:
    while isinstance(module, FullyShardedDataParallel):
        module = module.module
    return module
