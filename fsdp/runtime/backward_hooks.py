"""The hooks of one unit in a backward: on the nodes where autograd enters and leaves its calls, and on its gradients.

[Note: second graphs]
A backward with create_graph=True makes nodes that read the parameters of the unit again. A second backward may enter them, so
each node that made a gradient on its way out of the unit gets a hook.

[Note: kept AccumulateGrad nodes]
Autograd accumulates the gradient of a parameter in a node of its own: `p.expand_as(p).grad_fn.next_functions[0][0]`. Apex and
similar libraries keep that node and set hooks on it. Such a hook cannot be seen, but that the node is kept can be. The node
belongs to the user's Parameter. That Parameter is a shard once the module is wrapped, while gradients accumulate into the
unsharded parameter.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.frames import graph_is_made, graph_task
from fsdp.autograd.visits import BackwardPath, Endpoints, ForwardCall, NodePrehook, is_batched, node_behind
from fsdp.device.streams import Streams
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.gathered_copies import RefuseShardGrad
from fsdp.params.param_info import kept_accumulator
from fsdp.params.unit import RefuseCopy, Unit
from fsdp.runtime.backward_end import UNWINDING
from fsdp.runtime.passes import Passes
from state_machine import Event


class BackwardHooks(RefuseCopy):
    """The hooks of one unit in a backward. They call the stages of the passes."""

    def __init__(self, passes: Passes, index: int) -> None:
        engine = passes.engine
        super().__init__(engine.units[index])
        self._passes = passes
        self._engine = engine
        self._index = index
        self.visit = engine.visits[index]
        self.outer: Sequence[BackwardHooks] = ()
        """The hooks of all units with inner units. Autograd can leave such a unit by a path without hooks."""
        self._unit.observer = self
        self.handles: list[RemovableHandle] = []
        """Those of the hooks on parameters."""
        for number in engine.reducer.of_unit[index]:
            early_bucket = number if number in engine.reducer.early else None
            hook = _post_accumulate_hook(self, early_bucket, engine.streams)
            for unsharded in engine.reducer.buckets[number].flat.unsharded_params:
                self._set_hook(unsharded, unsharded.register_post_accumulate_grad_hook, hook)
        for info in self._unit.param_infos:
            self._set_hook(info.parameter, info.parameter.register_hook, RefuseShardGrad(info.names[0], self._unit.name))

    def _set_hook(self, parameter: Tensor, register: Callable[..., RemovableHandle], hook: Callable[..., None]) -> None:
        """Set a hook on a parameter. torch does so only if it requires a gradient, and a frozen one may be trained later."""
        if parameter.is_floating_point() or parameter.is_complex():
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            self.handles.append(register(hook))
            parameter.requires_grad_(trains)

    def hook_outputs(
        self,
        call: ForwardCall,
        outputs: Sequence[Tensor],
        side_outputs: Sequence[Tensor],
        around: "Sequence[tuple[BackwardHooks, BackwardPath]]",
    ) -> None:
        """Put a pre-backward hook on every node behind what a call that has just returned gives, and leaves behind.

        `around`: for each call around it, the hooks of its unit, and its path.
        """
        path = call.path
        for output in outputs:
            # an input that is returned unchanged has no node of the unit behind it
            if (node := node_behind(output, call.first_number)) is not None and node not in call.input_nodes:
                self.enter_at(node, path)
                if output._backward_hooks:
                    self._enter_before_hooks_of(output, path)
        for output in side_outputs:
            self.enter_side(output, call)
        path.endpoints += map(weakref.ref, (*outputs, *side_outputs))
        path.enclosing = around
        self.visit.add_path(path)
        for node in call.input_nodes:
            NodePrehook.of(node).leave(path, self._on_input_grad)

    def enter_at(self, node: Node, path: BackwardPath) -> NodePrehook:
        """Enter a call when autograd reaches `node`, which the call has made. Return the hook of the node."""
        prehook = NodePrehook.of(node)
        prehook.watched_by.add(id(self))
        if not any([known is path for known, _ in prehook.reaches]):
            prehook.reaches.append((path, self._pre_backward))
        return prehook

    def enter_side(self, tensor: Tensor, call: ForwardCall) -> None:
        """Enter `call` when autograd reaches the node behind `tensor`, which hooks of the user saw, or which is an attribute.

        A node that was there before the call would keep the call's graph alive. So it knows the path weakly, and not at all if
        the call makes no graph. Another thread may have made it in the call after all: then the next backward finds the path.
        """
        node = node_behind(tensor, call.first_number)
        if node is None or node in call.input_nodes:
            return
        if not call.may_be_earlier(node):
            call.entries.append(weakref.ref(self.enter_at(node, call.path)))
        elif call.records and id(self) not in (prehook := NodePrehook.of(node)).watched_by:
            prehook.reach(weakref.ref(call.path), self._pre_backward)
            self.visit.latest = call.path

    def _enter_before_hooks_of(self, output: Tensor, path: BackwardPath) -> None:
        """Enter before the hooks that the forward has set on an output: autograd runs those before the hooks of its node."""

        def enter(gradient: Tensor) -> None:
            # they run also where autograd only computes the gradient of the output, and runs no node of the unit
            if any([_runs(node) for node, _ in torch._C._current_autograd_node().next_functions if node is not None]):
                self._pre_backward(path, (gradient,))

        hooks: Any = output._backward_hooks
        others = dict(hooks)
        handle: Any = output.register_hook(enter)  # type: ignore[no-untyped-call]
        first = hooks.pop(handle.id)
        hooks.clear()
        hooks.update({handle.id: first, **others})

    # entering and leaving -----------------------------------------------------------------

    def _pre_backward(self, path: BackwardPath, gradients: Sequence[Tensor | None]) -> None:
        if path.enclosing is None:
            return  # a backward inside the forward
        for hooks, around in path.enclosing:
            if around.entered_in != hooks.visit.backward:
                hooks.enter_from_inner_unit(around, path.has_grad_inputs)
        self._refuse_changed_parameters(path.versions)
        self._passes.pre_backward(self._index)
        self.visit.reach(path)
        if torch.is_grad_enabled():
            # any of these units may have made the gradients
            for outer in self.outer:
                if outer.visit.entered:
                    outer.hook_gradients(gradients)
            for hooks, around in path.enclosing:
                hooks.hook_endpoints(around.endpoints)
            self.hook_endpoints()

    def enter_from_inner_unit(self, path: BackwardPath, goes_on: bool) -> None:
        """Enter a call of this unit through a side output of an inner unit. `goes_on`: the backward may continue here."""
        if goes_on:  # else it can continue only through a side input, which is not checked
            self._refuse_changed_parameters(path.versions)
        path.entered_in = self.visit.backward
        if not self.visit.entered:
            self._pre_backward_again()

    def _pre_backward_again(self) -> None:
        """Enter the unit where no call is followed."""
        self._passes.pre_backward(self._index)
        self.visit.reach_again()

    def _on_input_grad(self, path: BackwardPath, gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            self.hook_gradients(gradients)
        if not self.visit.leave(path):
            return
        if not self._unit.trains:
            self._engine.on_event(self._index, Event.INPUT_GRADS_DONE)
        elif self.visit.is_ready():
            self._post_backward()
        elif path.recompute and not path.inputs_are_interior and graph_task() not in self.visit.tasks:
            self.visit.tasks.add(graph_task())
            self._passes.call_at_end_of_graph_task(self._post_checkpoint_backward)

    def _post_checkpoint_backward(self) -> None:
        # the backward may have ended with the checkpoint
        if graph_task() in self.visit.tasks and self.visit.is_ready_after_checkpoint():
            self._post_backward()

    def _post_backward(self) -> None:
        self.visit.take_grads()
        self._passes.post_backward(self._index)

    def _refuse_changed_parameters(self, versions: int) -> None:
        if versions != self._unit.versions.now():
            raise self._refusal(
                f"parameters of unit {self._unit.name!r} were changed in place between its forward and its backward; "
                "step the optimizer after the backward of every forward that used them."
            )

    def _refusal(self, text: str) -> ShardingError:
        error = ShardingError(text)
        self._engine.note(error, self._index)
        return error

    # gradients ----------------------------------------------------------------------------

    def on_gradient(self, early_bucket: int | None) -> None:
        """Handle an accumulated gradient of one parameter. `early_bucket` is its bucket, if that is an early one."""
        if not self.visit.has_grad:
            if self.visit.lost_act is not None or torch.is_grad_enabled():
                self._refuse_first_grad()
            self.visit.add_grad()
            self._passes.add_gradient(self._index)
        if early_bucket is not None:
            self._passes.add_early_gradient(early_bucket)

    def _refuse_first_grad(self) -> NoReturn:
        if (lost_act := self.visit.lost_act) is not None:
            self.visit.add_lost_act(None)
            self._engine.note(lost_act, self._index)
            raise lost_act
        raise self._refusal(
            f"a backward with create_graph=True brings gradients to the parameters of unit {self._unit.name!r}, which are "
            "reduced over the ranks and have no graph; ask for those of inputs only: "
            "torch.autograd.grad(loss, inputs, create_graph=True)."
        )

    # uses outside the unit's forward --------------------------------------------------------

    def before_copy(self, flat: FlatBuffer, dtype: torch.dtype) -> None:
        self._engine.path.before_copy(flat, dtype)

    def on_used_outside(self) -> None:
        self._engine.reducer.used_outside(self._index)

    def factor_of_part(self) -> float:
        return self._engine.reducer.reductions.factor_of_part(self._unit)

    def on_external_grad(self) -> None:
        self._engine.on_event(self._index, Event.EXTERNAL_GRAD)

    def has_come(self, flat: FlatBuffer, index: int) -> bool:
        # one that has failed on a device drops its gradients then; hooks at the end of one are inside it, and do not wait
        self._engine.pending_backward.await_end()
        return self._engine.is_before_commits and self._engine.reducer.has_come(flat, index)

    def unshard_for_backward(self) -> bool:
        if graph_is_made():
            return False  # a second backward goes through it when the unit may be sharded again
        self._pre_backward_again()
        return True

    # second graphs ------------------------------------------------------------------------

    def hook_endpoints(self, more: Endpoints = ()) -> None:
        """Put hooks on the inputs and outputs of the unit's calls, for `torch.autograd.grad`, until the backward ends.

        It captures the gradient of a tensor that it was called for, and never enters the node behind it.
        """
        for reference in (*more, *(end for path in self.visit.living_paths() for end in path.endpoints)):
            tensor = reference()
            if tensor is not None and id(tensor) not in self.visit.endpoint_handles:
                handle = tensor.register_hook(lambda gradient: self.hook_gradients((gradient,)))  # type: ignore[no-untyped-call]
                self.visit.endpoint_handles[id(tensor)] = handle

    def hook_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Put a hook on the node that made each gradient. Raise ShardingError if the backward has is_grads_batched=True."""
        for gradient in gradients:
            if gradient is not None and is_batched(gradient):
                raise self._refusal(
                    f"a backward with is_grads_batched=True and create_graph=True goes through unit {self._unit.name!r}, and its "
                    "graph cannot be followed; take the gradients one by one."
                )
            node = None if gradient is None else node_behind(gradient)
            if node is not None:
                # keep the paths alive: of the first graph, maybe only what the second one needs is alive
                paths, versions = self.visit.living_paths(), self._unit.versions.now()
                NodePrehook.of(node).reaches.append((paths, partial(self._pre_second_backward, versions)))

    def _pre_second_backward(self, versions: int, paths: Sequence[BackwardPath], gradients: Sequence[Tensor | None]) -> None:
        self._refuse_changed_parameters(versions)
        self._pre_backward_again()
        if torch.is_grad_enabled():
            self.hook_gradients(gradients)
            self.hook_endpoints()


