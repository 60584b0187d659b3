"""install puts our names into a library, and uninstall puts the library's back."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fsdp
import fsdp.compat
from fsdp.compat import fully_shard
from fsdp.compat.doors import DOORS, WHAT_IT_HAS, Door, replacements


class THEIRS:
    """What the library defines. It is not bound to globals of this file, which install would find."""

    class Wrapper:
        """A class of the library."""

    @staticmethod
    def shard() -> str:
        return "theirs"


class OURS:
    """What the door defines."""

    class Wrapper:
        """The class of the door."""

    @staticmethod
    def shard() -> str:
        return "ours"


BOTH = {"Wrapper": THEIRS.Wrapper, "shard": THEIRS.shard}


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A library with two places, a user who imported from it, and a door to it."""
    there = {
        "a_library": module("a_library", **BOTH, only_theirs=len),
        "a_library.inner": module("a_library.inner", **BOTH),
        "a_library.other": module("a_library.other", **BOTH),
        "a_user": module("a_user", FSDP=THEIRS.Wrapper, shard=THEIRS.shard),
        "our_names": module(
            "our_names", Wrapper=OURS.Wrapper, shard=OURS.shard, only_ours=abs, __all__=["Wrapper", "shard", "only_ours"]
        ),
    }
    for name, one in there.items():
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setitem(
        DOORS, "a_door", Door("our_names", dict.fromkeys(("a_library", "a_library.inner", "a_library.gone"), WHAT_IT_HAS))
    )
    yield there["a_library"]
    if fsdp.compat.installation._installed:
        fsdp.compat.uninstall()


