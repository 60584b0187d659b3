"""Full parameters as plain tensors: gathered into a state dict, streamed, loaded from a state dict.

Rule 1: besides the result, a rank holds at most one range of `RANGE_BYTES`, or one parameter if that is larger.
Rule 2: a state dict that does not fit is refused on every rank, before anything is loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.comm.agreement import agree_and_share, agree_on_refusals
from fsdp.comm.communicator import Communicator
from fsdp.comm.exchanges import broadcast_all
from fsdp.errors import ShardingError
from fsdp.runtime.registry import collective_call
from fsdp.state_dict.fqns import IncompatibleKeys, check_names, check_values, extra_states, given_by, with_counts
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_ranges import RANGE_BYTES, full_params, gather_range, ranges_of
from fsdp.state_dict.param_shard import full_value, load_value


@torch.no_grad()
@collective_call
def full_state_dict(model: nn.Module, rank0_only: bool = True, device: torch.device | str = "cpu") -> dict[str, object]:
    """Return the state dict of the plain module: full parameters, persistent buffers, extra state of modules.

    With `rank0_only`, the other ranks join the collectives and get an empty dict. Tensors are copies on `device`. What is not
    sharded (buffers, extra state, parameters of ignored modules) is this rank's, and may be another on other ranks. State-dict
    hooks of modules are not called. Communicates: every rank must call it alike.

    Memory: on the model's device, one range of 32 MiB or one parameter; on `device`, the result.

    Raises:
        ShardingError: inside a forward, a backward or a summon, or `device` cannot be used.
    """
    model_view = ModelView(model, "full_state_dict")
    wanted = not rank0_only or model_view.world_comm.rank == 0
    copies = Copies("full_state_dict", model_view.world_comm, device, wanted)
    full: dict[int, Any] = {}
    for param_shard, found in full_params(model_view.units):
        full[id(param_shard.parameter)] = copies.of(found)
    for _, value in model_view.entries:
        if id(value) not in full:
            full[id(value)] = copies.of(full_value(value))
    copies.check()
    if not wanted:
        return {}
    state: dict[str, object] = {name: full[id(value)] for name, value in model_view.entries}
    state.update({name: module.get_extra_state() for name, module in extra_states(model).items()})
    return state


class Copies:
    """Copies of full tensors on the device that the user wants, between gathers.

    Rule: a copy that fails is no reason to leave out a gather, in which the other ranks wait.
    """

    def __init__(self, operation: str, comm: Communicator, device: torch.device | str, wanted: bool) -> None:
        """`wanted`: whether this rank keeps copies. Refused on every rank if one that does cannot use `device`. Communicates."""
        self._device, self._wanted = device, wanted
        self._failure: Exception | None = None

        def prepare() -> None:
            try:
                torch.empty(0, device=device if wanted else "cpu")
            except Exception as error:  # each backend of torch has its own
                raise ShardingError(f"{operation}: device {str(device)!r} cannot be used here: {error}") from error

        agree_on_refusals(comm, operation, prepare)

    def of(self, full: Tensor) -> Tensor | None:
        """A copy on the device; None if none is wanted, or one has failed."""
        if self._wanted and self._failure is None:
            try:
                return full.detach().to(self._device, copy=True)
            except Exception as error:  # such as out of memory
                self._failure = error
        return None

    def check(self) -> None:
        """Raise what the first copy to fail has raised. Call it after the last gather."""
        if self._failure is not None:
            raise self._failure


@torch.no_grad()
def iter_full_params(
    model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = RANGE_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full parameter, one after the other, on every rank; for example to send weights to an inference engine.

    Names are those of `named_parameters()` of the plain module; a tied parameter occurs once. The tensors are on the model's
    device, in `dtype` or their own, and are views of a buffer of `bucket_bytes` (or of one parameter, if that is larger). The
    buffer lives as long as any of these views: keep copies. Communicates while it runs: every rank must exhaust it.

    Raises:
        ShardingError: inside a forward, a backward or a summon; `bucket_bytes` is not above 0, or `dtype` is none.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ShardingError(f"iter_full_params: bucket_bytes is {bucket_bytes!r}; give a number above 0.")
    if not isinstance(dtype, torch.dtype | None):
        raise ShardingError(f"iter_full_params: dtype is {dtype!r}; give a torch.dtype, or None.")
    model_view = ModelView(model, "iter_full_params")
    # parameters of ignored modules, which every rank has in full
    for parameter in model.parameters():
        if id(parameter) not in model_view.param_shards:
            yield model_view.fqns[id(parameter)], full_value(parameter.detach()).to(dtype or parameter.dtype)
    for unit in model_view.units:
        for param_range in ranges_of(unit, bucket_bytes):
            for param_shard, full in gather_range(param_range, unit.name, dtype=dtype):
                yield model_view.fqns[id(param_shard.parameter)], full


@torch.no_grad()
@collective_call
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, object] | None, strict: bool = True) -> IncompatibleKeys:
    """Load a plain module's state dict: the same on every rank, or rank 0's if other ranks give None or {}.

    With `strict=False`, names that only one of the model and the state dict has are left out and returned, as `missing_keys` and
    `unexpected_keys`. Hooks of modules on loads are not called. Communicates: every rank must call it alike. If a rank gives
    nothing, rank 0 broadcasts one tensor at a time, so that no other rank holds more.

    Raises:
        ShardingError: on every rank, if on any of them a value has another shape, or a dtype whose conversion would lose
            something, or names are missing or unexpected; or if rank 0 gives nothing; or, with `strict=False`, if ranks give
            different names. Nothing was loaded.
    """
    model_view = ModelView(model, "load_full_state_dict")
    comm, param_shards = model_view.world_comm, model_view.param_shards

    def check() -> tuple[Mapping[str, Any], IncompatibleKeys | None]:
        given = given_by("load_full_state_dict", comm.rank, state_dict)
        if given is None:
            return {}, None
        mine = with_counts(model, given)
        names = [*(name for name, _ in model_view.entries), *extra_states(model)]
        found = check_names("load_full_state_dict", names, mine, strict)
        check_values("load_full_state_dict", model, mine)
        return mine, found

    (mine, _), by_rank = agree_and_share(comm, "load_full_state_dict", check, lambda checked: checked[1])
    keys: IncompatibleKeys | None = by_rank[0]
    assert keys is not None, "check raises if rank 0 gives nothing"
    for rank, other in enumerate(by_rank):
        if other is not None and other.missing_keys != keys.missing_keys:
            raise ShardingError(
                f"load_full_state_dict: the state dict of rank 0 lacks {keys.missing_keys or 'nothing'}, that of rank {rank} "
                f"lacks {other.missing_keys or 'nothing'}; give the same on every rank, or rank 0's alone."
            )
    everywhere, missing = None not in by_rank, set(keys.missing_keys)
    # a tied tensor once
    for name, value in {id(value): (name, value) for name, value in model_view.entries if name not in missing}.values():
        full: Any = mine.get(name)
        param_shard = param_shards.get(id(value))
        if not everywhere:
            shape, device = (value.shape, value.device) if param_shard is None else (param_shard.shape, param_shard.flat.device)
            carrier = torch.empty(shape, dtype=value.dtype, device=device)
            if comm.rank == 0:
                carrier.copy_(full)
            broadcast_all([(0, carrier)], comm, name)
            full = carrier
        if param_shard is None:
            load_value(value, full)
        else:
            placement, parameter = param_shard.placement, param_shard.parameter
            param_shard.overwrite(placement.part_of_given("load_full_state_dict", name, full, parameter))
    for name, module in extra_states(model).items():
        if name not in missing:
            extra = mine.get(name)
            module.set_extra_state(extra if everywhere else comm.gather_objects(extra, "load_full_state_dict")[0])
    return keys