def _post_accumulate_hook(owner: BackwardHooks, early_bucket: int | None, streams: Streams) -> Callable[[Tensor], None]:
    """The hook on the parameters of one bucket: it calls `on_gradient(early_bucket)` after the first accumulation.

    `early_bucket` is the number of the bucket if it is an early one, of which every accumulation counts. The hook refers to the
    owner weakly: the garbage collector does not see hooks of this kind, and the owner leads back to the tensor.
    """
    hooks, visit, on_host = weakref.ref(owner), owner.visit, streams.on_host

    def accumulated(unsharded: Tensor) -> None:
        if not on_host:
            streams.computes()  # a part of the forward, and so of the backward, may have run on a stream of its own
        if (not visit.has_grad or early_bucket is not None) and (target := hooks()) is not None:
            target.on_gradient(early_bucket)

    return accumulated


class AccumulateGradChecks:
    """Finds the AccumulateGrad nodes of one unit's parameters that some other code keeps.

    A node that was kept before wrapping gets every gradient of its unsharded parameter, so its hooks run. A node that was kept
    afterwards is refused. See [Note: kept AccumulateGrad nodes].
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.relayed: dict[int, RemovableHandle] = {}
        """The hooks that run nodes kept before wrapping, by the id of the shard."""
        self._is_checked = False
        for info, unsharded in zip(unit.param_infos, unit.unsharded_params, strict=True):
            if info.kept_accumulator is not None:
                relay = _relay(info.kept_accumulator, info.parameter, info.names[0])
                self.relayed[id(info.parameter)] = unsharded.register_hook(relay)  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Check before the first forward that no other node is kept, because no gradient would reach it.

        Raises:
            ShardingError: the AccumulateGrad node of a shard is kept, into which nothing accumulates, or torch's
                `register_multi_grad_hook`, which waits for these nodes, was set on parameters.
        """
        # one check costs as much as a small kernel for each parameter; in inference mode and in transforms there are no nodes
        if self._is_checked or torch.is_inference_mode_enabled() or torch._C._are_functorch_transforms_active():
            return
        for info, unsharded in zip(self._unit.param_infos, self._unit.unsharded_params, strict=True):
            hooks = [*(unsharded._backward_hooks or {}).values(), *(info.parameter._backward_hooks or {}).values()]
            names = [getattr(hook, "__qualname__", "") for hook in hooks]
            if any([name.startswith("register_multi_grad_hook.") for name in names]):
                raise ShardingError(
                    f"torch's register_multi_grad_hook was set on {info.names[0]!r} of unit {self._unit.name!r}: it "
                    "waits for the gradient of a shard, which never comes. Set it inside a forward, give it mode='any', or use "
                    "p.register_hook."
                )
            # what `p.full_tensor()` of a DTensor returns keeps the node, and code that has looked at it may keep that
            if self._unit.replaces_params or id(info.parameter) in self.relayed:
                continue
            if _keeps_accumulator(info.parameter):
                self._unit.check_modules()  # torch's prune keeps it, and says so by another name of the parameter
                raise ShardingError(
                    f"somebody keeps the node that accumulates the gradient of {info.names[0]!r} in unit {self._unit.name!r}. "
                    "It is that of a shard, and gets no gradient. Either a loss term on the weights was computed before the "
                    "forward: compute it inside fsdp.full_parameters(model). Or a module around the unit gave the unit's "
                    "parameters to an operation, as ODE solvers with an adjoint do: make that module the unit, and no module "
                    "inside it. Or hooks need it, on p.expand_as(p).grad_fn.next_functions[0][0]: take it before wrapping or "
                    "inside a forward, "
                    "or use p.register_hook or p.register_post_accumulate_grad_hook."
                )
        self._is_checked = True


