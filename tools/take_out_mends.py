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
from collections.abc import Callable
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


def _flags_at_the_forward_only() -> None:
    sync = Unit.sync_requires_grad

    def outside_backwards(unit: Unit) -> None:
        if torch._C._current_graph_task_id() == -1:
            sync(unit)

    patch.object(Unit, "sync_requires_grad", outside_backwards).start()


def _flags_of_shards_only() -> None:
    patch.object(FlatBuffer, "take_requires_grad", lambda flat: False).start()


def _steps_of_unreduced_gradients() -> None:
    patch.object(Engine, "has_unreduced_grads", False).start()
    patch.object(accumulated, "UnreducedGrad", accumulated.ShardTensor).start()


def _sizes_of_parts() -> None:
    patch.object(ShardTensor, "shape", property(lambda shard: torch.Size(shard.shard_info.local_shape))).start()


def _gradients_of_before() -> None:
    patch.object(Unit, "begin_pending", _nothing).start()


def _gradients_that_modules_show() -> None:
    patch.object(Unit, "on_listed", lambda unit, _: unit.sync_requires_grad()).start()


def _any_removal_of_hooks() -> None:
    patch.object(FlatBuffer, "refuse_removed_hook", _nothing).start()


def _recomputes_in_post_accumulate_hooks() -> None:
    patch.object(forward_hooks, "in_grad_hook", lambda: False).start()


def _any_parameter() -> None:
    patch.object(Unit, "_refuse_put_in", _nothing).start()


def _any_dtype_of_gradients() -> None:
    patch.object(FlatBuffer, "refuse_grads_of_other_dtype", _nothing).start()


def _data_where_it_was() -> None:
    patch.object(FlatBuffer, "_are_at_home", lambda flat: True).start()


def _changes_through_aliases() -> None:
    patch.object(shard_tensor, "_count_change", _nothing).start()


def _any_grad_dtype() -> None:
    patch.object(ShardTensor, "grad_dtype", torch.Tensor.grad_dtype).start()


def _forked_processes() -> None:
    patch.object(Unit, "refuse_forked", _nothing).start()


def _shards_made_in_inference_mode() -> None:
    patch.object(wrap, "torch", SimpleNamespace(inference_mode=lambda on: nullcontext())).start()


def _embeddings_that_renormalise() -> None:
    patch.object(wrap, "check_renormalised", _nothing).start()


def _lists_of_parameters() -> None:
    patch.object(InterceptingParamDict, "_tell_that_listed", _nothing).start()


def _flags_in_hooks() -> None:
    patch.object(Unit, "refuse_changed_flags", _nothing).start()


def _data_replaced_in_a_backward() -> None:
    patch.object(Unit, "refuse_repointed", _nothing).start()


class Mend(NamedTuple):
    """What takes a mend out, and an act at a moment, on the second unit or the first, that shows it."""

    take_out: Callable[[], None]
    act: str
    moment: str
    block: int = 0


MENDS: Final = {
    "requires_grad set between a forward and its backward": Mend(
        _flags_at_the_forward_only, "evaluate with the model frozen, and thaw it", "between forward and backward"
    ),
    "requires_grad set inside a forward": Mend(_flags_of_shards_only, "freeze a parameter", "in a pre-hook"),
    "steps and reads of gradients under no_sync": Mend(
        _steps_of_unreduced_gradients, "optimizer.step()", "between micro-batches"
    ),
    "the shape of a shard is that of its parameter": Mend(_sizes_of_parts, "read p.shape", "before a forward"),
    "gradients that are not reduced yet": Mend(_gradients_of_before, "set p.grad to ones", "in a tensor hook", 1),
    "gradients that modules show in a backward": Mend(
        _gradients_that_modules_show, "read a gradient of the root", "in a hook of an activation", 1
    ),
    "a hook that is removed before it has run": Mend(_any_removal_of_hooks, "remove the last hook", "in a tensor hook", 1),
    "forwards in a post-accumulate hook": Mend(
        _recomputes_in_post_accumulate_hooks, "replace p.data, evaluate, put it back", "in a post-accumulate hook"
    ),
    "a parameter that is put in inside a forward": Mend(_any_parameter, "replace a parameter", "in a pre-hook"),
    "grad_dtype inside a forward": Mend(_any_dtype_of_gradients, "set p.grad_dtype", "in a pre-hook"),
    "p.data is replaced and put back": Mend(_data_where_it_was, "replace p.data, evaluate, put it back", "before a forward"),
    "weights changed through p.data": Mend(_changes_through_aliases, "change a weight through .data", "in a pre-hook", 1),
    "grad_dtype": Mend(_any_grad_dtype, "set p.grad_dtype", "before a forward"),
    "changes of parameters that a backward lists": Mend(
        _lists_of_parameters, "change a weight of the root in place", "in a recompute", 1
    ),
    "requires_grad set in a hook of a backward": Mend(_flags_in_hooks, "freeze the model", "in a tensor hook", 1),
    "an evaluation with other weights inside a backward": Mend(
        _data_replaced_in_a_backward, "replace p.data, evaluate, put it back", "in a recompute", 1
    ),
    "forked processes": Mend(_forked_processes, "call the model in a forked process", "before a forward"),
    "models that are wrapped in inference mode": Mend(
        _shards_made_in_inference_mode, "make and wrap a model in inference mode", "before a forward"
    ),
    "embeddings with max_norm": Mend(
        _embeddings_that_renormalise, "make and wrap a model whose embedding has max_norm", "before a forward"
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
    mend.take_out()
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
