"""The names of a plain module's state, and whether a state dict has what they say."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.layout import Shape
from fsdp.state_dict.param_shard import check_fit, pieces_in

# Wrappers whose name is no part of a plain parameter name.
TRANSPARENT = frozenset({"_checkpoint_wrapped_module"})
EXTRA_STATE = "_extra_state"
"""The last part of the name under which torch keeps what `get_extra_state` of a module returns."""


def entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of the plain module's state dict, in its order; tied ones once a name."""
    for prefix, module in _plain(model):
        saved = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is not None:
                yield prefix + name, tensor


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The names of what is no tensor in the plain module's state dict, and the modules that give and take it."""
    return {
        prefix + EXTRA_STATE: module
        for prefix, module in _plain(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def check_names(asker: str, wanted: list[str], given: Mapping[str, Any]) -> None:
    """Raises:
    ShardingError: names are missing or unexpected.
    """
    missing = [name for name in wanted if name not in given]
    known = set(wanted)
    unexpected = sorted(name for name in given if name not in known)
    if missing or unexpected:
        raise ShardingError(
            f"{asker}: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}; "
            "give the state dict of the same plain module."
        )


def check_values(asker: str, model: nn.Module, given: Mapping[str, Any]) -> None:
    """Of the names that are in both.

    Raises:
        ShardingError: a value has another shape, or a dtype that would lose something.
    """
    pieces = pieces_in(model)
    for name, tensor in entries(model):
        if name in given:
            piece = pieces.get(id(tensor))
            shape: Shape = tuple(tensor.shape) if piece is None else piece.shape
            if piece is None:
                check_fit(asker, name, given[name], shape, tensor.dtype)
            else:
                piece.local_part(asker, name, given[name])


def _plain(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module and the prefix of the names in it."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield "".join(f"{part}." for part in path.split(".") if part and part not in TRANSPARENT), module
