"""A small vision-language model: some ranks see images and text, and some see text alone, another choice in every step.

    python examples/mixed_batches.py                                       # one process
    torchrun --standalone --nproc-per-node=2 examples/mixed_batches.py     # CPU and gloo, or one GPU per process and NCCL

The text is the Zen of Python, of which the model predicts the next byte. The images are drawn, each a disc or a square, and the
model says the first letter of the name. Only ranks that have images in a step run the image tower. `uneven_paths=True` lets the
others take part in its gathers and reductions without running it.
"""

import codecs
import contextlib
import io
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from world import join_world

import fsdp

BYTES, WIDTH, CONTEXT, SIDE = 128, 48, 24, 8
NAMES = ("disc", "square")
STEPS, BATCH, IMAGE_SHARE = 150, 16, 0.5
MAX_NORM = 1.0


class Block(nn.Module):
    """Attention and a perceptron. Each block is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.perceptron(self.norm2(x))


class ImageTower(nn.Module):
    """An image (batch, SIDE, SIDE) becomes one token (batch, 1, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(SIDE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.rows(image)
        for block in self.blocks:
            x = block(x)
        return x.mean(1, keepdim=True)


class VisionLanguage(nn.Module):
    """Predicts the next byte of a text, which may follow an image."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = ImageTower()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embedding(text)
        if image is not None:
            x = torch.cat([self.vision(image), x], 1)
        length = x.shape[1]
        x = x + self.places[:length]
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


class Result(NamedTuple):
    """What was learned, the same on every rank but for `image_steps`."""

    image_steps: int
    """The number of steps in which this rank had images, and ran the image tower."""
    text_loss_before: float
    text_loss: float
    named_rightly: float
    """The share of images for which the model says the right name."""


def train(rank: int, device: torch.device | str = "cpu") -> Result:
    """Run the example on one rank. It runs under `fsdp.simulate` too."""
    torch.manual_seed(0)
    model = VisionLanguage().to(device)
    fsdp.fully_shard(model, auto_wrap_policy={Block}, sync_module_states=True, uneven_paths=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus = read_corpus().to(device)
    before, _ = measure(model, corpus, device)
    chance = torch.Generator().manual_seed(1 + rank)  # each rank has its own data, and its own choice of images
    image_steps = 0
    for _ in range(STEPS):
        if torch.rand((), generator=chance) < IMAGE_SHARE:
            image_steps += 1
            loss = image_loss(model, *draw_images(BATCH, chance, device))
        else:
            loss = text_loss(model, draw_text(corpus, BATCH, chance))
        optimizer.zero_grad()
        loss.backward()
        fsdp.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    return Result(image_steps, before, *measure(model, corpus, device))


def text_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Every byte is predicted from those before it."""
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def image_loss(model: nn.Module, images: Tensor, names: Tensor) -> Tensor:
    """The first byte of the name is predicted from the image."""
    prompt = torch.full((len(images), 1), ord(">"), device=images.device)
    return functional.cross_entropy(model(prompt, images)[:, -1], names)


@torch.no_grad()
def measure(model: nn.Module, corpus: Tensor, device: torch.device | str) -> tuple[float, float]:
    chance = torch.Generator().manual_seed(0)  # alike on every rank
    loss = text_loss(model, draw_text(corpus, 64, chance))
    images, names = draw_images(64, chance, device)
    prompt = torch.full((len(images), 1), ord(">"), device=images.device)
    return loss.item(), float((model(prompt, images)[:, -1].argmax(-1) == names).float().mean())


def read_corpus() -> Tensor:
    """The bytes of the Zen of Python: real text that every Python has."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself when it is imported
        import this
    return torch.tensor(list(codecs.decode(this.s, "rot13").encode()), dtype=torch.int64)


def draw_text(corpus: Tensor, count: int, chance: torch.Generator) -> Tensor:
    starts = torch.randint(len(corpus) - CONTEXT, (count,), generator=chance)
    return torch.stack([corpus[start : start + CONTEXT] for start in starts.tolist()])


def draw_images(count: int, chance: torch.Generator, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Discs and squares (count, SIDE, SIDE), each somewhere and of some size, and the first letters of their names (count,)."""
    kinds = torch.randint(len(NAMES), (count,), generator=chance)
    centres = 2.5 + 2 * torch.rand(count, 2, 1, 1, generator=chance)
    sizes = 1.5 + torch.rand(count, 1, 1, generator=chance)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    down, right = (rows - centres[:, 0]).abs(), (columns - centres[:, 1]).abs()
    distance = torch.where(kinds.view(-1, 1, 1) == 0, (down.square() + right.square()).sqrt(), torch.maximum(down, right))
    images = (distance <= sizes).float() + 0.05 * torch.randn(count, SIDE, SIDE, generator=chance)
    letters = torch.tensor([ord(name[0]) for name in NAMES])
    return images.to(device), letters[kinds].to(device)


def main() -> None:
    world = join_world()
    result = train(world.rank, world.device)
    world.say(
        f"on {world.description}: rank 0 had images in {result.image_steps} of {STEPS} steps, and text alone in the others; the "
        f"loss on text fell from {result.text_loss_before:.2f} to {result.text_loss:.2f}, and {result.named_rightly:.0%} of the "
        "images are named rightly"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
