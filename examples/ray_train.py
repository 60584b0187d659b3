"""Ray Train: two workers train, one is killed, and Ray starts both again, which go on from the newest checkpoint.

    pip install "ray[train]"
    python examples/ray_train.py runs/ray --kill-at 5

Ray starts the workers and their process group. The loop is that of resume.py. Workers on several hosts need a shared folder.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray import train as ray_train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

WORKERS = 2


def loop(config: dict[str, Any]) -> None:
    """What each worker runs, at each start."""
    from resume import train

    rank = ray_train.get_context().get_world_rank()
    loss = train(rank, Path(config["folder"]), config["kill_at"])
    if rank == 0:
        Path(config["folder"], "loss").write_text(repr(loss), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints: all hosts see it")
    parser.add_argument("--kill-at", type=int, help="kill rank 1 in this step, once")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # the examples and their folder are where the driver runs: workers import resume.py from there
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}}, include_dashboard=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "kill_at": given.kill_at},
        torch_config=TorchConfig(backend="gloo"),  # "nccl" on GPUs
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()
    print(f"loss {Path(folder, 'loss').read_text(encoding='utf-8')}")


if __name__ == "__main__":
    main()
