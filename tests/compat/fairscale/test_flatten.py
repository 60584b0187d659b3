"""FlatParameter and FlattenParamsWrapper, without any group."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.compat.fairscale import FlatParameter, FlattenParamsWrapper, chunk_and_pad


def build(ties: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    if ties:
        model[2].weight = model[0].weight
    return model


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.linspace(0, 1, 12).view(4, 3)).square().sum()


@pytest.mark.parametrize("ties", [False, True])
def test_it_trains_as_the_module_does(ties: bool) -> None:
    plain, flat = build(ties), FlattenParamsWrapper(build(ties))
    assert flat.flat_param.numel() == sum(p.numel() for p in plain.parameters()) and flat.is_flattened
    for model in (plain, flat):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    for (name, mine), (other, value) in zip(flat.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(mine, value)


@pytest.mark.parametrize("ties", [False, True])
def test_both_forms_of_its_state_load(ties: bool) -> None:
    source = FlattenParamsWrapper(build(ties))
    with torch.no_grad():
        source.flat_param.mul_(3)
    expected = copy.deepcopy(dict(source.state_dict()))
    for state in (source.state_dict(), source.flat_state_dict()):
        state = {name: value.clone() for name, value in state.items()}
        target = FlattenParamsWrapper(build(ties))
        target.load_state_dict(state)
        assert torch.equal(target.flat_param, source.flat_param)
        outer = nn.Sequential(FlattenParamsWrapper(build(ties)))
        outer.load_state_dict({f"0.{name}": value for name, value in state.items()})
        assert all(torch.equal(outer.state_dict()[f"0.{name}"], value) for name, value in expected.items())
    assert next(iter(source.flat_state_dict())) == "flat_param_0"


def test_parameters_inside_the_context_share_the_vectors_memory() -> None:
    flat = FlattenParamsWrapper(build())
    with flat.unflatten_params():
        assert not flat.is_flattened and isinstance(flat[0].weight, nn.Parameter)
        flat[0].weight.data.fill_(2)
        flat[2].bias = nn.Parameter(torch.full((3,), 5.0))
    assert (flat.flat_param[:9] == 2).all() and (flat.flat_param[-3:] == 5).all()
    other = torch.full_like(flat.flat_param, 9)
    with flat.unflatten_params([other]):
        assert (flat[0].weight == 9).all()
        with pytest.raises(AssertionError, match="the module has parameters already; leave the context around this one first"):
            flat.unflatten_params([other]).__enter__()
    assert (flat.flat_param[:9] == 2).all() and "weight" not in flat[0]._parameters


def test_groups_and_their_names() -> None:
    module = build()
    flat = FlattenParamsWrapper(module, [list(module[0].parameters()), list(module[2].parameters())], ["a", "b"])
    assert flat.flat_param_names == ["flat_param_a", "flat_param_b"]
    assert [tuple(p.shape) for p in flat.flat_params] == [(12,), (12,)]
    assert flat.metadata(1) == (["2.weight", "2.bias"], (torch.Size([3, 3]), torch.Size([3])), [9, 3])
    assert [tuple(view.shape) for view in flat.get_param_views()] == [(3, 3), (3,)] * 2
    assert isinstance(module[1].weight, nn.Parameter)


def test_it_is_pickled() -> None:
    flat = FlattenParamsWrapper(build(ties=True))
    again = pickle.loads(pickle.dumps(flat))
    assert loss_of(again) == loss_of(flat) and isinstance(again.flat_param, FlatParameter)
    assert again.flat_param.metadata() == flat.flat_param.metadata()


REFUSED: dict[str, Any] = {
    "flat_param_names has 1 names for 2 lists of parameters; give as many": lambda m: ([[m[0].weight], [m[2].weight]], ["a"]),
    "flat_param_names: a name occurs twice in": lambda m: ([[m[0].weight], [m[2].weight]], ["a", "a"]),
    "param_list: a parameter is in two lists; flatten each parameter once": lambda m: ([[m[0].weight], [m[0].weight]], None),
    "param_list has a parameter that the module does not have": lambda m: ([nn.Parameter(torch.ones(1))], None),
    "the parameters of one flat parameter differ in requires_grad": lambda m: (
        list(m[0].requires_grad_(False).parameters()) + list(m[2].parameters()),
        None,
    ),
    "the parameters of one flat parameter differ in dtype": lambda m: (
        list(m[0].double().parameters()) + list(m[2].parameters()),
        None,
    ),
}


@pytest.mark.parametrize(("text", "arguments"), REFUSED.items(), ids=list(REFUSED))
def test_what_cannot_be_flat_is_refused(text: str, arguments: Any) -> None:
    module = build()
    with pytest.raises(AssertionError, match=text):
        FlattenParamsWrapper(module, *arguments(module))


def test_a_flat_parameter_says_what_it_needs() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    flat = FlatParameter([parameter, nn.Parameter(torch.zeros(3))], multiple=4)
    assert flat.shape == (8,) and [tuple(view.shape) for view in flat.get_param_views()] == [(2, 2), (3,)]
    for wrong, text in (
        ([], "give a list or tuple with at least one parameter"),
        ([torch.ones(1)], "every item of the list must be an nn.Parameter"),
        ([flat], "a parameter of the list is flat already"),
    ):
        with pytest.raises(ValueError, match=text):
            FlatParameter(wrong)
    with pytest.raises(ValueError, match="the data has 3 elements; it needs 7"):
        flat.get_param_views(torch.ones(3))


@pytest.mark.parametrize(("numel", "chunks"), [(4, 2), (9, 2), (3, 8), (1, 1), (7, 3)])
def test_chunks_have_one_length_and_put_the_tensor_together(numel: int, chunks: int) -> None:
    data = torch.arange(1.0, numel + 1)
    parts = chunk_and_pad(data, chunks)
    assert len(parts) == chunks and len({part.shape for part in parts}) == 1
    together = torch.cat(parts)
    assert torch.equal(together[:numel], data) and not together[numel:].any() and together.numel() < numel + chunks
