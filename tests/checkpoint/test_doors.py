"""`save` and `load` of models whose `state_dict()` has another format: FSDP1's, fairscale's, or one that hooks make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.compat import fairscale, torch_fsdp
from fsdp.compat.fully_shard import fully_shard
from fsdp.compat.torch_fsdp import StateDictType
from tests.support.models import weights_of
from tests.support.optimizers import assert_same
from tests.support.ranks import on_ranks


class Scaled(nn.Module):
    """The file has the logarithm of the scale, since version 2."""

    _version = 2

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((2,), float(2**seed)))
        self.register_buffer("plain", torch.full((2,), 0.5 + seed))
        self.register_state_dict_post_hook(lambda m, d, prefix, _: d.update({prefix + "scale": d[prefix + "scale"].log2()}))
        self.register_load_state_dict_pre_hook(taken)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x)) * self.scale[0] + self.plain[0]


def taken(module: nn.Module, given: dict[str, torch.Tensor], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("version", 1) == 2:  # older files have the scale itself
        given[prefix + "scale"] = given[prefix + "scale"].exp2()


def by_fsdp1(seed: int, kind: str, **options: Any) -> nn.Module:
    policy = torch_fsdp.ModuleWrapPolicy({nn.Linear})
    model: Any = torch_fsdp.FullyShardedDataParallel(
        Scaled(seed), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )
    config = torch_fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True) if kind.startswith("FULL") else None
    model.set_state_dict_type(model, StateDictType[kind], config)
    model(torch.ones(2, 4))  # which casts the buffers
    return model  # type: ignore[no-any-return]


def by_fairscale(seed: int, flat: bool) -> nn.Module:
    inner = Scaled(seed)
    inner.first = fairscale.FullyShardedDataParallel(inner.first, flatten_parameters=flat)  # type: ignore[assignment]
    return fairscale.FullyShardedDataParallel(inner, flatten_parameters=flat)


def native(seed: int) -> nn.Module:
    return fsdp.fully_shard(Scaled(seed), auto_wrap_policy={nn.Linear})


def by_fsdp2(seed: int) -> nn.Module:
    return fully_shard(Scaled(seed))  # type: ignore[no-any-return]


CAST = torch_fsdp.MixedPrecision(buffer_dtype=torch.bfloat16)
DOORS: dict[str, Callable[[int], nn.Module]] = {
    "native": native,
    "FSDP2": by_fsdp2,
    **{kind: lambda seed, kind=kind: by_fsdp1(seed, kind) for kind in StateDictType.__members__},  # type: ignore[misc]
    "one flat parameter": lambda seed: by_fsdp1(seed, "FULL_STATE_DICT", use_orig_params=False),
    "cast buffers": lambda seed: by_fsdp1(seed, "LOCAL_STATE_DICT", use_orig_params=True, mixed_precision=CAST),
    "NO_SHARD": lambda seed: by_fsdp1(seed, "FULL_STATE_DICT", sharding_strategy=torch_fsdp.ShardingStrategy.NO_SHARD),
    "fairscale": lambda seed: by_fairscale(seed, True),
    "fairscale, not flattened": lambda seed: by_fairscale(seed, False),
}


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_weights_and_buffers_come_back_by_every_door_and_from_the_native_one(rank: int, door: str, tmp_path: Path) -> None:
    wanted = tensors_of(DOORS[door](0))
    for number, saving in enumerate((door, "native")):
        fsdp.save(tmp_path / str(number), DOORS[saving](0))
        model = DOORS[door](1)
        fsdp.load(tmp_path / str(number), model)
        assert_same(tensors_of(model), wanted)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**weights_of(model), **dict(model.named_buffers())}


@pytest.mark.parametrize("door", [native, by_fsdp2])
@on_ranks(2)
def test_a_weight_that_a_hook_has_made_anew_is_loaded(rank: int, door: Callable[[int], nn.Module], tmp_path: Path) -> None:
    """A value that is a shard or a DTensor is not always the memory of the model."""
    saved, model = door(0), door(1)
    for one in (saved, model):
        one.register_state_dict_post_hook(lambda m, d, prefix, _: d.update({"first.bias": d["first.bias"].clone()}))
    fsdp.save(tmp_path / "made", saved)
    fsdp.load(tmp_path / "made", model)
    assert_same(tensors_of(model), tensors_of(saved))


@on_ranks(2)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(rank: int, tmp_path: Path) -> None:
    model = native(0)
    fsdp.save(tmp_path / "there", model)

    def fail(*_: object) -> None:
        raise KeyError("mine")

    if rank:
        model.register_state_dict_pre_hook(fail)
    with pytest.raises(fsdp.ShardingError if not rank else (fsdp.ShardingError, KeyError), match="mine"):
        fsdp.load(tmp_path / "there", model)
