"""Train a byte-level GPT, fully sharded, on a folder of text.

    torchrun --standalone --nproc-per-node=2 examples/train.py [folder]    # CPU and gloo, or one GPU per process and NCCL
    python examples/train.py [folder]                                      # one process
    torchrun ... examples/train.py --compare                               # against the same model unsharded

The folder is the Python standard library unless one is named. `runs/train` receives the loss curve (loss.png), its
numbers (losses.json) and a sample of generated text (sample.txt). With `--checkpoint-every` its folder `checkpoints`
receives checkpoints, and `--resume` goes on from the newest: on another number of ranks, or after `torchrun --max-
restarts`. The exit status is 1 when the model did not learn, that is when its loss on held-out text is not clearly
below what a model without context could reach.

Rule 1: a global batch is a function of (seed, step) alone; a rank takes its slice. So W ranks and one process train on
        the same bytes, and `--compare` compares the engine and nothing else.
Rule 2: every rank takes every step and every evaluation. Only printing, files and sampling belong to rank 0.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from model import BYTES, GPT, Block, byte_loss, generate
from torch import Tensor, nn
from world import World, join_world, local_rank, rank_before_joining

import fsdp

try:
    from tqdm import tqdm
except ImportError:  # the progress bar is optional
    tqdm = None

HELD_OUT = 0.05  # the last part of the corpus is never trained on
HELD_OUT_WINDOWS = 128  # and this many stretches of it, evenly spread, are what an evaluation reads
CLEARLY_BELOW = 0.9  # a held-out loss under this share of the unigram entropy says that context was learnt
SAME = 1e-5  # the largest relative difference that `--compare` accepts in fp32
MAX_NORM = 1.0
TEMPERATURE = 0.8
PROMPT_BYTES = 64
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "node_modules", "test", "tests", "idle_test", "__pycache__"}


def main() -> int:
    args = parse_arguments()
    try:
        corpus = read_corpus(args)
        if rank_before_joining() == 0:
            make_folder(args.out)
        world = join_world()
        try:
            check_agreement(corpus)
            return run(args, corpus, world)
        finally:
            dist.destroy_process_group()
    except fsdp.ShardingError as error:  # a damaged checkpoint, or no room for one
        refuse(str(error), status=1)
    except OSError as error:  # a full disk, a file without permission
        refuse(f"{error.filename or args.out}: {error.strerror or error}", status=1)
    except fsdp.PeerFailed as failure:
        refuse(f"rank {failure.rank} has ended, and training with it: {failure.reason}", status=1)
    except KeyboardInterrupt:
        refuse("stopped from the keyboard", status=130)


def run(args: argparse.Namespace, corpus: "Corpus", world: World) -> int:
    """Train, and leave the curve, the numbers and the sample behind. Returns the exit status."""
    module = make_model(args, world)
    size = sum(parameter.numel() for parameter in module.parameters())
    world.say(f"{corpus.description}; {size / 1e6:.1f} M parameters on {world.description}")
    if args.compare:
        world.say(
            f"comparing over {args.steps} steps of {args.optimizer}; SGD is the default here because AdamW divides by the size "
            "of the gradient, and so magnifies rounding where that is close to zero"
        )
    model = shard(module, args)
    curve = train(model, args, corpus, world)

    held_bytes = torch.tensor(fsdp.memory_bytes(model, peak=True), device=world.device)
    dist.all_reduce(held_bytes, op=dist.ReduceOp.MAX)
    world.say(f"{curve.tokens_per_second:,.0f} tokens/s; the engine held at most {megabytes(int(held_bytes))} on any rank")
    sample = write_sample(model, args, corpus, world)
    if world.rank == 0:
        print(f"--- sample ---\n{printable(sample)}\n--------------")
        (args.out / "sample.txt").write_text(sample, encoding="utf-8")
        (args.out / "losses.json").write_text(json.dumps(curve.as_json(args, world), indent=1), encoding="utf-8")
        drawn = curve.draw(args.out / "loss.png")
        missing = "" if drawn else "; a picture of the losses needs the package matplotlib"
        print(f"wrote {'loss.png, ' if drawn else ''}losses.json and sample.txt to {args.out}{missing}")

    if args.compare:
        weights = fsdp.full_state_dict(model)  # a collective: every rank calls it
        return compare(curve, weights, args, corpus, world) if world.rank == 0 else 0
    return judge(curve) if world.rank == 0 else 0


def shard(module: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Wrap the model: each block is a unit, and parameters() becomes this rank's shards."""
    precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: nn.Module = fsdp.FullyShardedDataParallel(
        module,
        auto_wrap_policy={Block},
        sharding_strategy=args.strategy,
        sync_module_states=True,
        mp_policy=precision if args.precision == "bf16" else None,
    )
    return model


