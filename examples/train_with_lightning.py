"""Lightning's Trainer, fully sharded by this engine: a byte-level GPT that learns the source of these examples.

    python examples/train_with_lightning.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/train_with_lightning.py     # CPU and gloo, or one GPU per process and NCCL

Needs the package lightning: pip install 'fsdp[lightning]'. One Trainer trains for an epoch and saves a folder with each rank's
shards in `runs/lightning`, another resumes from it, and a third one trains for both epochs at once. The losses are the same.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from model import GPT, Block, byte_loss
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from world import rank_before_joining

from fsdp.integrations.lightning import FSDPStrategy

CONTEXT, BATCH, STEPS = 64, 8, 15  # steps of one epoch
SAME = 1e-5
OUT = Path("runs/lightning")


class Source(Dataset[Tensor]):
    """Stretches of the source of the examples: (context + 1,)."""

    def __init__(self) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        start = index * 997 % (len(self.text) - CONTEXT - 1)  # 997 is prime, so the stretches are spread over all of the text
        return self.text[start : start + CONTEXT + 1]


class ByteModel(pl.LightningModule):
    """A GPT over bytes. `configure_model` runs on every rank before the strategy shards."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.gpt is None:
            torch.manual_seed(0)
            self.gpt = GPT(layers=2, width=64, heads=4, context=CONTEXT)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = byte_loss(self.gpt, batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *unused: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))  # the mean over ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(ranks: int, epochs: int, save: Path | None = None, resume: Path | None = None) -> list[float]:
    """Train up to the end of that epoch, and return the losses. One rank has nothing to shard: Lightning's own strategy runs."""
    sharded = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
    trainer = pl.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=sharded if ranks > 1 else "auto",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        default_root_dir=OUT,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
    )
    source = Source()
    sampler = torch.utils.data.DistributedSampler(source, ranks, rank_before_joining() if ranks > 1 else 0, shuffle=False)
    model = ByteModel()
    trainer.fit(model, DataLoader(source, BATCH // ranks, sampler=sampler), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.losses


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if rank_before_joining() == 0:
        shutil.rmtree(OUT, ignore_errors=True)
    losses = train(ranks, epochs=1, save=OUT / "epoch-1")
    losses += train(ranks, epochs=2, resume=OUT / "epoch-1")
    at_once = train(ranks, epochs=2)
    same = max(abs(one - other) for one, other in zip(losses, at_once, strict=True)) < SAME
    if rank_before_joining() == 0:
        print(f"on {ranks} rank{'s' if ranks > 1 else ''}: loss {losses[0]:.2f} to {losses[-1]:.2f}")
        print(f"the losses with a checkpoint in between are {'the same' if same else 'NOT the same'}")


if __name__ == "__main__":
    main()
