"""LoRA: small trainable adapters in fp32 beside a frozen base in bf16, in the same units.

    python examples/lora.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/lora.py     # CPU and gloo, or one GPU per process and NCCL

A unit may hold parameters of several dtypes, frozen and trainable ones: each kind is gathered in its own dtype. Only
trainable parameters have gradients and optimizer state. Only the adapters are saved, to `runs/lora/adapters.pt`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, Block, byte_loss
from torch import Tensor, nn
from world import join_world

import fsdp

CONTEXT, BATCH, STEPS = 64, 8, 25
OUT = Path("runs/lora")


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable detour of low rank: base(x) + up(down(x))."""

    def __init__(self, base: nn.Linear, width: int = 4) -> None:
        super().__init__()
        self.base = base
        self.adapter_down = nn.Parameter(torch.randn(width, base.in_features) / base.in_features**0.5)
        self.adapter_up = nn.Parameter(torch.zeros(base.out_features, width))  # zeros: training starts from the base itself

    def forward(self, x: Tensor) -> Tensor:
        detour = F.linear(F.linear(x.float(), self.adapter_down), self.adapter_up)
        output: Tensor = self.base(x) + detour.to(x.dtype)
        return output


def make_model() -> GPT:
    """The frozen base with fresh adapters. Random weights stand for those of a pretrained model."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=4, context=CONTEXT).to(torch.bfloat16).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return model


def is_adapter(name: str) -> bool:
    return ".adapter_" in name


class Result(NamedTuple):
    """The results of the run, the same on every rank, except for the memory."""

    loss_before: float
    loss: float
    loss_reloaded: float
    """The loss of a fresh, unsharded base with the saved adapters."""
    base_untouched: bool
    adapters: dict[str, Tensor]
    held_bytes: int
    """The bytes that the engine holds on this rank between steps."""
    model_bytes: int


def train(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    module = make_model().to(device)
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    model = fsdp.FullyShardedDataParallel(module, auto_wrap_policy={Block}, sync_module_states=True)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    held_out = draw_batch(-1).to(device)
    before = fsdp.full_state_dict(model, rank0_only=False)
    with torch.no_grad():
        loss_before = byte_loss(model, held_out).item()
    for step in range(STEPS):
        loss = byte_loss(model, draw_batch(rank * STEPS + step).to(device))  # each rank its own data
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = fsdp.full_state_dict(model, rank0_only=False)  # a collective: every rank calls it
    adapters = {name: value for name, value in after.items() if is_adapter(name)}

    fresh = make_model().to(device)
    fresh.load_state_dict(adapters, strict=False)
    with torch.no_grad():
        loss_after, loss_reloaded = byte_loss(model, held_out).item(), byte_loss(fresh, held_out).item()
    base_untouched = all(torch.equal(before[name], after[name]) for name in before if not is_adapter(name))
    return Result(loss_before, loss_after, loss_reloaded, base_untouched, adapters, fsdp.memory_bytes(model), model_bytes)


def draw_batch(seed: int) -> Tensor:
    """Random excerpts of the source of this example's model: (batch, context + 1)."""
    text = torch.tensor(list(Path(__file__).with_name("model.py").read_bytes()))
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(1 + seed))
    return text[starts + torch.arange(CONTEXT + 1)]


def main() -> None:
    world = join_world()
    result = train(world.rank, world.device)
    if world.rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        torch.save(result.adapters, OUT / "adapters.pt")
    world.say(
        f"on {world.description}: loss {result.loss_before:.2f} to {result.loss:.2f}, and {result.loss_reloaded:.2f} with the "
        f"adapters on a fresh base; the base is {'untouched, bit for bit' if result.base_untouched else 'NOT untouched'}"
    )
    saved = sum(value.numel() * value.element_size() for value in result.adapters.values())
    world.say(
        f"rank 0 holds {result.held_bytes / 1e6:.2f} MB of {result.model_bytes / 1e6:.2f} MB at rest; "
        f"{saved / 1e6:.2f} MB of adapters saved in {OUT / 'adapters.pt'}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
