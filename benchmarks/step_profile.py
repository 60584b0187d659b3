"""Where a training step over gloo goes, for every contender: torch's profiler over the cases of step.py, by kind of work.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --model tiny --option plain --contenders ddp ours_no_shard

Two processes, as in step.py, take the same steps under `torch.profiler`, and rank 0 says what its main thread did: arithmetic
(operators on values: layers, losses, optimizer, sums of gradients), moving (copies, zeros, joining and splitting), and the rest
of the time by the clock, which is Python, autograd's own work, and waiting for the other rank; the processor time of the
main thread shows which. The profiler makes every operator dearer, by the same for everybody, so shares say more than times;
step.py is what is judged.
"""

import gc
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from common import arguments, begin, markdown, no_standard_error, over_gloo, write
from engines import TITLES
from step import NAMES, OPTIONS, UNABLE, Runner, Settings, batches_of, make
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

DEFAULT = (("gpt8x256", "plain"), ("gpt4x512", "plain"), ("gpt8x256", "checkpoint"))
RANKS, WARM, STEPS = 2, 4, 8
MOVING = ("copy", "cat", "split", "zero", "fill", "clone", "contiguous", "empty", "resize", "unflatten", "flatten", "chunk")
COLUMNS = ("by the clock", "of the processor", "arithmetic", "moving", "the rest", "operators")


def kind_of(operator: str) -> str:
    return "moving" if any(word in operator for word in MOVING) else "arithmetic"


def profiled(runner: Runner, batches: Any) -> dict[str, Any]:
    """Of one step: milliseconds by the clock, of the processor, and of each kind; and how many operators there are."""
    runner.run(batches, WARM)
    gc.collect()
    dist.barrier()
    with no_standard_error(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        clock, processor = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            runner.step(batches)
        clock, processor = time.perf_counter() - clock, time.thread_time() - processor
    found: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    count = 0
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            found[kind_of(event.key)] += event.self_cpu_time_total
            operators[event.key] += event.self_cpu_time_total
            count += event.count
    kinds = {kind: found[kind] / STEPS / 1e3 for kind in ("arithmetic", "moving")}
    unsharded = 1e3 * clock / STEPS
    return {
        "by the clock": unsharded,
        "of the processor": 1e3 * processor / STEPS,
        **kinds,
        "the rest": unsharded - sum(kinds.values()),
        "operators": count / STEPS,
        "dearest": {name: spent / STEPS / 1e3 for name, spent in operators.most_common(12)},
    }


def work(rank: int, settings: Settings) -> dict[str, dict[str, Any]]:
    """What this rank's main thread did, for each contender."""
    module, batches = make(settings), batches_of(rank, settings)
    return {name: profiled(Runner(name, module, settings), batches) for name in settings.contenders}


def main() -> None:
    parser = arguments(__doc__, NAMES)
    parser.add_argument("--model", choices=WORKLOADS, help="one model; three cases by default")
    parser.add_argument("--option", choices=OPTIONS, default="plain")
    parser.add_argument("--small", action="store_true", help="small models, to see that all runs")
    options = parser.parse_args()
    report, names = begin("step_profile", options, NAMES)
    report["cases"] = []
    for model, option in [(options.model, options.option)] if options.model else DEFAULT:
        able = tuple(name for name in names if (name, option) not in UNABLE)
        settings = Settings(able, model, option, RANKS, 1, 1, options.small)
        found = over_gloo(work, settings, settings.ranks, options.timeout)
        report["cases"].append({"settings": asdict(settings), "contenders": found})
        print(f"\n{settings.label}: ms of a step on rank 0, under the profiler")
        rows = [[TITLES[name], *(f"{one[column]:.1f}" for column in COLUMNS)] for name, one in found.items()]
        print(markdown(["contender", *COLUMNS], rows), flush=True)
    write(report, [], options.out)


if __name__ == "__main__":
    main()