def train(model: nn.Module, args: argparse.Namespace, corpus: "Corpus", world: World) -> "Curve":
    """All the steps, with a progress bar on rank 0, an evaluation every `--eval-every` steps, and checkpoints if asked for."""
    optimizer = make_optimizer(model, args)
    curve = Curve(train=[], held_out=[], entropy=corpus.entropy)
    folder = args.out / "checkpoints"
    newest = fsdp.latest(folder) if args.resume else None
    if newest is None:
        curve.held_out.append((0, evaluate(model, args, corpus, world)))
    else:
        extra = fsdp.load(newest, model, optimizer)
        curve.train, curve.held_out = extra["train"], extra["held_out"]
        world.say(f"resumed from {newest}")
    begin = len(curve.train)
    mine = slice(world.rank * args.batch, (world.rank + 1) * args.batch)
    seconds = 0.0
    saving: fsdp.Saving | None = None
    with progress_bar(args, begin, world) as bar:
        for step in range(begin, args.steps):
            start = time.perf_counter()
            tokens = corpus.batch(args, step, world.size)[mine].to(world.device)
            loss = take_step(model, optimizer, fsdp.clip_grad_norm_, tokens, args, step)
            curve.train.append((step + 1, world.mean(loss)))
            seconds += time.perf_counter() - start
            curve.tokens_per_second = (step + 1 - begin) * world.size * args.batch * args.context / seconds
            evaluated = (step + 1) % args.eval_every == 0 or step + 1 == args.steps
            if evaluated:
                curve.held_out.append((step + 1, evaluate(model, args, corpus, world)))
            if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
                # the data of a step follow from its number
                extra = {"train": curve.train, "held_out": curve.held_out}
                saving = fsdp.save(folder / f"step-{step + 1}", model, optimizer, extra=extra, keep_last=2, async_=True)
            progress = (
                f"loss {curve.train[-1][1]:.3f}, held-out {curve.held_out[-1][1]:.3f}, {curve.tokens_per_second:,.0f} tokens/s, "
                f"{megabytes(fsdp.memory_bytes(model))}/rank"
            )
            if bar is not None:
                bar.set_postfix_str(progress, refresh=False)
                bar.update()
            elif evaluated:
                world.say(f"step {step + 1} of {args.steps}: {progress}")
    if saving is not None:
        saving.wait()  # before the group is destroyed, over which the ranks agree on it
    return curve


def progress_bar(args: argparse.Namespace, begin: int, world: World) -> Any:
    """A bar, or a context of None: on other ranks than 0, and without the package tqdm."""
    if tqdm is None or world.rank != 0:
        return nullcontext()
    return tqdm(total=args.steps, initial=begin, unit="step", dynamic_ncols=True)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[Any, float], Tensor],
    tokens: Tensor,
    args: argparse.Namespace,
    step: int,
) -> Tensor:
    """One step of training, sharded or not: the only difference is whose `clip` it is. Returns this rank's loss."""
    warm_up = max(1, args.steps // 10)
    decay = 0.5 * (1 + math.cos(math.pi * step / args.steps))
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(1.0, (step + 1) / warm_up) * (0.1 + 0.9 * decay)
    loss = byte_loss(model, tokens)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip(model, MAX_NORM)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, args: argparse.Namespace, corpus: "Corpus", world: World) -> float:
    """The loss on held-out text, in nats per byte. Every rank reads its share of the same windows."""
    share = corpus.held_out_windows(args.context, world.size)[world.rank :: world.size]
    total = torch.zeros((), device=world.device)
    for tokens in share.split(args.batch):
        total += byte_loss(model, tokens.to(world.device)) * len(tokens)
    return world.mean(total / len(share))


def write_sample(model: nn.Module, args: argparse.Namespace, corpus: "Corpus", world: World) -> str:
    """Held-out text continued by the model; empty on the other ranks, which only lend rank 0 their shards."""
    with fsdp.summon_full_params(model, writeback=False):
        if world.rank != 0:
            return ""
        prompt = corpus.held_out[:PROMPT_BYTES].long().to(world.device)
        text = generate(model, prompt, args.sample_bytes, context=args.context, temperature=TEMPERATURE, seed=args.seed)
    return bytes(text.tolist()).decode("utf-8", errors="replace")


def judge(curve: "Curve") -> int:
    """Say whether the model learnt, in one sentence; the exit status says the same."""
    loss, entropy = curve.held_out[-1][1], curve.entropy
    verdict = "clearly below" if loss < CLEARLY_BELOW * entropy else "NOT clearly below"
    print(f"held-out loss {nats_and_bits(loss)} is {verdict} the byte-unigram entropy {nats_and_bits(entropy)}")
    return 0 if loss < CLEARLY_BELOW * entropy else 1


