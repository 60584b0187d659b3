"""Trainer of transformers with `fsdp`, on this engine: a tiny Llama that learns the source of these examples.

    torchrun --standalone --nproc-per-node=2 examples/train_with_trainer.py [--cpu]

Needs accelerate and transformers: pip install 'fsdp[accelerate]'. All that is new in the script is the call of `install`.
`runs/trainer` receives checkpoints and the trained model. A second Trainer resumes from a checkpoint in the middle.
"""

import os
import sys
from pathlib import Path

from tiny_llama import LAYER, Source, make_model
from transformers import Trainer, TrainingArguments

import fsdp.integrations.accelerate

OUT = Path("runs/trainer")
SAME = 1e-5


def make_trainer(cpu: bool) -> Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    arguments = TrainingArguments(
        str(OUT),
        use_cpu=cpu,
        per_device_train_batch_size=8 // ranks,
        max_steps=24,
        save_steps=12,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        fsdp=True if ranks > 1 else None,
        fsdp_config={"version": 1, "transformer_layer_cls_to_wrap": [LAYER]} if ranks > 1 else None,
    )
    return Trainer(model=make_model(), args=arguments, train_dataset=Source())


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(cpu: bool) -> None:
    fsdp.integrations.accelerate.install("torch_fsdp")
    first = make_trainer(cpu)
    first.train()
    first.save_model(str(OUT / "model"))
    again = make_trainer(cpu)
    again.train(resume_from_checkpoint=str(OUT / "checkpoint-12"))
    one, other = losses_of(first), losses_of(again)
    if first.is_world_process_zero():
        same = max(abs(a - b) for a, b in zip(one, other, strict=True)) < SAME
        print(f"loss {one[0]:.2f} to {one[-1]:.2f}; resumed at step 12 it is {'the same' if same else 'NOT the same'}")


if __name__ == "__main__":
    main("--cpu" in sys.argv)
