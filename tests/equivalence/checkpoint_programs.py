"""What ranks of a real group do with checkpoints: with FSDP2's, and in the background. Run by gloo_programs.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fsdp
from tests.support.models import CASES, Block, Case, loss_of, make_net, own_batches, train, wrap

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


def save_both(rank: int) -> State:
    """Model and optimizer by torch's own save, at once and in the background; what was saved, in full."""
    model = wrap(CASE)
    optimizer = make_optimizer(model)
    train(model, own_batches(CASE, rank), lambda _: optimizer)
    saved = ours_of(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    distributed_checkpoint.save({"model": weights, "optim": state}, checkpoint_id=folder() / "both")
    saving = distributed_checkpoint.async_save({"model": weights, "optim": state}, checkpoint_id=folder() / "both later")
    train(model, own_batches(CASE, rank), lambda _: optimizer)
    saving.result()  # type: ignore[union-attr]
    return saved


def load_both(rank: int) -> list[State]:
    """What the ranks of this start loaded, in full."""
    found = []
    for name in ("both", "both later"):
        model = wrap(CASE)
        optimizer = make_optimizer(model)
        weights, state = get_state_dict(model, optimizer)
        distributed_checkpoint.load({"model": weights, "optim": state}, checkpoint_id=folder() / name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        found.append(ours_of(model, optimizer))
    other = wrap(CASE)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(found[0]["model"]), options=options)
    found.append({**found[0], "model": fsdp.full_state_dict(other)})
    return found


def full_by_torch(rank: int) -> list[dict[str, Any]]:
    """Full state by torch's functions, on the host of rank 0, and loaded from there. The second model lies on one rank."""
    found = []
    for case in (CASE, Case(lambda: nn.Linear(1, 1, bias=False), None)):
        model, other = wrap(case), wrap(case)
        optimizer, other_optimizer = make_optimizer(model), make_optimizer(other)
        loss_of(model(torch.linspace(-1, rank + 1, 6 if case is CASE else 1))).backward()
        optimizer.step()
        on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = get_state_dict(model, optimizer, options=on_host)
        kept = {"model": dict(weights), "optimizer": dict(state.get("state", {}))}
        from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # torch's set_state_dict does not call set_model_state_dict on a rank that gives {}
        set_model_state_dict(other, weights, options=from_rank_0)
        set_optimizer_state_dict(other, other_optimizer, state, options=from_rank_0)
        everywhere = get_model_state_dict(model, options=FULL)
        found.append(
            {
                "kept": kept,
                "everywhere": everywhere,
                "ours": ours_of(model, optimizer),
                "loaded": ours_of(other, other_optimizer),
            }
        )
    return found


def in_the_background(rank: int) -> list[tuple[State, State]]:
    """Three saves while training goes on, which none of them waits for or disturbs: what was loaded and what was there."""
    model = wrap(CASE)
    optimizer = make_optimizer(model)
    wanted, under_way = [], []
    for step in range(3):
        train(model, own_batches(CASE, rank, 2), lambda _: optimizer)
        wanted.append(ours_of(model, optimizer))
        path = folder() / "background" / str(step)
        under_way.append(fsdp.save(path, model, optimizer, extra={"rank": rank}, keep_last=2, async_=True))
        train(model, own_batches(CASE, rank, 2), lambda _: optimizer)
    if rank == 0:  # waiting is each rank's own affair
        assert under_way[-1].wait() == folder() / "background" / "2"
    train(model, own_batches(CASE, rank, 2), lambda _: optimizer)
    under_way[-1].wait()
    found = []
    for step in (1, 2):
        assert fsdp.load(under_way[step].path, model, optimizer) == {"rank": rank}
        found.append(ours_of(model, optimizer))
    assert not under_way[0].path.exists()
    return list(zip(found, wanted[1:], strict=True))


def own_versions(rank: int) -> list[tuple[State, State]]:
    """Running statistics of this rank, which two saves keep and two loads bring back: what was loaded and what was there."""
    torch.manual_seed(0)
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(3), nn.Linear(8, 2)), auto_wrap_policy={nn.Linear})
    wanted, under_way = [], []
    for step in range(2):
        train(model, own_batches(CASE, rank, 2))
        wanted.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        under_way.append(fsdp.save(folder() / "own" / str(step), model, async_=step == 1))
    train(model, own_batches(CASE, rank, 2))
    found = []
    for saving in under_way:
        fsdp.load(saving.wait(), model)
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return list(zip(found, wanted, strict=True))


def first_steps(rank: int) -> dict[str, Any]:
    """What newcomers meet: a first start, the {} of other ranks, other names, options of another engine on one rank."""
    model = wrap(CASE)
    optimizer = make_optimizer(model)
    train(model, own_batches(CASE, rank, 2), lambda _: optimizer)
    other = wrap(CASE)
    other_optimizer = make_optimizer(other)
    fsdp.load_full_state_dict(other, fsdp.full_state_dict(model))
    fsdp.load_full_optim_state_dict(other, other_optimizer, fsdp.full_optim_state_dict(model, optimizer))
    some = {name: value for name, value in fsdp.full_state_dict(model).items() if name != "leave.bias"}
    keys = fsdp.load_full_state_dict(other, {"more": torch.ones(1), **some} if rank == 0 else {}, strict=False)
    fsdp.save(folder() / "first", model)
    texts = []
    calls: list[Callable[[], object]] = [
        lambda: fsdp.load(fsdp.latest(folder() / "nothing"), model) if rank == 1 else fsdp.load(folder() / "first", model),
        lambda: fsdp.load_full_state_dict(model, {}),
        lambda: fsdp.load(folder() / "first", other, rng=False),
        lambda: fsdp.fully_shard(make_net(), **({"device_id": 0, "use_orig_params": True} if rank == 1 else {})),
    ]
    for call in calls:
        try:
            call()
            texts.append("")
        except fsdp.ShardingError as error:
            texts.append(str(error))
    return {"loaded": (ours_of(model, optimizer), ours_of(other, other_optimizer)), "keys": tuple(keys), "texts": texts}


CHECKPOINTS: Final[dict[str, Callable[[int], Any]]] = {
    "from FSDP2": from_fsdp2,
    "into FSDP2": into_fsdp2,
    "plain DCP": plain_dcp,
    "save both": save_both,
    "load both": load_both,
    "full by torch": full_by_torch,
    "in the background": in_the_background,
    "own versions": own_versions,
    "first steps": first_steps,
}
