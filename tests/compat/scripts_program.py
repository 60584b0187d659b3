"""One rank of two over gloo: calls that training code in public repositories makes, with torch's classes and with the drop-in modules."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import distribute_tensor

from fsdp.compat import fully_shard as ours2

CPU: Final = torch.device("cpu")


class Adapted(nn.Module):
    """A layer with an adapter beside it, as in recipes for LoRA."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def on_meta(api: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(Adapted(), Adapted())
    for layer in model:
        api.fully_shard(layer)
    return api.fully_shard(model)


def loaded(model: Any, given: dict[str, torch.Tensor]) -> list[str]:
    """Load full values with assign=True, as torchtune does; return the names that are on the meta device afterwards."""
    shown = model.state_dict()
    shards = {n: nn.Parameter(distribute_tensor(v, shown[n].device_mesh, shown[n].placements)) for n, v in given.items()}
    model.load_state_dict(shards, strict=False, assign=True)
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def trained(model: Any) -> list[Any]:
    """The dtypes of parameters, and the weights after a step."""
    before = [parameter.dtype for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 16).view(2, 8).to(before[0]) + dist.get_rank()
    model(x).square().mean().backward()
    optimizer.step()
    return [*before, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def children_get_memory(api: Any) -> list[Any]:
    """torchtune: the adapters of a meta model get memory one by one; the base is loaded."""
    torch.manual_seed(0)
    base = {n: v for n, v in nn.Sequential(Adapted(), Adapted()).state_dict().items() if ".base." in n}
    model = on_meta(api)
    parameters = [*model.parameters()]
    seen: list[Any] = []
    for layer in model:
        for child in (layer.down, layer.up):
            child.to_empty(device="cpu")
            nn.init.constant_(child.weight, 0.1)
        seen.append([name for name, parameter in model.named_parameters() if parameter.is_meta])
    if api is ours2:  # a model of torch's cannot be used after such a refusal
        try:
            model(torch.ones(2, 8))
        except RuntimeError as refusal:
            assert "['0.base.weight', '0.base.bias']" in str(refusal), refusal
    seen.append(loaded(model, base))
    if api is ours2:
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    return [*seen, *trained(model)]


def two_loads(api: Any) -> list[Any]:
    """torchtune: two loads with assign=True and strict=False, of the adapters and of the base, and one more of both."""
    torch.manual_seed(0)
    full = nn.Sequential(Adapted(), Adapted()).state_dict()
    model = on_meta(api)
    seen: list[Any] = [loaded(model, {n: v for n, v in full.items() if (".base." in n) is base}) for base in (False, True)]
    again = loaded(model, {n: v + 1 for n, v in full.items()})
    return [*seen, again, *trained(model)]


def loads_of_another_dtype(api: Any) -> list[Any]:
    """With assign=True the parameters get the dtype of what is loaded, on the meta device and with memory."""
    torch.manual_seed(0)
    full = {n: v.double() for n, v in nn.Sequential(Adapted(), Adapted()).state_dict().items()}
    model = on_meta(api)
    seen: list[Any] = [loaded(model, {n: v.bfloat16() for n, v in full.items()}), *(p.dtype for p in model.parameters())]
    return [*seen, loaded(model, full), *trained(model)]


def layer_of_another_dtype(api: Any) -> list[Any]:
    """A layer inside a unit is converted, and back."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted())
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model[0].base.to(torch.bfloat16)
    seen = [parameter.dtype for parameter in model.parameters()]
    model[0].base.float()
    return [*seen, *trained(model)]


BY_FSDP2: Final[dict[str, Callable[[Any], list[Any]]]] = {
    one.__name__: one for one in (children_get_memory, two_loads, loads_of_another_dtype, layer_of_another_dtype)
}


def run(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {name: (case(torch_fsdp), case(ours2)) for name, case in BY_FSDP2.items()}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
