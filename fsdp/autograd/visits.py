"""The calls of units, and what a backward does in them: the nodes where it enters and leaves, and whether it is done.

[Note: views]
If a call returns a view, the pre-backward hook is on the node of the view's *base*. An in-place update of the view gives the
view a new node, and a hook on the old node would never run.

[Note: when a unit is done with its parameters]
Arrived gradients do not prove it. A frozen weight beside trainable ones, or a detached use of a weight, is read by backward
nodes on which no gradient of a parameter depends. So a unit waits until autograd leaves it: until autograd is about to run
the nodes that made the inputs of each call. A unit waits for the end of the backward if its inputs need no gradient, or if
it has inner units, because autograd can leave it through any of those.

[Note: what other ranks know]
Reductions may be launched early, and parameters that may be gathered again may be released early, only at a moment that
every rank reaches. Otherwise one rank waits for a reduction while a peer waits for a gather. Ranks may get different
gradients (a parameter may be unused on one of them), so gradients are not counted. The path of autograd through the calls is
the same on all ranks. When every call on it has been left through nodes inside the graph, all gradients have arrived,
because autograd runs later nodes first and accumulates at once. The unit is then ready, with zeros for missing gradients.
The inputs of a reentrant recompute are leaves, whose gradients are accumulated at any time. There the unit is ready at the
end of the graph task of the checkpoint.

[Note: second backwards]
A backward with create_graph=True makes nodes that read the unit's parameters again. It is unknown when the last of them
runs, and where they lead in the graph of the forward. So a unit that is reached through them waits for the end of the
backward.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fsdp.autograd.cast import Cast
from fsdp.autograd.pytree import tensors_in

Endpoints = Sequence[weakref.ref[Tensor]]
_NEXT_FUNCTIONS: Final = attrgetter("next_functions")
_next_number: Final = torch._C._autograd._get_sequence_nr
"""The number that this thread gives to the next node. Autograd runs nodes of high numbers first; each thread counts its own."""


class ForwardCall:
    """One forward of one unit, while it runs."""

    __slots__ = (
        *("captured", "cast", "entries", "first_number", "gradients", "guard", "handled", "has_late_inputs", "input_nodes"),
        *("nested", "path", "records", "refused", "taken", "unit"),
    )

    def __init__(self, unit: int, recompute: bool, inputs: Sequence[Tensor], innermost: bool, versions: int) -> None:
        self.unit = unit
        """The number of the unit in its root."""
        self.input_nodes = tuple(dict.fromkeys([tensor.grad_fn or get_gradient_edge(tensor).node for tensor in inputs]))
        """The distinct nodes behind the inputs. For a leaf it is the node that accumulates its gradient."""
        self.first_number = _next_number()
        # Autograd can leave a unit with inner units through any of those, so its inputs say nothing. It may run a node of another
        # thread before those of the unit.
        self.has_late_inputs = any([_is_late(node, self.first_number) for node in self.input_nodes])
        """Whether another thread may have made a node behind an input."""
        is_left = innermost and not self.has_late_inputs
        self.path = BackwardPath(recompute, versions, inputs, self.input_nodes if is_left else ())
        self.handled = sys.exc_info()[1]
        """The exception that was being handled when the call began. The call did not raise it."""
        self.guard: Any = None
        """The guard of this call, in guard mode."""
        self.cast: Cast | None = None
        """What has cast the arguments of this call."""
        self.records = torch.is_grad_enabled()
        """Whether the call makes a graph. It does not in a reentrant checkpoint, which gives its outputs a graph at its end."""
        self.captured: list[weakref.ref[Tensor]] = []
        """What modules with hooks of the user have returned."""
        self.entries: list[weakref.ref[NodePrehook]] = []
        """The hooks on nodes that hooks of the user saw, through which a backward can enter the call."""
        self.taken: list[tuple[Tensor, Tensor, str]] = []
        """Views into shards, each with its values from before an in-place update of this call was written back, and a name."""
        self.gradients: Sequence[Tensor | None] = ()
        """In a recompute, `.grad` of each unsharded parameter when it began. In a forward they have none."""
        self.refused = True
        """Whether the pre-forward hook has not succeeded, so that the post-forward hook has nothing to do."""
        self.nested = False
        """Whether it is called inside the unit's own forward, by recursion or by a method registered as a forward."""

    def may_be_earlier(self, node: Node) -> bool:
        """Whether `node` may have been there before the call: this thread made it before, or another thread has."""
        return node._sequence_nr() < self.first_number

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the call has made the node behind `tensor`."""
        return (node := node_behind(tensor, self.first_number)) is not None and not self.may_be_earlier(node)

    def nest_in(self, outer: "ForwardCall") -> None:
        """Become a part of `outer`: both have one path, and gradients of the inputs of either may be computed."""
        self.nested = True
        outer.path.endpoints += self.path.endpoints
        self.path, self.captured, self.entries = outer.path, outer.captured, outer.entries

    def discard(self) -> None:
        """End the guard and drop all references to the graph, because the call will not end."""
        if self.guard is not None:
            self.guard.end()
        self.input_nodes, self.path = (), BackwardPath(self.path.recompute, self.path.versions, (), ())


class BackwardPath:
    """The path of a backward through one call of one unit: the nodes behind the call's inputs, and how many are still ahead.

    It lives as long as the autograd graph of the call or of a nested call.
    """

    __slots__ = (
        "__weakref__",
        "_backward",
        "_left_in",
        "_nodes_left",
        "enclosing",
        "endpoints",
        "entered_in",
        "has_grad_inputs",
        "input_nodes",
        "inputs_are_interior",
        "recompute",
        "versions",
    )

    def __init__(self, recompute: bool, versions: int, inputs: Sequence[Tensor], input_nodes: Sequence[Node]) -> None:
        self.recompute = recompute
        self.versions = versions
        """Of the shards it computes with, also if the gather has taken over data of the user, and what it changes in them."""
        self.endpoints = [*map(weakref.ref, inputs)]
        """The inputs of the call and, once it has returned, its outputs. `autograd.grad` may compute gradients of these."""
        self.enclosing: Sequence[tuple[Any, BackwardPath]] | None = None
        """For each call around this one: the hooks of its unit, and its path. None until the call has returned."""
        self.has_grad_inputs = bool(inputs)
        """Whether an input requires grad, so that a backward may continue beyond the call."""
        self.input_nodes = input_nodes
        """The nodes through which autograd leaves the call. Empty if no input requires grad or the unit has inner units."""
        self.inputs_are_interior = bool(input_nodes) and all(map(_NEXT_FUNCTIONS, input_nodes))
        """Whether a node inside the graph made each input. The gradient of a leaf may be accumulated at any time."""
        self.entered_in = 0
        """The number of the last backward that entered the call, maybe through a side output of an inner unit."""
        self._left_in = 0
        """The number of the last backward that left the call."""
        self._backward = 0
        """The number of the backward for which `_nodes_left` counts."""
        self._nodes_left = 0
        """Input nodes that the backward has not reached yet."""

    def enter(self, backward: int) -> bool:
        """Record that `backward` enters the call; return True the first time, if it will reach any input node."""
        self.entered_in = backward
        if not self.input_nodes or self._backward == backward:
            return False
        self._backward = backward
        # under autograd.grad the engine does not say whether it runs the node of a leaf; then wait for it, at worst until
        # the end of the backward
        self._nodes_left = 0
        for node in self.input_nodes:
            self._nodes_left += not node.next_functions or torch._C._will_engine_execute_node(node)
        return self._nodes_left > 0

    def leave(self, backward: int) -> bool:
        """Record that `backward` reaches one of the input nodes; return whether that was the last one."""
        if self._backward != backward or not self._nodes_left:
            return False
        self._nodes_left -= 1
        if self._nodes_left:
            return False
        self._left_in = backward
        return True

    def is_over(self, backward: int) -> bool:
        """Whether `backward` has left the call or does not enter it. False if that cannot be known."""
        if not self.inputs_are_interior:
            return False
        if self._backward == backward:
            return self._left_in == backward
        return not any(map(torch._C._will_engine_execute_node, self.input_nodes))


class Visit:
    """What one backward does in one unit: gradients that arrived, calls that autograd entered and has not left.

    Invariants, which tests/patterns/visits.py checks: at rest nothing is recorded but the paths of calls. A visit in which a
    backward has recorded something is in `visited`, and whoever ends the backward resets it. A visit with open calls, or
    reached through a second graph, is entered. At least as many calls are open as followed paths have input nodes ahead.
    """

    __slots__ = (
        *("_open_calls", "_paths", "_via_second_graph", "_visited", "backward", "endpoint_handles", "entered"),
        *("has_grad", "latest", "lost_act", "tasks"),
    )

    def __init__(self, visited: "set[Visit]") -> None:
        """`visited`: the visits of all units of the root in which the backward that runs has recorded something."""
        self._visited = visited
        self.backward = 1
        """The number of this backward, or of the next one."""
        self._paths: list[weakref.ref[BackwardPath]] = []
        """The paths that were alive when the last call returned."""
        self.entered = False
        """Whether this backward has reached the unit."""
        self._via_second_graph = False
        """Whether this backward has reached the unit through nodes that an earlier backward made."""
        self.has_grad = False
        """Whether a gradient has arrived that is neither reduced nor accumulated yet."""
        self.latest: BackwardPath | None = None
        """The path of the latest call that may be entered where nothing else keeps it, until the end of the next backward."""
        self._open_calls = 0
        """Calls that this backward has entered and not left."""
        self.lost_act: Exception | None = None
        """What the user did in a recompute of this backward that torch stopped early; raised at the first gradient."""
        self.tasks: set[int] = set()
        """The graph tasks of reentrant checkpoints at whose end the unit may be ready."""
        self.endpoint_handles: dict[int, RemovableHandle] = {}
        """The hooks of this backward on endpoints of the paths, by the id of the tensor."""

    def reset(self) -> None:
        """The backward is over: record for the next one."""
        self.backward += 1
        self.entered = self._via_second_graph = self.has_grad = False
        self._open_calls = 0
        self.lost_act = self.latest = None
        self.tasks.clear()
        for handle in self.endpoint_handles.values():
            handle.remove()
        self.endpoint_handles.clear()

    def add_grad(self) -> None:
        """Record that a gradient has arrived."""
        self._visited.add(self)
        self.has_grad = True

    def take_grads(self) -> None:
        """Record that all gradients that have arrived are handed to the reducer."""
        self.has_grad = False

    def add_lost_act(self, act: Exception | None) -> None:
        """Record what the user did in a recompute that ends by an exception, in whose place no other can be raised."""
        self._visited.add(self)
        self.lost_act = act

    def add_path(self, path: BackwardPath) -> None:
        """Follow the path through a call that has returned."""
        self._paths = [reference for reference in self._paths if reference() is not None]
        self._paths.append(weakref.ref(path))

    def reach(self, path: BackwardPath) -> None:
        """Record that autograd is about to enter a call."""
        self._visited.add(self)
        self.entered = True
        if path.enter(self.backward):
            self._open_calls += 1

    def reach_again(self) -> None:
        """Record that autograd is about to run nodes that belong to no followed path, such as those of a second graph."""
        self._visited.add(self)
        self.entered = self._via_second_graph = True

    def leave(self, path: BackwardPath) -> bool:
        """Record that autograd is about to run a node behind an input of a call.

        Returns whether autograd has left the call with that. Never true after `reach_again`.
        """
        if not path.leave(self.backward):
            return False
        self._open_calls -= 1
        return not self._via_second_graph

    def is_ready(self) -> bool:
        """Whether autograd has left every call that this backward enters."""
        return not self._open_calls and all(map(BackwardPath.is_over, self.living_paths(), repeat(self.backward)))

    def is_ready_after_checkpoint(self) -> bool:
        """Whether the unit is ready at the end of the graph task of a reentrant checkpoint, which ends all calls in it."""
        return not self._open_calls and not self._via_second_graph

    def living_paths(self) -> list[BackwardPath]:
        """The paths whose graph, or that of a nested call, is alive."""
        return [path for reference in self._paths if (path := reference()) is not None]


class Pass:
    """One forward of a root, or one backward, while it runs. It is dropped at its end, and when it fails."""

    __slots__ = ("calls", "failed_unit", "graph_task")

    def __init__(self, graph_task: int = -1) -> None:
        self.calls: list[ForwardCall] = []
        """The calls of units that run, outermost first. In a backward these are recomputes."""
        self.failed_unit = 0
        """The unit whose forward failed first."""
        self.graph_task = graph_task
        """Of a backward: the graph task in which the first unit joined."""

    def end(self, call: ForwardCall) -> None:
        """A call ends, and with it those inside it that ended unnoticed."""
        if call in self.calls:
            del self.calls[self.calls.index(call) :]


class NodePrehook:
    """The pre-hook of one autograd node: reports the calls that autograd leaves and those that it reaches by running it.

    Each node has one hook, so that a unit that is left releases its memory before the next one allocates. The hook lives as
    long as the node and refers only to nodes that the backward runs later. A reference cycle through the graph would keep
    all activations alive.
    """

    KEY: ClassVar = "fsdp"

    __slots__ = ("__weakref__", "leaves", "reaches", "watched_by")

    def __init__(self) -> None:
        self.watched_by: set[int] = set()
        """The ids of the unit hooks whose units are reached through this node."""
        self.leaves: list[tuple[weakref.ref[BackwardPath], Callable[[BackwardPath, Sequence[Tensor | None]], None]]] = []
        self.reaches: list[tuple[Any, Callable[[Any, Sequence[Tensor | None]], None]]] = []
        """What is called, and with what: a path, a list of paths, or a path that the hook does not keep alive."""

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        for known, call in (*self.leaves, *self.reaches):
            path = known() if isinstance(known, weakref.ref) else known
            if path is not None:
                call(path, gradients)

    def leave(self, path: BackwardPath, on_leave: Callable[[BackwardPath, Sequence[Tensor | None]], None]) -> None:
        """Call `on_leave` when this node runs, as long as the path lives.

        Dead paths are removed here, because the node of a leaf outlives the graphs it is in.
        """
        self.leaves = [entry for entry in self.leaves if entry[0]() is not None]
        self.leaves.append((weakref.ref(path), on_leave))

    def reach(self, path: "weakref.ref[BackwardPath]", on_reach: Callable[[Any, Sequence[Tensor | None]], None]) -> None:
        """Call `on_reach` before this node runs, as long as the path lives. Dead paths are removed, as in `leave`."""
        self.reaches = [entry for entry in self.reaches if not isinstance(entry[0], weakref.ref) or entry[0]() is not None]
        self.reaches.append((path, on_reach))

    @classmethod
    def of(cls, node: Node) -> "NodePrehook":
        """The hook of `node`, registered now if there is none."""
        metadata: Any = node.metadata
        prehook: NodePrehook | None = metadata.get(cls.KEY)
        if prehook is None:
            prehook = metadata[cls.KEY] = cls()
            node.register_prehook(prehook)
        return prehook


def node_behind(tensor: Tensor, first: int = 0) -> Node | None:
    """The node that made `tensor` or, for a view of what node number `first` or a later one made, its base. None for a leaf."""
    if tensor._is_view() and tensor._base is not None and (node := tensor._base.grad_fn) and node._sequence_nr() >= first:
        return node
    return tensor.grad_fn


def grad_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """The tensors among the arguments that require grad."""
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs and forward_ad._current_level < 0:
        return args if args[0].requires_grad else ()
    return [tensor for tensor in with_tangents([*tensors_in(args), *tensors_in(kwargs)]) if tensor.requires_grad]


def with_tangents(tensors: list[Tensor]) -> list[Tensor]:
    """These tensors and, where forward-mode differentiation runs, their tangents: a backward comes to those too."""
    if forward_ad._current_level < 0:
        return tensors
    return tensors + [tangent for tensor in tensors if (tangent := _tangent_of(tensor)) is not None]


def _tangent_of(tensor: Tensor) -> Tensor | None:
    try:
        return forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-any-return, no-untyped-call]
    except (NotImplementedError, RuntimeError, TypeError):  # of a layout or a class that has none
        return None


def leads_to_a_unit(outputs: Sequence[Any]) -> bool:
    """Whether a backward from these tensors or edges enters a unit."""
    todo = {one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs} - {None}
    seen: set[Node] = set()
    while todo:
        seen |= todo
        # the node of a reentrant checkpoint hides what it recomputes
        if any(NodePrehook.KEY in cast(Any, node.metadata) or hasattr(node, "run_function") for node in todo):
            return True
        todo = {following for node in todo for following, _ in node.next_functions} - seen - {None}
    return False


def of_this_thread(args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> tuple[Any, Any]:
    """The arguments with a view of each of `inputs` that another thread may have computed.

    The node of the view is this thread's, so autograd runs it after those that the call makes, on every rank.
    """
    now = _next_number()
    late = {id(tensor) for tensor in inputs if tensor.grad_fn is not None and _is_late(tensor.grad_fn, now)}
    views = [one.view_as(one) if id(one) in late else one for one in (*args, *kwargs.values())]
    return tuple(views[: len(args)]), dict(zip(kwargs, views[len(args) :], strict=True))


def _is_late(node: Node, now: int) -> bool:
    """Whether another thread has made `node`, by its number. That of a leaf has the highest one."""
    return node._sequence_nr() >= now and bool(node.next_functions)


def is_batched(tensor: Tensor) -> bool:
    """Whether `tensor` is a batch of gradients under `is_grads_batched=True`."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
