"""How an instance becomes a unit: modules on the meta device, and what is left alone."""

import pytest
import torch
from torch import nn

import fsdp
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from fsdp.compat.torch_fsdp import MixedPrecision, ModuleWrapPolicy
from tests.compat.fsdp1.test_torch_fsdp import Block, Net, batch
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_function_that_gives_memory_to_modules_on_the_meta_device_initialises_them(rank: int) -> None:
    def init(module: nn.Module) -> None:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(one.is_meta for one in tensors):
            module.to_empty(device="cpu", recurse=False)
            for one in module.parameters(recurse=False):
                one.data.fill_(3)

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), Block())
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=init)
    with FSDP.summon_full_params(model):
        assert all(bool((p == 3).all()) for p in model.parameters())


@on_ranks(2)
def test_ignored_parameters_of_a_module_stay_complete_and_the_instance_of_that_module_has_no_unit(rank: int) -> None:
    net = Net()
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=[*net.blocks[0].parameters()])
    names = dict(model.named_parameters())
    assert names["_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up.weight"].shape == (5, 3)
    model(batch(0, 0)).sum().backward()
    assert dict(model.state_dict()).keys() == Net().state_dict().keys()
    model.load_state_dict(model.state_dict())


@on_ranks(2)
def test_one_ignored_parameter_of_a_module_stays_complete_beside_the_others(rank: int) -> None:
    net = Net()
    bias = net.first.bias
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=[bias])
    assert bias.shape == (3,) and all(bias.data_ptr() != p.data_ptr() for p in model.params)
    model(batch(0, rank)).sum().backward()
    assert bias.grad is not None and bias.grad.shape == (3,)
    state = model.state_dict()
    assert torch.equal(state["first.bias"], bias)
    model.load_state_dict({**state, "first.bias": torch.full((3,), 2.0)})
    assert bool((bias == 2).all())


@on_ranks(2)
def test_an_instance_inside_an_ignored_module_stays_sharded_and_what_is_beside_it_does_not(rank: int) -> None:
    net = Net()
    net.blocks[0] = FSDP(net.blocks[0])
    beside = net.blocks[1].up.weight
    model = FSDP(net, ignored_modules=[net.blocks])
    assert beside.shape == (5, 3)
    assert [p.data_ptr() for p in model.params] == [p.data_ptr() for p in net.first.parameters()]
    assert len(net.blocks[0].params) == 4
    model(batch(0, rank)).sum().backward()
    assert beside.grad is not None
    with pytest.raises(ValueError, match="ignored_modules: an item is a FullyShardedDataParallel"):
        FSDP(nn.Sequential(net), ignored_modules=[net.blocks[0]])


@on_ranks(2)
def test_a_module_without_parameters_of_its_own_may_get_a_second_wrapper(rank: int) -> None:
    net = nn.Sequential(FSDP(nn.Linear(3, 3)))
    model = FSDP(net)
    model(batch(0, rank)).sum().backward()
    again = FSDP(net)
    assert torch.equal(again(batch(0, rank)), model(batch(0, rank)))
    assert list(again.state_dict()) == ["0.weight", "0.bias"]
    with pytest.raises(fsdp.ShardingError, match="Sequential is a unit already; wrap a module once"):
        FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


@on_ranks(2)
def test_an_instance_of_a_few_elements_is_cut_evenly_as_in_fsdp1(rank: int) -> None:
    model = FSDP(nn.Linear(1, 2, bias=False))
    model(torch.tensor([float(rank)])).sum().backward()
    assert [parameter.grad.tolist() for parameter in model.params] == [[0.5]]
