"""Finds two threads that use one model at once. Costs nothing until something is wrong already.

A root has one state, for one pass at a time. A second thread inside it looks like a forward that Ctrl-C has ended, or like an
event that no table allows. So the stacks of all threads are searched before either is believed.
"""

import sys
import threading
from collections.abc import Mapping

from fsdp.autograd.frames import UnitCall, innermost_call
from fsdp.comm.simulated import current_rank
from fsdp.errors import ShardingError


def refuse_two_threads(units: Mapping[int, str], in_backward: bool) -> None:
    """Refuse the use of a root by this thread while another thread is inside it.

    `units`: the name of each unit, the root's first, by the id of its module. `in_backward`: a backward of the root runs.

    Raises:
        ShardingError: another thread is inside. The text says what each thread does, and where.
    """
    me = threading.current_thread()
    if isinstance(me, threading._DummyThread):
        return  # a thread of autograd's own works for another one
    frames = sys._current_frames()
    mine = innermost_call(frames[threading.get_ident()], units)
    # ranks of a simulated world are threads as well, with models of their own; a backward does not show whose it is
    seek_backward = in_backward and current_rank() is None and not mine.in_backward
    for thread in threading.enumerate():
        theirs = innermost_call(frames.get(thread.ident or 0), units)
        if thread is not me and (theirs.unit is not None or (theirs.in_backward and seek_backward)):
            raise ShardingError(
                f"two threads use the model {next(iter(units.values()))!r} at once: {thread.name} is {_describe(theirs, units)}, "
                f"and {me.name} is {_describe(mine, units)}. Let one thread at a time use a model: put a lock around each step, "
                "or give each thread a model of its own."
            ) from None


def _describe(call: UnitCall, units: Mapping[int, str]) -> str:
    if call.unit is not None:
        return f"in the forward of unit {units[call.unit]!r} ({call.place})"
    return f"in a backward ({call.place})" if call.in_backward else f"at {call.place}"
