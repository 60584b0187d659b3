"""Where autograd enters and leaves the calls of units: nodes, and the one hook each of them carries.

[Note: views]
A pre-backward hook is put on the node of the *base* of a returned view: an in-place edit of the
view outside gives the view a new node, and a hook on the old one would never fire.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fsdp.autograd.pytree import tensors_in

Ends = Sequence[weakref.ref[Tensor]]


class Call:
    """One forward of one unit, while it runs."""

    __slots__ = ("carried", "exits", "guard", "handled", "nested", "outputs", "records", "refused", "taken", "way")

    def __init__(self, replay: bool, inputs: Sequence[Tensor], innermost: bool, versions: int) -> None:
        self.exits = nodes_of(inputs)
        """The distinct nodes behind the inputs: of a leaf, the one that accumulates its gradient."""
        # one with inner units can be left through any of them
        self.way = Way(replay, versions, inputs, self.exits if innermost else ())
        self.outputs: list[Tensor] = []
        # an exception that was being handled before the call is not one that passes through it
        self.handled = sys.exc_info()[1]
        self.guard: Any = None
        """What watches it, in guard mode."""
        self.records = torch.is_grad_enabled()
        """Whether it makes a graph; not so in a reentrant checkpoint, whose outputs get one when it is over."""
        self.carried: list[weakref.ref[Tensor]] = []
        """What the user's hooks had carried off when it began, in a call around it."""
        self.taken: list[tuple[Tensor, Tensor]] = []
        """Parts of shards, and their values before an edit of this call was taken."""
        self.refused = False
        self.nested = False
        """Called from inside its own forward: by a recursion, or by a method that is registered as a forward."""

    def nest_in(self, outer: "Call") -> None:
        """It is a part of `outer`, and a gradient may be asked of its inputs as well."""
        self.nested = True
        outer.way.ends += self.way.ends
        self.way = outer.way

    def give_up(self) -> None:
        """It will not end: end its guard, and keep nothing of its graph."""
        if self.guard is not None:
            self.guard.end()
        self.exits, self.outputs, self.way = (), [], Way(self.way.replay, self.way.versions, (), ())


class Way:
    """A backward's way through one call of one unit. Lives as long as the graph of the call, or of one inside it."""

    __slots__ = (
        "__weakref__",
        "around",
        "backward",
        "ends",
        "inputs",
        "led_to",
        "left_in",
        "pending",
        "reached_in",
        "replay",
        "through_graph",
        "versions",
    )

    def __init__(self, replay: bool, versions: int, inputs: Sequence[Tensor], exits: Sequence[Node]) -> None:
        self.replay = replay
        self.versions = versions
        """Of the shards it computes with, and what it changes in them."""
        self.ends = [weakref.ref(tensor) for tensor in inputs]
        """The inputs, and the outputs of a call that has ended: a gradient may be asked of them while somebody still has them."""
        self.around: Sequence[tuple[Any, Way]] = ()
        """The listeners of the units in whose calls this one was made, and the ways through these."""
        self.led_to = bool(inputs)
        """An input requires grad, so that a backward may go on where it came from."""
        self.inputs = exits
        """The nodes by which autograd leaves it, if any input requires grad."""
        self.through_graph = bool(exits) and all(node.next_functions for node in exits)
        """It is left, and every input was made by a node; the gradient of a leaf is accumulated out of turn."""
        self.reached_in = 0
        """The backward that reached it last."""
        self.left_in = 0
        """The backward that left last."""
        self.backward = 0
        """The backward in which `pending` counts."""
        self.pending = 0
        """Nodes behind the inputs that this backward has not come to yet."""


class Crossing:
    """Autograd is about to enter one node: calls it leaves that way, and calls it reaches.

    One hook a node, because the unit that is left gives its memory back before the next one takes
    some. It lives as long as the node, and refers only to nodes further on in the backward: a cycle
    through the graph would keep every activation alive.
    """

    KEY: ClassVar = "fsdp"

    __slots__ = ("leaves", "reaches", "watched_by")

    def __init__(self) -> None:
        self.watched_by: set[int] = set()
        """The ids of the listeners whose units are reached this way."""
        self.leaves: list[tuple[weakref.ref[Way], Callable[[Way, Sequence[Tensor | None]], None]]] = []
        self.reaches: list[Callable[[Sequence[Tensor | None]], None]] = []

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        for reference, leave in tuple(self.leaves):
            way = reference()
            if way is not None:
                leave(way, gradients)
        for reach in tuple(self.reaches):
            reach(gradients)

    def leave(self, way: Way, tell: Callable[[Way, Sequence[Tensor | None]], None]) -> None:
        """This is the way out of a call. A leaf outlives the graphs it is in, so ways are forgotten when they are dead."""
        self.leaves = [one for one in self.leaves if one[0]() is not None]
        self.leaves.append((weakref.ref(way), tell))

    @classmethod
    def of(cls, node: Node) -> "Crossing":
        """The crossing of `node`, put there if it has none."""
        metadata = cast(dict[str, Any], node.metadata)
        found: Crossing | None = metadata.get(cls.KEY)
        if found is None:
            found = metadata[cls.KEY] = cls()
            node.register_prehook(found)
        return found


def node_behind(tensor: Tensor) -> Node | None:
    if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
        return tensor._base.grad_fn
    return tensor.grad_fn


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """The inputs that require grad."""
    if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
        return args if args[0].requires_grad else ()
    return [tensor for tensor in (*tensors_in(args), *tensors_in(kwargs)) if tensor.requires_grad]


def nodes_of(tensors: Sequence[Tensor]) -> Sequence[Node]:
    """The distinct nodes behind tensors that require grad."""
    return tuple(dict.fromkeys(tensor.grad_fn or get_gradient_edge(tensor).node for tensor in tensors))


def is_batched(tensor: Tensor) -> bool:
    """Whether it stands for several, under `is_grads_batched=True`."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
