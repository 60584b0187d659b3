"""When a unit is done with its parameters in a backward, and what may be told of it. Hears from hooks.py, decides no move.

[Note: when a unit is done with its parameters]
All its gradients having arrived is not enough: a frozen weight beside trainable ones, or a detached
use, is read by backward nodes no gradient of ours depends on. So a unit also waits until autograd
leaves it, which is when it is about to enter the nodes that made the inputs of each call. A unit
with inner units can be left through any of them, so it waits for the end of the backward.

[Note: what other ranks know]
A reduction may be launched early only at a moment every rank comes to, or a rank that waits for it
starves a peer that waits for a gather first. Which gradients arrive differs between ranks (a
parameter unused on one of them); the way autograd takes through the calls does not. When every call
of a unit has been left through nodes inside the graph, all its gradients have arrived, because
autograd runs later nodes first and accumulates at once: then the unit is ready, with zeros for what
did not come. A unit that is complete by counting alone keeps its gradients for the end of the backward.

[Note: second backwards]
A backward with create_graph=True makes nodes that read the unit's parameters again. Nobody can tell
when the last of them has run, nor where they lead into the graph of the forward, so a unit that is
reached through them waits for the end of the backward.
"""

import weakref
from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from fsdp.crossings import Way
from fsdp.stack import graph_task
from state_machine import Event


class Readiness:
    """What has arrived at one unit in this backward, and which of its calls autograd is still inside."""

    __slots__ = ("_again", "_backward", "_from_outside", "_innermost", "_reached_in", "_ways", "arrived", "open_calls")

    def __init__(self, innermost: bool) -> None:
        self._innermost = innermost
        self._backward = 1
        self._ways: list[weakref.ref[Way]] = []
        """Of the calls whose graph was alive at the last call."""
        self._reached_in = -1
        """The graph task that reached the unit last."""
        self._from_outside: set[int] = set()
        """Parameters whose gradient is about to come from a use outside the unit."""
        self._again = False
        """Reached through nodes that an earlier backward made."""
        self.arrived: dict[int, int] = {}
        """Of each parameter whose gradient came: the graph task it came in last."""
        self.open_calls = 0

    def reset(self) -> None:
        """A backward is over: for the next one nothing has arrived and nothing is open."""
        self._backward += 1
        self._reached_in = -1
        self._from_outside.clear()
        self._again = False
        self.arrived.clear()
        self.open_calls = 0

    def watch(self, way: Way) -> None:
        """A call has returned, and this is the way back through it."""
        self._ways = [*(one for one in self._ways if one() is not None), weakref.ref(way)]

    def reach(self, way: Way, inputs: Sequence[Node]) -> None:
        """Autograd is about to enter a call."""
        self._reached_in = graph_task()
        if inputs and way.backward != self._backward:
            way.backward = self._backward
            # autograd.grad does not say whether it comes to a leaf: wait for it, at worst until the backward ends
            way.pending = sum(not node.next_functions or torch._C._will_engine_execute_node(node) for node in inputs)
            if way.pending:
                self.open_calls += 1

    @property
    def reached(self) -> bool:
        """Whether this backward has come to the unit."""
        return self._reached_in != -1

    def reach_again(self) -> None:
        """Autograd is about to enter nodes that an earlier backward through the unit made, or that nothing leads to."""
        self._reached_in = graph_task()
        self._again = True

    def leave(self, way: Way, trainable: int) -> Event | None:
        """Autograd is about to enter a node behind an input of a call; return what this completes, if anything."""
        if way.backward != self._backward or not way.pending:
            return None
        way.pending -= 1
        if way.pending:
            return None
        self.open_calls -= 1
        way.left_in = self._backward
        if self._again:
            return None
        if not trainable:
            return Event.BACKWARD_LEFT
        if not self.open_calls and all(self._left(one) and one.through_graph for one in self.living_ways()):
            return Event.GRADIENTS_READY
        return self._complete(trainable)

    def expect_from_outside(self, number: int) -> None:
        """The next gradient of a parameter comes from a use outside the unit, perhaps added to one from inside."""
        self._from_outside.add(number)

    def came_from_outside(self, number: int) -> bool:
        """Whether the gradient that has just arrived is the one that was expected. Asked once."""
        if number in self._from_outside:
            self._from_outside.remove(number)
            return True
        return False

    def arrive(self, number: int, trainable: int) -> Event | None:
        """A gradient of one parameter has been accumulated; return what this completes, if anything."""
        arrived = self.arrived
        arrived[number] = graph_task()
        # one that came from a checkpoint inside the unit may not be the last: then only leaving, or the end, tells
        if len(arrived) == trainable and all(task == self._reached_in for task in arrived.values()):
            return self._complete(trainable)
        return None

    def _complete(self, trainable: int) -> Event | None:
        if len(self.arrived) < trainable or self.open_calls or self._again or not self._innermost:
            return None
        # the inputs of a replay are leaves for autograd, and not for the user
        living = self.living_ways()
        taken = [way for way in living if way.backward == self._backward]
        early = taken and all(self._left(way) and (way.through_graph or way.replay) for way in taken)
        # a call that nobody can see being left is over at the same moment on every rank only at the end
        early = early and not any(way.unseen and not way.replay for way in living)
        return Event.GRADIENTS_READY if early else Event.GRADIENTS_KEPT

    def _left(self, way: Way) -> bool:
        return way.left_in == self._backward

    def living_ways(self) -> list[Way]:
        """The ways through calls whose graph is alive."""
        return [way for reference in self._ways if (way := reference()) is not None]
