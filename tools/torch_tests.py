"""Runs torch's own tests of FSDP1, FSDP2, DDP and of their composition with other dimensions, unmodified, on the host, with
torch's classes or with the drop-in modules.

python -m tools.torch_tests FOLDER torch               FOLDER: a source tree of torch, of which test/distributed is needed
python -m tools.torch_tests FOLDER fsdp test_wrap.py   some files, with the drop-in modules instead

It needs pytest, expecttest and parameterized. Each file is a run of pytest with this module as a plugin: names of CUDA mean the
host, NCCL means gloo, ranks are forked, and torch's FSDP1 takes the host for its device. The outcomes are written to
runs/torch_tests.torch.json or runs/torch_tests.fsdp.json.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parents[1]
NEEDED: Final = ("expecttest", "parameterized")
"""Packages that torch's tests import, and the project does not need."""
NOT_COLLECTED: Final = 2
"""The exit status of pytest where a file cannot be imported: it wants a name that the installed torch has no more."""
NO_TESTS: Final = 5
"""The exit status of pytest where a file has none."""
FSDP2_FOLDER: Final = Path("_composable") / "fsdp"
DDP_FILE: Final = "test_c10d_gloo.py"
DDP_TESTS: Final = "DistributedDataParallelTest"
COMPOSITION: Final = (
    *("_composable/test_composability/test_2d_composability.py", "_composable/test_composability/test_pp_composability.py"),
    *("fsdp/test_fsdp_tp_integration.py", "fsdp/test_hsdp_dtensor_state_dict.py"),
    *(f"checkpoint/test_{name}.py" for name in ("fsdp_model_state", "fsdp_optim_state", "fsdp_tp_checkpoint_conversion")),
    *("checkpoint/test_hsdp_checkpoint.py", "checkpoint/test_state_dict.py", "checkpoint/fsdp/test_fsdp_dsd.py"),
    *(f"checkpoint/e2e/test_{name}.py" for name in ("e2e_save_and_load", "fine_tuning", "fsdp_ep", "pipeline")),
)
"""Files of several dimensions and of torch's checkpoints. They use both engines, and four ranks, or eight."""
PROCESSES: Final = 8
"""A test of more ranks is left out."""
SECONDS: Final = 60
"""A test that takes longer is one that hangs."""
_HOST: Final = torch.device("cpu")
_MAKERS: Final = (
    *("rand", "randn", "randint", "zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "eye"),
    *("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "empty_strided"),
)
"""torch's functions with an argument `device`."""
_BEFORE: Final = (
    *("torch._dynamo", "torch.onnx", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed._shard.sharded_tensor"),
    "torch.testing._internal.distributed.multi_threaded_pg",
)
"""Modules that must see the real torch.device when they are imported."""


def main(arguments: list[str]) -> None:
    """Run the files one after the other, and print how many tests pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the root of a source tree of torch")
    parser.add_argument("engine", choices=("torch", "fsdp"), help="whose classes are tested")
    parser.add_argument("files", nargs="*", help="names of files; all of them without any")
    given = parser.parse_args(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        parser.error(f"install {' and '.join(missing)}, which torch's tests import.")
    tests = given.folder / "test" / "distributed"
    folders = (tests / "fsdp", tests / FSDP2_FOLDER)
    files = [*(file for folder in folders for file in sorted(folder.glob("test_*.py"))), tests / DDP_FILE]
    files = [*dict.fromkeys([*files, *map(tests.joinpath, COMPOSITION)])]
    files = [file for file in files if not given.files or file.name in given.files]
    results = ROOT / "runs" / f"torch_tests.{given.engine}.json"
    results.parent.mkdir(exist_ok=True)
    found: dict[str, str] = json.loads(results.read_text(encoding="utf-8")) if given.files and results.exists() else {}
    for file in files:
        outcomes, name = _run(file, given.engine), _name_of(file)
        found = {test: one for test, one in found.items() if not test.startswith(f"{name}::")} | outcomes
        results.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{name}: {[*outcomes.values()].count('passed')} of {len(outcomes)}", flush=True)
    print(f"{[*found.values()].count('passed')} of {len(found)} pass; see {results}")
    theirs = results.with_name("torch_tests.torch.json")
    if given.engine == "fsdp" and theirs.exists():
        _compare(found, json.loads(theirs.read_text(encoding="utf-8")))


def _compare(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Print how many of the tests that pass with torch's classes pass with ours, and the names of the others."""
    wanted = [name for name, outcome in theirs.items() if outcome == "passed" and name in ours]
    failed = [name for name in wanted if ours[name] != "passed"]
    print(f"{len(wanted) - len(failed)} of the {len(wanted)} that pass with torch", *failed, sep="\n    ")


def _run(file: Path, engine: str) -> dict[str, str]:
    """The outcome of each test of a file."""
    events = ROOT / "runs" / f"torch_tests.{engine}.events"
    events.write_text("", encoding="utf-8")
    paths = [str(ROOT), str(file.parent), str(file.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **{"FSDP_PEER_DOORS": doors_of(file), "FSDP_PEER_DEVICES": str(_devices_of(file)), "FSDP_PEER_ENGINE": engine},
        **{"FSDP_PEER_EVENTS": str(events), "FSDP_PEER_FILE": _name_of(file), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        **{"PYTHONPATH": os.pathsep.join(paths), "BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": str(events.parent)},
    }
    plugins = ("tools.torch_tests", "no:cacheprovider", "no:xdist")
    options = [f"-p{name}" for name in plugins] + ["-q", "-c", os.devnull, "--rootdir", str(file.parent)]
    pick = ["-k", DDP_TESTS] if file.name == DDP_FILE else []
    command = [sys.executable, "-m", "pytest", *options, *pick, str(file)]
    done = subprocess.run(command, env=environment, cwd=file.parent, check=False)
    lines = events.read_text(encoding="utf-8").splitlines()
    events.unlink()
    if done.returncode not in (0, 1, NOT_COLLECTED, NO_TESTS) or (done.returncode == 1 and not lines):
        raise SystemExit(f"{file.name}: pytest ended with {done.returncode}; its text says why.")
    return outcomes_of(lines)


def _name_of(file: Path) -> str:
    """The name of a file in the results: its own, and that of its folder, because two files have one name."""
    return f"{file.parent.name}/{file.name}"


def doors_of(file: Path) -> str:
    """The drop-in modules that a file is run with. Tests of FSDP1 compare with torch's DDP."""
    if any(file.match(one) for one in COMPOSITION):
        return "torch_fsdp fully_shard"
    return "ddp" if file.name == DDP_FILE else "fully_shard" if file.match(f"{FSDP2_FOLDER}/*") else "torch_fsdp"


def _devices_of(file: Path) -> int:
    """How many devices there seem to be. Most tests take as many ranks."""
    return 2 if " " not in doors_of(file) else 8 if file.name == "test_fsdp_ep.py" else 4


def outcomes_of(lines: list[str]) -> dict[str, str]:
    """The outcome of each test, from lines of its name and an outcome. A test that failed anywhere has failed."""
    outcomes: dict[str, str] = {}
    for line in lines:
        name, outcome = json.loads(line)
        if outcomes.get(name) != "failed":
            outcomes[name] = outcome
    return outcomes


# the plugin -------------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """Let the host stand in for a device, and the drop-in modules for torch's classes."""
    torch.set_num_threads(1)
    for name in _BEFORE:
        import_module(name)
    if os.environ["FSDP_PEER_ENGINE"] == "fsdp":
        import fsdp.compat

        fsdp.compat.install(*os.environ["FSDP_PEER_DOORS"].split())
    else:
        _give_fsdp1_the_host()
    _give_names_of_cuda_the_host()
    _give_tests_the_host()
    if "fully_shard" in os.environ["FSDP_PEER_DOORS"]:
        _give_fsdp2s_tests_the_host()


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test down."""
    if report.when == "call" or report.outcome != "passed":
        name = f"{os.environ['FSDP_PEER_FILE']}::{report.nodeid.partition('::')[2]}"
        with open(os.environ["FSDP_PEER_EVENTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps([name, report.outcome]) + "\n")


class _Event:
    """An event that is over."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 1.0


def _give_fsdp1_the_host() -> None:
    from torch.distributed.fsdp import _init_utils, fully_sharded_data_parallel
    from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

    def handle(state: Any, *_: Any) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(_HOST)
        return state

    for module in (_init_utils, fully_sharded_data_parallel):
        setattr(module, "_init_device_handle", handle)  # noqa: B010  # mypy knows that a function is assigned
    host: Any = torch.cpu
    host.Event = getattr(host, "Event", _Event)
    host.Stream.record_event = getattr(host.Stream, "record_event", lambda self, event=None: event or _Event())


def _is_cuda(device: Any) -> bool:
    """Whether an argument means a device of CUDA. A number does."""
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


class _DeviceType(type):
    """Makes `torch.device("cuda")` the host, and devices instances of the class that stands in for torch.device."""

    _real: Final = torch.device

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, cls._real)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        first = arguments[0] if arguments else named.get("type", named.get("device"))
        return _HOST if _is_cuda(first) else cls._real(*arguments, **named)


def _give_names_of_cuda_the_host() -> None:
    place: Any = torch
    # `with torch.device("meta")` knows functions by what they are
    torch.utils._device._device_constructors()
    place.device = _DeviceType("device", (), {"__module__": "torch"})
    for name in _MAKERS:
        setattr(torch, name, _on_the_host(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        setattr(kind, "to", _to_the_host(kind.to))  # noqa: B010  # mypy knows that a method is assigned
        setattr(kind, "cuda", lambda self, *_, **__: self)  # noqa: B010
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name, value in {
        "current_device": lambda: _HOST,
        "device_count": lambda: int(os.environ["FSDP_PEER_DEVICES"]),
        # one function for each name: torch.compile has a rule for each
        **{name: lambda *_: None for name in ("set_device", "manual_seed", "manual_seed_all", "synchronize", "_sleep")},
        "memory_allocated": lambda *_: 0,
    }.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.device_count = lambda: 8
    _replace(
        torch.amp.autocast_mode.autocast,
        "__init__",
        lambda init: lambda self, device_type, *a, **k: init(self, "cpu" if device_type == "cuda" else device_type, *a, **k),
    )


def _on_the_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return make(*arguments, **(named | {"device": _HOST} if _is_cuda(named.get("device")) else named))

    return wrapped


def _to_the_host(to: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        if arguments and _is_cuda(arguments[0]):
            arguments = (_HOST, *arguments[1:])
        return to(self, *arguments, **(named | {"device": _HOST} if _is_cuda(named.get("device")) else named))

    return wrapped


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _give_tests_the_host() -> None:
    """What torch's tests use besides: their helpers, process groups and meshes."""
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal import common_device_type, common_distributed, common_fsdp

    common: Any = common_distributed
    fsdp_tests: Any = common_fsdp
    fsdp_tests.DEVICE_COUNT, fsdp_tests.DEVICE_TYPE = torch.cuda.device_count(), "cpu"
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_nccl_version"):
        setattr(common, name, lambda *_, **__: lambda test: test)
    common.get_timeout = lambda _: float(SECONDS)
    forked = torch.multiprocessing.get_context("fork")
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(forked.Process)
    torch.multiprocessing.set_start_method = lambda *_, **__: None
    limit = datetime.timedelta(seconds=SECONDS - 10)

    def begins(init: Any) -> Any:
        def init_process_group(backend: Any = None, init_method: Any = None, timeout: Any = None, *a: Any, **k: Any) -> Any:
            k.pop("device_id", None)
            return init("gloo" if "nccl" in str(backend) else backend, init_method, timeout or limit, *a, **k)

        return init_process_group

    def makes(new: Any) -> Any:
        return lambda ranks=None, timeout=None, backend=None, *a, **k: new(
            ranks, timeout or limit, "gloo" if backend == "nccl" else backend, *a, **k
        )

    for owner, name, wrap in ((c10d, "init_process_group", begins), (c10d, "new_group", makes)):
        _replace(owner, name, wrap)
        setattr(dist, name, getattr(owner, name))
    _replace(
        meshes,
        "init_device_mesh",
        lambda init: lambda device_type, *a, **k: init("cpu" if _is_cuda(device_type) else device_type, *a, **k),
    )
    setattr(dist, "init_device_mesh", meshes.init_device_mesh)  # noqa: B010
    _replace(
        meshes.DeviceMesh,
        "__init__",
        lambda init: lambda self, device_type, *a, **k: init(self, "cpu" if _is_cuda(device_type) else device_type, *a, **k),
    )
    ddp = torch.nn.parallel.DistributedDataParallel
    _replace(
        ddp,
        "__init__",
        lambda init: lambda self, module, device_ids=None, output_device=None, *a, **k: init(self, module, None, None, *a, **k),
    )
    base = import_module("torch.testing._internal.distributed._tensor.common_dtensor").DTensorTestBase
    _replace(base, "init_pg", lambda init: lambda self, *_, **__: init(self, False, "gloo"))
    made: Any = common_device_type.instantiate_device_type_tests
    common_device_type.instantiate_device_type_tests = lambda cls, scope, **_: made(cls, scope, only_for="cpu")


def _give_fsdp2s_tests_the_host() -> None:
    """What the tests of FSDP2 use besides. Ranks that are threads of a pretend group become processes."""
    from torch.testing._internal import common_cuda, common_fsdp

    fsdp_tests: Any = common_fsdp
    for name in ("TEST_CUDA", "TEST_MULTIGPU"):
        setattr(common_cuda, name, True)

    class Processes(fsdp_tests.FSDPTest):
        def setUp(self) -> None:
            if self.world_size > PROCESSES:
                self.skipTest(f"{self.world_size} ranks")
            super().setUp()

        def perThreadSetUp(self) -> None: ...

    fsdp_tests.FSDPTestMultiThread = Processes
    # its name in torch 2.6
    fsdp_tests.test_compiled_fsdp = fsdp_tests.compiled_fsdp_test
    place: Any = torch
    place.Event = place.cuda.Event = _Event
    place.cuda.current_stream = place.accelerator.current_stream = torch.cpu.current_stream
    place.cpu.Stream.record_event = lambda self, event=None: event or _Event()
    place.accelerator.current_device_index = lambda: 0


if __name__ == "__main__":
    main(sys.argv[1:])
