"""Cuts flat tensors into views of given shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Cutter:
    """Cuts flat tensors into views, in one call into C++: a slice and a view for each would take as long as a small kernel."""

    __slots__ = ("_segments", "_templates")

    def __init__(self, extents: Sequence[tuple[int, int, tuple[int, ...]]], device: torch.device) -> None:
        """`extents` are (start, numel, shape), in the order of their starts."""
        element = torch.empty((), device=device)
        self._templates: list[Tensor] = []
        """Tensors with the shapes of the extents and of the gaps between them, each with the memory of one element."""
        self._segments: list[tuple[int, tuple[int, ...]]] = []
        """For each extent, its index in `_templates`, or -1 if it has no elements; and its shape."""
        end = 0
        for start, numel, shape in extents:
            if start > end:
                self._templates.append(element.expand(start - end))
            self._segments.append((len(self._templates) if numel else -1, shape))
            if numel:
                self._templates.append(element.expand(shape))
            end = start + numel

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The view of each extent in `flat`."""
        views = torch._C._nn.unflatten_dense_tensors(flat, self._templates)
        return [flat[:0].view(shape) if segment < 0 else views[segment] for segment, shape in self._segments]
