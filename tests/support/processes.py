"""How tests start programs of this repository as processes of their own.

A new interpreter needs 4 s of CPU to import torch, its compiler and fsdp. So ranks are forks of one process that has imported
them (`start_rank`; jobs.py for scripts). A test that looks at the start or at the end of an interpreter starts one by `command`.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import site
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
ROOT: Final = Path(__file__).resolve().parents[2]

START_METHOD: Final = "forkserver"
"""The method of multiprocessing that starts these forks."""
_FORK_SERVER: Final = multiprocessing.get_context(START_METHOD)
# not torch.distributed.pipelining: a test imports it after the drop-in modules
_TORCH: Final = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
_FORK_SERVER.set_forkserver_preload([*_TORCH, "fsdp", "pytest", "tests.support.models", "tests.support.ranks"])


def command(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """The environment of such a process: it imports this repository and its examples, and computes in one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def run_module(module: str, *arguments: object, seconds: float = 120, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a module in a process, and wait for its end."""
    return subprocess.run(
        command(module, *arguments), cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=seconds
    )


class Rank:
    """A rank that runs in a fork: what tests use of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the rank runs. Minus the number of the signal, where one ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it now. Does nothing to a rank that has ended."""
        self._process.kill()


def start_rank(
    module: str | Path, *arguments: object, output: Path, errors: Path | None = None, cwd: Path = ROOT, **variables: str
) -> Rank:
    """Run a module, or the script in a file, with these arguments in a fork.

    What it prints is added to the file `output`, and what it prints to stderr to the file `errors`, if there is one.
    """
    program = [str(module), *map(str, arguments)]
    given = (program, isinstance(module, Path), environment(**variables), (output, errors or output), cwd)
    process = _FORK_SERVER.Process(target=_run_program, args=given, name=" ".join(program))
    process.start()
    return Rank(process)


_namespaces: Final[list[dict[str, Any]]] = []
"""What programs leave behind, kept until their process ends.

torch's DDP waits in its destructor for a thread of gloo. It holds the GIL, and that thread may need the GIL: both wait for ever.
"""


def _run_program(program: list[str], is_script: bool, variables: dict[str, str], printed: tuple[Path, Path], cwd: Path) -> None:
    """As `python SCRIPT` runs it, or as `python -m MODULE`."""
    for stream, path in zip((sys.stdout, sys.stderr), printed, strict=True):
        with open(path, "ab") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    gc.freeze()  # a collection of garbage need not search what was imported before the fork
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    own = [str(Path(program[0]).parent)] if is_script else []
    for folder in [*own, *variables["PYTHONPATH"].split(os.pathsep)]:
        site.addsitedir(folder)  # an interpreter reads PYTHONPATH only when it starts
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch reads it only when it is imported
    sys.argv = program
    for kind in (FutureWarning, DeprecationWarning):  # as pyproject.toml says to pytest
        warnings.filterwarnings("error", category=kind, module=r"(fsdp|state_machine)\.")
    try:
        if is_script:
            _namespaces.append(runpy.run_path(program[0], run_name="__main__"))
        else:
            _namespaces.append(runpy.run_module(program[0], run_name="__main__", alter_sys=True))
    finally:
        atexit._run_exitfuncs()  # as at the end of an interpreter; the end of a fork leaves them out


def beside_each_other(starts: Mapping[str, Callable[[], T]], at_once: int = 3) -> dict[str, Future[T]]:
    """Call functions that start processes and wait for them. Return what each has returned or raised, by name."""
    with ThreadPoolExecutor(at_once) as pool:
        return {name: pool.submit(start) for name, start in starts.items()}


def end_all(ranks: Iterable[Rank]) -> None:
    """End those that still run."""
    for one in ranks:
        one.kill()
        one.wait()


def results_of(
    program: str | Callable[[int, int, Path], Any],
    size: int,
    folder: Path,
    *names: str,
    seconds: float = 120,
    may_fail: int = 0,
    stops: bool = False,
) -> list[Any]:
    """Run a program as `size` ranks. Return what each of them saved as `folder / "RANK.pt"`.

    It is a module (arguments: rank, size, folder, names), or a function of another one, for `be_a_rank`.

    may_fail: so many of the last ranks may fail, and save nothing: {}. stops: the last one stops, and does not end
    """
    given = [program] if isinstance(program, str) else ["tests.support.a_rank", program.__module__, program.__name__]
    ranks = [start_rank(*given, rank, size, folder, *names, output=folder / f"{rank}.txt") for rank in range(size)]
    try:
        codes = [one.wait(timeout=seconds) for one in (ranks[:-1] if stops else ranks)]
    finally:
        end_all(ranks)
    printed = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(size))
    assert not any(codes[: size - may_fail]), printed
    assert "terminate called" not in printed
    saved = [folder / f"{rank}.pt" for rank in range(size)]
    return [{} if may_fail and not one.exists() else torch.load(one, weights_only=False) for one in saved]


def be_a_rank(run: Callable[[int, int, Path], Any]) -> None:
    """Be one of the ranks that `results_of` starts: `run(rank, size, folder)` over gloo. What it returns is saved."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(run(rank, size, folder), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def rank_0_of(size: int) -> Iterator[None]:
    """This process is rank 0 of a group whose others do not exist: nothing is sent, so only shapes and sizes mean anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def be_alone(measure: Callable[[], Any]) -> None:
    """Be the one process that `results_of` starts, without a group. What `measure` returns is saved."""
    torch.set_num_threads(1)
    torch.save(measure(), Path(sys.argv[3]) / f"{sys.argv[1]}.pt")


def without(folder: Path, *packages: str) -> Path:
    """Make `folder`, to be named in PYTHONPATH, such that these packages are not installed."""
    folder.mkdir(exist_ok=True)
    for name in packages:
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (folder / f"{name}.py").write_text(missing, encoding="utf-8")
    return folder
