"""Options of DDP, Apex, fairscale, FSDP1 and FSDP2 that are not options here: what is accepted, and what to give instead.

Rule: one table. A value in it means what happens here anyway, so it is dropped. Any other value is refused with the remedy.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar, cast

from fsdp.building.consistency import Prepared, agree
from fsdp.comm.open_communicators import open_comms
from fsdp.config import find_strategy
from fsdp.errors import ShardingError

F = TypeVar("F", bound=Callable[..., Any])


class PeerOption(NamedTuple):
    """An option of another engine."""

    remedy: str
    """What the error says."""
    accepted: tuple[str, ...] = ("None",)
    """The values that mean what happens here anyway, as `str` shows them: objects of other engines need no import."""


_OFFLOAD: Final = "give offload_policy=fsdp.OffloadPolicy(), which keeps shards, gradients and optimizer state on the host"
_OBJECTS: Final = "parameters are always the original objects; leave it out"
_DEVICE: Final = "move the module to its device before wrapping it, and its inputs before the forward"
_PREFETCH: Final = "prefetch follows the recorded order; give prefetch=0 to switch it off"
_AT_END: Final = "give reduction=fsdp.ReductionPolicy(at_end=True), which launches every reduction at the end"
_CAP: Final = "give reduction=fsdp.ReductionPolicy(bucket_cap_mb=...)"
_PREDIVIDE: Final = "give reduction=fsdp.ReductionPolicy(predivide_factor=...)"
_FP32: Final = "give mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)"
_VIEWS: Final = "gradients are always views of what was reduced; leave it out"
_BUFFERS: Final = "buffers keep their dtype; convert them before wrapping"

PEER_OPTIONS: Final[dict[str, PeerOption]] = {
    # FSDP1
    "cpu_offload": PeerOption(_OFFLOAD, ("None", "False", "CPUOffload(offload_params=False)")),
    "backward_prefetch": PeerOption(_PREFETCH, ("BackwardPrefetch.BACKWARD_PRE",)),
    "forward_prefetch": PeerOption(_PREFETCH, ("False", "True")),
    "limit_all_gathers": PeerOption("at most `prefetch` units are gathered ahead; give prefetch", ("True",)),
    "use_orig_params": PeerOption(_OBJECTS, ("True",)),
    "mixed_precision": PeerOption(
        "give mp_policy, which takes a fsdp.MixedPrecisionPolicy and the policies of FSDP1 and FSDP2", ("None", "False")
    ),
    "device_id": PeerOption(_DEVICE),
    "ignored_states": PeerOption("give ignored_modules, or ignored_params"),
    "device_mesh": PeerOption("give it as mesh; a two-dimensional one needs sharding_strategy='HYBRID_SHARD'"),
    # FSDP2
    "dp_mesh_dims": PeerOption("give a mesh of these dimensions alone, such as mesh=mesh['shard']"),
    # DDP
    "device_ids": PeerOption(_DEVICE),
    "output_device": PeerOption(_DEVICE),
    "dim": PeerOption("inputs are not scattered: give each rank its own batch", ("0",)),
    "init_sync": PeerOption("give sync_module_states=True, which broadcasts the parameters of rank 0", ("False",)),
    "forward_sync_buffers": PeerOption("give broadcast_buffers=True, which broadcasts the buffers of rank 0", ("False",)),
    "bucket_cap_mb": PeerOption(_CAP),
    "bucket_cap_mb_list": PeerOption("give reduction=fsdp.ReductionPolicy(triggers=names), parameters that end a bucket"),
    "find_unused_parameters": PeerOption("give reduction=fsdp.ReductionPolicy(find_unused_parameters=True)", ("False",)),
    "skip_all_reduce_unused_params": PeerOption("parameters that no rank used get no gradient; leave it out", ("False",)),
    "static_graph": PeerOption("give reduction=fsdp.ReductionPolicy(static_graph=True)", ("False",)),
    "check_reduction": PeerOption("it does nothing in DDP either; leave it out", ("False", "True")),
    "gradient_as_bucket_view": PeerOption(_VIEWS, ("False", "True")),
    "batched_grad_copy": PeerOption("how gradients get into buckets cannot be chosen; leave it out", ("False",)),
    "lazy_bucket_allocation": PeerOption("buckets are allocated when gradients arrive; leave it out", ("False", "True")),
    "delay_all_reduce_named_params": PeerOption(_AT_END),
    "param_to_hook_all_reduce": PeerOption(_AT_END),
    # Apex
    "message_size": PeerOption(_CAP, ()),
    "delay_allreduce": PeerOption(_AT_END, ("False",)),
    "shared_param": PeerOption("shared parameters need no option; leave it out"),
    "allreduce_trigger_params": PeerOption("give reduction=fsdp.ReductionPolicy(triggers=names), parameters that end a bucket"),
    "retain_allreduce_buffers": PeerOption(_VIEWS, ("False",)),
    "allreduce_always_fp32": PeerOption(_FP32, ("False",)),
    "num_allreduce_streams": PeerOption("give reduction=fsdp.ReductionPolicy(streams=...), each with its communicator", ("1",)),
    "allreduce_communicators": PeerOption("communicators are made from process_group; leave it out"),
    "gradient_average": PeerOption("give reduction=fsdp.ReductionPolicy(average=False), which sums over the ranks", ("True",)),
    "gradient_average_split_factor": PeerOption(_PREDIVIDE),
    "prof": PeerOption("put torch.profiler around the step; leave it out", ("False",)),
    # fairscale, and some names of Apex
    "gradient_predivide_factor": PeerOption(_PREDIVIDE),
    "process_group_reduce_scatter": PeerOption("reductions have a communicator of their own; leave it out"),
    "disable_reshard_on_root": PeerOption("give reshard_after_forward=True, which reshards the root's own unit too", ("True",)),
    "fp32_reduce_scatter": PeerOption(_FP32, ("False",)),
    "flatten_parameters": PeerOption(_OBJECTS, ("False",)),
    "move_params_to_cpu": PeerOption(_OFFLOAD, ("False",)),
    "move_grads_to_cpu": PeerOption(_OFFLOAD, ("None", "False")),
    "compute_dtype": PeerOption("give mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=...)"),
    "buffer_dtype": PeerOption(_BUFFERS),
    "compute_device": PeerOption(_DEVICE),
    "no_broadcast_optim_state": PeerOption("fsdp.save writes each rank's part of the state; leave it out", ("False",)),
    "state_dict_device": PeerOption("give device to fsdp.full_state_dict; the host is its default"),
    "state_dict_on_rank_0_only": PeerOption("give rank0_only to fsdp.full_state_dict; True is its default", ("False",)),
    "clear_autocast_cache": PeerOption("call torch.clear_autocast_cache() between the forwards where it is needed", ("False",)),
    "force_input_to_fp32": PeerOption("convert the inputs before the forward, or inside the module", ("False",)),
    "verbose": PeerOption("fsdp.story(model) and fsdp.reducer_stats(model) say what a step did", ("False",)),
}  # fmt: skip
"""By name, in the order of the engines."""


def refused_options(given: Mapping[str, object]) -> list[str]:
    """The options that are neither known nor harmless. `given` are those that are not options here."""
    return [name for name, value in given.items() if name not in PEER_OPTIONS or str(value) not in PEER_OPTIONS[name].accepted]


def remedies_for(names: Collection[str], known: Collection[str]) -> str:
    """Say of each name what to give instead. `known` are the options here."""
    said = []
    for name in names:
        nearest = get_close_matches(name, [*known, *PEER_OPTIONS], n=1)
        found = name if name in PEER_OPTIONS else next(iter(nearest), "")
        asked = "" if found == name or not found else f"did you mean {found}?"
        remedy = PEER_OPTIONS[found].remedy if found in PEER_OPTIONS else ""
        what = " ".join(part for part in (asked, remedy) if part)
        said.append(f"{name!r}: {what}" if what else repr(name))
    return "; ".join(said)


def accepts_peer_options(function: F) -> F:
    """Let `function` be called with options of other engines, which its signature does not show.

    Those whose value means what happens here anyway are dropped. All others are refused in one text, on every rank.
    """
    signature = inspect.signature(function)
    known = [name for name in signature.parameters if name not in ("self", "module")]

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        foreign = {name: kwargs.pop(name) for name in [*kwargs] if name not in signature.parameters}
        if refused := refused_options(foreign):
            _refuse_options(refused, known, signature.bind_partial(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return cast(F, wrapper)


def _refuse_options(names: Collection[str], known: Collection[str], given: Mapping[str, Any]) -> None:
    """Refuse options on every rank: the other ranks compare the model and the options that they were given."""
    mesh_kind = find_strategy(given.get("sharding_strategy")).mesh_kind
    comms = open_comms(given.get("process_group"), given.get("mesh"), mesh_kind)

    def refuse() -> Prepared:
        plural = "s" if len(names) > 1 else ""
        raise ShardingError(f"unknown option{plural} {remedies_for(names, known)}. The options are module, {', '.join(known)}.")

    agree(comms.world_comm, refuse)
