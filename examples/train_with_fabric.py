"""A loop of Lightning's Fabric, fully sharded by this engine: a byte-level GPT that learns the source of these examples.

    python examples/train_with_fabric.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/train_with_fabric.py     # CPU and gloo, or one GPU per process and NCCL

Needs the package lightning: pip install 'fsdp[lightning]'. A first run saves each rank's shards in `runs/fabric` after half of
the steps, a second one resumes from them, and a third one takes all steps at once. The losses are the same.
"""

import os
import shutil
from pathlib import Path

import lightning
import torch
from model import GPT, Block, byte_loss
from torch.utils.data import DataLoader, DistributedSampler
from train_with_lightning import BATCH, CONTEXT, SAME, STEPS, Source
from world import rank_before_joining

from fsdp.integrations.lightning import FabricFSDPStrategy

OUT = Path("runs/fabric")


def train(ranks: int, to: int, save: Path | None = None, resume: Path | None = None) -> list[float]:
    """Train up to that step, and return the losses. One rank has nothing to shard: Lightning's own strategy runs."""
    sharded = FabricFSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
    accelerator = "auto" if torch.cuda.is_available() else "cpu"
    fabric = lightning.Fabric(accelerator=accelerator, devices=ranks, strategy=sharded if ranks > 1 else "auto")
    fabric.launch()
    torch.manual_seed(0)
    gpt = GPT(layers=2, width=64, heads=4, context=CONTEXT)
    model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, state)
    source = Source()
    sampler = DistributedSampler(source, ranks, fabric.global_rank, shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(source, BATCH // ranks, sampler=sampler), use_distributed_sampler=False)
    losses = []
    for batch in list(loader)[state["step"] : to]:
        optimizer.zero_grad()
        loss = byte_loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        state["step"] += 1
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    if save is not None:
        fabric.save(save, state)
        fabric.barrier()
    return losses


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if rank_before_joining() == 0:
        shutil.rmtree(OUT, ignore_errors=True)
    half = STEPS // 2
    losses = train(ranks, half, save=OUT / "half")
    losses += train(ranks, STEPS, resume=OUT / "half")
    at_once = train(ranks, STEPS)
    same = max(abs(one - other) for one, other in zip(losses, at_once, strict=True)) < SAME
    if rank_before_joining() == 0:
        print(f"on {ranks} rank{'s' if ranks > 1 else ''}: loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"the losses with a checkpoint in between are {'the same' if same else 'NOT the same'}")


if __name__ == "__main__":
    main()
