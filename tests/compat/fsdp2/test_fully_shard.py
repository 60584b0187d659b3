"""fsdp.compat.fully_shard in the simulated world: what FSDP2's names do, and what is refused."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.comm.simulated import current_rank
from fsdp.compat import fully_shard as api
from fsdp.compat.fully_shard import FSDPModule, fully_shard
from fsdp.runtime.registry import unit_ref_of
from tests.support.described_torch import describes_this_torch
from tests.support.ranks import on_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migration" / "from-fsdp2.md"
STEPS = 3


class Net(nn.Module):
    """An embedding tied to the head, and blocks with odd numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2 * step + rank))


def sharded(**options: Any) -> Any:
    model: Any = net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard([model.embed, model.head], **options)
    return fully_shard(model, **options)


def train(model: Any, ranks: list[int], before: Callable[[Any, int], object] = lambda model, step: None) -> list[Tensor]:
    """Train with the mean loss over `ranks`; return the full parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for step in range(STEPS):
        before(model, step)
        optimizer.zero_grad()
        losses = [model.loss(tokens_of(step, rank)) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
    if not isinstance(model, FSDPModule):
        return [p.detach() for p in model.parameters()]
    return [fsdp.full_tensor(p).detach() for p in model.parameters()]


@on_ranks(2)
def test_a_list_of_modules_is_one_unit(rank: int) -> None:
    model = sharded()
    refs = [unit_ref_of(one) for one in (model.embed, model.head)]
    assert refs[0] is not None and refs[0] is refs[1]
    assert len(refs[0].engine.units) == 4 and [info.names for info in refs[0].unit.param_infos] == [["0.weight", "1.weight"]]


@on_ranks(2)
def test_a_module_inside_another_one_of_its_list_is_left_out(rank: int) -> None:
    model = net()
    fully_shard([model.blocks[0], model.blocks[0][0]])
    ref = unit_ref_of(model.blocks[0])
    assert len(ref.unit.modules) == 1


@on_ranks(2)
def test_the_class_is_a_subclass_of_the_modules_own(rank: int) -> None:
    model = sharded()
    assert type(model).__name__ == "FSDPNet"
    assert isinstance(model, FSDPModule) and isinstance(model, Net)
    assert not isinstance(model.blocks[0][0], FSDPModule)
    # a slice of a container is an ordinary container
    assert type(model.blocks[0][:2]) is nn.Sequential


def toggle_everything(model: Any, step: int) -> None:
    model.set_reshard_after_forward(step != 1)
    model.set_reshard_after_backward(step != 1)
    model.set_is_last_backward(True)
    model.set_post_optim_event(None)
    model.set_unshard_in_backward(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model._set_unshard_async_op(True)
    model.reset_iter_state()


def unshard_ahead(model: Any, step: int) -> None:
    handle = model.blocks[0].unshard(async_op=True)
    model.unshard()
    if step:
        handle.wait()
        model.blocks[1].reshard()


def prefetch(model: Any, step: int) -> None:
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def nothing(model: Any, step: int) -> None:
    """A list of modules with a tied weight, and no calls."""


@pytest.mark.parametrize("before", [nothing, toggle_everything, unshard_ahead, prefetch])
def test_training_ends_in_the_weights_of_a_single_process_whatever_is_called_before_a_step(before: Any) -> None:
    expected = train(net(), [0, 1])
    for found in fsdp.simulate(2, lambda rank: train(sharded(), [rank], before)):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_unshard_shows_full_parameters_from_wait_until_reshard(rank: int) -> None:
    model = sharded()
    block, engine = model.blocks[0], unit_ref_of(model).engine
    handle = block.unshard(async_op=True)
    assert type(block[0].weight) is not nn.Parameter and len(engine.gathered_units()) == 1
    for _ in range(2):  # a second time does nothing
        handle.wait()
        assert torch.equal(block[0].weight, net().blocks[0][0].weight)  # type: ignore[index]
    block.reshard()
    assert type(block[0].weight) is not nn.Parameter and not engine.gathered_units()


@on_ranks(2)
def test_when_parameters_are_freed_changes_between_steps_only(rank: int) -> None:
    model = sharded()
    model.blocks[0].register_forward_hook(lambda *_: model.set_reshard_after_forward(False))
    with pytest.raises(fsdp.ShardingError, match="set_reshard_after_forward: call it outside any forward"):
        model(tokens_of(0, rank))


@on_ranks(2)
def test_weights_that_an_optimizer_changes_after_unshard_are_gathered_again(rank: int) -> None:
    plain, model = net(), sharded()
    model.unshard()
    model.blocks[0].unshard(async_op=True)
    model.reshard()
    with torch.no_grad():
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(0.5)
        for _ in range(2):
            torch.testing.assert_close(model(tokens_of(0, 0)), plain(tokens_of(0, 0)))


@on_ranks(2)
def test_a_state_dict_and_gradients_can_be_copied_deeply(rank: int) -> None:
    model = sharded()
    model.loss(tokens_of(0, rank)).backward()
    state = model.state_dict()
    for kept, now in zip(copy.deepcopy(state).values(), state.values(), strict=True):
        assert torch.equal(kept.full_tensor(), now.full_tensor()) and kept.to_local().data_ptr() != now.to_local().data_ptr()
    grads = [p.grad for p in model.parameters()]
    assert len(copy.deepcopy(grads)) == len(grads)


@on_ranks(2)
def test_a_gather_of_ones_own_is_refused_until_it_is_deleted(rank: int) -> None:
    model = sharded()
    wanted = model.loss(tokens_of(0, rank)).item()
    local: Any = next(model.parameters())._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    with torch.no_grad():
        local.add_(1.0)
    with pytest.raises(fsdp.ShardingError, match="fsdp_pre_all_gather of a local tensor is not called"):
        model.loss(tokens_of(0, rank))
    del local.fsdp_pre_all_gather
    assert model.loss(tokens_of(0, rank)).item() != wanted


@on_ranks(2)
def test_a_local_tensor_that_torch_resizes_over_the_next_parameter_is_refused(rank: int) -> None:
    model = fully_shard(nn.Linear(6, 6))
    local: Any = model.weight._local_tensor
    local.resize_(6, 6)  # as torch 2.13 does in nn.init.eye_; torch 2.15 refuses that
    with pytest.raises(fsdp.ShardingError, match="was resized, which has overwritten the parameters behind it"):
        model(torch.ones(2, 6))


@on_ranks(2)
def test_data_that_is_assigned_to_a_dtensor_is_refused_once_and_changes_nothing(rank: int) -> None:
    model = sharded()
    wanted = model.loss(tokens_of(0, rank)).item()
    weight = next(model.parameters())
    weight.data = torch.zeros_like(weight)
    with pytest.raises(fsdp.ShardingError, match="they have not changed"):
        model.loss(tokens_of(0, rank))
    assert model.loss(tokens_of(0, rank)).item() == wanted
    with torch.no_grad():
        weight.copy_(torch.zeros_like(weight))
    assert model.loss(tokens_of(0, rank)).item() != wanted


@pytest.mark.parametrize(("switch", "mesh"), [("set_requires_gradient_sync", (2,)), ("set_requires_all_reduce", (2, 1))])
@on_ranks(2)
def test_a_reduction_can_wait_for_the_next_backward(rank: int, switch: str, mesh: tuple[int, ...]) -> None:
    plain, model = net(), sharded(mesh=init_device_mesh("cpu", mesh))
    for step in (0, 1):
        root, *others = [one for one in model.modules() if isinstance(one, FSDPModule)]
        for one in others:  # each by itself, as Lightning does it
            getattr(one, switch)(step == 1, recurse=False)
        with pytest.raises(fsdp.ShardingError, match="together or not at all"):
            model.loss(tokens_of(step, rank)).backward()
        getattr(root, switch)(step == 1, recurse=False)
        model.loss(tokens_of(step, rank)).backward()
    torch.stack([plain.loss(tokens_of(step, one)) for step in (0, 1) for one in (0, 1)]).sum().div(2).backward()
    found = [fsdp.full_tensor(p.grad) for p in model.parameters()]
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()])


@on_ranks(2)
def test_each_unit_has_a_divisor_of_its_own(rank: int) -> None:
    plain: Any = net()
    model = sharded()
    model.blocks[0].set_gradient_divide_factor(1.0)
    model.set_gradient_divide_factor(4.0)
    model.double()  # makes the units anew
    for one in (model, plain.double()):
        one.loss(tokens_of(0, 0)).backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        factor = 2.0 if name.startswith("blocks.0") else 0.5 if name.startswith("norm") else 1.0
        torch.testing.assert_close(fsdp.full_tensor(parameter.grad), factor * gradients[name].grad, msg=name)


@on_ranks(2)
def test_a_setting_stays_when_a_root_is_wrapped_around_the_module(rank: int) -> None:
    inner: Any = fully_shard(nn.Linear(4, 4))
    inner.set_reshard_after_forward(False)
    model = fully_shard(nn.Sequential(inner, nn.Linear(4, 4)))
    model(torch.ones(1, 4))
    ref = unit_ref_of(inner)
    assert ref is not None and ref.engine.gathered_units() == [0, 1], "the root's parameters and its own"


@on_ranks(2)
def test_when_parameters_are_freed_after_the_backward_is_a_setting_of_its_own(rank: int) -> None:
    model: Any = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].set_reshard_after_backward(False)
    fully_shard(model)

    def gathered() -> tuple[list[int], list[int]]:
        ref = unit_ref_of(model)
        loss = model(torch.ones(1, 4)).sum()
        after_forward = ref.engine.gathered_units()
        loss.backward()
        return after_forward, ref.engine.gathered_units()

    assert gathered() == ([0, 1], [1])
    model[0].set_reshard_after_forward(False)
    assert gathered() == ([0, 1], [1]), "kept after the backward all the same"
    model[0].set_reshard_after_forward(True)
    model[0].set_reshard_after_backward(True)
    assert gathered() == ([0], [])
    model.set_reshard_after_backward(False)
    assert gathered() == ([0, 1], [0, 1])
    model.set_reshard_after_backward(True)
    assert gathered() == ([0], []), "as before the first call"


@on_ranks(2)
def test_prefetch_lists_are_not_lost(rank: int) -> None:
    inner: Any = nn.Sequential(*(fully_shard(nn.Linear(4, 4)) for _ in range(3)))
    fully_shard(inner)
    inner[0].set_modules_to_forward_prefetch([inner[2]])
    inner.double()
    outer: Any = nn.Sequential(inner)
    with pytest.raises(fsdp.ShardingError, match=r"unit '0\.0' has a prefetch list, and with uneven_paths all ranks gather in"):
        fsdp.fully_shard(outer, uneven_paths=True)
    fully_shard(outer)

    def gathered() -> list[str]:
        here: Any = current_rank()
        before = len(here.log)
        outer(torch.ones(2, 4, dtype=torch.float64))
        return [call.label for call in here.log[before:] if call.kind == "all_gather"]

    assert gathered() == ["0.0", "0.2", "0.1"]
    inner[0].set_modules_to_forward_prefetch([])
    assert gathered() == ["0.0", "0.1", "0.2"]


def test_a_method_that_is_registered_runs_as_a_forward() -> None:
    def program(rank: int) -> Tensor:
        model = sharded()
        api.register_fsdp_forward_method(model.embed, "forward_twice")
        return torch.zeros(())

    class Twice(nn.Linear):
        def twice(self, x: Tensor) -> Tensor:
            return 2 * self(x)

    def registered(rank: int) -> Tensor:
        torch.manual_seed(0)
        model: Any = fully_shard(Twice(3, 3))
        api.register_fsdp_forward_method(model, "twice")
        api.register_fsdp_forward_method(nn.Linear(2, 2), "no such method")  # not wrapped: nothing happens
        out: Tensor = model.twice(torch.ones(3))
        return out.detach()

    torch.manual_seed(0)
    torch.testing.assert_close(fsdp.simulate(2, registered)[0], Twice(3, 3).twice(torch.ones(3)).detach())
    with pytest.raises(ValueError, match="has no method 'forward_twice'"):
        fsdp.simulate(2, program)


@on_ranks(2)
def test_ignored_parameters_stay_as_they_are(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    left = model[0].bias
    fully_shard(model, ignored_params={left})
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].bias is left
    assert (type(left).__name__, tuple(left.shape), left.grad is not None) == ("Parameter", (4,), True)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_loading_a_state_dict_gives_memory_to_a_model_on_the_meta_device(rank: int, assign: bool) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    torch.manual_seed(0)
    plain, x = made(), torch.rand(4, 4)
    with torch.device("meta"):
        model: Any = made()
    fully_shard(model)
    model.load_state_dict(plain.state_dict(), assign=assign)
    for one in (model, plain):
        one(x).sum().backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(fsdp.full_tensor(mine.grad), wanted.grad)
        torch.testing.assert_close(fsdp.full_tensor(mine).detach(), wanted.detach())


@on_ranks(2)
def test_a_module_is_converted_after_wrapping(rank: int) -> None:
    model: Any = sharded().double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(train(model, [rank]), train(net().double(), [0, 1]))


@on_ranks(2)
def test_offloading_to_the_host_changes_nothing_on_the_host(rank: int) -> None:
    model = fully_shard(net(), offload_policy=api.CPUOffloadPolicy())
    torch.testing.assert_close(train(model, [rank]), train(net(), [0, 1]))


@on_ranks(2)
def test_a_number_of_ranks_to_reshard_to_is_taken_as_true_with_a_warning(rank: int) -> None:
    with pytest.warns(UserWarning, match="reshard_after_forward=2: parameters are resharded over all ranks"):
        fully_shard(net(), reshard_after_forward=2)


def _mesh_of_three() -> Any:
    return SimpleNamespace(ndim=3)


def _hook_on_a_stream_with_replicas() -> None:
    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1)))
    module.set_all_reduce_hook(print, stream=object())


def _around_one_that_does_not_reduce() -> None:
    inner: Any = fully_shard(nn.Linear(2, 2))
    inner.set_requires_gradient_sync(False)
    fully_shard(nn.Sequential(inner))


REFUSALS: dict[str, Callable[[Any], object]] = {
    "dp_mesh_dims is not supported": lambda model: fully_shard(nn.Linear(2, 2), dp_mesh_dims="dp"),
    "Shard dim 1 is invalid for 1D tensor 'bias'": lambda model: fully_shard(
        nn.Linear(2, 2), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1)
    ),
    "dtensors=True needs a DeviceMesh, not the shape of one": lambda model: fully_shard(nn.Linear(2, 2), mesh=(2, 1)),
    "takes a module or a list of modules, not \\[\\]": lambda model: fully_shard([]),
    "reshard_after_forward must be": lambda model: fully_shard(nn.Linear(2, 2), reshard_after_forward="no"),  # type: ignore[arg-type]
    "does not support containers that do not implement forward": lambda model: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    "can only be applied to a module once. fully_shard: FSDPNet is wrapped already": lambda model: fully_shard(model),
    "expects a 1D or 2D DeviceMesh but got": lambda model: fully_shard(nn.Linear(2, 2), mesh=_mesh_of_three()),
    "CPUOffloadPolicy with 'weight' on the meta device: give the module memory and values on the cuda": lambda model: fully_shard(
        nn.Linear(2, 2, device="meta"), mesh=SimpleNamespace(ndim=1, device_type="cuda"), offload_policy=api.CPUOffloadPolicy()
    ),
    "set_gradient_divide_factor: a factor must be a pos": lambda model: model.blocks[0].set_gradient_divide_factor(0),
    "set_custom_all_gather: communication is": lambda model: model.set_custom_all_gather(None),
    "set_custom_reduce_scatter: communication is": lambda model: model.set_custom_reduce_scatter(None),
    "unit '0' does not reduce its gradients, by no_sync or set_req": lambda model: _around_one_that_does_not_reduce(),
    "stream cannot be set when there are replicas": lambda model: _hook_on_a_stream_with_replicas(),
    "set_all_reduce_hook takes a function of a tensor, not 3": lambda model: model.set_all_reduce_hook(3),
    "set_symm_mem_for_comm: buffers are": lambda model: model.set_symm_mem_for_comm(),
    "_from_process_group_for_comm: buffers are": lambda model: model.set_allocate_memory_from_process_group_for_comm(True),
    "max_input_buffers must be 1 or more": lambda model: model.set_reduce_scatter_max_input_buffers(0),
    "expected modules that fully_shard has wrapped": lambda model: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
    "is no unit of the same root": lambda model: model.set_modules_to_forward_prefetch([fully_shard(nn.Linear(2, 2))]),
    "share_comm_ctx|expected modules": lambda model: api.share_comm_ctx([nn.Linear(2, 2)]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("text", REFUSALS)
@on_ranks(2)
def test_is_refused(rank: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        REFUSALS[text](sharded())


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
@on_ranks(2)
def test_a_state_dict_inside_a_forward_or_a_backward_has_the_shards(rank: int, hook: str) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), fully_shard(nn.Sequential(nn.Linear(4, 4)))))
    found: list[dict[str, Any]] = []
    getattr(model[1][0], hook)(lambda *_: found.append(model.state_dict()))
    model(torch.ones(2, 4)).sum().backward()
    (during,), after = found, model.state_dict()
    assert [*during] == [*after]
    for name, value in after.items():
        assert during[name].placements == value.placements and during[name].shape == value.shape
        torch.testing.assert_close(during[name].to_local(), value.to_local())


@on_ranks(2)
def test_a_parameter_that_is_not_contiguous_is_refused_on_every_rank(rank: int) -> None:
    """As in FSDP2. An unsharded parameter would be contiguous, and convolutions would lose their memory format unnoticed."""
    model = nn.Conv2d(4, 4, 3)
    if rank:
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(
        (NotImplementedError, fsdp.ShardingError), match="FSDP does not support non-contiguous parameters: one of shape"
    ):
        fully_shard(model)


# the page ------------------------------------------------------------------------------


METHODS = [
    name
    for name, one in vars(torch_fsdp.FSDPModule).items()
    if inspect.isfunction(one) and not name.startswith("__") and name not in ("_apply", "_get_fsdp_state")
]


def names_of_torch() -> list[str]:
    """Every name of FSDP2, every argument of its functions, and every method of FSDPModule."""
    names = list(torch_fsdp._fully_shard.__all__)
    for function in (torch_fsdp.fully_shard, torch_fsdp.register_fsdp_forward_method, torch_fsdp.share_comm_ctx):
        names += inspect.signature(function).parameters
    return names + METHODS


NOT_YET = {"GradientReductionHandle"} - {*torch_fsdp._fully_shard.__all__}
"""Names of torch 2.15, on an older one."""


@on_ranks(2)
def test_each_wrapped_module_has_a_state_of_its_own(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    states = [fully_shard.state(module) for module in (model, model[0])]
    assert len({*states, None}) == 3 and fully_shard.state(model[1]) is None


@describes_this_torch
def test_every_name_of_fsdp2_is_here() -> None:
    assert set(torch_fsdp._fully_shard.__all__) == set(api.__all__) - NOT_YET
    for name in names_of_torch():
        assert (
            hasattr(api, name)
            or hasattr(FSDPModule, name)
            or name in inspect.signature(fully_shard).parameters
            or (name in ("module", "method_name", "modules"))
        )


@describes_this_torch
def test_the_page_has_a_row_for_every_name_of_fsdp2() -> None:
    rows = "\n".join(line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    assert [name for name in names_of_torch() if f"`{name}`" not in rows] == []


@describes_this_torch
@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx", *METHODS])
def test_functions_and_methods_have_torchs_arguments(name: str) -> None:
    owners = (torch_fsdp.FSDPModule, FSDPModule) if name in METHODS else (torch_fsdp, api)
    theirs, ours = (inspect.signature(getattr(one, name)).parameters for one in owners)
    assert [(key, one.kind) for key, one in ours.items()] == [(key, one.kind) for key, one in theirs.items()]


def test_the_policies_are_torchs_own() -> None:
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        assert getattr(api, name) is getattr(torch_fsdp, name, None)
