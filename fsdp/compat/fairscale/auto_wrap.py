"""Functions that choose modules and wrap them: wrap, auto_wrap, enable_wrap, two policies, auto_wrap_bn."""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp.compat.fairscale.groups import ProcessGroupName, get_process_group_cached, global_rank
from fsdp.compat.fairscale.wrapper import FullyShardedDataParallel


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wrap modules whose parameters that are not wrapped yet are at least `min_num_params` elements.

    With `recurse` it says whether to look into `module`; without, whether to wrap it.
    """
    leaves = default_auto_wrap_policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules  # type: ignore[attr-defined]
    excluded = default_auto_wrap_policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules  # type: ignore[attr-defined]
    is_large = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
    return is_large and not isinstance(module, tuple(leaves if recurse else excluded))


default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wrap the modules that have an attribute `wrapper_config`, a dict of arguments for the wrapper."""
    return recurse or hasattr(module, "wrapper_config")


class _Context(threading.local):
    """What `enable_wrap` has set in this thread."""

    active = False
    policy: Callable[..., bool] = default_auto_wrap_policy
    wrapper: Callable[..., nn.Module] | None = None
    moves = False
    arguments: Mapping[str, Any] = MappingProxyType({})


_context = _Context()


class ConfigAutoWrap:
    """The context of `enable_wrap`, and the recursion of `auto_wrap`. One may be active in a thread."""

    def __init__(self, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any) -> None:
        self._policy = auto_wrap_policy
        self._kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(auto_wrap_policy: Callable[..., bool] | None, kwargs: Any) -> None:
        """Begin a context.

        Raises:
            NotImplementedError: a context is active already.
            AssertionError: `wrapper_cls` is missing.
        """
        if _context.active:
            raise NotImplementedError("enable_wrap: a context is active already, and contexts cannot be nested; leave it first.")
        if "wrapper_cls" not in kwargs:
            raise AssertionError("enable_wrap: give wrapper_cls, the class that wraps modules.")
        given = dict(kwargs)
        _context.active = True
        _context.wrapper = given.pop("wrapper_cls")
        _context.moves = given.pop("move_module_cuda_half", False)
        _context.arguments = given
        _context.policy = auto_wrap_policy or default_auto_wrap_policy

    @staticmethod
    def disable_autowrap_context() -> None:
        """End the context."""
        _context.active = False

    def __enter__(self) -> None:
        self.enable_autowrap_context(self._policy, self._kwargs)

    def __exit__(self, *_: object) -> None:
        self.disable_autowrap_context()

    @staticmethod
    def recursive_wrap(
        module: nn.Module, auto_wrap_policy: Callable[..., bool] | None, module_is_root: bool, **kwargs: Any
    ) -> tuple[nn.Module, int]:
        """Wrap children first, then `module`, as the policy says; return the module and how many elements are wrapped in it."""
        policy, wrapper = auto_wrap_policy or _context.policy, _context.wrapper
        if isinstance(wrapper, type):
            for path, child in module.named_modules():
                if isinstance(child, wrapper):
                    raise AssertionError(f"auto_wrap: {path or type(child).__name__!r} is wrapped already; wrap a module once.")
        count = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, unwrapped_params=count, module_is_root=module_is_root):
            return module, 0
        wrapped = 0
        for name, child in module.named_children():
            result, inside = ConfigAutoWrap.recursive_wrap(child, policy, module_is_root=False, **kwargs)
            setattr(module, name, result)
            wrapped += inside
        if policy(module=module, recurse=False, unwrapped_params=count - wrapped, module_is_root=module_is_root):
            return wrap(module, **kwargs), count
        return module, wrapped


@contextmanager
def enable_wrap(auto_wrap_policy: Callable[..., bool] | None = None, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Let `wrap` and `auto_wrap` wrap inside, with `wrapper_cls` and the other arguments."""
    with ConfigAutoWrap(auto_wrap_policy, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module inside `enable_wrap`; outside, return it as it is.

    Arguments of the context count least, then those in `module.wrapper_config`, then `wrap_overrides`.
    """
    if not _context.active:
        return module
    assert _context.wrapper is not None, "an active context has one"
    if _context.moves:
        module = module.cuda().half()
    arguments = {**_context.arguments, **getattr(module, "wrapper_config", {}), **wrap_overrides}
    return _context.wrapper(module, **arguments)


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **kwargs: Any) -> nn.Module:
    """Wrap inside `enable_wrap` what the policy chooses, children first; outside, return the module as it is."""
    if not _context.active:
        return module
    return ConfigAutoWrap.recursive_wrap(module, auto_wrap_policy, module_is_root=True, **kwargs)[0]


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap every batch norm in `module` by itself, in fp32 and not flattened; return the module.

    Raises:
        AssertionError: a batch norm has a `wrapper_config` already.
    """
    group = get_process_group_cached(ranks=[global_rank()]) if single_rank_pg else process_group
    config = fsdp_config or {
        "process_group": group,
        "process_group_reduce_scatter": ProcessGroupName.default if single_rank_pg else ProcessGroupName.reduce_scatter,
        "mixed_precision": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
        "flatten_parameters": False,
        "force_input_to_fp32": False,
    }
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            if assert_on_collision and hasattr(norm, "wrapper_config"):
                raise AssertionError(
                    "auto_wrap_bn: a batch norm has a wrapper_config already; remove it, or give assert_on_collision=False."
                )
            norm.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)
