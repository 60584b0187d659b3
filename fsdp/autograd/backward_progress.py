"""How far a backward has come in one unit: whether gradients have arrived, and whether autograd has left all its calls.

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

import weakref
from collections.abc import Callable

from fsdp.autograd.visits import BackwardPath


class BackwardProgress:
    """What one backward has done in one unit: gradients that arrived, calls that autograd entered and has not left."""

    __slots__ = ("_entered_via_second_graph", "_open_calls", "_paths", "backward", "entered", "has_grad")

    def __init__(self) -> None:
        self.backward = 1
        """The number of this backward."""
        self._paths: list[weakref.ref[BackwardPath]] = []
        """The paths that were alive when the last call returned."""
        self.entered = False
        """Whether this backward has reached the unit."""
        self._entered_via_second_graph = False
        """Whether this backward has reached the unit through nodes that an earlier backward made."""
        self.has_grad = False
        """Whether a gradient has arrived that is neither reduced nor accumulated yet."""
        self._open_calls = 0
        """Calls that this backward has entered and not left."""

    def reset(self) -> None:
        """Start counting for the next backward."""
        self.backward += 1
        self.entered = False
        self._entered_via_second_graph = False
        self.has_grad = False
        self._open_calls = 0

    def add_grad(self) -> None:
        """Record that a gradient has arrived."""
        self.has_grad = True

    def take_grads(self) -> None:
        """Record that all gradients that have arrived are handed to the reducer."""
        self.has_grad = False

    def add_path(self, path: BackwardPath, on_freed: Callable[[weakref.ref[BackwardPath]], None]) -> None:
        """Follow the path through a call that has returned. `on_freed` is called when its graph is freed."""
        self._paths = [reference for reference in self._paths if reference() is not None]
        self._paths.append(weakref.ref(path, on_freed))

    def reach(self, path: BackwardPath) -> None:
        """Record that autograd is about to enter a call."""
        self.entered = True
        if path.enter(self.backward):
            self._open_calls += 1

    def reach_again(self) -> None:
        """Record that autograd is about to run nodes that belong to no followed path, such as those of a second graph."""
        self.entered = True
        self._entered_via_second_graph = True

    def leave(self, path: BackwardPath) -> bool:
        """Record that autograd is about to run a node behind an input of a call.

        Returns whether autograd has left the call with that. Never true after `reach_again`.
        """
        if not path.leave(self.backward):
            return False
        self._open_calls -= 1
        return not self._entered_via_second_graph

    def is_ready(self) -> bool:
        """Whether autograd has left every call that this backward enters."""
        return not self._open_calls and all([path.is_over(self.backward) for path in self.living_paths()])

    def is_ready_after_checkpoint(self) -> bool:
        """Whether the unit is ready at the end of the graph task of a reentrant checkpoint, which ends all calls in it."""
        return not self._open_calls and not self._entered_via_second_graph

    def living_paths(self) -> list[BackwardPath]:
        """The paths whose graph, or that of a nested call, is alive."""
        return [path for reference in self._paths if (path := reference()) is not None]
