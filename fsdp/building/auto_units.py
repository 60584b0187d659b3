"""Chooses units for `auto_wrap_policy="auto"`: neither a hundred tiny ones nor one huge one.

Rule 1: a module of at most `1 / parts` of the parameters is one unit with everything below it. In a model of many equal blocks
        that is each block.
Rule 2: a larger module is divided between its children, and keeps what is left.
Rule 3: a module of less than `least_bytes`, or of less than `1 / MOST_UNITS` of the parameters, is no unit: it belongs to the
        module around it. A smaller gather takes about as long as its latency, which no other unit can hide.
Rule 4: modules of torch that use the weights of inner modules without calling these are not divided.
"""

from collections.abc import Collection
from typing import Final

from torch import nn

PARTS: Final = 8
"""Two units are gathered at once when one computes and one is gathered ahead. They are a quarter of the model at most."""
MOST_UNITS: Final = 256
LEAST_BYTES: Final = 2**20
"""At 50 GB/s that is 20 µs, about the latency of a gather between hosts."""
_UNDIVIDED: Final = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


def auto_units(root: nn.Module, ignored: Collection[int], parts: int = PARTS, least_bytes: int = LEAST_BYTES) -> set[int]:
    """Return the ids of the modules below `root` that become units. `ignored`: ids of modules that are left alone.

    `parts`: a unit is at most one of so many parts of the parameters. `fsdp.plan` compares several sizes.
    """
    sizes = _sizes(root, ignored)
    total = sizes[id(root)]
    least = max(least_bytes, total // MOST_UNITS)
    chosen: set[int] = set()
    _divide(root, sizes, least, total // parts, chosen)
    return chosen


def _divide(module: nn.Module, sizes: dict[int, int], least: int, most: int, chosen: set[int]) -> None:
    for child in module.children():
        size = sizes.get(id(child), 0)
        if size < least or id(child) in chosen:
            continue
        has_forward = type(child).forward is not nn.Module.forward
        fits = size <= most or isinstance(child, _UNDIVIDED) or next(child.children(), None) is None
        if has_forward and fits:
            chosen.add(id(child))
        else:
            _divide(child, sizes, least, most, chosen)


def _sizes(root: nn.Module, ignored: Collection[int]) -> dict[int, int]:
    """Bytes of the parameters in each module with all below it, by id. Parameters that several modules share count in each."""
    found: dict[int, int] = {}

    def visit(module: nn.Module) -> dict[int, int]:
        own = {id(p): p.numel() * p.element_size() for p in module._parameters.values() if p is not None}
        for child in module.children():
            if id(child) not in ignored:
                own |= visit(child)
        found[id(module)] = sum(own.values())
        return own

    visit(root)
    return found
