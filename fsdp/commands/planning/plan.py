"""Compares choices for one job, and recommends one: `fsdp.plan`."""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdp.building.choose_units import WrapPolicy
from fsdp.commands.planning.assumptions import assumptions, default_reserve, notes_of
from fsdp.commands.planning.choices import (
    AUTO,
    STRATEGIES,
    Choice,
    NamedUnits,
    UnitsOfClasses,
    make_choices,
    make_dimensions,
    other_sizes,
)
from fsdp.commands.planning.comparison import Candidate, Fewest, Plan
from fsdp.commands.rehearsal.hardware import DEVICES, NETWORKS, Cluster, Device, Link, find
from fsdp.commands.rehearsal.kernels import ATTENTION, Attention
from fsdp.commands.rehearsal.memory import tensors_in
from fsdp.commands.rehearsal.pipeline import rehearse_all
from fsdp.commands.rehearsal.rehearse import Batch, Dimensions, Job
from fsdp.commands.reporting.formats import size
from fsdp.config import MixedPrecisionPolicy
from fsdp.errors import ShardingError

OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def plan(
    model_or_builder: nn.Module | Callable[[], nn.Module],
    world_size: int,
    *,
    inputs: Callable[..., object],
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = "adamw",
    device: str | Device = "h100",
    network: str | Link = "ib-ndr",
    per_host: int = 8,
    memory: int | None = None,
    reserve: int | None = None,
    params: torch.dtype | None = None,
    strategies: Sequence[str] = STRATEGIES,
    units: Mapping[str, WrapPolicy | None] | None = None,
    checkpointing: Sequence[bool] = (False, True),
    offload: Sequence[bool] | None = None,
    max_ranks: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    micro_batches: int = 1,
    attention: Attention = "auto",
    tp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    parallelize: Callable[..., object] | None = None,
    loss_parallel: bool = False,
    stages: Callable[[nn.Module, int, int], nn.Module] | None = None,
    options: Mapping[str, object] | None = None,
) -> Plan:
    """Say what a job needs with each choice of options, and which choice is the fastest that fits. Needs no process group.

    The engine itself runs two steps of rank 0 for each choice, on the meta device and over communicators that send nothing. So
    the bytes of the engine, and the number and bytes of collectives, are exact. Activations are counted from the operators of
    the model. Seconds are an estimate, see `fsdp/commands/rehearsal/clock.py`.

    Args:
        model_or_builder: a function that makes the model, called on the meta device; or a model, which is not changed.
        world_size: the number of ranks, at least 2.
        inputs: a function that makes one micro-batch of a rank, called on the meta device: a tensor, a tuple of arguments, or a
            dict of keyword arguments of the model. If it takes a number, it gets how many ranks share a micro-batch, and makes
            so many times the rows; else these ranks take so many times the micro-batches, one after another.
        loss: from what the model returns to a scalar. Default None: `.loss` of it if it has that, else the sum of it.
        optimizer: "adamw", "adam", "sgd", "adagrad", "rmsprop", or a function of a list of parameters. None: none.
        device: a name of the table in `fsdp/commands/rehearsal/hardware.py`, or a `Device`.
        network: what connects hosts: a name of that table, or a `Link`.
        per_host: ranks on one host.
        memory: bytes of a rank's device. Default None: all that the table says.
        reserve: bytes of these that stay free, for what no tensor is: the context, buffers of communicators, fragmentation.
            Default None: 6 % of the memory, and nothing on processors.
        params: the dtype of floating-point parameters, as of gradients and optimizer state. Default None: as the model is made.
        strategies: the sharding strategies to compare.
        units: the choices of units to compare, by name: what `auto_wrap_policy` takes. Default None: "auto", and units of other
            sizes where these may be faster, or may fit.
        checkpointing: whether to compare with and without the recomputing of inner units' activations.
        offload: whether to compare with and without an `OffloadPolicy`. Default None: with one only if nothing fits without.
        max_ranks: find also the smallest number of ranks that fits, up to this one: powers of two inside a host, then full hosts.
        mp_policy: the dtypes, as for `fsdp.fully_shard`.
        micro_batches: forwards and backwards before each step of the optimizer.
        attention: which kernel `scaled_dot_product_attention` takes: "auto" (the one that torch chooses on the device), "flash"
            (always a fused one), or "math" (never a fused one).
        tp: the sizes of tensor parallelism to compare: over how many ranks each layer is spread. These ranks share their data. A
            step of every choice trains on as much data, see `inputs`.
        ep: the sizes of expert parallelism to compare: over how many ranks, of those with data of their own, experts are spread.
        pp: the sizes of pipeline parallelism to compare: how many stages there are, each on as many ranks. Stages run 1F1B, over
            as many times more micro-batches.
        parallelize: a function of a model and a DeviceMesh that applies torch's parallel styles over `mesh["tp"]`, and makes the
            parameters of experts DTensors over `mesh["ep"]`. Called on the meta device, before the model is sharded over the
            other dimensions, with a mesh of the dimensions that are not 1.
        stages: a function of a model, the number of a stage, and how many there are, that returns the module of this stage. Each
            module takes what the one before it returns: tensors.
        loss_parallel: whether to run forwards and backwards under torch's `loss_parallel` where `tp` is not 1.
        options: other options of `fsdp.fully_shard`, the same for every choice.

    Raises:
        ShardingError: an argument is refused, the model cannot be made on the meta device, or it reads values of tensors.
    """
    if not isinstance(world_size, int) or world_size < 2:
        raise ShardingError(f"plan: world_size is {world_size!r}; give the number of ranks, at least 2.")
    if not isinstance(per_host, int) or per_host < 1:
        raise ShardingError(f"plan: per_host is {per_host!r}; give the number of ranks on one host, at least 1.")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ShardingError(f"plan: micro_batches is {micro_batches!r}; give a number, at least 1.")
    shared = make_dimensions(tp, ep, pp, world_size)
    if (stages is None) is any(one.pp > 1 for one in shared):
        raise ShardingError(
            "plan: stages belongs to pp; give the sizes to compare, as in pp=[1, 2], and a function of a model, the number of a "
            "stage, and how many there are, that returns the module of this stage."
        )
    if (parallelize is None) is any(one.tp * one.ep > 1 for one in shared):
        raise ShardingError(
            "plan: parallelize belongs to tp and ep; give the sizes to compare, as in tp=[1, 2], and a function of a model and "
            "a mesh that applies torch's parallel styles."
        )
    if attention not in ATTENTION:
        raise ShardingError(f"plan: attention is {attention!r}; give one of {', '.join(ATTENTION)}.")
    found = find("device", DEVICES, device, "Device")
    cluster = Cluster(found, find("network", NETWORKS, network, "Link"), per_host)
    template = _on_meta(model_or_builder)
    if params is not None:
        template.to(params)
    grows = _takes_number(inputs)
    summed: list[None] = []
    job = Job(
        build=lambda: _copy_of(template),
        batch=lambda: _batch(partial(inputs, 1) if grows else inputs),
        loss=loss or partial(_loss, summed),
        optimizer=_optimizer(optimizer, found.name != "cpu"),
        world_size=world_size,
        cluster=cluster,
        micro_batches=micro_batches,
        parallelize=parallelize,
        loss_parallel=loss_parallel,
        cut=stages,
        attention=attention,
    )
    own = {**(options or {}), **({} if mp_policy is None else {"mp_policy": mp_policy})}
    given = found.memory if memory is None else memory
    free = default_reserve(found, given) if reserve is None else reserve
    limit = given - free
    if limit <= 0:
        raise ShardingError(f"plan: the reserve of {size(free)} leaves nothing of {size(given)} of memory.")

    def job_of(dimensions: Dimensions) -> Job:
        """The job in which so many ranks share their data, with as much data in a step."""
        more = micro_batches * dimensions.pp
        if not grows:
            return replace(job, micro_batches=more * dimensions.tp)
        return replace(job, micro_batches=more, batch=lambda: _batch(partial(inputs, dimensions.tp)))

    def compare(policies: Mapping[str, WrapPolicy | None], offloads: Sequence[bool]) -> list[Candidate]:
        choices = make_choices(strategies, policies, checkpointing, offloads, world_size, per_host, shared, own)
        return _different([_candidate(job_of(choice.dimensions), choice) for choice in choices])

    policies: dict[str, WrapPolicy | None] = {**(units or {AUTO: AUTO})}
    for policy in policies.values():
        if isinstance(policy, UnitsOfClasses):
            policy.check(template)
    candidates = compare(policies, offload or [False])
    others: dict[str, NamedUnits | None] = {}
    if units is None:
        rehearsed = [one.rehearsal for one in candidates if one.rehearsal is not None]
        others = other_sizes(template, rehearsed, limit, False in checkpointing)
        candidates += compare(others, offload or [False]) if others else []
    fits = any(one.rehearsal is not None and one.rehearsal.peak <= limit for one in candidates)
    if offload is None and found.name != "cpu" and not fits:
        candidates += compare(policies, [True])
        candidates += compare(others, [True]) if others else []
    if all(one.rehearsal is None for one in candidates):
        raise ShardingError(
            f"plan: every choice is refused; the first one because {candidates[0].refusal.removeprefix('plan: ')}"
        )

    def place(one: Candidate) -> tuple[int, float, bool]:
        if one.rehearsal is None:
            return 2, 0.0, one.choice.checkpointing
        fits = one.rehearsal.peak <= limit
        # of two that are as fast to a thousandth, the one that recomputes nothing is first
        return (0, float(f"{one.rehearsal.seconds:.3g}"), one.choice.checkpointing) if fits else (1, one.rehearsal.peak, False)

    ordered = tuple(sorted(candidates, key=place))
    precision: Any = own.get("mp_policy")
    return Plan(
        ordered,
        given,
        world_size,
        cluster,
        sum(parameter.numel() for parameter in template.parameters()),
        free,
        tuple(
            assumptions(
                template,
                job.batch(),
                precision,
                next(one.rehearsal for one in ordered if one.rehearsal),
                free,
                bool(summed),
                tuple(notes_of(max(tp) > 1, max(pp) > 1, grows)),
            )
        ),
        None if max_ranks is None else _smallest_ranks(job_of, candidates, limit, max_ranks),
    )


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that do something else than one before them. Checkpointing without inner units changes nothing, for example."""
    found: list[Candidate] = []
    for one in candidates:
        if one.rehearsal is None or all(one.rehearsal != other.rehearsal for other in found):
            found.append(one)
    return found


def _smallest_ranks(job_of: Callable[[Dimensions], Job], candidates: Sequence[Candidate], limit: int, most: int) -> Fewest:
    """The smallest number of ranks that fits. More ranks never need more memory of each, but for some padding."""
    sharded = [one for one in candidates if one.rehearsal is not None and one.choice.mesh is None]
    if not sharded:
        raise ShardingError("plan: max_ranks needs a strategy that spreads over all ranks, such as FULL_SHARD.")
    choice = min(sharded, key=lambda one: one.found.peak).choice
    job = job_of(choice.dimensions)
    per_host = job.cluster.per_host
    inside = [2**power for power in range(1, per_host.bit_length()) if 2**power < per_host]
    sizes = [
        size
        for size in (*inside, *range(per_host, most + 1, per_host))
        if 2 <= size <= most and size % choice.dimensions.ranks == 0
    ]
    if not sizes:
        raise ShardingError(f"plan: max_ranks is {most!r}; give a number of ranks, at least 2.")

    @cache
    def peak(size: int) -> int:
        return rehearse_all(replace(job, world_size=size), choice.options, choice.checkpointed(), choice.dimensions).peak

    if peak(sizes[-1]) > limit:
        return Fewest(None, sizes[-1], choice.title, peak(sizes[-1]))
    found = sizes[bisect_left(sizes, True, key=lambda size: peak(size) <= limit)]
    return Fewest(found, sizes[-1], choice.title, peak(found))


def _candidate(job: Job, choice: Choice) -> Candidate:
    try:
        return Candidate(choice, rehearse_all(job, choice.options, choice.checkpointed(), choice.dimensions), "")
    except ShardingError as refusal:
        return Candidate(choice, None, str(refusal))


def _on_meta(given: Any) -> nn.Module:
    """A model whose tensors have no memory.

    Raises:
        ShardingError: it cannot be made.
    """
    if isinstance(given, nn.Module):
        tensors = [*given.parameters(), *given.buffers()]
        memo: dict[int, Any] = {id(tensor): _empty_like(tensor) for tensor in tensors}
        return copy.deepcopy(given, memo)
    if not callable(given):
        raise ShardingError(f"plan: give a model or a function that makes one, not {given!r}.")
    try:
        with torch.device("meta"):
            model = given()
    except Exception as reason:
        raise ShardingError(
            f"plan: the model cannot be made on the meta device ({type(reason).__name__}: {reason}); give a function that makes "
            "it without reading the value of a tensor and without loading weights."
        ) from reason
    if not isinstance(model, nn.Module):
        raise ShardingError(f"plan: the function that makes the model returned {type(model).__name__}, not an nn.Module.")
    return _on_meta(model) if any(not tensor.is_meta for tensor in model.parameters()) else model


def _copy_of(template: nn.Module) -> nn.Module:
    model = copy.deepcopy(template)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # weak references to parameters, which cannot get memory then
            module.__dict__["_flat_weight_refs"] = [None] * len(module._flat_weight_refs)
    return model


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _takes_number(inputs: Callable[..., Any]) -> bool:
    """Whether a function has a positional argument without a default."""
    try:
        known = signature(inputs).parameters.values()
    except (TypeError, ValueError):  # built-in functions have none
        return False
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in known)


def _batch(inputs: Callable[[], Any]) -> Batch:
    with torch.device("meta"):
        made = inputs()
    if isinstance(made, Batch):
        return made
    if isinstance(made, Mapping):
        return Batch(kwargs=made)
    return Batch(tuple(made) if isinstance(made, tuple | list) else (made,))


def _loss(summed: list[None], output: Any) -> Tensor:
    """The loss that the model returns, else the sum of what it returns, of which `summed` gets an entry."""
    found = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        found, output = output.get("loss", found), dict(output)
    if isinstance(found, Tensor):
        return found
    tensors = [one for one in tensors_in(output) if one.requires_grad]
    if not tensors:
        raise ShardingError("plan: the model returns no tensor with a graph; give `loss`, a function of what the model returns.")
    summed.append(None)
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _optimizer(given: Any, on_device: bool) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    if given not in OPTIMIZERS:
        raise ShardingError(f"plan: there is no optimizer {given!r}; give one of {', '.join(OPTIMIZERS)}, or a function.")
    # torch's default on devices, which it does not choose for tensors without memory
    return lambda parameters: OPTIMIZERS[given](parameters, foreach=on_device)
