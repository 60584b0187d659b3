"""The migration pages have a row for every public name and argument of the peers. FSDP2's are in test_fully_shard.py."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

from fsdp.building.peer_options import PEER_OPTIONS
from fsdp.compat import apex, ddp, fairscale
from fsdp.compat.doors import DOORS
from tests.docs.test_pages import DOCS
from tests.support.described_torch import describes_this_torch

TORCH_DDP = torch.nn.parallel.DistributedDataParallel
CONSTRUCTOR, METHODS = "argument of the constructor", "method or attribute"


def rows(page: str, first_header: str) -> list[str]:
    """The first cells of all tables of a page whose first column has that header."""
    found: list[str] = []
    header = ""
    for line in (DOCS / "migration" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = ""
            continue
        cell = line.split("|")[1].strip()
        if header == first_header and not cell.startswith("---"):
            found.append(cell)
        header = header or cell
    assert found, f"{page} has no table {first_header!r}"
    return found


def names_in(cells: list[str]) -> set[str]:
    """The names in code of some cells, and of a call those of its arguments."""
    return {name for cell in cells for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"\w+", code)}


def arguments(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name for one in inspect.signature(function).parameters.values() if one.kind not in kinds} - {"self"}


def public(cls: type) -> set[str]:
    return {
        name for name, value in vars(cls).items() if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def fairscale_class() -> Any:
    return pytest.importorskip("fairscale.nn").FullyShardedDataParallel


@describes_this_torch
def test_every_argument_of_ddp_and_of_fsdp1_has_a_row() -> None:
    assert arguments(TORCH_DDP.__init__) - names_in(rows("from-ddp", CONSTRUCTOR)) == set()
    assert arguments(Fsdp1.__init__) - names_in(rows("from-fsdp1", CONSTRUCTOR)) == set()


@describes_this_torch
def test_every_method_of_ddp_has_a_row_with_its_arguments() -> None:
    named = names_in(rows("from-ddp", METHODS))
    assert public(TORCH_DDP) - named == set()
    for name in ("join", "no_sync", "register_comm_hook"):
        assert arguments(getattr(TORCH_DDP, name)) - named == set()


@describes_this_torch
def test_the_constructor_of_ddp_takes_the_arguments_of_torch() -> None:
    theirs, ours = (inspect.signature(cls.__init__).parameters for cls in (TORCH_DDP, ddp.DistributedDataParallel))
    *known, others = ours.values()
    assert [*theirs][: len(known)] == [one.name for one in known]
    # the last one takes the options of Apex and of newer versions of torch, which are in the table of options
    assert others.kind == inspect.Parameter.VAR_KEYWORD
    assert {*theirs} - {one.name for one in known} <= {*PEER_OPTIONS}


def test_every_argument_and_method_of_fairscale_has_a_row() -> None:
    theirs = fairscale_class()
    assert arguments(theirs.__init__) - names_in(rows("from-fairscale", CONSTRUCTOR)) == set()
    assert public(theirs) - names_in(rows("from-fairscale", METHODS)) == set()


def test_fairscales_constructor_and_methods_are_called_alike() -> None:
    theirs, ours = fairscale_class(), fairscale.FullyShardedDataParallel
    for name in ("__init__", *sorted(public(theirs))):
        one, other = getattr(theirs, name), getattr(ours, name)
        if callable(one):
            assert list(inspect.signature(other).parameters) == list(inspect.signature(one).parameters), name


def test_every_name_of_fairscales_door_has_a_row() -> None:
    places = {name for names in DOORS["fairscale"].places.values() for name in names}
    assert (places | {*fairscale.__all__}) - names_in(rows("from-fairscale", "name")) == set()


def test_every_argument_of_the_door_of_apex_has_a_row() -> None:
    """Apex itself is not in a package index."""
    assert arguments(apex.DistributedDataParallel.__init__) - names_in(rows("from-apex", CONSTRUCTOR)) == set()


def test_a_name_without_a_row_is_found() -> None:
    cells = rows("from-ddp", CONSTRUCTOR)
    assert "dim" in names_in(cells) and "dims" not in names_in(cells)
    with pytest.raises(AssertionError, match="has no table"):
        rows("from-ddp", "argument of nothing")
