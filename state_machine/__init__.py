"""The lifecycle of a sharded unit and its neighbours: states, events, tables, and the explorer.

It imports the standard library only; it never loads torch.
"""

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.residency import Effect, Request, Residency, ResidencyState
from state_machine.root import Instruction, Root
from state_machine.staleness import CopyAction, CopyEvent, CopyState
from state_machine.table import TABLES, BackwardEvent, BackwardState, ReshardPolicy, Step
from state_machine.vocabulary import Action, Event, State

__all__ = [
    "TABLES",
    "Action",
    "BackwardEvent",
    "BackwardState",
    "CopyAction",
    "CopyEvent",
    "CopyState",
    "Effect",
    "Event",
    "IllegalTransition",
    "Instruction",
    "Lifecycle",
    "Request",
    "ReshardPolicy",
    "Residency",
    "ResidencyState",
    "Root",
    "State",
    "Step",
]
