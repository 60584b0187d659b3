"""DistributedDataParallel with the constructors of torch and of Apex, over this engine."""

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.utils import prune

import fsdp
from fsdp.compat import apex, ddp
from fsdp.compat.ddp.arguments import ABSENT
from tests.support.models import promised
from tests.support.ranks import on_ranks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TORCH_DDP: Any = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    """Two layers, running statistics between them, and a layer that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.extra = nn.Linear(4, 1)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = torch.relu(self.norm(self.enter(x)))
        return self.extra(x) if extra else self.leave(x)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def plain_steps(ranks: int, steps: int, scale: float) -> dict[str, Tensor]:
    """One process: each step sums the gradients of all ranks' batches times `scale`. Running statistics are those of rank 0."""
    model = Net()
    optimizer = SGD(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        buffers = [buffer.clone() for buffer in model.buffers()]
        for rank in reversed(range(ranks)):
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            (model(batch(rank, number)).square().mean() * scale).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(wrapper: Callable[[nn.Module], nn.Module], rank: int, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapper(Net())
    optimizer = SGD(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        model(batch(rank, number)).square().mean().backward()
        optimizer.step()
    return model, optimizer


WRAPPERS: dict[str, tuple[Callable[..., nn.Module], float]] = {
    "torch's defaults": (ddp.DistributedDataParallel, 0.5),
    "torch's options that change nothing": (
        partial(
            ddp.DistributedDataParallel,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=0.00005,
            check_reduction=True,
            skip_all_reduce_unused_params=True,
            batched_grad_copy=True,
            lazy_bucket_allocation=True,
            delay_allreduce=False,
        ),
        0.5,
    ),
    "torch's static graph": (partial(ddp.DistributedDataParallel, static_graph=True, find_unused_parameters=True), 0.5),
    "Apex's defaults": (apex.DistributedDataParallel, 0.5),
    "Apex's options": (
        partial(
            apex.DistributedDataParallel,
            message_size=10,
            delay_allreduce=True,
            allreduce_always_fp32=True,
            num_allreduce_streams=2,
            gradient_predivide_factor=2.0,
        ),
        0.5,
    ),
    "Apex's sum": (partial(apex.DistributedDataParallel, gradient_average=False), 1.0),
}


@pytest.mark.parametrize(("wrapper", "scale"), WRAPPERS.values(), ids=WRAPPERS)
@on_ranks(2)
def test_weights_are_those_of_one_process_and_have_the_names_of_the_peer(rank: int, wrapper: Any, scale: float) -> None:
    expected = plain_steps(2, 3, scale)
    state = trained(wrapper, rank)[0].state_dict()
    assert [*state] == [f"module.{name}" for name in expected]
    for name, value in expected.items():
        is_weight = "running" not in name
        if is_weight or rank == 0:
            torch.testing.assert_close(state[f"module.{name}"], value)


@on_ranks(2)
def test_states_are_plain_tensors_that_torch_saves_and_loads(rank: int) -> None:
    model, optimizer = trained(ddp.DistributedDataParallel, rank)
    with torch.no_grad():
        expected = model.eval()(batch(0, 9))
    file = io.BytesIO()
    torch.save((model.state_dict(), model.module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    full, inner, optimizer_state = torch.load(file)
    again = ddp.DistributedDataParallel(Net())
    again.load_state_dict(full)
    SGD(again.parameters()).load_state_dict(optimizer_state)
    plain = Net()
    plain.load_state_dict(inner)
    with torch.no_grad():
        found = [one.eval()(batch(0, 9)) for one in (again, plain)]
    assert all(torch.equal(one, expected) for one in found)


def test_buffers_are_those_of_rank_0_unless_they_are_not_broadcast() -> None:
    def one_rank(rank: int, **options: Any) -> Tensor:
        model, _ = trained(partial(ddp.DistributedDataParallel, **options), rank)
        model(batch(0, 9))
        return model.module.norm.running_mean

    one, other = fsdp.simulate(2, one_rank)
    assert torch.equal(one, other)
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        one, other = fsdp.simulate(2, partial(one_rank, **{name: False}))
        assert not torch.equal(one, other)


def test_buffers_begin_as_those_of_rank_0_unless_broadcast_buffers_is_false_as_in_ddp() -> None:
    def mean(rank: int, **options: Any) -> Tensor:
        net = Net()
        net.norm.running_mean.fill_(rank + 1)
        return ddp.DistributedDataParallel(net, **options).module.norm.running_mean

    for options, expected in (({}, 1.0), ({"forward_sync_buffers": False}, 1.0), ({"broadcast_buffers": False}, 2.0)):
        assert fsdp.simulate(2, partial(mean, **options))[1].tolist() == [expected] * 4


def test_an_evaluation_after_training_has_the_buffers_of_rank_0_as_in_ddp() -> None:
    def run(rank: int, broadcasts: bool, under_no_sync: bool) -> tuple[Tensor, Tensor]:
        model = ddp.DistributedDataParallel(Net(), broadcast_buffers=broadcasts)
        if under_no_sync:
            with model.no_sync():
                model(batch(rank, 0)).sum().backward()
        else:
            model(batch(rank, 0)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(batch(0, 1))
            if rank == 0:  # a second one needs no other rank
                model(batch(0, 2))
        return model.module.norm.running_mean, model.module.norm.num_batches_tracked

    for broadcasts, under_no_sync in ((True, False), (False, False), (True, True)):
        (one, _), (other, _) = fsdp.simulate(2, lambda rank, a=broadcasts, b=under_no_sync: run(rank, a, b))
        assert torch.equal(one, other) is (broadcasts and not under_no_sync)


def test_a_compiled_model_trains_once_the_door_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, compiles: bool) -> Tensor:
        model: Any = ddp.DistributedDataParallel(Net(), find_unused_parameters=True)
        called = torch.compile(model, backend="eager") if compiles else model
        called(batch(rank, 0)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = fsdp.simulate(2, lambda rank: run(rank, False))
    # as if the compiler had been imported after the door was installed
    monkeypatch.setattr("torch._dynamo.convert_frame.DistributedDataParallel", ddp.DistributedDataParallel)
    compiled = fsdp.simulate(2, lambda rank: run(rank, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))


@on_ranks(2)
def test_a_pickle_is_refused_with_what_can_be_saved(rank: int) -> None:
    model = ddp.DistributedDataParallel(Net())
    with pytest.raises(fsdp.ShardingError, match=r"holds the engine of its process: .* model.state_dict\(\) by DDP's names"):
        torch.save(model.module, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize("make", [ddp.DistributedDataParallel, partial(fsdp.fully_shard, sharding_strategy="NO_SHARD")])
@on_ranks(2)
def test_a_scaler_of_replicas_asks_no_rank(rank: int, make: Any) -> None:
    """One that has no data left in a join would not answer."""
    model = make(nn.Linear(4, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    with model.join() if isinstance(model, ddp.DistributedDataParallel) else fsdp.join(model):
        for _ in range(3 - rank):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_weight_that_is_pruned_after_wrapping_is_named(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(3, 2))
    prune.l1_unstructured(model.module, "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.raises(fsdp.ShardingError, match=r"Linear.weight in unit 'Linear' was taken away after wrapping"):
        model(torch.ones(2, 3))


@on_ranks(2)
def test_gradients_accumulate_on_this_rank_under_no_sync(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    weight, x = model.module.weight, torch.full((1, 2), float(rank + 1))
    with model.no_sync():
        assert not model.require_backward_grad_sync
        model(x).sum().backward()
    assert torch.equal(weight.grad, torch.full((1, 2), rank + 1.0))
    model(x).sum().backward()
    assert torch.equal(weight.grad, torch.full((1, 2), 3.0))


@on_ranks(2)
def test_the_switches_of_the_peers_are_no_sync_too(rank: int) -> None:
    torchs, apexs = ddp.DistributedDataParallel(nn.Linear(1, 1)), apex.DistributedDataParallel(nn.Linear(1, 1))
    x = torch.full((1, 1), float(rank))
    torchs.require_backward_grad_sync = False
    apexs.disable_allreduce()
    torchs(x).sum().backward(), apexs(x).sum().backward()
    torchs.require_backward_grad_sync = True
    apexs.enable_allreduce()
    torchs(x).sum().backward(), apexs(x).sum().backward()
    found = torchs.module.weight.grad, apexs.module.weight.grad
    assert [gradient.item() for gradient in found] == [1.0, 1.0]


@on_ranks(2)
def test_ranks_may_use_different_parameters(rank: int) -> None:
    model = ddp.DistributedDataParallel(Net(), find_unused_parameters=True)
    for _ in range(2):
        model(batch(rank, 0), extra=bool(rank)).sum().backward()
    assert [parameter.grad is not None for parameter in model.parameters()] == [True] * 8


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_an_unchanged_loop_trains_with_uneven_batches_inside_join(divides_by_all: bool) -> None:
    counts = (3, 1, 0, 2)

    def one_rank(rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = ddp.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divides_by_all):
            for number in range(counts[rank]):
                optimizer.zero_grad()
                model(batch(rank, number)).square().mean().backward()
                optimizer.step()
        return dict(model.module.state_dict()), optimizer.state_dict()

    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for number in range(max(counts)):
        ranks = [rank for rank, count in enumerate(counts) if count > number]
        optimizer.zero_grad()
        for rank in ranks:
            (plain(batch(rank, number)).square().mean() / (4 if divides_by_all else len(ranks))).backward()
        optimizer.step()

    for state, optimizer_state in fsdp.simulate(4, one_rank):
        torch.testing.assert_close(state, dict(plain.state_dict()))
        for mine, theirs in zip(optimizer_state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
            torch.testing.assert_close(mine, theirs)


@on_ranks(2)
def test_join_stops_all_ranks_with_the_first_and_does_nothing_if_it_is_not_enabled(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(3, 1))
    stops = pytest.raises(RuntimeError, match="rank 0 had no further batch while others had; all ranks stop")
    with stops, model.join(throw_on_early_termination=True):
        for number in range(1 + rank):
            model(batch(rank, number)).sum().backward()
    with model.join(enable=False) as nothing:
        assert nothing is None


@pytest.mark.parametrize("ignored", [["extra.weight", "extra.bias"], ["extra.weight"]], ids=["a module", "a part of one"])
@on_ranks(2)
def test_parameters_that_the_user_ignores_are_left_alone(rank: int, ignored: list[str]) -> None:
    net = Net()
    ddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    nn.init.constant_(net.extra.weight, float(rank))
    model = ddp.DistributedDataParallel(net, broadcast_buffers=False)
    both: Tensor = model(batch(rank, 0)).sum() + model(batch(rank, 0), extra=True).sum()
    both.backward()
    assert (bool((model.module.extra.weight == rank).all()), model.module.extra.bias.grad is not None) == (True, True)


@on_ranks(1)
def test_frameworks_that_ask_for_torchs_class_find_it(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(1, 1))
    assert isinstance(model, TORCH_DDP) and issubclass(ddp.DistributedDataParallel, TORCH_DDP)
    logged = model._get_ddp_logging_data()
    assert logged["world_size"] == 1 and logged["static_graph"] is False and model.broadcast_buffers is True
    assert not isinstance(fsdp.FullyShardedDataParallel(nn.Linear(1, 1)), TORCH_DDP)
    with pytest.raises(fsdp.ShardingError, match=r"use `with model.join\(\):`"):
        Join([model])


def torchs(make: Callable[[], nn.Module] = Net, **options: Any) -> Callable[[], Any]:
    return lambda: ddp.DistributedDataParallel(make(), **options)


def apexs(**options: Any) -> Callable[[], Any]:
    return lambda: apex.DistributedDataParallel(Net(), **options)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "device on the host": (torchs(device_ids=[0]), "and None on the host; the parameters are on cpu"),
    "output device": (torchs(output_device=0), "one device is allowed"),
    "dim": (torchs(dim=1), "inputs are not scattered"),
    "delayed": (torchs(delay_all_reduce_named_params=[]), "at_end=True"),
    "mixed_precision": (torchs(mixed_precision=object()), "give mp_policy"),
    "caps": (torchs(bucket_cap_mb_list=[1]), "parameters that end a bucket"),
    "Apex's": (torchs(delay_allreduce=True), "those of fsdp.compat.apex"),
    "unknown": (torchs(bucket_cap=3), "did you mean bucket_cap_mb?"),
    "nothing to train": (torchs(lambda: Net().requires_grad_(False)), "no parameter that requires a gradient"),
    "lazy": (torchs(nn.LazyBatchNorm1d, broadcast_buffers=False), "run one forward of the plain module before wrapping it"),
    "ignored nothing": (
        torchs(lambda: ignoring("extra.none")),
        "'extra.none' is ignored, and is no parameter",
    ),
    "ignored buffer": (torchs(lambda: ignoring("norm.running_mean")), "give broadcast_buffers=False"),
    "no hook": (lambda: torchs()()._register_builtin_comm_hook(0), "register default_hooks.allreduce_hook"),
    "buffer hook": (lambda: torchs()()._register_buffer_comm_hook(0, 0), "leave out the buffer hook"),
    "fused": (lambda: torchs()()._register_fused_optim(SGD), "step the optimizer after it"),
    "static": (lambda: torchs()()._set_static_graph(), "give static_graph=True to the constructor"),
    "shared": (apexs(shared_param=True), "shared parameters need no option"),
    "retained": (apexs(retain_allreduce_buffers=True), "always views of what was reduced"),
    "communicators": (apexs(allreduce_communicators=[]), "made from process_group"),
    "prof": (apexs(prof=True), "put torch.profiler around the step"),
    "trigger": (apexs(allreduce_trigger_params=[nn.Parameter(torch.ones(2))]), "is not one of Net"),
    "late triggers": (apexs(delay_allreduce=True, allreduce_trigger_params=[]), "allreduce_trigger_params mean nothing"),
    "divided sum": (apexs(gradient_average=False, gradient_predivide_factor=2.0), "gradient_average=False sums"),
}


def ignoring(name: str) -> nn.Module:
    net = Net()
    ddp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [name])
    return net


@pytest.mark.parametrize(("wrap", "text"), REFUSED.values(), ids=REFUSED)
@on_ranks(1)
def test_what_this_engine_lacks_is_refused_with_the_alternative(rank: int, wrap: Callable[[], object], text: str) -> None:
    with pytest.raises(fsdp.ShardingError, match=text.replace("?", "\\?")):
        wrap()


@on_ranks(1)
def test_a_part_of_torchs_engine_is_not_there_and_the_error_says_what_is(rank: int) -> None:
    model = ddp.DistributedDataParallel(Net())
    for name, instead in ABSENT.items():
        with pytest.raises(
            AttributeError, match=re.escape(f"DistributedDataParallel.{name} is part of torch's engine: {instead}")
        ):
            getattr(model, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        model.nonsense  # noqa: B018  # it raises


@on_ranks(2)
def test_a_communication_hook_reduces_the_buckets_inside_join_too(rank: int) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(1, 1))
    seen = []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        seen.append(float(bucket.buffer().sum()))
        return promised(torch.full_like(bucket.buffer(), 5.0))

    model.register_comm_hook(None, hook)
    with model.join():
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
    assert model.module.weight.grad.item() == 5.0
    # a rank that has finished sends zeros
    assert seen == [2.0, 2.0 * rank]


@on_ranks(1)
def test_a_wrong_communication_hook_is_refused_with_the_types_and_words_of_ddp(rank: int) -> None:
    def of_a_number(state: object, bucket: int) -> torch.futures.Future[Tensor]:
        return torch.futures.Future()

    def to_a_number(state: object, bucket: "torch.distributed.GradBucket") -> int:
        return 1

    def without_annotations(state, bucket):  # type: ignore[no-untyped-def]  # what is under test
        return 1

    model = ddp.DistributedDataParallel(nn.Linear(1, 1))
    assert model._get_ddp_logging_data()["has_error"] == 0
    with pytest.raises(TypeError, match="Communication hook must be callable"):
        model.register_comm_hook(None, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bucket annotation should be dist.GradBucket. It is <class 'int'>"):
        model.register_comm_hook(None, of_a_number)
    with pytest.raises(ValueError, match=r"return annotation should be torch.futures.Future"):
        model.register_comm_hook(None, to_a_number)  # type: ignore[arg-type]
    logged = model._get_ddp_logging_data()
    assert logged["has_error"] == 1 and "return annotation" in str(logged["error"]) and logged["iteration"] == 0
    model.register_comm_hook(None, without_annotations)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, without_annotations)
    loss = model(torch.ones(1, 1)).sum()
    assert model._get_ddp_logging_data()["iteration"] == 1
    with pytest.raises(RuntimeError, match=r"callback must return a torch.futures.Future object, but got int"):
        loss.backward()


@on_ranks(1)
def test_torchs_annotated_hooks_are_accepted(rank: int) -> None:
    def quoted(state: object, bucket: "fsdp.GradBucket") -> "torch.futures.Future[Tensor]":
        return promised(bucket.buffer())

    class Callable:
        """A hook that is an object."""

        def __call__(self, state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
            return quoted(state, bucket)  # type: ignore[arg-type]

    for hook in (quoted, Callable(), fp16_compress_hook):
        ddp.DistributedDataParallel(nn.Linear(1, 1)).register_comm_hook(None, hook)


@on_ranks(2)
def test_parameters_that_trigger_a_reduction_are_found_by_identity(rank: int) -> None:
    net = Net()
    model = apex.DistributedDataParallel(net, allreduce_trigger_params=[net.leave.weight])
    model(batch(rank, 0)).sum().backward()
    assert len(fsdp.reducer_stats(model)) > 1
