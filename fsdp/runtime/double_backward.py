"""Pre-backward hooks on the graph that a backward with create_graph=True makes through one unit.

Such a backward makes nodes that read the parameters of the unit again. A second backward may enter them, so each node that made
a gradient on its way out of the unit gets a hook.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.backward_progress import BackwardProgress
from fsdp.autograd.visits import BackwardPath, Endpoints, NodePrehook, is_batched, node_behind
from fsdp.errors import ShardingError
from fsdp.params.unit import Unit
from fsdp.runtime.refuse_copy import RefuseCopy


class DoubleBackward(RefuseCopy):
    """The hooks of one unit on the graphs of its gradients."""

    def __init__(
        self,
        unit: Unit,
        progress: BackwardProgress,
        pre_backward: Callable[[int, Sequence[Tensor | None]], None],
        refusal: Callable[[str], ShardingError],
    ) -> None:
        super().__init__(unit)
        self._progress = progress
        self._pre_backward = pre_backward
        """Called before a node of such a graph runs, with the version counters from when it was made and the gradients."""
        self._refusal = refusal
        self._endpoint_handles: dict[int, RemovableHandle] = {}

    def remove_endpoint_hooks(self) -> None:
        """Remove the hooks of `hook_endpoints`, at the end of the backward."""
        for handle in self._endpoint_handles.values():
            handle.remove()
        self._endpoint_handles.clear()

    def hook_endpoints(self, more: Endpoints = ()) -> None:
        """Put hooks on the outputs of the unit, for `torch.autograd.grad`.

        It captures the gradient of a tensor that it was called for, and never enters the node behind it.
        """
        for reference in (*more, *(end for path in self._progress.living_paths() for end in path.endpoints)):
            tensor = reference()
            if tensor is not None and id(tensor) not in self._endpoint_handles:
                self._endpoint_handles[id(tensor)] = tensor.register_hook(self._on_captured)  # type: ignore[no-untyped-call]

    def hook_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Put a hook on the node that made each gradient.

        Raises:
            ShardingError: the backward has is_grads_batched=True.
        """
        for gradient in gradients:
            if gradient is not None and is_batched(gradient):
                raise self._refusal(
                    f"a backward with is_grads_batched=True and create_graph=True goes through unit {self._unit.name!r}, and its "
                    "graph cannot be followed; take the gradients one by one."
                )
            node = None if gradient is None else node_behind(gradient)
            if node is not None:
                # keep the paths alive: of the first graph, maybe only what the second one needs is alive
                paths = self._progress.living_paths()
                NodePrehook.of(node).reaches.append(partial(self._enter, paths, self._unit.versions.now()))

    def _on_captured(self, gradient: Tensor) -> None:
        self.hook_gradients((gradient,))

    def _enter(self, paths: Sequence[BackwardPath], versions: int, gradients: Sequence[Tensor | None]) -> None:
        self._pre_backward(versions, gradients)
