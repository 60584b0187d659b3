"""wrap, auto_wrap, enable_wrap, their policies, auto_wrap_bn."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.comm.simulated import simulate
from fsdp.compat.fairscale import (
    FullyShardedDataParallel,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    wrap,
)


class Box(nn.Module):
    """A wrapper that only remembers its arguments."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments


def boxes(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Box)]


def test_size_decides_children_first() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.ModuleList([nn.Linear(9, 9)]))
    with enable_wrap(partial(default_auto_wrap_policy, min_num_params=60), wrapper_cls=Box):
        assert boxes(auto_wrap(model)) == ["1", "2.0"]
    assert auto_wrap(nn.Linear(9, 9)).__class__ is wrap(nn.Linear(9, 9)).__class__ is nn.Linear
    with enable_wrap(wrapper_cls=Box):
        attention = auto_wrap(nn.MultiheadAttention(8, 1), partial(default_auto_wrap_policy, min_num_params=1))
    assert boxes(attention) == []
    root = partial(default_auto_wrap_policy, min_num_params=1000, skip_params_check_for_root=True)
    with enable_wrap(wrapper_cls=Box):
        assert boxes(auto_wrap(nn.Sequential(nn.Linear(5, 5)), root)) == [""]


def test_arguments_override_those_of_the_module_and_of_the_context() -> None:
    module = nn.Linear(2, 2)
    module.wrapper_config = {"b": 2, "c": 2}  # type: ignore[assignment]
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=Box, a=1, b=1, c=1):
        assert wrap(module, c=3).arguments == {"a": 1, "b": 2, "c": 3}
        model = auto_wrap(nn.Sequential(nn.Linear(2, 2), module))
    assert boxes(model) == ["1"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AssertionError, match="enable_wrap: give wrapper_cls, the class that wraps modules"):
        enable_wrap().__enter__()
    with enable_wrap(wrapper_cls=Box):
        with pytest.raises(NotImplementedError, match="a context is active already, and contexts cannot be nested; leave it"):
            enable_wrap(wrapper_cls=Box).__enter__()
        with pytest.raises(AssertionError, match="auto_wrap: '0' is wrapped already; wrap a module once"):
            auto_wrap(nn.Sequential(Box(nn.Linear(2, 2))))
    assert wrap(module := nn.Linear(2, 2)) is module


def test_batch_norms_are_instances_of_their_own() -> None:
    def one_rank(rank: int, single: bool) -> None:
        torch.manual_seed(0)
        model = auto_wrap_bn(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), single_rank_pg=single)
        (norm,) = get_fsdp_instances(model)
        assert not norm.flatten_parameters and not norm.mixed_precision and norm.world_size == (1 if single else 2)
        root = FullyShardedDataParallel(model)
        root(torch.ones(4, 3)).sum().backward()
        assert all(p.grad is not None for p in root.parameters())
        with pytest.raises(AssertionError, match="a batch norm has a wrapper_config already; remove it, or give"):
            auto_wrap_bn(root, wrap_it=False)

    for single in (False, True):
        simulate(2, partial(one_rank, single=single))