def compare(curve: "Curve", weights: dict[str, Tensor], args: argparse.Namespace, corpus: "Corpus", world: World) -> int:
    """Train the same model unsharded, in this process alone and in plain torch, and print the largest differences."""

    def clip(model: nn.Module, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    model = make_model(args, world)
    optimizer = make_optimizer(model, args)
    losses = []
    steps = range(args.steps)
    for step in steps if tqdm is None else tqdm(steps, desc="unsharded", unit="step", dynamic_ncols=True):
        tokens = corpus.batch(args, step, world.size).to(world.device)
        losses.append(take_step(model, optimizer, clip, tokens, args, step).item())

    in_loss, _ = largest_difference(
        {f"step {step}": torch.tensor(loss) for step, loss in curve.train},
        {f"step {step}": torch.tensor(loss) for step, loss in enumerate(losses, start=1)},
    )
    in_weights, where = largest_difference(weights, model.state_dict())
    if args.precision == "bf16":
        verdict, status = "reported only, for it is bf16 against fp32", 0
    elif in_loss <= SAME and in_weights <= SAME:
        verdict, status = f"the same within {SAME:g}", 0
    else:
        verdict, status = f"NOT the same within {SAME:g}", 1
    print(
        f"sharded on {world.size} {'rank' if world.size == 1 else 'ranks'} against unsharded, {args.steps} steps: "
        f"largest relative difference {in_loss:.1e} in loss, {in_weights:.1e} in weights (in {where}): {verdict}"
    )
    return status


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, relative to each tensor's largest value, and in which tensor. A NaN is larger than any."""
    names = list(theirs)
    tiny = torch.finfo(torch.float32).tiny  # a tensor of zeros differs by nothing, or by very much
    relative = []
    for name in names:
        expected = theirs[name].cpu()
        relative.append((ours[name].cpu() - expected).abs().max() / expected.abs().max().clamp_min(tiny))
    largest = torch.stack(relative).max(dim=0)
    return largest.values.item(), names[int(largest.indices)]


def make_model(args: argparse.Namespace, world: World) -> GPT:
    """The initial model, the same on every call and on every rank."""
    torch.manual_seed(args.seed)
    module = GPT(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        context=args.context,
        checkpoint_activations=args.checkpoint_activations,
    )
    return module.to(world.device)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not. A shard has as many dimensions as its parameter, so the rule reads as ever."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1 if args.optimizer == "adamw" else 1e-4},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two parts: one to train on, one held out."""

    train: Tensor
    held_out: Tensor
    description: str
    digest: str

    @property
    def entropy(self) -> float:
        """Byte-unigram entropy of the held-out text, in nats: no model that ignores context can have a smaller loss on it."""
        chances = torch.bincount(self.held_out.long(), minlength=BYTES) / len(self.held_out)
        return float(torch.special.entr(chances.double()).sum())

    def batch(self, args: argparse.Namespace, step: int, ranks: int) -> Tensor:
        """The global batch of this step: (ranks * batch, context + 1), in rank order."""
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - args.context, (ranks * args.batch, 1), generator=generator)
        return self.train[starts + torch.arange(args.context + 1)].long()

    def held_out_windows(self, context: int, ranks: int) -> Tensor:
        """Stretches of held-out text, the same on every call, as many for each rank: (windows, context + 1).

        They overlap where there is little text.
        """
        windows = math.ceil(HELD_OUT_WINDOWS / ranks) * ranks  # every rank takes part in every forward
        starts = torch.linspace(0, len(self.held_out) - context - 1, windows).long()
        return self.held_out[starts[:, None] + torch.arange(context + 1)].long()


def read_corpus(args: argparse.Namespace) -> Corpus:
    """Every text file below the folder, up to `--megabytes`, in an order that mixes the folders and never changes."""
    folder: Path = args.data
    if not folder.is_dir():
        refuse(f"{folder} is not a folder; name one that holds text files")
    limit = int(args.megabytes * 1e6)
    text, files = bytearray(), 0

    def shuffled(path: Path) -> bytes:
        """By the hash of the name: what comes last, and is held out, is then a fair sample of the whole."""
        return hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()

    for path in sorted(text_files(folder), key=shuffled):
        if len(text) < limit:
            with path.open("rb") as file:
                text += file.read(limit - len(text))
            files += 1
    if not text:
        refuse(f"{folder} holds no text (hidden folders and {', '.join(sorted(SKIPPED_FOLDERS))} are not looked into)")
    cut = int(len(text) * (1 - HELD_OUT))
    if len(text) - cut < args.context + 2:
        needed = math.ceil((args.context + 2) / HELD_OUT)
        refuse(f"{folder} holds {len(text):,} bytes of text; --context {args.context} needs at least {needed:,}")
    data = torch.frombuffer(text, dtype=torch.uint8)
    description = f"{len(text) / 1e6:.2f} MB of text in {files:,} files of {folder}"
    return Corpus(data[:cut], data[cut:], description, hashlib.sha256(text).hexdigest())


