"""Accelerate's FSDP plugin, Trainer and TRL with this engine, on two processes, against one process without it."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import accelerate
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tiny_llama import LAYER, Source, make_model
from torch.utils.data import DataLoader, Subset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp
from fsdp.integrations.accelerate import PATCHES, install
from tests.integrations.forked import KILLED, alone, largest_difference, run, script_of_page

BATCH, ROWS = 8, 32
SAME = 1e-5
WEIGHTS = 1e-4  # AdamW divides by the size of the gradient, and so magnifies rounding where that is close to zero
pytestmark = pytest.mark.filterwarnings("ignore")


def rows() -> Any:
    return Subset(Source(), range(ROWS))


def accelerated(world_size: int, load: Any = None, save: Any = None, **options: Any) -> dict[str, Any]:
    """Train an epoch with the FSDP plugin. Returns losses, the norm of the last step, and the weights on rank 0."""
    plugin = None
    if world_size > 1:
        install("torch_fsdp")
        options = {"auto_wrap_policy": "transformer_based_wrap", "use_orig_params": True, **options}
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=[LAYER], **options)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), BATCH // world_size))
    if load is not None:
        accelerator.load_state(load)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
    if save is not None:
        accelerator.save_state(save)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    kind = f"{type(model).__module__} {accelerator.distributed_type}"
    return {"kind": kind, "losses": losses, "norm": float(norm), "weights": weights}


def test_the_plugin_trains_as_one_process_does() -> None:
    expected = alone(lambda rank: accelerated(1))
    first, second = run(2, lambda rank: accelerated(2))
    assert first["kind"].startswith("fsdp.") and first["kind"].endswith("FSDP")
    assert first["losses"] == pytest.approx(expected["losses"], abs=SAME)
    assert first["norm"] == second["norm"] == pytest.approx(expected["norm"], abs=SAME)
    assert largest_difference(first["weights"], expected["weights"]) < WEIGHTS
    assert second["weights"] == {}


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_plugin_loads_what_it_saved(kind: str, tmp_path: Path) -> None:
    def twice(world_size: int) -> dict[str, Any]:
        run(world_size, lambda rank: accelerated(world_size, save=str(tmp_path / f"of {world_size}"), **options(world_size)))
        return run(
            world_size, lambda rank: accelerated(world_size, load=str(tmp_path / f"of {world_size}"), **options(world_size))
        )[0]

    def options(world_size: int) -> dict[str, str]:
        return {"state_dict_type": kind} if world_size > 1 else {}

    expected, found = twice(1), twice(2)
    assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)
    assert largest_difference(found["weights"], expected["weights"]) < WEIGHTS


def test_rank_0_broadcasts_its_weights() -> None:
    expected = alone(lambda rank: accelerated(1))
    found = run(2, lambda rank: accelerated(2, sync_module_states=True))[0]
    assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)


class Dies(TrainerCallback):
    """Kills the process after the fourth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    world_size: int, out: Path, resume: bool = False, dies: bool = False, kind: str = "FULL_STATE_DICT"
) -> dict[str, Any]:
    """Train two epochs with Trainer, then save the model, evaluate and generate."""
    config = None
    if world_size > 1:
        install("torch_fsdp")
        config = {"version": 1, "transformer_layer_cls_to_wrap": [LAYER], "state_dict_type": kind}
    arguments = TrainingArguments(
        str(out),
        use_cpu=True,
        per_device_train_batch_size=BATCH // world_size,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        fsdp=True if world_size > 1 else None,
        fsdp_config=config,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=rows(), callbacks=[Dies()] if dies else None)
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-4") if resume else None)
    trainer.save_model(str(out / "model"))
    prompt = rows()[0]["input_ids"][None, :8]
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "text": trainer.model.generate(prompt, max_new_tokens=8, do_sample=False).tolist(),
        "error": trainer.evaluate(rows())["eval_loss"],
    }


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_trainer_that_was_killed_resumes_as_one_process_goes_on(kind: str, tmp_path: Path) -> None:
    expected = alone(lambda rank: trained(1, tmp_path / "one"))
    run(2, lambda rank: trained(2, tmp_path / "two", dies=True, kind=kind), exits=KILLED)
    for found in run(2, lambda rank: trained(2, tmp_path / "two", resume=True, kind=kind)):
        assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)
        assert found["text"] == expected["text"]
        assert found["error"] == pytest.approx(expected["error"], abs=SAME)
    if kind == "FULL_STATE_DICT":
        weights = LlamaForCausalLM.from_pretrained(tmp_path / "two" / "model").state_dict()
        assert largest_difference(weights, LlamaForCausalLM.from_pretrained(tmp_path / "one" / "model").state_dict()) < WEIGHTS


def without_door(rank: int, prepares_model: bool) -> list[float]:
    """A loop in which the user has sharded the model, and Accelerate prepares the rest."""
    accelerator = Accelerator()
    model = make_model()
    if accelerator.num_processes > 1:
        fsdp.fully_shard(model, auto_wrap_policy={LlamaDecoderLayer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(rows(), BATCH // accelerator.num_processes))
    if prepares_model:
        model = accelerator.prepare(model)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
    return losses


def test_accelerate_prepares_optimizer_and_data_of_a_model_that_is_sharded() -> None:
    expected = alone(lambda rank: without_door(rank, False))
    assert run(2, lambda rank: without_door(rank, False))[0] == pytest.approx(expected, abs=SAME)


def test_a_model_that_is_sharded_is_not_wrapped_once_more() -> None:
    def refused(rank: int) -> str:
        with pytest.raises(fsdp.ShardingError) as caught:
            without_door(rank, True)
        return str(caught.value)

    assert all("is sharded by fsdp" in text for text in run(2, refused))


def test_what_is_patched_is_put_back() -> None:
    def before_and_after(rank: int) -> list[bool]:
        theirs = [getattr(accelerate.state.AcceleratorState, "__init__"), accelerate.utils.load_fsdp_optimizer]  # noqa: B009
        with install("torch_fsdp"):
            inside = [accelerate.state.AcceleratorState.__init__, accelerate.utils.load_fsdp_optimizer]
        after = [accelerate.state.AcceleratorState.__init__, accelerate.utils.load_fsdp_optimizer]
        return [*(one is not other for one, other in zip(theirs, inside, strict=True)), theirs == after]

    assert alone(before_and_after) == [True, True, True]


def test_the_page_lists_every_patch() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "accelerate.md").read_text(encoding="utf-8")
    assert all(f"| `{patch.place}.{patch.name}` | {patch.replace.__doc__} |" in page for patch in PATCHES)


EXAMPLES = {
    "train_with_accelerate": "with a checkpoint in between it is the same",
    "train_with_trainer": "resumed at step 12 it is the same",
    "lora_with_trl": "the adapters on a fresh base are trained",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module(name)
    run(2, lambda rank: example.main() if name == "train_with_accelerate" else example.main(cpu=True))
    assert EXAMPLES[name] in capfd.readouterr().out


def test_the_script_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    script = script_of_page("accelerate", "accelerate_plugin.py")
    run(2, lambda rank: exec(compile(script, "accelerate_plugin.py", "exec"), {"__name__": "__main__"}))


def test_without_accelerate_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import fsdp.integrations.accelerate"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package accelerate: pip install 'fsdp[accelerate]'" in ended.stderr
