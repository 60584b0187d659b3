"""TRL and peft through Accelerate, on this engine: supervised fine-tuning of LoRA adapters on a frozen tiny Llama.

    torchrun --standalone --nproc-per-node=2 examples/lora_with_trl.py [--cpu]

Needs trl and peft: pip install 'fsdp[accelerate]' trl peft. `runs/trl` receives the adapters alone, which fit onto a fresh base.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tiny_llama import LAYER, ROWS, Source, make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer

import fsdp.integrations.accelerate

OUT = Path("runs/trl")
LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")


def train(cpu: bool) -> list[float]:
    """Train the adapters, save them, and return the losses."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    arguments = SFTConfig(
        str(OUT),
        use_cpu=cpu,
        per_device_train_batch_size=8 // ranks,
        max_steps=16,
        learning_rate=1e-1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,
        fsdp=True if ranks > 1 else None,
        fsdp_config={"version": 1, "transformer_layer_cls_to_wrap": [LAYER]} if ranks > 1 else None,
    )
    source = Source()
    trainer = SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": source[index]["input_ids"].tolist()} for index in range(ROWS)]),
        processing_class=make_tokenizer(),
        peft_config=LORA,
    )
    trainer.train()
    trainer.save_model(str(OUT))  # every rank calls it
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(cpu: bool) -> None:
    fsdp.integrations.accelerate.install("torch_fsdp")
    losses = train(cpu)
    if int(os.environ.get("RANK", 0)) == 0:
        adapted = PeftModel.from_pretrained(make_model(), OUT)
        trained = sum(float(value.abs().sum()) for name, value in adapted.named_parameters() if "lora_B" in name)
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"the adapters on a fresh base are {'trained' if trained else 'NOT trained'}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main("--cpu" in sys.argv)
