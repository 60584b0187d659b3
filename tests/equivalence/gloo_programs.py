"""What every rank of a real group does, and may do in a simulated world as well. Run as a script, it is one rank.

python -m tests.equivalence.gloo_programs RANK WORLD_SIZE FOLDER [PROGRAM ...]
"""

import faulthandler
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import fsdp
from fsdp.comm.process_group import ProcessGroupCommunicator
from fsdp.debug.delays import DELAYS
from fsdp.debug.error_notes import MARK
from fsdp.runtime.registry import unit_ref_of
from tests.equivalence.border_programs import BORDER
from tests.equivalence.checkpoint_programs import CHECKPOINTS
from tests.equivalence.compressed_programs import COMPRESSED
from tests.equivalence.unheard_programs import UNHEARD
from tests.support import outside
from tests.support.models import CASES, Block, Net, Trained, gradients_of, loss_of, own_batches, train, wrap
from tests.support.stalls import look_soon

LIMIT: Final = 60
"""Seconds until a rank prints its stacks and dies."""

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def trained(case_name: str, rank: int, steps: int = 3, micro: int = 1, no_sync: bool = False, **options: Any) -> Trained:
    case = CASES[case_name]
    model = wrap(case, **options)
    more: dict[str, Any] = {"accumulate": partial(fsdp.no_sync, model)} if no_sync else {}
    return train(model, own_batches(case, rank, steps, micro), SGD, **more)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def delayed(rank: int, **options: Any) -> Trained:
    """With random delays before everything that computes or communicates."""
    os.environ[DELAYS] = "7"
    try:
        return trained("net in layers", rank, prefetch=2, **options)
    finally:
        del os.environ[DELAYS]


def clipped(rank: int) -> tuple[float, Trained]:
    case = CASES["net"]
    model = wrap(case)
    found = train(model, own_batches(case, rank, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    norm = fsdp.clip_grad_norm_(model, 0.1)
    return float(norm), Trained([gradients_of(model)], found.weights)


def state(rank: int) -> dict[str, torch.Tensor]:
    model = wrap(CASES["tied"])
    train(model, own_batches(CASES["tied"], rank), SGD)
    saved = fsdp.full_state_dict(model, rank0_only=False)
    other = wrap(CASES["tied"])
    fsdp.load_full_state_dict(other, saved)
    again = fsdp.full_state_dict(other, rank0_only=False)
    assert list(again) == list(saved)
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())
    return saved


def uneven(rank: int) -> dict[str, torch.Tensor]:
    """Rank r has r + 1 batches."""
    model = wrap(CASES["net"])
    optimizer = SGD(model.parameters())
    with fsdp.join(model, optimizer.step) as joined:
        for (batch,) in own_batches(CASES["net"], rank, rank + 1):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            joined.step()
    return fsdp.full_state_dict(model, rank0_only=False)


def hooked(rank: int) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """By hook of torch, and by parameter: the gradient under NO_SHARD, and under torch's DDP."""
    found = {}
    for name, (make_state, hook) in HOOKS.items():
        models = [CASES["net"].model() for _ in range(2)]
        ours, theirs = fsdp.fully_shard(models[0], auto_wrap_policy={Block}, sharding_strategy="NO_SHARD"), DDP(models[1])
        fsdp.register_comm_hook(ours, make_state(), hook)
        theirs.register_comm_hook(make_state(), hook)
        for model in (ours, theirs):
            for batches in own_batches(CASES["net"], rank):
                model.zero_grad()
                loss_of(model(batches[0])).backward()
        gradients = [gradients_of(model) for model in models]
        found[name] = {name: (gradients[0][name], gradients[1][name]) for name in gradients[0]}
    return found


HOOKS: Final[dict[str, tuple[Callable[[], Any], Any]]] = {
    "allreduce_hook": (lambda: None, default_hooks.allreduce_hook),
    "fp16_compress_hook": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16_compress_wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    # of full rank, so that what it comes to is no approximation
    "powerSGD_hook": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=0),
        powerSGD_hook.powerSGD_hook,
    ),
}


def built_differently(rank: int) -> str:
    """What this rank was told."""
    try:
        fsdp.fully_shard(Net(width=8 + rank))
    except fsdp.ShardingError as refusal:
        return str(refusal)
    return "nothing was said"


class Two(torch.nn.Module):
    """Both outputs always, for a loss that takes one of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


class ByShape(Two):
    """Another branch where the batch has another number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if len(x) == 2 else self.other(x)


class Turned(Net):
    """Its blocks are called in reversed order if somebody says so."""

    reverse = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        for block in reversed(self.blocks) if self.reverse else self.blocks:
            x = block(x)
        return self.leave(x)


Told = tuple[str, str, str]
"""What a rank was told of the others: the type of the error, its text, and the engine's note on it."""


