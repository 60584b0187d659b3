"""The short examples: as scripts beside the wheel in one process, in two processes, and their numbers in the simulated world."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import fsdp
from tests.support.jobs import Ended, run_job
from tests.support.processes import environment, without
from tests.support.several_scripts import MARK

ROOT = Path(__file__).parents[2]
SECONDS = 240
SEVERAL = ROOT / "tests" / "support" / "several_scripts.py"
SAYS = {
    "checkpointing": "the gradients are the same, bit for bit",
    "compression": "the losses are within 0.01 of each other",
    "gan": "8 of 8 centres are hit",
    "generate": "losses and weights are the same as without generation, bit for bit",
    "hugging_face": "the same with its cache and without",
    "lora": "the base is untouched, bit for bit",
    "mixed_batches": "of the images are named rightly",
    "retry": "the weights are those of a run with enough memory",
    "step_in_backward": "the same as with a step after the backward, bit for bit; 0 gradients were left for it",
}
SCRIPTS = [ROOT / "examples" / f"{name}.py" for name in SAYS]

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """An example as a module, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def printed_by(ended: Ended) -> dict[str, str]:
    """What each script printed in one start, which ran all of them."""
    assert ended.status == 0, ended.output + ended.errors
    printed = dict(part.split("\n", 1) for part in ended.output.split(MARK)[1:])
    assert list(printed) == list(SAYS), ended.output
    return printed


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return printed_by(run_job(SEVERAL, *SCRIPTS, size=2, cwd=tmp_path_factory.mktemp("two"), seconds=SECONDS))


@pytest.fixture(scope="module")
def in_one_process(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In an interpreter that has the wheel, and no package that the library does not need."""
    folder = tmp_path_factory.mktemp("one")
    # the folder of the scripts too, as `python SCRIPT` has it: several_scripts.py stands elsewhere
    paths = [installed, without(folder, "matplotlib", "tqdm"), ROOT / "examples"]
    variables = environment(PYTHONPATH=os.pathsep.join(map(str, paths)), CUDA_VISIBLE_DEVICES="")
    program = [sys.executable, str(SEVERAL), *map(str, SCRIPTS)]
    done = subprocess.run(program, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    return printed_by(Ended(done.returncode, done.stdout, done.stderr))


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize(
    ("start", "processes"),
    [("in_one_process", "1 process"), pytest.param("in_two_processes", "2 processes", marks=pytest.mark.gloo)],
)
def test_the_script_runs(start: str, processes: str, name: str, request: pytest.FixtureRequest) -> None:
    output = request.getfixturevalue(start)[name]
    assert f"{processes} (cpu, gloo)" in output
    assert SAYS[name] in output
    assert "NOT" not in output


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


@pytest.mark.gloo
def test_a_job_that_lost_a_rank_goes_on_to_the_same_loss(tmp_path: Path) -> None:
    script = ROOT / "examples" / "resume.py"
    plain = run_job(script, tmp_path / "plain", size=2, cwd=tmp_path)
    assert plain.status == 0, plain.errors
    killed = run_job(script, tmp_path / "killed", "--kill-at", "5", size=2, cwd=tmp_path)
    assert killed.status == -signal.SIGKILL, killed.errors
    resumed = run_job(script, tmp_path / "killed", "--kill-at", "5", size=2, cwd=tmp_path)
    assert resumed.status == 0, resumed.errors
    assert plain.output.splitlines()[0] == "begins after step 0" and resumed.output.splitlines()[0] == "begins after step 4"
    assert plain.output.splitlines()[1] == resumed.output.splitlines()[1]


def test_the_script_for_slurm_is_one_that_bash_reads() -> None:
    """It was run by hand, as its page says: a machine that runs tests has no Slurm."""
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text(encoding="utf-8")
    script = page.partition('```bash title="job.sbatch"\n')[2].partition("```")[0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "srun torchrun" in script and script.index("trap ") < script.index("srun ")
