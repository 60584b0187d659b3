"""The shape of the code: who imports whom, and which file alone may do what."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import fsdp
from fsdp.runtime.registry import unit_ref_of
from state_machine import Action, Effect
from tests.support.ranks import on_ranks

ROOT = Path(__file__).resolve().parent.parent
FSDP = ROOT / "fsdp"

# imports point down: from a package, or a file directly in fsdp/, to those after it
ORDER = (
    "__main__",
    "commands",
    "commands.selftest",
    "__init__",
    "commands.planning",
    "commands.rehearsal",
    "commands.reporting",
    "integrations",
    "compat.frameworks",
    "compat",
    "compat.ddp",
    "compat.fsdp1",
    "compat.fsdp2",
    "compat.fairscale",
    "compat.shared",
    "api",
    "building",
    "runtime.uneven",
    "checkpoint",
    "state_dict",
    "debug.tracing",
    "runtime",
    "debug",
    "reduction",
    "params",
    "shards",
    "comm",
    "comm.failure",
    "device",
    "config",
    "file_errors",
    "random_states",
    "errors",
    "log",
    "autograd",
)
# torch's Distributed Checkpoint lies below torch.distributed, and communicates only where it is asked to
DCP = "torch.distributed.checkpoint"
DCP_USERS = {"shards.sharded_value", "shards.dtensors", "checkpoint.dcp", "compat.frameworks.accelerate"}

PACKAGES = sorted(".".join(path.parent.relative_to(FSDP).parts) for path in FSDP.glob("*/**/__init__.py"))
FILES = sorted(
    ".".join(path.relative_to(FSDP).with_suffix("").parts)
    for path in FSDP.rglob("*.py")
    if path.parent == FSDP or path.stem != "__init__"
)
IMPORTED_BY_USERS = ("compat", "compat.ddp", "compat.fairscale")
"""Packages in which users find names. The others are a docstring and files."""


def init_of(package: str) -> Path:
    return FSDP / package.replace(".", "/") / "__init__.py"


def room_of(module: str) -> str:
    """The innermost package of `fsdp` that a module is or is in; the name of a module that is in none."""
    name = module.removeprefix("fsdp.")
    inside = [package for package in PACKAGES if f"{name}.".startswith(f"{package}.")]
    return max(inside, key=len, default=name.partition(".")[0])


def path_of(name: str) -> Path:
    return FSDP / f"{name.replace('.', '/')}.py"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The full dotted names a file imports, also inside functions: `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls_in(path: Path) -> Iterator[str]:
    """The dotted name of everything a file calls."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            yield dotted(node.func)


def climbs(imports: Mapping[str, AbstractSet[str]], order: tuple[str, ...]) -> list[str]:
    """One sentence for every import of a package that does not point down."""
    place = {name: number for number, name in enumerate(order)}
    return [
        f"fsdp.{one} reaches up to fsdp.{other}"
        for one, names in sorted(imports.items())
        for other in sorted(names)
        if place[other] < place[one]
    ]


