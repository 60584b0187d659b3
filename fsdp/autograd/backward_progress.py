"""When a unit is done with its parameters in a backward, and what may be told of it. Hears from hooks.py, decides no move.

[Note: when a unit is done with its parameters]
Its gradients having arrived does not say it: a frozen weight beside trainable ones, or a detached
use, is read by backward nodes no gradient of ours depends on. So a unit waits until autograd leaves
it, which is when it is about to enter the nodes that made the inputs of each call. A unit whose
inputs need no gradient, or with inner units, through any of which it can be left, waits for the end
of the backward.

[Note: what other ranks know]
A reduction may be launched early, and parameters may be given back that may be gathered again, only
at a moment every rank comes to, or a rank that waits for the one starves a peer that waits for the
other. Which gradients arrive differs between ranks (a parameter unused on one of them), so nobody
counts them; the way autograd takes through the calls does not. When every call this backward goes
through has been left through nodes inside the graph, all gradients have arrived, because autograd
runs later nodes first and accumulates at once: then the unit is ready, with zeros for what did not
come. The inputs of a reentrant replay are leaves, whose gradients are accumulated out of turn, so
there the moment is the end of the checkpoint's own backward.

[Note: second backwards]
A backward with create_graph=True makes nodes that read the unit's parameters again. Nobody can tell
when the last of them has run, nor where they lead into the graph of the forward, so a unit that is
reached through them waits for the end of the backward.
"""

import weakref
from collections.abc import Callable

import torch

from fsdp.autograd.node_hooks import Way


class Readiness:
    """Whether gradients have arrived at one unit in this backward, and which of its calls autograd is still inside."""

    __slots__ = ("_again", "_open_calls", "_ways", "arrived", "backward", "reached")

    def __init__(self) -> None:
        self.backward = 1
        """Its number."""
        self._ways: list[weakref.ref[Way]] = []
        """Of the calls whose graph, or that of a call inside, was alive at the last call."""
        self.reached = False
        """This backward has come to the unit."""
        self._again = False
        """Reached through nodes that an earlier backward made."""
        self.arrived = False
        """A gradient came, and is not reduced or kept."""
        self._open_calls = 0

    def reset(self) -> None:
        """A backward is over: for the next one nothing has arrived and nothing is open."""
        self.backward += 1
        self.reached = False
        self._again = False
        self.arrived = False
        self._open_calls = 0

    def watch(self, way: Way, gone: Callable[[weakref.ref[Way]], None]) -> None:
        """A call has returned, and this is the way back through it; `gone` is called when its graph is."""
        self._ways = [*(one for one in self._ways if one() is not None), weakref.ref(way, gone)]

    def reach(self, way: Way) -> None:
        """Autograd is about to enter a call."""
        self.reached = True
        way.reached_in = self.backward
        if way.inputs and way.backward != self.backward:
            way.backward = self.backward
            # autograd.grad does not say whether it comes to a leaf: wait for it, at worst until the backward ends
            way.pending = sum(not node.next_functions or torch._C._will_engine_execute_node(node) for node in way.inputs)
            if way.pending:
                self._open_calls += 1

    def reach_again(self) -> None:
        """Autograd is about to enter nodes that an earlier backward through the unit made, or that nothing leads to."""
        self.reached = True
        self._again = True

    def leave(self, way: Way) -> bool:
        """Autograd is about to enter a node behind an input of a call; return whether it leaves it with that."""
        if way.backward != self.backward or not way.pending:
            return False
        way.pending -= 1
        if way.pending:
            return False
        self._open_calls -= 1
        way.left_in = self.backward
        return not self._again

    def is_ready(self) -> bool:
        """Whether every call this backward goes through is over."""
        return not self._open_calls and all(map(self._is_over, self.living_ways()))

    def is_ready_after_checkpoint(self) -> bool:
        """The same, at the end of the backward of a reentrant checkpoint, in which calls are over that were entered."""
        return not self._open_calls and not self._again

    def _is_over(self, way: Way) -> bool:
        """Whether this backward has come out of a call, or does not go through it."""
        if not way.through_graph:
            return False
        if way.backward == self.backward:
            return way.left_in == self.backward
        return not any(map(torch._C._will_engine_execute_node, way.inputs))

    def living_ways(self) -> list[Way]:
        """The ways through calls whose graph, or that of a call inside, is alive."""
        return [way for reference in self._ways if (way := reference()) is not None]
