"""A parameter that one instance owns and another one uses, such as the weight of an embedding that is the head's, too."""

from collections.abc import Generator
from contextlib import contextmanager
from math import prod

import torch
from torch import nn

from fsdp.compat.fairscale.flat_params import Shown
from fsdp.params.use_outside_forward import full_tensor


class SharedParam:
    """One parameter of another instance, and the modules of this one that use it.

    Its value is gathered in each forward of this instance. Its gradient is added to that of the owner.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        self.dtype = dtype
        self.slots: list[tuple[nn.Module, str]] = []

    @property
    def _shape(self) -> torch.Size:
        shape: torch.Size = self.parameter._orig_size  # type: ignore[attr-defined]
        return shape

    def values(self) -> Shown:
        """The full value for each module that uses it. Communicates."""
        value = full_tensor(self.parameter)[: prod(self._shape)].view(self._shape).to(self.dtype)
        return tuple((module, name, value) for module, name in self.slots)

    def placeholders(self) -> Shown:
        """What each module shows outside a forward: a tensor with a shape and no memory."""
        placeholder = torch.empty(self._shape, dtype=self.dtype, device="meta")
        return tuple((module, name, placeholder) for module, name in self.slots)

    @contextmanager
    def shown_in_full(self) -> Generator[None, None, None]:
        """Let the modules have the parameter inside, while its owner has its full value."""
        value = full_tensor(self.parameter).detach()[: prod(self._shape)].view(self._shape)
        shown = nn.Parameter(value, self.parameter.requires_grad)
        for module, name in self.slots:
            module._parameters[name] = shown
        try:
            yield
        finally:
            for module, name in self.slots:
                del module._parameters[name]