def told_in(part: Callable[[], Any]) -> Told:
    """What a part of a step raises, in which the ranks are of one mind no longer."""
    try:
        part()
    except fsdp.WorldError as told:
        notes = [note for note in getattr(told, "__notes__", ()) if note.startswith(MARK)]
        return type(told).__name__, str(told), "\n".join(notes)
    return "", "nothing was said", ""


def disagrees(rank: int, width: int) -> Told:
    """After steps alike, each rank's loss comes through a unit of its own."""
    model = _sharded(Two(width), torch.nn.Linear)
    for _ in range(3):
        one, other = model(torch.ones(2, 4))
        (one.sum() + other.sum()).backward()
    outputs = model(torch.ones(2, 4))
    return told_in(lambda: outputs[rank % 2].sum().backward())


def swaps(rank: int, steps: int) -> Told:
    """After steps alike, rank 1 calls its blocks in reversed order. All of them have one size."""
    model = _sharded(Turned(), Block)
    for _ in range(steps):
        loss_of(model(torch.ones(2, 6))).backward()
    model.reverse = rank == 1
    return told_in(lambda: loss_of(model(torch.ones(2, 6))).backward())


def shard_on_one_rank(rank: int) -> Told:
    """After steps alike, rank 0 alone reads its shard before the forward, and its loss uses it."""
    model = outside.wrapped(dist.get_world_size(), "FULL_SHARD", reads=False)
    for step in range(3):
        outside.loss_of(*outside.in_forward(model, outside.batch(rank, step)), False).backward()
    read = outside.shard_before_forward if rank == 0 else outside.in_forward

    def two_steps() -> None:
        for step in range(2):
            outside.loss_of(*read(model, outside.batch(rank, step)), rank == 0).backward()

    return told_in(two_steps)


def branches(rank: int) -> Told:
    """After steps alike, rank 1 gets a batch that leads through another unit."""
    model = _sharded(ByShape(9), torch.nn.Linear)
    for _ in range(3):
        loss_of(model(torch.ones(2, 4))).backward()
    return told_in(lambda: loss_of(model(torch.ones(3 if rank == 1 else 2, 4))).backward())


def one_more_batch(rank: int, then: Callable[[torch.nn.Module], Any]) -> Told:
    """After steps alike, rank 1 has one more batch than the others, who go on to what comes then."""
    model = _sharded(Net(), Block)
    for _ in range(3):
        loss_of(model(torch.ones(2, 6))).backward()
    return told_in(lambda: loss_of(model(torch.ones(2, 6))).backward() if rank == 1 else then(model))


def _beside(name: str) -> Path:
    """A path beside the results."""
    return Path(sys.argv[3]) / name


def _group_of(model: torch.nn.Module) -> Any:
    unit_ref = unit_ref_of(model)
    comm = unit_ref.engine.comms.world_comm
    assert isinstance(comm, ProcessGroupCommunicator)
    return comm.group


def _sharded(model: torch.nn.Module, unit: type[torch.nn.Module]) -> torch.nn.Module:
    """On a group of its own, which is of no use to anybody afterwards."""
    return fsdp.fully_shard(model, auto_wrap_policy={unit}, prefetch=0, process_group=dist.new_group())


def recovers(rank: int) -> Trained:
    """A forward that fails on every rank leaves the group usable."""
    case = CASES["net"]
    model = wrap(case)
    try:
        model(torch.ones(2, 5))
    except RuntimeError as failure:
        assert "shapes cannot be multiplied" in str(failure)
    else:
        raise AssertionError("a batch of the wrong shape was taken")
    return train(model, own_batches(case, rank), SGD)


BF16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PIECES = fsdp.ReductionPolicy(bucket_cap_mb=0.0002)
SHARED = fsdp.ReductionPolicy(bucket_cap_mb=1, first_bucket_mb=0.0002)
TWO = fsdp.ReductionPolicy(streams=2)
EXACT = fsdp.ReductionPolicy(deterministic=True, bucket_cap_mb=1)

