"""How an instance becomes a unit: modules on the meta device, and what is left alone."""

import pytest
import torch
from torch import nn

import fsdp
from fsdp.comm.simulated import simulate
from fsdp.compat.torch_fsdp import FullyShardedDataParallel as FSDP
from fsdp.compat.torch_fsdp import ModuleWrapPolicy
from tests.compat.test_torch_fsdp import Block, Net, batch


def test_a_function_that_gives_memory_to_modules_on_the_meta_device_initialises_them() -> None:
    def init(module: nn.Module) -> None:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(one.is_meta for one in tensors):
            module.to_empty(device="cpu", recurse=False)
            for one in module.parameters(recurse=False):
                one.data.fill_(3)

    def fn(rank: int) -> None:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(3, 3), Block())
        model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=init)
        with FSDP.summon_full_params(model):
            assert all(bool((p == 3).all()) for p in model.parameters())

    simulate(2, fn)


def test_ignored_parameters_of_a_module_stay_complete_and_the_instance_of_that_module_has_no_unit() -> None:
    def fn(rank: int) -> None:
        net = Net()
        model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=[*net.blocks[0].parameters()])
        names = dict(model.named_parameters())
        assert names["_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up.weight"].shape == (5, 3)
        model(batch(0, 0)).sum().backward()
        assert dict(model.state_dict()).keys() == Net().state_dict().keys()
        model.load_state_dict(model.state_dict())

    simulate(2, fn)


def test_one_ignored_parameter_of_a_module_is_refused_by_name() -> None:
    def fn(rank: int) -> None:
        net = Net()
        with pytest.raises(fsdp.ShardingError, match=r"ignored_states: parameter 'first.bias' belongs to a module with"):
            FSDP(net, ignored_states=[net.first.bias])

    simulate(2, fn)