def _runs(node: Node) -> bool:
    """Whether this backward runs `node`. False for a leaf under `autograd.grad`, of which the engine does not say it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def _keeps_accumulator(shard: nn.Parameter) -> bool:
    """Whether the AccumulateGrad node of a shard is kept. On a device this may take a moment."""
    end = time.monotonic() + UNWINDING
    while kept_accumulator(shard) is not None:
        # the thread of autograd that runs the backwards of a device still holds the graph of one that has failed just now
        if shard.device.type == "cpu" or time.monotonic() > end:
            return True
        time.sleep(0.001)
    return False


def _relay(node: Any, shard: nn.Parameter, name: str) -> Callable[[Tensor], None]:
    """A hook for the unsharded parameter. It runs `node` with each gradient, for the hooks of that, and accumulates nothing."""

    def run_node(gradient: Tensor) -> None:
        # the hooks of a leaf get the reduced gradient later; a leaf that requires no gradient accumulates none
        leaf, version = node.variable, shard._version
        hooks, leaf._backward_hooks = leaf._backward_hooks, None
        trains = leaf.requires_grad
        leaf.requires_grad_(False)
        try:
            torch.autograd.backward((GradientEdge(node, 0),), (gradient,))
        finally:
            leaf.requires_grad_(trains)
            leaf._backward_hooks = hooks
        if shard._version != version:
            raise ShardingError(
                f"a hook on the node that accumulates the gradient of {name!r} changed the parameter, whose gradient is not "
                "reduced yet, nor in `.grad`; step the optimizer in p.register_post_accumulate_grad_hook."
            )

    return run_node
