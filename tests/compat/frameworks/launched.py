"""A script of Accelerate as `accelerate launch` starts it: the FSDP plugin and its version come from the command line.

    accelerate launch ... launched.py FOLDER dies       # saves after two steps, and is killed after the third
    accelerate launch ... launched.py FOLDER resumes    # goes on after the second step

Rank 0 prints the loss of each step.
"""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from tiny_llama import Source, make_model
from torch import nn
from torch.utils.data import DataLoader, Subset

import fsdp.integrations.accelerate

STEPS, BATCH = 4, 8


def engine_of(model: nn.Module) -> str:
    """The package of this engine that has wrapped the model, or "torch". The wrapped class has one name in both."""
    ours = [one.__module__ for one in type(model).__mro__ if one.__module__.startswith("fsdp.")]
    return ours[0].rpartition(".")[0] if ours else "torch"


def main(folder: str, way: str) -> None:
    torch.set_num_threads(1)
    fsdp.integrations.accelerate.install("torch_fsdp" if os.environ.get("FSDP_VERSION", "1") == "1" else "fully_shard")
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Subset(Source(), range(STEPS * BATCH)), BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin = 0
    if way == "resumes":
        accelerator.load_state(folder)
        begin, loader = 2, accelerator.skip_first_batches(loader, 2)
    for step, batch in enumerate(loader, begin):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.gather(loss.detach().view(1)).mean().item():.9f}", flush=True)
        if step == 1:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
        if step == 2 and way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    accelerator.print(engine_of(model), accelerator.distributed_type)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
