"""Options, policies and precisions of DDP, Apex, fairscale, FSDP1 and FSDP2: followed, or refused with what to give instead."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Precision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _recursive_wrap,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import fsdp
from fsdp.building.peer_options import PEER_OPTIONS, remedies_for
from fsdp.runtime.registry import unit_ref_of, units_in
from tests.support.models import Block, Net, X, make_net
from tests.support.ranks import on_ranks, refused_everywhere
from tests.support.states import refused_unchanged

NAMES = {"BackwardPrefetch": BackwardPrefetch, "CPUOffload": CPUOffload, "OffloadPolicy": OffloadPolicy}
ACCEPTED = [(name, value) for name, option in PEER_OPTIONS.items() for value in option.accepted]


def names_of_units(model: nn.Module) -> list[str]:
    return [ref.unit.name for ref in units_in(model, "test")]


class TestOptions:
    @pytest.mark.parametrize(("name", "value"), ACCEPTED)
    @on_ranks(1)
    def test_a_value_that_means_what_happens_anyway_is_accepted(self, rank: int, name: str, value: str) -> None:
        given = eval(value, NAMES)
        assert unit_ref_of(fsdp.fully_shard(make_net(), **{name: given})) is not None
        assert fsdp.FullyShardedDataParallel(make_net(), **{name: given}).module

    @pytest.mark.parametrize("name", PEER_OPTIONS)
    def test_any_other_value_gets_the_remedy(self, name: str) -> None:
        text = f"unknown option {name!r}: {PEER_OPTIONS[name].remedy}. The options are module, process_group, mesh, auto_wrap"
        refused_unchanged({name: object()}, text)

    @pytest.mark.parametrize("wrap", [fsdp.fully_shard, fsdp.FullyShardedDataParallel])
    def test_all_unknown_options_are_in_one_text_with_the_nearest_names(self, wrap: Callable[..., nn.Module]) -> None:
        options = {"shard_strategy": 1, "device_id": 0, "use_orig_params": True, "limit_all_gather": 1, "zzz": 1, "prefetch": -1}
        text = (
            "unknown options 'shard_strategy': did you mean sharding_strategy?; "
            f"'device_id': {PEER_OPTIONS['device_id'].remedy}; "
            f"'limit_all_gather': did you mean limit_all_gathers? {PEER_OPTIONS['limit_all_gathers'].remedy}; "
            "'zzz'. The options are module, process_group, mesh, auto_wrap_policy, sharding_strategy, reshard_after_forward, "
            "mp_policy, sync_module_states, param_init_fn, ignored_modules, ignored_params, prefetch, guard, reduction, "
            "broadcast_buffers, aligned, plain_shards, dtensors, shard_placement_fn, uneven_paths, "
            "offload_policy."
        )
        refused_everywhere(2, lambda rank: wrap(make_net(), **options), text)

    def test_the_nearest_name_is_one_of_the_options(self) -> None:
        assert remedies_for(["auto_wrap_polcy"], ["auto_wrap_policy"]) == "'auto_wrap_polcy': did you mean auto_wrap_policy?"
        assert remedies_for(["q"], ["auto_wrap_policy"]) == "'q'"

    @on_ranks(3, "unknown option 'device_id': move the module to its device")
    def test_ranks_that_give_other_options_are_notified_too(self, rank: int) -> None:
        fsdp.fully_shard(make_net(), **({"device_id": 0} if rank == 1 else {}))

    @pytest.mark.parametrize("engine", [FSDP1.__init__, fsdp2, DDP.__init__], ids=["FSDP1", "FSDP2", "DDP"])
    def test_every_option_of_torchs_engines_has_an_answer(self, engine: Callable[..., object]) -> None:
        ours = inspect.signature(fsdp.fully_shard).parameters
        theirs = [name for name in inspect.signature(engine).parameters if name != "self"]
        assert not [name for name in theirs if name not in ours and name not in PEER_OPTIONS]

    @pytest.mark.parametrize("engine", [FSDP1.__init__, fsdp2], ids=["FSDP1", "FSDP2"])
    def test_the_defaults_of_torchs_engines_are_accepted(self, engine: Callable[..., object]) -> None:
        """All but one: `use_orig_params=False` means FlatParameters."""
        defaults = {
            name: one.default
            for name, one in inspect.signature(engine).parameters.items()
            if one.default is not one.empty and name != "use_orig_params"
        }
        assert len(defaults) > 5
        fsdp.simulate(2, lambda rank: fsdp.fully_shard(make_net(), **defaults))

    def test_no_option_of_ours_is_in_the_table(self) -> None:
        assert not PEER_OPTIONS.keys() & inspect.signature(fsdp.fully_shard).parameters.keys()

    @on_ranks(1)
    def test_no_strategy_is_the_one_that_fsdp1_means(self, rank: int) -> None:
        models = [fsdp.fully_shard(make_net(), sharding_strategy=one) for one in (None, ShardingStrategy.FULL_SHARD)]
        configs = [ref.unit.config for model in models if (ref := unit_ref_of(model)) is not None]
        assert configs[0] == configs[1]


def by_width(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True if recurse else isinstance(module, nn.Linear) and module.in_features == 8


POLICIES: dict[str, Callable[..., bool]] = {
    "size 100": partial(size_based_auto_wrap_policy, min_num_params=100),
    "size 1": partial(size_based_auto_wrap_policy, min_num_params=1),
    "size 400": partial(size_based_auto_wrap_policy, min_num_params=400),
    "size, leaf": partial(size_based_auto_wrap_policy, min_num_params=10, force_leaf_modules={Block}),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)),
    "own": by_width,
    "or": partial(_or_policy, policies=[by_width, partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})]),
}


class Attends(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def chosen_by_torch(model: nn.Module, policy: Callable[..., bool]) -> list[str]:
    """The modules that FSDP1 wraps, by name; its wrapper is a class that notes what it was given."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str] = []

    class Noting(nn.Module):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__()
            found.append(names[id(module)])

    _recursive_wrap(model, policy, Noting, set(), set(), only_wrap_children=True)
    return found


