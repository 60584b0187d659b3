"""What `help()` and `inspect` show: real arguments, with types, of every public function; and the forward of a wrapper."""

import gc
import inspect
import pydoc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, get_args

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.models import X, make_net
from tests.support.ranks import on_ranks


class Model(nn.Module):
    """A forward as transformers has them: callers look which columns of a data set it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Own words."""
        return self.layer(input_ids) * scale


class TestForward:
    @on_ranks(2)
    def test_a_wrapper_shows_the_arguments_of_the_wrapped_forward(self, rank: int) -> None:
        plain = Model()
        wanted = inspect.signature(plain.forward)
        assert list(wanted.parameters) == ["input_ids", "labels", "scale"]
        model = fsdp.FullyShardedDataParallel(plain)
        assert inspect.signature(model) == inspect.signature(model.forward) == wanted
        assert inspect.getdoc(model.forward) == "Own words."
        assert inspect.signature(fsdp.fully_shard(Model()).forward) == wanted
        assert torch.equal(model(X, scale=2.0), 2 * model(input_ids=X))

    @on_ranks(1)
    def test_wrappers_around_wrappers_show_it_too(self, rank: int) -> None:
        inner = fsdp.FullyShardedDataParallel(Model())
        model = fsdp.FullyShardedDataParallel(nn.Sequential(inner))
        assert list(inspect.signature(model.module[0]).parameters) == ["input_ids", "labels", "scale"]
        assert list(inspect.signature(model).parameters) == ["input"]
        model(X).sum().backward()

    @on_ranks(1)
    def test_a_subclass_may_have_a_forward_of_its_own(self, rank: int) -> None:
        class Doubled(fsdp.FullyShardedDataParallel):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        model = Doubled(Model())
        assert torch.equal(model(X), 2 * model.module(X))
        assert list(inspect.signature(model.forward).parameters) == ["x"]

    @on_ranks(1)
    def test_a_wrapper_dies_with_its_last_user(self, rank: int) -> None:
        gc.disable()
        try:
            model = fsdp.FullyShardedDataParallel(Model())
            model(X).sum().backward()
            there = weakref.ref(model)
            del model
            assert there() is None
        finally:
            gc.enable()

    @on_ranks(1)
    def test_ctrl_c_in_a_wrapper_is_still_cleaned_up_at_once(self, rank: int) -> None:
        class Stopping(Model):
            stops = True

            def forward(self, x: Tensor) -> Tensor:
                if self.stops:
                    raise KeyboardInterrupt
                return self.layer(x)

        model = fsdp.FullyShardedDataParallel(Stopping())
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert [p.shape for p in model.parameters()] == [p.shape for p in model.module.parameters()]
        model.module.stops = False
        model(X).sum().backward()


EXCEPTIONS = {
    "FullyShardedDataParallel.forward(args)": "takes what the wrapped forward takes; on an object the signature is that one's",
    "FullyShardedDataParallel.forward(kwargs)": "as above",
    "FullyShardedDataParallel.forward(return)": "returns what the wrapped forward returns",
    "PipelineStage.__init__(return)": "torch's signature",
}
"""Where a type cannot be said, and why."""


def contains_any(annotation: object) -> bool:
    if isinstance(annotation, str | ForwardRef):
        return "Any" in str(annotation)
    return annotation is Any or any(contains_any(one) for one in [*get_args(annotation)])


def contains_any_inside(annotation: object) -> bool:
    """Also in the arguments of a Callable, which are a list."""
    if isinstance(annotation, list | tuple):
        return any(map(contains_any_inside, annotation))
    return contains_any(annotation) or any(contains_any_inside(one) for one in get_args(annotation))


def public_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every public function, constructor and public method that a class defines itself."""
    for name in fsdp.__all__:
        thing = getattr(fsdp, name)
        if not isinstance(thing, type):
            yield name, thing
            continue
        for attribute, value in vars(thing).items():
            function = getattr(value, "__func__", value)
            if callable(function) and (not attribute.startswith("_") or attribute == "__init__"):
                yield f"{name}.{attribute}", function


def problems(name: str, function: Callable[..., object]) -> list[str]:
    signature = inspect.signature(function)
    found = []
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.annotation is one.empty or one.kind is one.VAR_KEYWORD or contains_any_inside(one.annotation):
            found.append(f"{name}({one.name})")
    if signature.return_annotation is signature.empty or contains_any_inside(signature.return_annotation):
        found.append(f"{name}(return)")
    return found


def test_every_public_argument_has_a_name_and_a_type_but_for_the_exceptions() -> None:
    found = [one for name, function in public_functions() for one in problems(name, function)]
    assert sorted(found) == sorted(EXCEPTIONS)


def test_the_check_finds_what_it_looks_for() -> None:
    def wrong(a, b: Any, c: dict[str, Any], d: Callable[[int, Any], None], e: "list[Any]", *f: int, g: int, **h: int):  # type: ignore[no-untyped-def]
        pass

    assert problems("wrong", wrong) == [f"wrong({name})" for name in ("a", "b", "c", "d", "e", "h", "return")]


@pytest.mark.parametrize("name", fsdp.__all__)
def test_help_shows_no_any_and_no_options(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(fsdp, name)))
    own = text.partition("Methods inherited")[0]
    shown = [line for line in own.splitlines() if "(" in line and ("->" in line or line.endswith(")"))]
    assert not [line for line in shown if "**options" in line or ("Any" in line and "forward(" not in line and "__" not in line)]


def test_both_calls_that_wrap_have_the_same_options() -> None:
    calls = [inspect.signature(one).parameters for one in (fsdp.FullyShardedDataParallel, fsdp.fully_shard)]
    assert [*calls[0]] == [*calls[1]] and len(calls[0]) > 10


@on_ranks(1)
def test_every_option_is_passed_on(rank: int) -> None:
    """A value that is refused shows that it has arrived."""
    for name in inspect.signature(fsdp.fully_shard).parameters:
        if name not in ("module", "sync_module_states", "process_group"):
            with pytest.raises(fsdp.ShardingError, match=name):
                fsdp.FullyShardedDataParallel(make_net(), **{name: 3.5})


def test_the_options_of_the_scaler_are_torchs() -> None:
    theirs = [*inspect.signature(torch.amp.GradScaler).parameters.values()][1:]
    *ours, stages = [*inspect.signature(fsdp.ShardedGradScaler).parameters.values()][2:]
    assert [(one.name, one.default) for one in ours] == [(one.name, one.default) for one in theirs]
    assert len(ours) == 5 and (stages.name, stages.default) == ("pp_mesh", None)
    scalers = fsdp.simulate(
        1, lambda rank: fsdp.ShardedGradScaler(fsdp.fully_shard(make_net()), "cpu", **{one.name: 1.5 for one in ours[:2]})
    )
    assert scalers[0].state_dict()["growth_factor"] == scalers[0].get_scale() == 1.5
