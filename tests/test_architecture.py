"""The shape of the code: who imports whom, and which file alone may do what."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path
from types import MethodType

import pytest
from torch import nn

import fsdp
from fsdp.runtime.registry import unit_ref_of
from state_machine import Action, Effect

ROOT = Path(__file__).resolve().parent.parent
FSDP = ROOT / "fsdp"

# imports point down: from a package to the packages below it, and inside a package to the files after it
ORDER: dict[str, tuple[str, ...]] = {
    "__main__": (),
    "commands": ("main",),
    "commands.selftest": (
        "command",
        "rank",
        "checks",
        "failures",
        "training",
    ),
    "__init__": (),
    "commands.planning": (
        "command",
        "shapes",
        "plan_page",
        "plan",
        "measure",
        "assumptions",
        "comparison",
        "choices",
    ),
    "commands.rehearsal": (
        "rehearse",
        "memory",
        "kernels",
        "rehearsed_communicator",
        "recall",
        "clock",
        "hardware",
    ),
    "commands.reporting": (
        "command",
        "report_page",
        "html",
        "text",
        "who",
        "advice",
        "formats",
        "replay",
        "numbers",
        "intervals",
        "clocks",
        "rank_trace",
    ),
    "integrations": (
        "accelerate",
        "lightning",
    ),
    "compat.frameworks": (
        "accelerate",
        "lightning_trainer",
        "lightning_fabric",
        "lightning_common",
    ),
    "compat": (
        "installation",
        "doors",
        "apex",
        "fully_shard",
        "torch_fsdp",
    ),
    "compat.ddp": (
        "apex_wrapper",
        "wrapper",
        "arguments",
    ),
    "compat.fsdp1": (
        "wrapper",
        "instance",
        "optim_states",
        "states",
        "state_types",
        "gradients",
        "summon",
        "root_forward",
        "sharding",
        "flat_param",
        "torch_names",
    ),
    "compat.fsdp2": (
        "wrap",
        "module",
        "move_module",
        "residence",
        "settings",
    ),
    "compat.fairscale": (
        "auto_wrap",
        "wrapper",
        "gradients",
        "optim_states",
        "states",
        "sharding",
        "shared_params",
        "recompute",
        "flatten",
        "flat_params",
        "instance",
        "groups",
    ),
    "compat.shared": (
        "dtype_and_device",
        "plain_group",
    ),
    "api": (
        "unwrap",
        "wrap",
        "shard_grads",
        "summon",
        "story",
        "reductions",
        "recovery",
        "clip_and_scale",
        "comm_hooks",
        "forward_methods",
        "host_memory",
        "trace",
    ),
    "building": (
        "peer_options",
        "builder",
        "attach",
        "copies",
        "dissolve",
        "consistency",
        "shardable",
        "other_engines",
        "choose_units",
        "auto_units",
        "torch_policies",
    ),
    "runtime.uneven": (
        "join",
        "join_result",
        "empty_backward",
        "meet",
        "join_with_last_batch",
        "inputs_of_others",
        "join_without_batch",
        "join_base",
        "uneven_engine",
        "data_left",
        "gather_order",
        "weight_changes",
    ),
    "checkpoint": (
        "convert",
        "load",
        "save",
        "hf_safetensors",
        "own_values",
        "saved_grads",
        "dcp",
        "manifest",
        "atomic_folder",
        "background",
        "progress",
        "rng",
    ),
    "state_dict": (
        "ema",
        "optim_state",
        "full_state",
        "model_view",
        "state_dict_hooks",
        "fqns",
        "param_ranges",
        "optim_placement",
        "param_shard",
    ),
    "debug.tracing": (
        "chrome",
        "lanes",
        "recorder",
    ),
    "runtime": (
        "steps",
        "registry",
        "hooks",
        "double_backward",
        "refuse_copy",
        "grad_hooks",
        "side_outputs",
        "engine",
        "final_callback",
        "launch_gathers",
        "hook_actions",
        "stale_params",
        "prefetch",
    ),
    "debug": (
        "guard",
        "phases",
        "step_stats",
        "dump",
        "run_dir",
        "error_notes",
        "threads",
        "snapshot",
        "delays",
    ),
    "reduction": (
        "reducer",
        "build_buckets",
        "order",
        "used_params",
        "stats",
        "in_flight",
        "bucketing",
        "comm_hook",
        "sparse_bucket",
        "bucket",
        "accumulated",
        "sparse",
    ),
    "params": (
        "unit",
        "unit_observer",
        "summoned_params",
        "versions",
        "use_outside_forward",
        "buffer_plan",
        "flat_buffer",
        "wire",
        "use_after_free",
        "module_tree",
        "shown_params",
        "param_info",
        "layout",
    ),
    "shards": (
        "optimizer_steps",
        "optimizer_state",
        "unreduced",
        "sharded_value",
        "chunks",
        "shard_parameter",
        "shard_tensor",
        "dtensors",
        "refusals",
        "norms_and_sums",
        "operators",
        "info",
        "cut",
    ),
    "comm": (
        "broadcast_buffers",
        "dtensor_mesh",
        "open_communicators",
        "context",
        "agreement",
        "joint_gather",
        "process_group",
        "simulated",
        "simulated_group",
        "simulated_ops",
        "communicator",
        "work",
        "pairwise_sum",
    ),
    "comm.failure": (
        "watchdog",
        "peer_monitor",
        "notices",
        "process_end",
        "ended_processes",
        "desync",
        "pending_call",
        "environment",
        "unreachable_hosts",
    ),
    "device": (
        "streams",
        "cutter",
        "storage",
    ),
    "newer_peers": (),
    "config": (),
    "file_errors": (),
    "errors": (),
    "log": (),
    "autograd": (
        "backward_progress",
        "node_hooks",
        "engine_calls",
        "frames",
        "pytree",
        "dynamo",
    ),
}
STATE_MACHINE_USERS = {
    "runtime.uneven.uneven_engine",
    "runtime.uneven.gather_order",
    "runtime.uneven.join_without_batch",
    "runtime.registry",
    "runtime.stale_params",
    "reduction.reducer",
    "reduction.build_buckets",
    "runtime.engine",
    "runtime.final_callback",
    "debug.snapshot",
    "debug.phases",
    "debug.tracing.lanes",
    "debug.tracing.recorder",
    "runtime.hooks",
    "compat.fsdp2.residence",
    "compat.fsdp2.settings",
    "state_dict.state_dict_hooks",
    "api.summon",
    "config",
    "errors",
}
# torch's Distributed Checkpoint lies below torch.distributed, and communicates only where it is asked to
DCP = "torch.distributed.checkpoint"
DCP_USERS = {"shards.sharded_value", "checkpoint.dcp", "compat.frameworks.accelerate"}
LONGEST = 700
LONGER = {"comm.simulated": 600}

PACKAGES = sorted(".".join(path.parent.relative_to(FSDP).parts) for path in FSDP.glob("*/**/__init__.py"))
FILES = sorted(
    ".".join(path.relative_to(FSDP).with_suffix("").parts)
    for path in FSDP.rglob("*.py")
    if path.parent == FSDP or path.stem != "__init__"
)
IMPORTED_BY_USERS = ("compat", "compat.ddp", "compat.fairscale")
"""Packages in which users find names. The others are a docstring and files."""
PLACES = tuple(f"{package}.{name}" if files else package for package, files in ORDER.items() for name in files or ("",))


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
    """One sentence for every import that does not point down."""
    place = {name: number for number, name in enumerate(order)}
    return [
        f"fsdp.{one} reaches up to fsdp.{other}"
        for one, names in imports.items()
        for other in sorted(place)
        if f"fsdp.{other}" in names and place[other] <= place[one]
    ]


def only_in(home: set[str], offenders: dict[str, list[str]]) -> None:
    """Of all files, `home` alone may have any of these."""
    assert {name for name, found in offenders.items() if found} == home, {n: f for n, f in offenders.items() if n not in home}


def test_every_file_has_its_place_in_the_order() -> None:
    assert sorted(PLACES) == FILES


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_docstring_and_files(package: str) -> None:
    tree = parse(init_of(package))
    text = ast.get_docstring(tree)
    assert text and (len(tree.body) == 1 or package in IMPORTED_BY_USERS)
    assert all(line in text for line in ("Start with", "May use:", "Must not:"))
    assert ORDER[package]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_those_that_it_says(package: str) -> None:
    text = ast.get_docstring(parse(init_of(package))) or ""
    said = text.partition("May use:")[2].partition("\n")[0]
    if "every package below" not in said:
        files = [path_of(f"{package}.{name}") for name in ORDER[package]]
        used = {room_of(one) for path in files for one in imports_of(path) if one.startswith("fsdp.")} - {package}
        assert used <= set(re.findall(r"\w+(?:\.\w+)*", re.sub(r"\(.*?\)", "", said)))


def test_imports_point_down() -> None:
    assert climbs({name: imports_of(path_of(name)) for name in FILES}, PLACES) == []


def test_an_import_that_points_up_is_named() -> None:
    assert climbs({"a.storage": {"fsdp.b.engine"}, "b.engine": {"fsdp.a.storage"}}, ("b.engine", "a.storage")) == [
        "fsdp.a.storage reaches up to fsdp.b.engine"
    ]


def test_only_engine_and_its_neighbours_import_state_machine() -> None:
    only_in(
        STATE_MACHINE_USERS,
        {name: [one for one in imports_of(path_of(name)) if one.startswith("state_machine")] for name in FILES},
    )


# torch's configuration objects are given on, its names are compared with ours, and nothing is called
_NAMES_OF_FSDP2 = {"compat.fully_shard", "compat.fsdp2.wrap", "compat.fsdp2.module"}


def test_only_process_group_and_connect_import_torch_distributed() -> None:
    only_in(
        {
            *(
                "comm.process_group",
                "comm.open_communicators",
                "comm.dtensor_mesh",
                "compat.shared.plain_group",
                "shards.dtensors",
                "commands.planning.measure",
            ),
            *("compat.fairscale.groups", "compat.fsdp1.torch_names", "compat.frameworks.lightning_trainer", *_NAMES_OF_FSDP2),
            "commands.selftest.rank",
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


def test_only_streams_names_a_device_stream() -> None:
    def named(name: str) -> list[str]:
        dots = [dotted(node) for node in ast.walk(parse(path_of(name))) if isinstance(node, ast.Attribute)]
        return [one for one in dots if one.startswith("torch.cuda.") or one.endswith(("record_stream", "wait_stream"))]

    only_in({"device.streams"}, {name: named(name) for name in FILES})


def test_only_hooks_registers_a_hook() -> None:
    def registrations(name: str) -> list[str]:
        last = [one.rsplit(".", 1)[-1] for one in calls_in(path_of(name))]
        return [one for one in last if one.startswith("register_") and one.endswith("hook") and "state_dict" not in one]

    only_in(
        {
            # fused optimizers, whose steps no version counter shows
            "runtime.uneven.weight_changes",
            # steps whose gradients are not there yet are refused
            "runtime.steps",
            "runtime.hooks",
            "runtime.double_backward",
            "runtime.grad_hooks",
            "autograd.node_hooks",
            "runtime.side_outputs",
            # a refusal to compute without memory
            "runtime.refuse_copy",
            "shards.optimizer_steps",
            # hooks of the user, which a DTensor takes over from the parameter that it replaces
            "shards.dtensors",
            "runtime.uneven.join_result",
            # full values are gathered again after a step of an optimizer; no event
            "api.summon",
            # fairscale's hooks that show views again and that patch batch norms; they raise no event
            *("compat.fairscale.wrapper", "compat.fairscale.recompute"),
            # a communication hook, by the function of fsdp
            "compat.ddp.wrapper",
            # FSDP1's communication hook, given to the engine
            "compat.fsdp1.gradients",
        },
        {name: registrations(name) for name in FILES},
    )


def test_only_storage_resizes_memory() -> None:
    only_in({"device.storage"}, {name: [one for one in calls_in(path_of(name)) if one.endswith(".resize_")] for name in FILES})


def test_only_engine_queues_a_callback() -> None:
    calls = {name: [one for one in calls_in(path_of(name)) if one.endswith("queue_callback")] for name in FILES}
    only_in({"runtime.engine"}, calls)


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


@pytest.mark.parametrize("name", FILES)
def test_files_can_be_held_in_the_head(name: str) -> None:
    assert len((path_of(name)).read_text(encoding="utf-8").splitlines()) <= LONGER.get(name, LONGEST)


def test_engine_has_a_named_method_for_every_action_and_every_effect() -> None:
    def fn(rank: int) -> None:
        unit_ref = unit_ref_of(fsdp.fully_shard(nn.Linear(2, 2)))
        assert unit_ref is not None
        engine = unit_ref.engine
        assert set(engine._action_handlers) == set(Action)
        assert all(set(effects) == set(Effect) for effects in engine._effect_handlers)
        called = [*engine._action_handlers.values(), *(one for effects in engine._effect_handlers for one in effects.values())]
        methods = [one.func if isinstance(one, partial) else one for one in called]
        assert all(isinstance(one, MethodType) for one in methods), "a lambda or a closure, which nobody can look up"

    fsdp.simulate(1, fn)


NOT_OURS = {
    "grad": "of a parameter of torch, which optimizers read",
    "data": "of a parameter of torch, which stays the user's object over other memory",
    "_backward_hooks": "of a parameter of torch: hooks that were set before wrapping get the full gradient",
    "_post_accumulate_grad_hooks": "of a parameter of torch, which learns by it of the hooks of the shard that it was",
    "__class__": "of a module's dict of parameters, which intercepts reads, and of a gradient that is kept under no_sync",
    "shard_info": "of a tensor of torch, which knows by it that it is a shard",
    "f_trace": "of a frame of Python, whose end raises the error that gets a note",
    "atexit": "of a finalizer of Python",
    "asyncOp": "of options of a collective of torch",
    "reduceOp": "of options of a collective of torch",
    "rootRank": "of options of a collective of torch",
    "_use_dtensor": "of a configuration of torch: FSDP1 sets it where there is a device mesh",
    "_is_sharded": "of a parameter of torch, on which users of fairscale look for it",
    "_orig_size": "of a parameter of torch, on which users of fairscale look for it",
    "_is_shared": "of a parameter of torch, on which users of fairscale look for it",
    "wrapper_config": "of a module of the user: arguments of its wrapper",
    "per_thread_copy_ahead": "of a writer of torch's Distributed Checkpoint",
}
"""The attributes of objects of torch and Python that this package writes, and why."""
LOCALS_NOT_OURS = {
    ("shards.shard_tensor", "made"): "a tensor that is made here",
    ("shards.shard_tensor", "torch"): "torch.numel, which asks no class of tensors and must count the elements of the parameter",
    ("shards.shard_tensor", "ctx"): "the context of a torch.autograd.Function is for attributes of its user",
    ("params.use_outside_forward", "ctx"): "the context of a torch.autograd.Function is for attributes of its user",
    ("comm.simulated", "_this_thread"): "a threading.local is for attributes of its user",
    ("shards.optimizer_steps", "kind"): "a class of optimizers of torch, whose step is wrapped",
    ("shards.optimizer_steps", "step"): "a function that torch has wrapped, and marks so",
    ("compat.fairscale.auto_wrap", "_context"): "a threading.local is for attributes of its user",
    ("compat.fairscale.auto_wrap", "default_auto_wrap_policy"): "a function whose attributes users of fairscale change",
    ("compat.fairscale.recompute", "ctx"): "the context of a torch.autograd.Function is for attributes of its user",
    ("compat.fairscale.recompute", "module"): "a module of the user, whose forward is replaced",
    ("shards.dtensors", "tensor"): "a DTensor of torch, whose part on this rank is set as torch's own fully_shard sets it",
    ("compat.fairscale.recompute", "norm"): "a batch norm of torch, which leaves its statistics alone meanwhile",
}


def foreign_writes(name: str, source: str) -> list[str]:
    """The attributes that a file sets on other objects than `self`. In `__new__` any local name may be the new object."""
    tree = ast.parse(source)
    made = {
        id(node) for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "__new__" for node in ast.walk(one)
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and id(node) not in made
        and dotted(node.value) not in ("self", "cls")
        and node.attr not in NOT_OURS
        and (name, dotted(node.value)) not in LOCALS_NOT_OURS
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_state_of_an_object_is_written_by_its_class_alone(name: str) -> None:
    assert not foreign_writes(name, path_of(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted((ROOT / "state_machine").glob("*.py")), ids=lambda path: path.stem)
def test_the_state_of_a_machine_is_written_by_its_class_alone(path: Path) -> None:
    """The explorer is left out: what it visits are records, which it stores and restores as a whole."""
    assert not foreign_writes(path.stem, path.read_text(encoding="utf-8"))


def test_a_write_to_another_object_is_found() -> None:
    source = """
class A:
    def __new__(cls):
        value = object.__new__(cls)
        value.x = 1
        return value

    def f(self, other, parameter):
        self.x, other.x, self.other.y = 1, 2, 3
        other.z += 1
        del other.w
        parameter.grad = None
"""
    assert sorted(foreign_writes("a", source)) == ["other.w", "other.x", "other.z", "self.other.y"]


def test_every_attribute_that_is_not_ours_is_written_somewhere() -> None:
    stores = [
        (name, node)
        for name in FILES
        for node in ast.walk(parse(path_of(name)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    assert {node.attr for _, node in stores} >= set(NOT_OURS)
    assert {(name, dotted(node.value)) for name, node in stores} >= set(LOCALS_NOT_OURS)


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