class TestPolicies:
    @pytest.mark.parametrize("policy", POLICIES)
    @on_ranks(2)
    def test_a_policy_of_three_arguments_chooses_what_fsdp1_wraps(self, rank: int, policy: str) -> None:
        wanted = chosen_by_torch(Attends(), POLICIES[policy])
        model = fsdp.fully_shard(Attends(), auto_wrap_policy=POLICIES[policy])
        assert sorted(names_of_units(model)) == sorted(["Attends", *wanted])
        assert wanted or policy == "size 400"

    @on_ranks(1)
    def test_what_is_ignored_does_not_count(self, rank: int) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((type(module).__name__, recurse, nonwrapped_numel))
            return recurse

        asked: list[tuple[str, bool, int]] = []
        net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)))
        fsdp.fully_shard(net, auto_wrap_policy=policy, ignored_modules={net[1][1]})
        assert asked == [
            ("Sequential", True, 13),
            ("Linear", True, 9),
            ("Linear", False, 9),
            ("Sequential", True, 4),
            ("Linear", True, 4),
            ("Linear", False, 4),
            ("Sequential", False, 4),
        ]

    @on_ranks(3)
    def test_units_that_were_wrapped_before_do_not_count(self, rank: int) -> None:
        net = make_net()
        fsdp.fully_shard(net.blocks[0])
        policy = partial(size_based_auto_wrap_policy, min_num_params=100)
        model = fsdp.fully_shard(net, auto_wrap_policy=policy)
        plain = [name for name in chosen_by_torch(make_net(), policy) if not name.startswith("blocks.0")]
        assert sorted(names_of_units(model)) == sorted(["Net", "blocks.0", *plain])

    @on_ranks(2)
    def test_objects_of_fsdp1_are_policies(self, rank: int) -> None:
        wanted = ["Net", "blocks.0", "blocks.1", "blocks.2"]
        for policy in (ModuleWrapPolicy({Block}), CustomPolicy(lambda module: isinstance(module, Block))):
            assert names_of_units(fsdp.fully_shard(make_net(), auto_wrap_policy=policy)) == wanted

    def test_options_of_one_module_are_refused(self) -> None:
        policy = CustomPolicy(lambda module: {"prefetch": 2} if isinstance(module, Block) else False)
        text = (
            "auto_wrap_policy gives a Block the options {'prefetch': 2}; units of one call have the same but for mesh. Wrap that "
            "module first"
        )
        refused_everywhere(2, lambda rank: fsdp.fully_shard(make_net(), auto_wrap_policy=policy), text)

    def test_a_container_that_a_policy_chose_is_refused_by_name(self) -> None:
        text = "auto_wrap_policy chose 'blocks', a ModuleList, which has no forward"
        refused_everywhere(1, lambda rank: fsdp.fully_shard(make_net(), auto_wrap_policy=always_wrap_policy), text)

    @on_ranks(1)
    def test_an_error_of_a_policy_is_the_users(self, rank: int) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            raise TypeError("mine")

        with pytest.raises(TypeError, match=r"^mine$"):
            fsdp.fully_shard(make_net(), auto_wrap_policy=policy)

    def test_a_function_of_other_arguments_is_refused_with_both_forms(self) -> None:
        text = (
            "must be callable as policy(name, module) -> bool, or as FSDP1's policy(module, recurse, nonwrapped_numel) -> bool; "
        )
        for policy in (lambda module: True, lambda module, recurse, unwrapped_params: True):
            refused_everywhere(1, lambda rank, policy=policy: fsdp.fully_shard(make_net(), auto_wrap_policy=policy), text)