def circles(imports: Mapping[str, AbstractSet[str]]) -> list[str]:
    """The names that lead back to themselves."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        todo = [name]
        while todo:
            todo.extend(new := imports[todo.pop()] - found)
            found |= new
        return found

    return [name for name in imports if name in reached(name)]


def files_used_by(name: str) -> set[str]:
    """The files of `fsdp` that one of them imports."""
    return {one.removeprefix("fsdp.") for one in imports_of(path_of(name)) if one.startswith("fsdp.")} & set(FILES)


def only_in(home: set[str], offenders: dict[str, list[str]]) -> None:
    """Of all files, `home` alone may have any of these."""
    assert {name for name, found in offenders.items() if found} == home, {n: f for n, f in offenders.items() if n not in home}


def test_every_package_has_its_place_in_the_order() -> None:
    assert sorted(ORDER) == sorted({*PACKAGES, *(name for name in FILES if "." not in name)})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_docstring_and_files(package: str) -> None:
    tree = parse(init_of(package))
    text = ast.get_docstring(tree)
    assert text and (len(tree.body) == 1 or package in IMPORTED_BY_USERS)
    assert all(line in text for line in ("Start with", "May use:", "Must not:"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_those_that_it_says(package: str) -> None:
    text = ast.get_docstring(parse(init_of(package))) or ""
    said = text.partition("May use:")[2].partition("\n")[0]
    if "every package below" not in said:
        used = {room_of(other) for name in FILES if room_of(name) == package for other in files_used_by(name)} - {package}
        assert used <= set(re.findall(r"\w+(?:\.\w+)*", re.sub(r"\(.*?\)", "", said)))


def test_imports_point_down() -> None:
    used: dict[str, set[str]] = {name: set() for name in ORDER}
    for name in FILES:
        used[room_of(name)] |= {room_of(other) for other in files_used_by(name)} - {room_of(name)}
    assert climbs(used, ORDER) == []


def test_an_import_that_points_up_is_named() -> None:
    assert climbs({"a": {"b"}, "b": {"a"}}, ("b", "a")) == ["fsdp.a reaches up to fsdp.b"]


def test_no_file_needs_itself() -> None:
    assert circles({name: files_used_by(name) for name in FILES}) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]


# torch's configuration objects are given on, its names are compared with ours, and nothing is called
_NAMES_OF_TORCH = {"compat.torch_fsdp", "compat.fully_shard", "compat.fsdp2.wrap", "compat.fsdp2.module"}


def test_only_process_group_and_connect_import_torch_distributed() -> None:
    only_in(
        {
            *(
                "comm.process_group",
                "comm.open_communicators",
                "comm.routed_group",
                "comm.simulated_group",
                "comm.dtensor_mesh",
                "compat.shared.plain_group",
                "shards.dtensors",
                *("commands.planning.measure", "commands.planning.shapes", "commands.rehearsal.torch_groups"),
            ),
            *("compat.fairscale.groups", "compat.fsdp1.torch_names", "compat.frameworks.lightning_trainer", *_NAMES_OF_TORCH),
            *("commands.selftest.rank", "api.pipeline"),
        },
        {name: [one for one in imports_of(path_of(name)) if is_distributed(one) and not is_dcp(one)] for name in FILES},
    )


def test_only_the_files_that_save_and_load_import_dcp() -> None:
    only_in(DCP_USERS, {name: [one for one in imports_of(path_of(name)) if is_dcp(one)] for name in FILES})


def is_distributed(name: str) -> bool:
    return name.startswith("torch.distributed")


def is_dcp(name: str) -> bool:
    return name == DCP or name.startswith(f"{DCP}.")


@pytest.mark.parametrize("name", FILES)
def test_nobody_reaches_torch_distributed_by_attribute(name: str) -> None:
    dots = [dotted(node) for node in ast.walk(parse(path_of(name))) if isinstance(node, ast.Attribute)]
    assert not [one for one in dots if one.startswith("torch.distributed")]


@pytest.mark.parametrize(
    ("room", "classes"),
    [
        ("params.placement", {"ShardPlacement", "DTensorPlacement"}),
        ("device.home", {"HostHome"}),
        ("params.wire", {"WireOfSegments"}),
    ],
)
def test_no_other_file_asks_of_which_kind_a_placement_a_home_or_a_wire_is(room: str, classes: set[str]) -> None:
    """What differs is a method or an attribute. A flat buffer chooses its wire."""
    users = {name: sorted(classes & set(re.findall(r"\w+", path_of(name).read_text(encoding="utf-8")))) for name in FILES}
    only_in({room, *(["params.flat_buffer"] if room == "params.wire" else [])}, users)


def test_only_streams_names_a_device_stream() -> None:
    def named(name: str) -> list[str]:
        dots = [dotted(node) for node in ast.walk(parse(path_of(name))) if isinstance(node, ast.Attribute)]
        return [one for one in dots if one.startswith("torch.cuda.") or one.endswith(("record_stream", "wait_stream"))]

    only_in({"device.streams"}, {name: named(name) for name in FILES})


def test_only_storage_resizes_memory() -> None:
    only_in({"device.storage"}, {name: [one for one in calls_in(path_of(name)) if one.endswith(".resize_")] for name in FILES})


def test_only_engine_queues_a_callback() -> None:
    calls = {name: [one for one in calls_in(path_of(name)) if one.endswith("queue_callback")] for name in FILES}
    only_in({"runtime.passes"}, calls)


ARITHMETIC = ("shards.cut", "params.layout", "reduction.bucketing", "runtime.prefetch", "log")


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_knows_nothing_of_torch(name: str) -> None:
    pure = {f"fsdp.{other}" for other in ARITHMETIC}
    foreign = [one for one in imports_of(path_of(name)) if one.split(".")[0] not in sys.stdlib_module_names]
    assert not [one for one in foreign if one not in pure and one.rpartition(".")[0] not in pure]


@pytest.mark.parametrize("path", sorted((ROOT / "state_machine").rglob("*.py")), ids=lambda path: path.stem)
def test_state_machine_imports_the_standard_library_and_itself(path: Path) -> None:
    heads = {one.split(".")[0] for one in imports_of(path)}
    assert not heads - {"state_machine"} - set(sys.stdlib_module_names)


@on_ranks(1)
def test_engine_has_a_handler_for_every_action_and_every_effect(rank: int) -> None:
    unit_ref = unit_ref_of(fsdp.fully_shard(nn.Linear(2, 2)))
    engine = unit_ref.engine
    assert set(engine._action_handlers) == set(Action)
    assert all(set(effects) == set(Effect) for effects in engine._effect_handlers)


@pytest.mark.parametrize("name", fsdp.__all__)
def test_public_names_are_explained(name: str) -> None:
    thing = getattr(fsdp, name)
    # a class without a docstring of its own has None in its own __dict__
    assert thing.__dict__["__doc__"] if isinstance(thing, type) else thing.__doc__


def test_public_names_are_sorted_and_exist() -> None:
    assert list(fsdp.__all__) == sorted(fsdp.__all__)
    assert all(hasattr(fsdp, name) for name in fsdp.__all__)


def test_folders_of_tests_mirror_the_packages() -> None:
    folders = {".".join(path.relative_to(ROOT / "tests").parts) for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    # names alone, tested with what they name
    packages = [name for name in PACKAGES if name != "integrations"]
    assert set(packages) <= folders, "each package has a folder of tests"
    assert not [name for name in packages if not list((ROOT / "tests" / name.replace(".", "/")).rglob("test_*.py"))]


@pytest.mark.parametrize("folder", ["tests", "tools"])
def test_tests_and_tools_are_packages_and_leave_the_path_alone(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert not [path for path in files if not (path.parent / "__init__.py").exists()]
    dots = {path: [dotted(node) for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)] for path in files}
    assert not [path for path, found in dots.items() if "sys.path" in found]


def test_dir_lists_the_public_names_and_no_module() -> None:
    assert [name for name in dir(fsdp) if not name.startswith("__")] == sorted(fsdp.__all__)
    assert "__version__" in dir(fsdp)


def test_the_version_is_said_in_one_place_that_a_build_reads_without_importing() -> None:
    assigned = [node for node in parse(FSDP / "__init__.py").body if isinstance(node, ast.Assign)]
    found = [ast.literal_eval(node.value) for node in assigned if [dotted(one) for one in node.targets] == ["__version__"]]
    assert found == [fsdp.__version__] and re.fullmatch(r"\d+\.\d+\.\d+\S*", fsdp.__version__)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"] and "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fsdp.__version__"}


def test_a_tree_that_is_not_installed_has_its_version_too() -> None:
    """Nothing is asked of an installation, which may be another one, older than the tree."""
    assert not [name for name in imports_of(path_of("__init__")) if name.startswith("importlib")]


def test_after_star_import_there_are_public_names_only() -> None:
    names: dict[str, object] = {}
    exec("from fsdp import *", names)
    assert {name for name in names if not name.startswith("__")} == set(fsdp.__all__)
