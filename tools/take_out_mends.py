"""Takes out, one at a time, what makes acts between two hooks right, until the random programs of tests/acts show it.

python -m tools.take_out_mends                     all of them, each in a process of its own; fails if one is not noticed
python -m tools.take_out_mends --one NAME          one of them, in this process
python -m tools.take_out_mends --programs 2000     after so many programs a mend counts as not noticed
"""

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch

from fsdp.api import wrap
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.reduction import accumulated
from fsdp.reduction.reducer import Reducer
from fsdp.runtime import steps
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
    def from_the_shards(flat: FlatBuffer) -> bool:
        flags = [p.requires_grad for p in flat.sharded_params]
        changed, flat.requires_grad_flags = flags != flat.requires_grad_flags, flags
        for parameter, flag in zip(flat.unsharded_params, flags, strict=True) if changed else ():
            parameter.requires_grad_(flag)
        return changed

    patch.object(FlatBuffer, "sync_requires_grad", from_the_shards).start()


def _steps_of_unreduced_gradients() -> None:
    patch.object(steps, "_look_at_step", _nothing).start()
    patch.object(accumulated, "mark_unreduced", _nothing).start()


def _sizes_of_parts() -> None:
    patch.object(ShardTensor, "shape", property(lambda shard: torch.Size(shard.shard_info.local_shape))).start()


def _any_gradient_in_tensor_hooks() -> None:
    patch.object(Reducer, "_shown_grads", lambda reducer: {}).start()


def _forwards_in_tensor_hooks() -> None:
    patch.object(Engine, "refuse_in_grad_hook", _nothing).start()


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


MENDS: Final[dict[str, Callable[[], None]]] = {
    "requires_grad set between a forward and its backward": _flags_at_the_forward_only,
    "requires_grad set inside a forward": _flags_of_shards_only,
    "steps and reads of gradients under no_sync": _steps_of_unreduced_gradients,
    "the shape of a shard is that of its parameter": _sizes_of_parts,
    "gradients set in a tensor hook": _any_gradient_in_tensor_hooks,
    "forwards in a tensor hook": _forwards_in_tensor_hooks,
    "p.data is replaced and put back": _data_where_it_was,
    "weights changed through p.data": _changes_through_aliases,
    "grad_dtype": _any_grad_dtype,
    "forked processes": _forked_processes,
    "models that are wrapped in inference mode": _shards_made_in_inference_mode,
    "embeddings with max_norm": _embeddings_that_renormalise,
}
"""By name, what takes the mend out."""
BATCH: Final = 100


def is_noticed(name: str, programs: int) -> bool:
    """Take out the mend, and play random programs until one is a fault. Print that one."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from tests.acts.machine import ActsAtAnyMoment

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    MENDS[name]()
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