BF16, FP32 = torch.bfloat16, torch.float32
SINCE_2_15 = hasattr(FSDP2Precision, "param_dtype_override_fn")
"""Whether None as FSDP2's `reduce_dtype` means the dtype of the shards."""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


class TestPrecision:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (FSDP2Precision(), fsdp.MixedPrecisionPolicy(reduce_in_shard_dtype=SINCE_2_15)),
            (FSDP2Precision(BF16, FP32, BF16, False), fsdp.MixedPrecisionPolicy(BF16, FP32, BF16, False)),
            (MixedPrecision(), fsdp.MixedPrecisionPolicy(None, None, None, False, True)),
            (MixedPrecision(BF16, FP32), fsdp.MixedPrecisionPolicy(BF16, FP32, None, False, True)),
            (
                MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False),
                fsdp.MixedPrecisionPolicy(BF16, None, None, True, False),
            ),
        ],
    )
    @on_ranks(1)
    def test_policies_of_torch_are_converted_field_by_field(
        self, rank: int, given: Any, wanted: fsdp.MixedPrecisionPolicy
    ) -> None:
        ref = unit_ref_of(fsdp.fully_shard(make_net(), mp_policy=given))
        assert ref is not None and ref.unit.config.mp_policy == wanted

    @on_ranks(1)
    def test_fsdp1_casts_the_inputs_of_the_root_only(self, rank: int) -> None:
        class Recording(nn.Module):
            def __init__(self, inner: nn.Module | None) -> None:
                super().__init__()
                self.own, self.inner = nn.Linear(6, 6), inner

            def forward(self, x: Tensor) -> Tensor:
                seen.append(x.dtype)
                x = self.own(x.to(self.own.weight.dtype))
                return x if self.inner is None else self.inner(x.float())

        seen: list[torch.dtype] = []
        for policy, wanted in (
            (MixedPrecision(BF16), [BF16, FP32, FP32]),
            (MixedPrecision(BF16, cast_root_forward_inputs=False), [FP32, FP32, FP32]),
            (MixedPrecision(BF16, cast_forward_inputs=True), [BF16, BF16, BF16]),
        ):
            seen.clear()
            model = Recording(Recording(Recording(None)))
            fsdp.fully_shard(model.inner.inner, mp_policy=policy)
            model(X)
            assert seen[2] == wanted[0], "it is a root as long as nothing is wrapped around it"
            seen.clear()
            fsdp.fully_shard(model, auto_wrap_policy={Recording}, mp_policy=policy)
            model(X)
            assert seen == wanted

    @on_ranks(1)
    def test_a_buffer_dtype_that_changes_nothing_is_accepted(self, rank: int) -> None:
        fsdp.fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecision(BF16, BF16, BF16))
        fsdp.fully_shard(make_net(), mp_policy=MixedPrecision(BF16, BF16, FP32))

    @on_ranks(2)
    def test_batch_norm_that_was_wrapped_first_is_left_alone(self, rank: int) -> None:
        model = Normed()
        fsdp.fully_shard(model.norm)
        fsdp.fully_shard(model, auto_wrap_policy={nn.Linear}, mp_policy=MixedPrecision(BF16))
        model(X).sum().backward()
        # without a policy FSDP1 wraps nothing apart, and converts batch norm like the rest
        fsdp.fully_shard(Normed(), mp_policy=MixedPrecision(BF16))

    @pytest.mark.parametrize(
        ("make", "policy", "text"),
        [
            (
                make_net,
                MixedPrecision(keep_low_precision_grads=True),
                "mp_policy.keep_low_precision_grads=True: `.grad` always has the dtype of the shards; leave it out.",
            ),
            (
                make_net,
                MixedPrecision(BF16, BF16, BF16),
                "mp_policy.buffer_dtype=torch.bfloat16: buffers keep their dtype, and 'scale' is torch.float32; leave it out, or",
            ),
            (
                Normed,
                MixedPrecision(BF16),
                "mp_policy: FSDP1's MixedPrecision leaves 'norm', a BatchNorm1d, in full precision. Wrap it first, by",
            ),
            (make_net, object(), "FSDP2's class of that name, or FSDP1's MixedPrecision, not <object"),
        ],
    )
    def test_a_field_that_cannot_be_followed_is_refused(self, make: Callable[[], nn.Module], policy: Any, text: str) -> None:
        refused_everywhere(2, lambda rank: fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear}, mp_policy=policy), text)

    @pytest.mark.parametrize("name", ["cast_forward_inputs", "cast_root_forward_inputs", "reduce_in_shard_dtype"])
    def test_a_flag_is_true_or_false(self, name: str) -> None:
        with pytest.raises(fsdp.ShardingError, match=f"mp_policy.{name} must be True or False, not 1"):
            fsdp.MixedPrecisionPolicy(**{name: 1})
