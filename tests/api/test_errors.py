"""Every refusal, by its text: what happened, where, and what to do. Nothing moved before it."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.comm.simulated import SimulatedCommunicator
from tests.support.models import Block, Odd, X, is_at_rest, loss_of, make_net
from tests.support.processes import rank_0_of
from tests.support.ranks import on_ranks, refused_everywhere
from tests.support.states import refused_unchanged


class TestWrapping:
    def test_without_ranks_it_says_how_to_start_them(self) -> None:
        with pytest.raises(
            fsdp.ShardingError, match=r"No process group and no mesh: call .*init_process_group.*torchrun.*simulate"
        ):
            fsdp.fully_shard(make_net())

    def test_what_is_no_process_group_is_refused(self) -> None:
        refused_everywhere(1, lambda rank: fsdp.fully_shard(make_net(), 3), "process_group must be a process group of torch")  # type: ignore[arg-type]

    def test_what_is_no_module_is_refused(self) -> None:
        refused_everywhere(1, lambda rank: fsdp.fully_shard(3), "fully_shard takes an nn.Module or a list of them, not int")  # type: ignore[type-var]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"sharding_strategy": "ZERO"}, "sharding_strategy 'ZERO' is not known; choose one of FULL_SHARD, SHARD_GRAD_OP"),
            *(
                ({"reshard_after_forward": value}, f"reshard_after_forward must be True, False or None, not {value!r}")
                for value in (0, 1, 2, "yes")
            ),
            *(({name: 1}, f"{name} must be True or False, not 1") for name in ("broadcast_buffers", "aligned", "plain_shards")),
            (
                {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
                "reshard_after_forward=True contradicts sharding_strategy='SHARD_GRAD_OP'",
            ),
            (
                {"sharding_strategy": "NO_SHARD", "reshard_after_forward": True},
                "reshard_after_forward=True contradicts sharding_strategy='NO_SHARD'",
            ),
            ({"sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD needs a mesh"),
            ({"sharding_strategy": "HYBRID_SHARD", "mesh": (4,)}, "mesh (4,) does not fit"),
            ({"sharding_strategy": "HYBRID_SHARD", "mesh": (-2, -1)}, "mesh (-2, -1) does not fit"),
            (
                {"sharding_strategy": "HYBRID_SHARD", "mesh": (3, 2)},
                "mesh (3, 2) does not fit: give (replicas, shards) with a product of 2",
            ),
            *(
                (
                    options,
                    f"mesh must be a DeviceMesh, or for HYBRID_SHARD the shape (replicas, shards), not {options['mesh']!r}; for",
                )
                for options in ({"mesh": (2, 2)}, {"mesh": 4}, {"sharding_strategy": "HYBRID_SHARD", "mesh": "cpu"})
            ),
            ({"prefetch": -1}, "prefetch must be a number of units, 0 or more, not -1"),
            ({"prefetch": True}, "prefetch must be a number of units"),
            ({"mp_policy": "bf16"}, "mp_policy must be a fsdp.MixedPrecisionPolicy (fields param_dtype"),
            ({"auto_wrap_policy": nn.Linear}, "auto_wrap_policy is the class Linear; put it in a set: {Linear}"),
            ({"auto_wrap_policy": "Block"}, "auto_wrap_policy must be 'auto', a set of module classes"),
            ({"auto_wrap_policy": set()}, "auto_wrap_policy is empty; leave it out"),
            (
                {"auto_wrap_policy": {nn.Conv2d, nn.Tanh}},
                "names Conv2d, Tanh, and no module is one; the classes with parameters are Block, LayerNorm, Linear, ModuleList,",
            ),
            ({"auto_wrap_policy": {int}}, "auto_wrap_policy must name nn.Module classes; this is not one: <class 'int'>"),
            ({"auto_wrap_policy": lambda module: True}, "must be callable as policy(name, module) -> bool, or as"),
            ({"auto_wrap_policy": torch.tensor(1)}, "auto_wrap_policy must be 'auto', a set of module classes"),
            ({"auto_wrap_policy": nn.Linear(2, 2)}, "must be callable as policy(name, module) -> bool, or as"),
            ({"ignored_modules": torch.tensor(1)}, "ignored_modules must be a collection of modules"),
            ({"sync_module_states": 2}, "sync_module_states must be True or False, not 2"),
            ({"auto_wrap_policy": {nn.ModuleList}}, "auto_wrap_policy chose 'blocks', a ModuleList, which has no forward"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_an_option_that_cannot_be_right_is_refused(self, options: dict[str, Any], text: str) -> None:
        refused_unchanged(options, text)

    def test_a_precision_must_be_floating_point(self) -> None:
        with pytest.raises(fsdp.ShardingError, match=r"mp_policy.param_dtype must be a floating-point torch.dtype"):
            fsdp.MixedPrecisionPolicy(param_dtype=torch.int8)

    @pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, type("Blocks", (nn.ModuleList,), {}), nn.ParameterList])
    def test_a_container_cannot_be_a_unit(self, container: type[nn.Module]) -> None:
        text = f"a {container.__name__} has no forward of its own and cannot be a unit; wrap its members"
        refused_everywhere(1, lambda rank: fsdp.fully_shard(container()), text)

    def test_a_parametrization_cannot_be_a_unit(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))

        text = "a ParametrizationList computes a parameter of another module and cannot be a unit; wrap that module."
        refused_everywhere(2, lambda rank: fsdp.fully_shard(make()[1].parametrizations.weight), text)
        chosen = (
            "chose '1.parametrizations.weight', a ParametrizationList, which computes a parameter of another module; choose that"
        )
        policy = {nn.utils.parametrize.ParametrizationList}
        refused_everywhere(2, lambda rank: fsdp.fully_shard(make(), auto_wrap_policy=policy), chosen)
        fsdp.simulate(2, lambda rank: fsdp.fully_shard(make(), auto_wrap_policy={nn.Linear})(torch.ones(1, 3)).sum().backward())

    def test_a_module_is_wrapped_once(self) -> None:
        def twice(door: Any) -> Callable[[int], object]:
            return lambda rank: door(door(make_net()))

        refused_everywhere(2, twice(fsdp.fully_shard), "Net is a unit already; wrap a module once")
        text = "the module is a FullyShardedDataParallel already; wrap a module once"
        refused_everywhere(2, twice(fsdp.FullyShardedDataParallel), text)

    @on_ranks(2, "Odd.gain in unit 'Sequential' is on the meta device, and the module has no reset_parameters()")
    def test_a_module_on_the_meta_device_that_cannot_initialise_itself(self, rank: int) -> None:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(2, 2), Odd())
        fsdp.fully_shard(net)

    def test_a_device_the_group_cannot_reach_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SimulatedCommunicator, "supports_device", lambda self, device: False)
        text = "parameter 'enter.weight' is on cpu, where this process group cannot communicate"
        refused_everywhere(2, lambda rank: fsdp.fully_shard(make_net()), text)

    @on_ranks(1, "parameter 'blocks.0.extra' is new in unit 'Block', which was wrapped before")
    def test_a_parameter_added_to_a_finished_unit_is_refused(self, rank: int) -> None:
        net = make_net()
        fsdp.fully_shard(net.blocks[0])
        net.blocks[0].extra = nn.Parameter(torch.ones(3))
        fsdp.fully_shard(net)

    def test_several_ranks_need_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "numpy", None)
        net = make_net()
        with rank_0_of(2), pytest.raises(fsdp.ShardingError) as refusal:
            fsdp.fully_shard(net)
        assert str(refusal.value) == "A process group of several ranks needs the package numpy: pip install numpy."
        assert fsdp.simulate(1, lambda rank: fsdp.fully_shard(net) is net) == [True], "nothing was changed"

    def test_units_of_one_model_share_one_group(self) -> None:
        with rank_0_of(2):
            net = make_net()
            fsdp.fully_shard(net.blocks[0], dist.new_group([0]))
            with pytest.raises(fsdp.ShardingError, match=r"'blocks.0' was wrapped over a part of the ranks, and nothing says"):
                fsdp.fully_shard(net)


@on_ranks(2, "unit '0' returns one of its own parameters (or a view of one)")
def test_a_unit_that_returns_its_own_parameter_is_refused(rank: int) -> None:
    class Leaky(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"out": super().forward(x), "weight": self.weight.t()}

    model = fsdp.fully_shard(nn.Sequential(Leaky(6, 6)), auto_wrap_policy={Leaky})
    try:
        model(X)
    finally:
        assert is_at_rest(model)


@pytest.mark.parametrize("model", [[nn.Linear(2, 2)], 5, None, nn.Linear])
@pytest.mark.parametrize("call", [lambda m: fsdp.no_sync(m).__enter__(), fsdp.stats, lambda m: fsdp.EMA(m, 0.9)])
def test_what_is_no_model_is_refused(call: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(fsdp.ShardingError, match="takes a wrapped model, not an object of class "):
        call(model)


@pytest.mark.parametrize("caller", [fsdp.no_sync, fsdp.summon_full_params], ids=["no_sync", "summon_full_params"])
def test_a_plain_module_is_refused(caller: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(fsdp.ShardingError, match="Linear contains no unit; wrap it with"), caller(nn.Linear(1, 1)):
        raise AssertionError("entered")


Use = Callable[[nn.Module], object]


def train(model: nn.Module) -> None:
    loss_of(model(X)).backward()


def summoned(use: Use) -> Use:
    def inside(model: nn.Module) -> None:
        with fsdp.summon_full_params(model):
            use(model)

    return inside


def summon_inside_a_forward(model: nn.Module) -> None:
    handle = model.blocks[0].register_forward_hook(lambda *_: summoned(print)(model))
    try:
        model(X)
    finally:
        handle.remove()


def backward_under_a_summon(model: nn.Module) -> None:
    loss = loss_of(model(X))
    summoned(lambda model: loss.backward())(model)


def clip_kept_gradients(model: nn.Module) -> None:
    with fsdp.no_sync(model):
        train(model)
    fsdp.clip_grad_norm_(model, 1.0)


def convert(model: nn.Module) -> None:
    try:
        model.half()(X.half())
    finally:
        model.float()


ILLEGAL: dict[str, Use] = {
    "Call summon_full_params before or after the forward, not from inside it.": summon_inside_a_forward,
    "leave the first summon_full_params before entering another": summoned(summoned(print)),
    "Summoned parameters cannot be trained: leave summon_full_params": summoned(train),
    "Leave summon_full_params before calling backward().": backward_under_a_summon,
}
"""Uses that raise IllegalTransition."""
WRONG: dict[str, Use] = {
    "full_state_dict: call it outside any forward, backward and summon_full_params": summoned(
        lambda model: fsdp.full_state_dict(model, rank0_only=False)
    ),
    "load_full_state_dict: call it outside any forward, backward and summon_full_params": summoned(
        lambda model: fsdp.load_full_state_dict(model, make_net().state_dict())
    ),
    "clip_grad_norm_: gradients are kept under no_sync; clip after a backward that synchronises": clip_kept_gradients,
    "norm_type must be a positive number or inf, not 0": lambda model: fsdp.clip_grad_norm_(model, 1.0, 0),
    "norm_type must be a positive number or inf, not -1.0": lambda model: fsdp.clip_grad_norm_(model, 1.0, -1.0),
    "memory_bytes: Block is a part of root 'Net'; call it on the root": lambda model: fsdp.memory_bytes(model.blocks[0]),
    "was replaced from outside by a tensor of shape": convert,
}


@pytest.mark.parametrize("text", {**ILLEGAL, **WRONG})
@on_ranks(2)
def test_a_use_is_refused_and_leaves_the_model_ready_for_the_next_step(rank: int, text: str) -> None:
    model = fsdp.fully_shard(make_net(), auto_wrap_policy={Block})
    with pytest.raises(fsdp.IllegalTransition if text in ILLEGAL else fsdp.ShardingError, match=re.escape(text)):
        {**ILLEGAL, **WRONG}[text](model)
    model.zero_grad()
    assert is_at_rest(model)
    train(model)
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    assert is_at_rest(model)
