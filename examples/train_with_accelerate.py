"""Hugging Face Accelerate with its FSDP plugin, on this engine: a tiny Llama that learns the source of these examples.

    accelerate launch --num_processes 2 --use_fsdp examples/train_with_accelerate.py      # one GPU for each process
    ACCELERATE_USE_CPU=true accelerate launch --num_processes 2 --use_fsdp ...            # CPU and gloo

Needs accelerate and transformers: pip install 'fsdp[accelerate]'. All that is new in the script are the two lines above the
Accelerator. `runs/accelerate` receives the state after the first epoch and the trained model, which plain transformers load.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny_llama import LAYER, Source, make_model, make_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import fsdp.integrations.accelerate

OUT = Path("runs/accelerate")
BATCH, SAME = 8, 1e-5


def train(epochs: range, resume: Path | None = None, save: Path | None = None, model_at: Path | None = None) -> list[float]:
    """Train for some epochs, and return the losses."""
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[LAYER], use_orig_params=True
    )
    accelerator = Accelerator(fsdp_plugin=plugin if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Source(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume is not None:
        accelerator.load_state(str(resume))
    losses = []
    for _ in epochs:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
    if save is not None:
        accelerator.save_state(str(save))
    if model_at is not None:
        weights = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            model_at, state_dict=weights, is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
    accelerator.wait_for_everyone()
    return losses


def main() -> None:
    fsdp.integrations.accelerate.install("torch_fsdp")
    losses = train(range(1), save=OUT / "epoch-1") + train(range(1, 2), resume=OUT / "epoch-1", model_at=OUT / "model")
    at_once = train(range(2))
    if int(os.environ.get("RANK", 0)) == 0:
        same = max(abs(one - other) for one, other in zip(losses, at_once, strict=True)) < SAME
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"with a checkpoint in between it is {'the same' if same else 'NOT the same'}")
        tokenizer = make_tokenizer()
        prompt = tokenizer("import ", return_tensors="pt")["input_ids"]
        text = LlamaForCausalLM.from_pretrained(OUT / "model").generate(prompt, max_new_tokens=24, do_sample=False)
        print(f"transformers load it and go on: {tokenizer.decode(text[0])!r}")


if __name__ == "__main__":
    main()
