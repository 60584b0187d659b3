"""The lifecycle of a sharded unit and its neighbours: states, events, tables, and the explorer.

It imports the standard library only; it never loads torch.

[Note: theory of operation]
There are seven machines. Each is a table from a state and an event to the next state and to what must be done. A machine does
nothing itself: it returns actions, in order, and `fsdp` executes them. A pair that has no row is an error, and changes nothing.

    machine        one for each   states                      file            who sends its events
    Lifecycle      unit           State (5)                   table.py        hooks of torch; Root, at the end of a backward
    the backward   root           BackwardState (6)           table.py        Root, for its units; the engine, for kind and end
    Residency      unit           ResidencyState (4)          residency.py    the actions of Lifecycle; prefetch; ends of passes
    Copy           unit           CopyState (3)               staleness.py    begins of passes and forwards; gathers; commits
    Bucket         bucket         BucketState (11), 5 kinds   bucket.py       arriving gradients; the reducer; UNITS
    UNITS          unit           UnitState (5)               bucket.py       gathers, post-backwards and uses outside the unit
    Paths          root           a common path of calls      paths.py        every gather, under `uneven_paths` alone

Who drives whom. `Root` has the lifecycles and copies of its units and the backward that they share. The engine has one `Root` and
the residencies, and the reducer has one `BucketQueue`, which holds the buckets and UNITS.

1. A hook becomes an event of one unit. `Root.on_event` asks the Lifecycle. If the unit joins a backward, it asks the backward as
   well: only the first unit that joins keeps the action JOIN_BACKWARD. In it the engine finds out the kind of the backward, gives
   it to the root (`begin`), and queues the final callback.
2. The actions UNSHARD, KEEP_UNSHARDED and RESHARD are requests to the Residency of the unit. Its effects allocate, gather, wait,
   change what the modules use, and free. Prefetch makes requests too, and changes no Lifecycle. So the Lifecycle says who
   computes, and the Residency says where the memory is.
3. Before an effect ALL_GATHER the Copy is asked (`before_gather`); after FREE_UNSHARDED it gets RELEASED. At DROP_STALE, and at
   the begin of a pass, it decides whether a copy from before may be used. If not, the unit is resharded, and gathered again.
4. Each unit whose gradients are complete asks the backward which event that is: POST_BACKWARD, or POST_BACKWARD_NO_SYNC. The
   action REDUCE_GRADS goes to UNITS; if the unit is done for the first time, its buckets get POST_BACKWARD. A bucket is launched
   when its table allows it (OFFER) and its group has its turn in the agreed order.
5. The final callback ends the backward (`end_backward`): every unit of the root gets FINAL_CALLBACK, FINAL_CALLBACK_NO_SYNC,
   BACKWARD_FAILED or STEP_ABANDONED. Everything that can fail, the wait for reductions included, comes before the first gradient
   is put into `.grad` by a COMMIT, or kept by an ACCUMULATE_UNSHARDED.
6. With `uneven_paths`, a gather that a rank wants first goes through Paths, which says what this rank gathers passively before.
   The other machines do not know of it: what is gathered passively has memory of its own.

What always holds between them. "At rest" is: between two events that were executed to their end.

- At rest, a unit computes if and only if its Residency is UNSHARDED. It computes in FORWARD and in BACKWARD_PRE. Elsewhere it
  is SHARDED; or UNSHARDING, if it was prefetched; or CACHED, if its policy keeps it. The end of a pass leaves none UNSHARDING.
- A unit in SUMMONED is SHARDED: the full parameters have memory of their own.
- No memory is freed while a collective writes it, and none is gathered twice.
- A Copy can be FRESH or UNSURE only while the unit is gathered or being gathered. A forward computes with a FRESH copy alone.
- What a Copy decides from one pass to the next is the same on all ranks: it follows the reshard policy, the passes, the
  backwards and a comparison over all ranks. Within a pass it also asks the version counters of this rank (USED_CHANGED).
- BACKWARD_PRE and BACKWARD_POST occur only while a backward of the root runs. FORWARD may hold through a whole backward: then
  the backward is inside that forward, the unit stays unsharded, and the backward ends in RESTING_INSIDE.
- A bucket leaves EMPTY, and a unit is done, only in a backward that reduces. The order of groups changes between backwards
  alone. The gradients of a backward are committed or accumulated for all units, or for none.
- STEP_ABANDONED is allowed in every state of a Lifecycle and of the backward. After it every unit is IDLE and SHARDED, nothing is
  in flight, and only what earlier backwards accumulated under `no_sync` is left.

What has no table: the path of autograd through a unit and one call of a unit (fsdp/autograd/visits.py), the order of prefetch
(fsdp/runtime/prefetch.py) and what is known of the peers (fsdp/comm/failure). Read table.py first, then root.py. What drives
the machines is in fsdp/runtime/passes.py.
"""

from state_machine.lifecycle import IllegalTransition, Lifecycle
from state_machine.residency import Effect, Request, Residency, ResidencyState
from state_machine.root import Instruction, Root
from state_machine.staleness import CopyAction, CopyEvent
from state_machine.table import BackwardEvent, BackwardState, ReshardPolicy
from state_machine.vocabulary import Action, Event, State

__all__ = [
    "Action",
    "BackwardEvent",
    "BackwardState",
    "CopyAction",
    "CopyEvent",
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
]
