"""Takes out, one at a time, what makes acts between two hooks right, until the programs of tests/acts show it.

First an act and a moment are played that show it, with the mend and without. Then random programs, until one is a fault.

python -m tools.take_out_mends                     all of them, each in a process of its own; fails if one is not noticed
python -m tools.take_out_mends --one NAME          one of them, in this process
python -m tools.take_out_mends --programs 5000     after so many programs a mend counts as not noticed; 0: plays one known program
"""

import argparse
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from fsdp.api import wrap
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.shown_params import InterceptingParamDict
from fsdp.params.unit import Unit
from fsdp.reduction import accumulated
from fsdp.runtime import forward_hooks
from fsdp.runtime.engine import Engine
from fsdp.shards import shard_tensor
from fsdp.shards.shard_tensor import ShardTensor


def _nothing(*args: Any) -> None:
    """What is left of a mend."""


_sync_flags: Final = Unit.sync_requires_grad


def _sync_flags_outside_backwards(unit: Unit) -> None:
    if torch._C._current_graph_task_id() == -1:
        _sync_flags(unit)


class Mend(NamedTuple):
    """An act at a moment, on the second unit or the first, that shows a mend; and what is replaced to take the mend out."""

    act: str
    moment: str
    patches: list[Any]
    block: int = 0


MENDS: Final = {
    "requires_grad set between a forward and its backward": Mend(
        "evaluate with the model frozen, and thaw it",
        "between forward and backward",
        [patch.object(Unit, "sync_requires_grad", _sync_flags_outside_backwards)],
    ),
    "requires_grad set inside a forward": Mend(
        "freeze a parameter", "in a pre-hook", [patch.object(FlatBuffer, "take_requires_grad", lambda flat: False)]
    ),
    "steps and reads of gradients under no_sync": Mend(
        "optimizer.step()",
        "between micro-batches",
        [patch.object(Engine, "has_unreduced_grads", False), patch.object(accumulated, "UnreducedGrad", accumulated.ShardTensor)],
    ),
    "the shape of a shard is that of its parameter": Mend(
        "read p.shape",
        "before a forward",
        [patch.object(ShardTensor, "shape", property(lambda shard: torch.Size(shard.shard_info.local_shape)))],
    ),
    "gradients that are not reduced yet": Mend(
        "set p.grad to ones", "in a tensor hook", [patch.object(Unit, "begin_pending", _nothing)], 1
    ),
    "gradients that modules show in a backward": Mend(
        "read a gradient of the root",
        "in a hook of an activation",
        [patch.object(Unit, "on_listed", lambda unit, _: unit.sync_requires_grad())],
        1,
    ),
    "a hook that is removed before it has run": Mend(
        "remove the last hook", "in a tensor hook", [patch.object(FlatBuffer, "refuse_removed_hook", _nothing)], 1
    ),
    "forwards in a post-accumulate hook": Mend(
        "replace p.data, evaluate, put it back",
        "in a post-accumulate hook",
        [patch.object(forward_hooks, "in_grad_hook", lambda: False)],
    ),
    "a parameter that is put in inside a forward": Mend(
        "replace a parameter", "in a pre-hook", [patch.object(Unit, "_refuse_put_in", _nothing)]
    ),
    "grad_dtype inside a forward": Mend(
        "set p.grad_dtype", "in a pre-hook", [patch.object(FlatBuffer, "refuse_grads_of_other_dtype", _nothing)]
    ),
    "p.data is replaced and put back": Mend(
        "replace p.data, evaluate, put it back", "before a forward", [patch.object(FlatBuffer, "_are_at_home", lambda flat: True)]
    ),
    "weights changed through p.data": Mend(
        "change a weight through .data", "in a pre-hook", [patch.object(shard_tensor, "_count_change", _nothing)], 1
    ),
    "grad_dtype": Mend(
        "set p.grad_dtype", "before a forward", [patch.object(ShardTensor, "grad_dtype", torch.Tensor.grad_dtype)]
    ),
    "changes of parameters that a backward lists": Mend(
        "change a weight of the root in place",
        "in a recompute",
        [patch.object(InterceptingParamDict, "_tell_that_listed", _nothing)],
        1,
    ),
    "requires_grad set in a hook of a backward": Mend(
        "freeze the model", "in a tensor hook", [patch.object(Unit, "refuse_changed_flags", _nothing)], 1
    ),
    "an evaluation with other weights inside a backward": Mend(
        "replace p.data, evaluate, put it back", "in a recompute", [patch.object(Unit, "refuse_repointed", _nothing)], 1
    ),
    "forked processes": Mend(
        "call the model in a forked process", "before a forward", [patch.object(Unit, "refuse_forked", _nothing)]
    ),
    "models that are wrapped in inference mode": Mend(
        "make and wrap a model in inference mode",
        "before a forward",
        [patch.object(wrap, "torch", SimpleNamespace(inference_mode=lambda on: nullcontext()))],
    ),
    "embeddings with max_norm": Mend(
        "make and wrap a model whose embedding has max_norm",
        "before a forward",
        [patch.object(wrap, "check_renormalised", _nothing)],
    ),
}
BATCH: Final = 100


def is_noticed(name: str, programs: int) -> bool:
    """Take out the mend, and play the program that shows it, then random ones until one is a fault. Print that one."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from tests.acts import table
    from tests.acts.machine import ActsAtAnyMoment

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mend = MENDS[name]
    pair = table.Pair(mend.act, mend.moment, mend.block, "FULL_SHARD")
    before = table.outcome(pair)
    for one in mend.patches:
        one.start()
    after = table.outcome(pair)
    print(
        f"{name}: {mend.act}, {mend.moment}: {before[0]}; without the mend: {(after[1].fault or after[0]).partition(chr(10))[0]}",
        flush=True,
    )
    if before[0] == "fault" or after[0] != "fault":
        return False
    if not programs:
        return True
    settings = hypothesis.settings(
        max_examples=BATCH,
        deadline=None,
        report_multiple_bugs=False,
        database=None,
        stateful_step_count=12,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    begin = time.process_time()
    for seed in range(programs // BATCH):
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(ActsAtAnyMoment), settings=settings)
        except AssertionError as fault:
            spent = f"{time.process_time() - begin:.0f} s of processor time"
            print(f"{name}: noticed with at most {(seed + 1) * BATCH} programs, {spent}:\n{fault}\n", flush=True)
            return True
    print(f"{name}: NOT NOTICED by {programs} programs", flush=True)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=list(MENDS))
    parser.add_argument("--programs", type=int, default=2000)
    asked = parser.parse_args()
    if asked.one:
        sys.exit(not is_noticed(asked.one, asked.programs))
    command = [sys.executable, "-m", "tools.take_out_mends", "--programs", str(asked.programs), "--one"]
    silent = [name for name in MENDS if subprocess.run([*command, name], check=False).returncode]
    assert not silent, f"nobody notices that these are taken out: {silent}"


if __name__ == "__main__":
    main()