TRAININGS: Final[dict[str, Callable[[int], Trained]]] = {
    "twenty steps in float64": lambda rank: trained("net in float64", rank, steps=20),
    "in place": lambda rank: trained("net", rank, in_place=True),
    "SHARD_GRAD_OP": lambda rank: trained("net", rank, sharding_strategy="SHARD_GRAD_OP"),
    "reshard": lambda rank: trained("net in layers", rank, reshard_after_forward=True),
    "no prefetch": lambda rank: trained("net", rank, prefetch=0),
    "deep prefetch": lambda rank: trained("net in layers", rank, prefetch=4),
    "delayed": delayed,
    "delayed, deterministic": lambda rank: delayed(rank, reduction=EXACT),
    "tied": lambda rank: trained("tied", rank),
    "recurrent": lambda rank: trained("recurrent", rank),
    "odd": lambda rank: trained("odd", rank),
    "large": lambda rank: trained("large", rank),
    "no_sync": lambda rank: trained("net", rank, micro=3, no_sync=True),
    "recovers": recovers,
    "NO_SHARD": lambda rank: trained("net", rank, sharding_strategy="NO_SHARD"),
    "NO_SHARD in pieces": lambda rank: trained("net", rank, sharding_strategy="NO_SHARD", reduction=PIECES),
    "SHARD_GRADIENTS": lambda rank: trained("net", rank, micro=3, no_sync=True, sharding_strategy="SHARD_GRADIENTS"),
    "SHARD_OPTIMIZER": lambda rank: trained("net", rank, sharding_strategy="SHARD_OPTIMIZER"),
    "in pieces": lambda rank: trained("net in layers", rank, reduction=PIECES),
    "shared": lambda rank: trained("net in layers", rank, reduction=SHARED),
    "at the end": lambda rank: trained("net", rank, reduction=fsdp.ReductionPolicy(at_end=True, static_graph=True)),
    "on three streams": lambda rank: trained("net in layers", rank, reduction=fsdp.ReductionPolicy(streams=3)),
    "sparse": lambda rank: trained("sparse", rank, sharding_strategy="NO_SHARD", reduction=TWO),
}
HYBRID: Final = {"sharding_strategy": "HYBRID_SHARD", "mesh": (2, 2)}
# of four processes
FOUR: Final[dict[str, Callable[[int], Trained]]] = {
    "hybrid": lambda rank: trained("net in layers", rank, **HYBRID),
    "hybrid over a mesh": lambda rank: trained("odd", rank, sharding_strategy="HYBRID_SHARD", mesh=_mesh()),
    "hybrid, no_sync": lambda rank: trained("net", rank, micro=3, no_sync=True, **HYBRID),
    "a mesh of one dimension": lambda rank: trained("net", rank, mesh=_mesh()["shard"], sharding_strategy="FULL_SHARD"),
    "NO_SHARD, four": lambda rank: trained("tied", rank, sharding_strategy="NO_SHARD"),
    "hybrid, on two streams": lambda rank: trained("net", rank, reduction=TWO, **HYBRID),
    "deterministic": lambda rank: trained("net", rank, reduction=EXACT),
    "deterministic, hybrid": lambda rank: trained("net", rank, reduction=EXACT, **HYBRID),
    "deterministic, NO_SHARD": lambda rank: trained("net", rank, reduction=EXACT, sharding_strategy="NO_SHARD"),
}
OTHERS: Final[dict[str, Callable[[int], Any]]] = {
    "twenty steps": lambda rank: trained("net", rank, steps=20),
    "bf16": lambda rank: trained("net", rank, mp_policy=BF16),
    "clipped": clipped,
    "state": state,
    "built differently": built_differently,
    "hooked": hooked,
    "uneven": uneven,
    **COMPRESSED,
}


BETWEEN_STEPS: Final[dict[str, Callable[[torch.nn.Module], Any]]] = {
    "save": lambda model: fsdp.save(_beside("saved"), model),
    "save with async_": lambda model: fsdp.save(_beside("saved"), model, async_=True),
    "load": lambda model: fsdp.load(_beside("saved"), model),
    "full_optim_state_dict": lambda model: fsdp.full_optim_state_dict(model, SGD(model.parameters())),
    "export_safetensors": lambda model: fsdp.export_safetensors(model, _beside("exported")),
    "fully_shard": lambda model: fsdp.fully_shard(torch.nn.Linear(2, 2), process_group=_group_of(model)),
}
ALONE: Final = {f"alone in {name}": partial(one_more_batch, then=then) for name, then in BETWEEN_STEPS.items()}
"""Rank 0 makes a call between steps, and rank 1 trains on."""
DISAGREE: Final[dict[str, Callable[[int], Told]]] = {
    "other units, of one size": lambda rank: disagrees(rank, 4),
    "other units, of two sizes": lambda rank: disagrees(rank, 9),
    "swapped order": lambda rank: swaps(rank, 3),
    "swapped order, in the first step": lambda rank: swaps(rank, 0),
    "other branch by shape": branches,
    "a shard on one rank only": shard_on_one_rank,
    "one more batch, while the others save": lambda rank: one_more_batch(rank, fsdp.full_state_dict),
    # the last one: they end
    "one more batch, and the others end": lambda rank: one_more_batch(rank, lambda model: None),
}


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    """These programs (or all) in turn, over one group; the results go to a file."""
    usual = {**TRAININGS, **OTHERS}
    programs = {**usual, **FOUR, **UNHEARD, **DISAGREE, **ALONE, **CHECKPOINTS, **BORDER}
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    if set(names) & {*DISAGREE, *ALONE, *UNHEARD}:
        look_soon()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT))
    torch.save({name: programs[name](rank) for name in names or usual}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
