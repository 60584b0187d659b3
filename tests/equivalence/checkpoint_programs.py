"""What ranks of a real group do with checkpoints: with FSDP2's, and when one of them is killed. Run by gloo_programs.py."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from models import CASES, Block, make_net, own_batches, train, wrap
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fsdp
from fsdp import dcp

State = dict[str, Any]
CASE: Final = CASES["net"]
FULL: Final = StateDictOptions(full_state_dict=True)


def folder() -> Path:
    """Where the ranks of this start leave what they make."""
    return Path(sys.argv[3])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The peer, with state of zeros in its optimizer."""
    model = make_net()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    optimizer = make_optimizer(model)
    return model, optimizer


def full_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Of the peer, on rank 0."""
    return {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL)["state"],
    }


def ours_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Of ours, on rank 0."""
    return {"model": fsdp.full_state_dict(model), "optimizer": fsdp.full_optim_state_dict(model, optimizer).get("state", {})}


def from_fsdp2(rank: int) -> tuple[State, State]:
    """What FSDP2 saved, and what we loaded."""
    model, optimizer = fsdp2()
    train(model, own_batches(CASE, rank), lambda _: optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    distributed_checkpoint.save(state, checkpoint_id=folder() / "theirs")
    mine = wrap(CASE)
    my_optimizer = make_optimizer(mine)
    fsdp.load(folder() / "theirs", mine, my_optimizer)
    return full_of(model, optimizer), ours_of(mine, my_optimizer)


def into_fsdp2(rank: int) -> tuple[State, State]:
    """What FSDP2 loaded, and what we had saved."""
    mine = wrap(CASE)
    my_optimizer = make_optimizer(mine)
    train(mine, own_batches(CASE, rank), lambda _: my_optimizer)
    fsdp.save(folder() / "ours", mine, my_optimizer)
    model, optimizer = fsdp2()
    train(model, own_batches(CASE, rank, 1), lambda _: optimizer)  # so that there is state to load into
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    distributed_checkpoint.load(state, checkpoint_id=folder() / "ours")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return full_of(model, optimizer), ours_of(mine, my_optimizer)


def plain_dcp(rank: int) -> State:
    """torch's own saves (at once, and in the background while weights change) and its load, which writes into the shards."""
    model, other = wrap(CASE), wrap(CASE)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    distributed_checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder() / "plain")
    distributed_checkpoint.load({"model": other.state_dict()}, checkpoint_id=folder() / "plain")
    at_once = fsdp.full_state_dict(other)
    saving = distributed_checkpoint.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder() / "later")
    with torch.no_grad():
        for p in (*model.parameters(), *other.parameters()):
            p.zero_()
    saving.result()  # type: ignore[union-attr]
    distributed_checkpoint.load({"model": other.state_dict()}, checkpoint_id=folder() / "later")
    later = fsdp.full_state_dict(other)
    assert all(torch.equal(later[name], tensor) for name, tensor in at_once.items())
    return at_once


def killed(rank: int) -> tuple[str, float]:
    """Rank 1 is killed when it has written its parts: what rank 0 is told, and after how many seconds."""
    model = wrap(CASE)
    fsdp.save(folder() / "run" / "1", model)
    real = dcp.FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        done = real(self, plan, planner)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    dcp.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        fsdp.save(folder() / "run" / "2", model)
    except Exception as told:
        torch.save((str(told), time.monotonic() - begin), folder() / "told.pt")
    os._exit(0)  # the group cannot be destroyed any more


def reads_alone(rank: int) -> State:
    """Any process of another world reads what those left."""
    model = wrap(CASE)
    newest = fsdp.latest(folder() / "run")
    assert newest == folder() / "run" / "1"
    fsdp.load(newest, model)
    assert dist.get_world_size() == 1
    return fsdp.full_state_dict(model)


CHECKPOINTS: Final[dict[str, Callable[[int], Any]]] = {
    "from FSDP2": from_fsdp2,
    "into FSDP2": into_fsdp2,
    "plain DCP": plain_dcp,
    "killed": killed,
    "reads alone": reads_alone,
}
