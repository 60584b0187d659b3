"""What the gradients of a plain model are summed from: how many numbers, and how large."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


class Summands:
    """What the parameters of one model got in backwards: the number of summands, and the sum of their absolute values.

    A gradient is the sum of what comes over each edge of the graph that leads to its parameter: one for each use in each
    call, and more where a backward has a graph too. These may cancel, so the gradient says little about them.
    """

    def __init__(self) -> None:
        self.counts: dict[nn.Parameter, int] = {}
        self.sizes: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """In every backward that begins inside, those of reentrant checkpoints too, which begin at graphs of their own."""
        plain = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # one for the gradients of some inputs leaves none in a parameter
            hooks = [] if kwargs.get("inputs") else self._listen((tensors,) if isinstance(tensors, Tensor) else tensors)
            try:
                plain(tensors, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()

        with mock.patch.object(torch.autograd, "backward", backward):
            yield

    def _listen(self, tensors: Any) -> list[Any]:
        todo: list[Node] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen, hooks = set(todo), []
        while todo:
            node = todo.pop()
            ends: dict[int, nn.Parameter] = {}
            for number, (after, _) in enumerate(node.next_functions):
                variable = getattr(after, "variable", None)
                if isinstance(variable, nn.Parameter):
                    ends[number] = variable
                elif after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
            if ends:
                hooks.append(node.register_hook(lambda gradients, _, ends=ends: self._add(gradients, ends)))
        return hooks

    def _add(self, gradients: tuple[Tensor | None, ...], ends: dict[int, nn.Parameter]) -> None:
        for number, parameter in ends.items():
            gradient = gradients[number]
            if gradient is not None:
                self.counts[parameter] = self.counts.get(parameter, 0) + 1
                before = self.sizes.get(parameter)
                self.sizes[parameter] = gradient.detach().abs() if before is None else before + gradient.detach().abs()
