"""What is not sharded, and ranks may have in different versions: buffers, extra state, parameters of ignored modules.

A checkpoint has rank 0's version under the plain keys, so that every reader finds it there. Another rank's version is saved
only if it differs, in a part of its own, under the same keys. A load on as many ranks gives each rank its own.
"""

import io
from collections.abc import Collection, Mapping
from ctypes import c_char
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp.comm.agreement import agree_and_share
from fsdp.errors import ShardingError
from fsdp.shards.state_placement import PLAIN
from fsdp.state_dict.model_view import ModelView
from fsdp.state_dict.param_shard import is_sharded

PART: Final = "own"
"""The part of a checkpoint with the versions of ranks other than rank 0: `own.R.KEY` is what rank R has in place of KEY."""
Path = tuple[Any, ...]
"""Of a value in a nested state dict."""


def set_apart(state: dict[str, Any], model_view: ModelView) -> None:
    """Move what differs from rank 0's version into this rank's own part of `state`. Communicates.

    Traffic: a checksum (sha256) of all unsharded values; if these differ between ranks, one of each value.
    """
    comm = model_view.world_comm
    dicts = _dicts_of_unsharded(state, model_view)

    def checksums() -> dict[Path, str]:
        return {path: _checksum(found.get(path[-1])) for path, found in dicts.items()}

    mine, of_all = agree_and_share(comm, "save", checksums, lambda mine: _checksum([*mine.values()]))
    if len(set(of_all)) == 1:
        return
    first = comm.gather_objects(mine, "save")[0]
    own: dict[str, Any] = {}
    for path, checksum in mine.items():
        if first.get(path, checksum) != checksum:
            inner = own
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = dicts[path].pop(path[-1], None)
    if own:
        state[PART] = {str(comm.rank): own}


def refuse_lost_versions(operation: str, paths: Collection[Path], model_view: ModelView, world_size: int) -> None:
    """Check that no parameter loses the versions of other ranks. Errors begin with `operation`.

    A load on another number of ranks takes rank 0's version of everything, which is well for buffers. A parameter of an ignored
    module may be one that each rank trains for itself.

    Raises:
        ShardingError: ranks had different versions of a parameter, and they are not as many as now, or the parameter is sharded.
    """
    alike = model_view.world_comm.size == world_size
    parameters = {name: id(tensor) for name, tensor in model_view.entries if isinstance(tensor, nn.Parameter)}
    for path in paths:
        if path[0] != PART:
            continue
        name = _of_one_name(path[2:])[-1]
        if name in parameters and not (alike and parameters[name] not in model_view.param_shards):
            raise ShardingError(
                f"{operation}: parameter {name!r} was not sharded, and each of the {world_size} ranks that saved it may have "
                "trained its own; load it on as many ranks with the same ignored_modules. To give rank 0's to every rank, run "
                "`python -m fsdp convert PATH OUT --to torch` and load the result with fsdp.load_full_state_dict."
            )


def seen_by(rank: int, paths: Mapping[str, Path]) -> dict[str, tuple[str, Path]]:
    """The keys that `rank` reads, each with the key and the path that it stands for: its own version in place of rank 0's."""
    own = {key: path[2:] for key, path in paths.items() if path[:2] == (PART, str(rank))}
    # the versions of a state may have different keys inside
    replaced = {_of_one_name(path) for path in own.values()}
    seen = {key: (key, path) for key, path in paths.items() if path[0] != PART and _of_one_name(path) not in replaced}
    return {**seen, **{key: (key.removeprefix(f"{PART}.{rank}."), path) for key, path in own.items()}}


def _of_one_name(path: Path) -> Path:
    """The part of `path` that ends with a name: of a value of the model, or of a parameter whose state the optimizer keeps."""
    return path[:2] if path[0] == "model" else path[:3]


def _dicts_of_unsharded(state: dict[str, Any], model_view: ModelView) -> dict[Path, dict[str, Any]]:
    """The dict in which each unsharded value of the model, and the optimizer's state of each unsharded parameter, has its place.

    The last part of a path is the key in the dict, where a state may be missing.
    """
    model = state["model"]
    found: dict[Path, dict[str, Any]] = {("model", name): model for name in model if not is_sharded(model[name])}
    if "ema" in state:
        averages = state["ema"]["averages"]
        found |= {("ema", "averages", name): averages for name in averages if not is_sharded(averages[name])}
    if "optimizer" in state:
        states = state["optimizer"]["state"]
        sharded = {model_view.fqns[key] for key in model_view.param_shards}
        stepped = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
        found |= {("optimizer", "state", name): states for name in sorted(stepped - sharded)}
    return found


def _checksum(value: Any) -> str:
    """Equal for equal values on any device, whatever memory they are views of."""
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        found = sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        if plain.nbytes:
            found.update((c_char * plain.nbytes).from_address(plain.data_ptr()))
        return found.hexdigest()
    if isinstance(value, dict):
        return sha256(repr([(key, _checksum(inner)) for key, inner in value.items()]).encode()).hexdigest()
    if isinstance(value, PLAIN):
        return sha256(repr(value).encode()).hexdigest()
    stream = io.BytesIO()
    torch.save(value.detach().cpu() if isinstance(value, Tensor) else tree_map_only(Tensor, _checksum, value), stream)
    return sha256(stream.getvalue()).hexdigest()