def text_files(folder: Path) -> Iterator[Path]:
    """Files that begin with UTF-8 and without a zero byte, whatever their names end in."""

    def stop(error: OSError) -> NoReturn:
        raise error

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for path in (Path(here, name) for name in names if not name.startswith(".")):
            if path.is_file():
                with path.open("rb") as file:
                    head = file.read(4096)
                # a character cut by the end of the head is no fault of the file
                if b"\0" not in head and "\ufffd" not in head.decode("utf-8", errors="replace")[:-1]:
                    yield path


def check_agreement(corpus: Corpus) -> None:
    """Ranks on different machines may have found different text; training on it would be silently wrong."""
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, corpus.digest)
    if strangers := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        refuse(f"ranks {strangers} read other text than rank 0; name a folder that is the same on every machine")


@dataclass
class Curve:
    """Losses in nats per byte, each with the number of steps taken before it was measured."""

    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    entropy: float
    tokens_per_second: float = 0.0

    def as_json(self, args: argparse.Namespace, world: World) -> dict[str, Any]:
        options = {name: value if isinstance(value, int | float) else str(value) for name, value in vars(args).items()}
        return {
            "options": options,
            "ranks": world.size,
            "tokens_per_second": self.tokens_per_second,
            "unigram_entropy": self.entropy,
            "train": self.train,
            "held_out": self.held_out,
        }

    def draw(self, path: Path) -> bool:
        """Draw the losses; False without the package matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*self.train, strict=True), linewidth=1, label="training")
        axes.plot(*zip(*self.held_out, strict=True), "o-", markersize=4, label="held-out")
        axes.axhline(self.entropy, color="gray", linestyle="--", label="byte-unigram entropy")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)
        return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT, fully sharded, on a folder of text.")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("data", nargs="?", type=Path, default=stdlib, help="folder of text (default: the standard library)")
    parser.add_argument(
        "--megabytes", type=positive_float, default=16.0, help="read at most this much text (default: %(default)g)"
    )
    parser.add_argument("--steps", type=positive_int, help="steps of the optimizer (default: 400, with --compare 30)")
    parser.add_argument("--batch", type=positive_int, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--context", type=positive_int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--layers", type=positive_int, default=4, help="(default: %(default)s)")
    parser.add_argument("--width", type=positive_int, default=256, help="(default: %(default)s)")
    parser.add_argument("--heads", type=positive_int, default=4, help="(default: %(default)s)")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], help="(default: adamw, with --compare sgd)")
    parser.add_argument("--lr", type=positive_float, help="highest learning rate (default: 2e-3 for adamw, 0.1 for sgd)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in the backward")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="what the model computes in (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD", help="(default: %(default)s)"
    )
    parser.add_argument("--checkpoint-every", type=positive_int, help="steps between checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--eval-every", type=positive_int, default=50, help="steps between evaluations (default: %(default)s)")
    parser.add_argument(
        "--sample-bytes", type=positive_int, default=400, help="length of the generated text (default: %(default)s)"
    )
    parser.add_argument("--compare", action="store_true", help="train the same model unsharded as well, and compare")
    args = parser.parse_args()
    if args.width % args.heads:
        refuse(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.checkpoint_every and not args.resume and any((args.out / "checkpoints").glob("step-*")):
        refuse(f"{args.out / 'checkpoints'} holds checkpoints of another run; give --resume to go on with it, or another --out")
    args.steps = args.steps or (30 if args.compare else 400)
    args.optimizer = args.optimizer or ("sgd" if args.compare else "adamw")
    args.lr = args.lr or {"adamw": 2e-3, "sgd": 0.1}[args.optimizer]
    return args


def positive_int(text: str) -> int:
    if (value := int(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def positive_float(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {folder} cannot be a folder: {error.strerror}")


def refuse(reason: str, status: int = 2) -> NoReturn:
    """End with a sentence, said once on each host, and the exit status of a wrong command line."""
    if local_rank() == 0:
        print(f"train.py: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # torchrun ends all processes when the first one ends, which is to be the one that speaks
    sys.exit(status)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def nats_and_bits(nats: float) -> str:
    return f"{nats:.3f} nats/byte ({nats / math.log(2):.3f} bits)"


def printable(text: str) -> str:
    """Without control characters: a young model emits them, and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


if __name__ == "__main__":
    sys.exit(main())