def run(name: str, source: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModuleType:
    """Import a file of the user."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def user() -> dict[str, Any]:
    return vars(sys.modules["a_user"])


def test_names_of_the_library_and_names_bound_to_them_are_ours_until_uninstall(library: ModuleType) -> None:
    before = {name: dict(vars(sys.modules[name])) for name in ("a_library", "a_library.inner", "a_library.other", "a_user")}
    fsdp.compat.install("a_door")
    assert (
        library.Wrapper is OURS.Wrapper
        and library.shard is OURS.shard
        and library.only_theirs is len
        and not hasattr(library, "only_ours")
    )
    assert sys.modules["a_library.inner"].Wrapper is OURS.Wrapper
    assert user()["FSDP"] is OURS.Wrapper and user()["shard"] is OURS.shard
    assert sys.modules["a_library.other"].Wrapper is THEIRS.Wrapper, "inside the library only the places of the door change"
    fsdp.compat.uninstall()
    assert {name: dict(vars(sys.modules[name])) for name in before} == before


def test_code_that_is_imported_later_gets_ours_and_goes_back(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "import fsdp.compat; fsdp.compat.install('a_door'); from a_library import Wrapper as FSDP"
    late = run("a_late_user", source, monkeypatch, tmp_path)
    assert late.FSDP is OURS.Wrapper
    fsdp.compat.uninstall("a_door")
    assert late.FSDP is THEIRS.Wrapper


def test_code_that_imports_the_door_itself_keeps_ours(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "from our_names import Wrapper"
    early = module("an_early_user", Wrapper=OURS.Wrapper)
    monkeypatch.setitem(sys.modules, "an_early_user", early)
    fsdp.compat.install("a_door")
    late = run("a_user_of_the_door", source, monkeypatch, tmp_path)
    fsdp.compat.uninstall()
    assert early.Wrapper is OURS.Wrapper and late.Wrapper is OURS.Wrapper


def test_checks_of_code_that_was_imported_before_hold_for_our_instances(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "from a_library import Wrapper  # not from our_names\ndef is_wrapped(model): return isinstance(model, Wrapper)"
    framework = run("a_framework", source, monkeypatch, tmp_path)
    with fsdp.compat.install("a_door"):
        assert framework.is_wrapped(OURS.Wrapper()) and not framework.is_wrapped(3)
    assert framework.is_wrapped(THEIRS.Wrapper()) and not framework.is_wrapped(OURS.Wrapper())


def test_a_context_takes_out_what_it_has_put_in(library: ModuleType) -> None:
    with fsdp.compat.install("a_door") as outer:
        with fsdp.compat.install("a_door") as inner:
            assert outer.doors == fsdp.compat.installed() == ("a_door",) and inner.doors == ()
        assert library.Wrapper is OURS.Wrapper
    assert library.Wrapper is THEIRS.Wrapper and fsdp.compat.installed() == ()
    with fsdp.compat.install("a_door"):
        fsdp.compat.uninstall()
    assert library.Wrapper is THEIRS.Wrapper


def test_a_name_that_someone_else_has_replaced_since_stays(library: ModuleType) -> None:
    fsdp.compat.install("a_door")
    library.shard = print  # type: ignore[attr-defined]
    user()["FSDP"] = dict
    fsdp.compat.uninstall()
    assert library.shard is print and user()["FSDP"] is dict and library.Wrapper is THEIRS.Wrapper


def test_modules_stand_in_for_a_library_that_is_absent(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        DOORS, "absent", Door("our_names", dict.fromkeys(("an_absent_library.nn", "an_absent_library.nn.shard"), WHAT_IT_HAS))
    )
    with fsdp.compat.install("absent"):
        from an_absent_library.nn import Wrapper, shard  # type: ignore[import-not-found]
        from an_absent_library.nn.shard import Wrapper as the_same  # type: ignore[import-not-found]

        assert Wrapper is the_same is OURS.Wrapper and shard is OURS.shard, "a name of ours covers the module of that name"
    assert not [name for name in sys.modules if name.startswith("an_absent_library")]


def test_an_alias_is_replaced_too(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    library.FSDP = THEIRS.Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(DOORS, "aliased", Door("our_names", {"a_library": ("shard",)}, {("a_library", "FSDP"): "Wrapper"}))
    with fsdp.compat.install("aliased"):
        assert library.FSDP is OURS.Wrapper and library.Wrapper is THEIRS.Wrapper
    assert library.FSDP is THEIRS.Wrapper


def test_what_cannot_be_installed_is_refused_and_nothing_is_replaced(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "other_names", module("other_names", Wrapper=dict, __all__=["Wrapper"]))
    monkeypatch.setitem(DOORS, "other", Door("other_names", {"a_library": WHAT_IT_HAS}))
    for doors, text in (
        ((), "install takes the names of doors: "),
        (("a_door", "pipeline"), "there is no door 'pipeline'; the doors are torch_fsdp, "),
        (("a_door", "other"), "doors 'a_door' and 'other' both replace a_library.Wrapper; install one of them"),
    ):
        with pytest.raises(fsdp.ShardingError, match=text):
            fsdp.compat.install(*doors)
        assert library.Wrapper is THEIRS.Wrapper
    with fsdp.compat.install("a_door"):
        with pytest.raises(fsdp.ShardingError, match="both replace"):
            fsdp.compat.install("other")
        with pytest.raises(fsdp.ShardingError, match="uninstall: other is not installed; installed are a_door"):
            fsdp.compat.uninstall("a_door", "other")
        assert library.Wrapper is OURS.Wrapper


def test_an_unchanged_script_for_fairscale_trains() -> None:
    def one_rank(rank: int) -> torch.Tensor:
        from fairscale.nn import FullyShardedDataParallel  # type: ignore[import-not-found]
        from fairscale.nn.wrap import auto_wrap, enable_wrap  # type: ignore[import-not-found]

        torch.manual_seed(0)
        with enable_wrap(wrapper_cls=FullyShardedDataParallel):
            model = FullyShardedDataParallel(auto_wrap(torch.nn.Linear(3, 1)))
        model(torch.full((1, 3), float(rank))).sum().backward()
        return model.params[0].grad

    with fsdp.compat.install("fairscale"):
        assert torch.equal(torch.cat(fsdp.simulate(2, one_rank)), torch.tensor([0.5, 0.5, 0.5, 1.0]))


def test_the_old_path_of_fsdp2_is_that_of_the_door() -> None:
    with fsdp.compat.install("fully_shard"):
        old = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
        assert (old.FSDPModule, old.fully_shard) == (fully_shard.FSDPModule, fully_shard.fully_shard)


@pytest.mark.parametrize("door", [name for name, door in DOORS.items() if importlib.util.find_spec(door.module)])
def test_a_door_replaces_something_and_no_name_twice(door: str) -> None:
    found = [(one.place, one.name) for one in replacements(DOORS[door])]
    assert found and len(found) == len(set(found))
