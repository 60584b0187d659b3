"""The short examples: as scripts beside the wheel, in one process and in two, and their numbers in the simulated world."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.processes import without
from tests.support.several_scripts import MARK

ROOT = Path(__file__).parents[2]
SECONDS = 240
SAYS = {
    "checkpointing": "the gradients are the same, bit for bit",
    "compression": "the losses are within 0.01 of each other",
    "gan": "8 of 8 centres are hit",
    "generate": "losses and weights are the same as without generation, bit for bit",
    "hugging_face": "the same with its cache and without",
    "lora": "the base is untouched, bit for bit",
    "mixed_batches": "of the images are named rightly",
    "retry": "the weights are those of a run with enough memory",
    "step_in_backward": "losses and weights are the same as with a step after the backward, bit for bit",
}

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """An example as a module, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def run_all(starter: list[str], folder: Path, installed: Path) -> dict[str, str]:
    """What each script printed in the processes of one start, which run all of them."""
    scripts = [str(ROOT / "tests" / "support" / "several_scripts.py"), *(script(name) for name in SAYS)]
    with started([*starter, *scripts], folder, installed) as process:
        output = finish(process)
    assert process.returncode == 0, output
    printed = dict(part.split("\n", 1) for part in output.split(MARK)[1:])
    assert list(printed) == list(SAYS), output
    return printed


@pytest.fixture(scope="module")
def in_two_processes(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return run_all(starter, tmp_path_factory.mktemp("two"), installed)


@pytest.fixture(scope="module")
def in_one_process(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_all([], tmp_path_factory.mktemp("one"), installed)


@pytest.mark.gloo
@pytest.mark.parametrize("name", SAYS)
def test_the_script_runs_in_two_processes(name: str, in_two_processes: dict[str, str]) -> None:
    output = in_two_processes[name]
    assert "2 processes (cpu, gloo)" in output
    assert SAYS[name] in output
    assert "NOT" not in output


@pytest.mark.parametrize("name", SAYS)
def test_the_script_runs_in_one_process(name: str, in_one_process: dict[str, str]) -> None:
    output = in_one_process[name]
    assert "1 process (cpu, gloo)" in output
    assert SAYS[name] in output
    assert "NOT" not in output


def script(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


def test_checkpointing_keeps_a_fraction_of_the_activations_and_the_same_gradients(load: Load) -> None:
    for result in fsdp.simulate(2, load("checkpointing").run):
        assert result.same_gradients
        assert any(gradient.any() for gradient in result.plain.gradients)
        assert result.checkpointed.activation_bytes < result.plain.activation_bytes / 10
        assert result.checkpointed.engine_peak_bytes <= result.plain.engine_peak_bytes * 1.1


def test_a_batch_that_does_not_fit_is_taken_in_parts(load: Load) -> None:
    retry = load("retry")
    short, ample = fsdp.simulate(2, retry.train), fsdp.simulate(2, lambda rank: retry.train(rank, limit=float("inf")))
    for one, other in zip(short, ample, strict=True):
        assert one.parts == [2, 1, 1] * 2 and other.parts == [1] * 6
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one.weights, other.weights, strict=True))


def test_the_generator_learns_every_centre(load: Load) -> None:
    first, second = fsdp.simulate(2, load("gan").train)
    assert first == second
    assert first.distance < first.distance_before / 4
    assert first.centres_hit == 8


def test_the_gradient_penalty_moves_the_weights_as_it_does_in_one_process(load: Load) -> None:
    gan = load("gan")
    torch.manual_seed(0)
    points = [[torch.randn(6, 2), torch.randn(6, 2), torch.rand(6, 1)] for _ in range(2)]

    def updated(rank: int | None) -> dict[str, Tensor]:
        torch.manual_seed(1)
        critic = gan.make_perceptron(2, 1)
        if rank is not None:
            fsdp.fully_shard(critic, auto_wrap_policy={nn.Linear})
        mine = points if rank is None else [points[rank]]
        torch.stack([gan.gradient_penalty(critic, *some) for some in mine]).mean().backward()
        torch.optim.SGD(critic.parameters(), lr=1.0).step()
        return critic.state_dict() if rank is None else fsdp.full_state_dict(critic, rank0_only=False)

    expected = updated(None)
    for weights in fsdp.simulate(2, updated):
        torch.testing.assert_close(weights, dict(expected), rtol=1e-5, atol=1e-6)


def test_adapters_learn_on_a_base_that_stays_as_it_is(load: Load) -> None:
    lora = load("lora")
    for result in fsdp.simulate(2, lora.train):
        assert result.loss < 0.65 * result.loss_before
        assert result.loss_reloaded == pytest.approx(result.loss, rel=1e-3)
        assert result.base_untouched
        assert result.held_bytes < 0.55 * result.model_bytes
        assert len(result.adapters) == 2 * (2 * 4 + 1), "two for each linear layer of two blocks, and for the head"
        assert {value.dtype for value in result.adapters.values()} == {torch.float32}


def test_the_look_alike_learns_its_source_by_heart(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    example = load("hugging_face")
    for result in fsdp.simulate(2, example.train):
        assert result.model == "LookAlike"
        assert result.losses[-1] < result.losses[0] / 10
        assert result.text == Path(example.__file__).read_bytes()[: example.LENGTH]
        assert result.text_without_cache == result.text


def test_generation_leaves_training_as_it_was(load: Load) -> None:
    example = load("generate")
    first, second = fsdp.simulate(2, example.run)
    assert first.same
    assert second.same
    assert first.speaking.said == second.speaking.said
    assert first.speaking.said[0] != example.TEXT
    assert first.speaking.said[-1] == example.TEXT
    assert first.silent.losses != second.silent.losses, "each rank has its own dropout"


def test_a_step_in_the_backward_is_the_step_after_it(load: Load) -> None:
    example = load("step_in_backward")
    after, inside = (
        fsdp.simulate(2, lambda rank, where=where: example.train(rank, in_backward=where)) for where in (False, True)
    )
    for one, other in zip(after, inside, strict=True):
        assert example.same(one, other)
        assert one.gradients_left > 0
        assert other.gradients_left == 0


@contextmanager
def started(arguments: list[str], folder: Path, installed: Path) -> Iterator[subprocess.Popen[str]]:
    """Scripts running in `folder`, without packages that the library does not need; ended at the end, workers included."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["OMP_NUM_THREADS"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # the folder of the scripts too, as `python SCRIPT` has it: several_scripts.py stands elsewhere
    paths = [installed, without(folder, "matplotlib", "tqdm"), ROOT / "examples"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            end(process)


def finish(process: subprocess.Popen[str]) -> str:
    """Everything a process printed, when it is done, within SECONDS."""
    try:
        return process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done after {SECONDS} s:\n{end(process)}")


def end(process: subprocess.Popen[str]) -> str:
    """End a process that may still run; what it printed."""
    if process.poll() is not None:
        return ""
    process.send_signal(signal.SIGTERM)  # torchrun ends its workers, which a SIGKILL would leave behind
    try:
        return process.communicate(timeout=40)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
