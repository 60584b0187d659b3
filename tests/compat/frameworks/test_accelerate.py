"""Accelerate's FSDP plugin, Trainer and TRL with this engine, on two processes, against one process without it."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import accelerate
import peft
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import load_fsdp_model, save_fsdp_model
from peft.utils.other import fsdp_auto_wrap_policy
from tiny_llama import LAYER, Source, make_model
from torch.utils.data import DataLoader, Subset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp
from fsdp.compat.frameworks.accelerate import PLUGIN_FIELDS, _check_fields
from fsdp.integrations.accelerate import PATCHES, install
from tests.compat.frameworks.forked import KILLED, alone, largest_difference, run, script_of_page
from tests.compat.frameworks.launched import engine_of

BATCH, ROWS = 8, 32
SAME = 1e-5
DOORS = {1: "torch_fsdp", 2: "fully_shard"}
"""By version of the plugin."""
ROOT = Path(__file__).parents[3]
KINDS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
WEIGHTS = 1e-4  # AdamW divides by the size of the gradient, and so magnifies rounding where that is close to zero
pytestmark = pytest.mark.filterwarnings("ignore")


def rows() -> Any:
    return Subset(Source(), range(ROWS))


def plugin_of(version: int, **options: Any) -> FullyShardedDataParallelPlugin:
    by_layer = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [LAYER]}
    original = {"use_orig_params": True} if version == 1 else {}
    return FullyShardedDataParallelPlugin(fsdp_version=version, **{**by_layer, **original, **options})


def accelerated(
    world_size: int, version: int = 1, load: Any = None, save: Any = None, seed: int = 0, accumulates: int = 1, **options: Any
) -> dict[str, Any]:
    """Train an epoch with the FSDP plugin. Returns losses, the norm of the last step, and the weights on rank 0."""
    precision = options.pop("mixed_precision", "no")
    if world_size > 1:
        install(DOORS[version])
    accelerator = Accelerator(
        fsdp_plugin=plugin_of(version, **options) if world_size > 1 else None,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulates,
    )
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), BATCH // world_size))
    if load is not None:
        accelerator.load_state(load)
    losses, norm = [], torch.zeros(())
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
    if save is not None:
        accelerator.save_state(save)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {
        "kind": f"{engine_of(model)} {accelerator.distributed_type}",
        "losses": losses,
        "norm": float(norm),
        "weights": weights,
    }


ENGINES = {1: "fsdp.compat.fsdp1", 2: "fsdp.compat.fsdp2"}


@pytest.mark.parametrize("version", DOORS)
@pytest.mark.parametrize("accumulates", [1, 2])
def test_the_plugin_trains_as_one_process_does(version: int, accumulates: int) -> None:
    expected = alone(lambda rank: accelerated(1, accumulates=accumulates))
    first, second = run(2, lambda rank: accelerated(2, version, accumulates=accumulates))
    assert first["kind"] == f"{ENGINES[version]} DistributedType.FSDP"
    assert first["losses"] == pytest.approx(expected["losses"], abs=SAME)
    assert first["norm"] == second["norm"] == pytest.approx(expected["norm"], abs=SAME)
    assert largest_difference(first["weights"], expected["weights"]) < WEIGHTS
    assert second["weights"] == {}


OPTIONS: dict[str, dict[str, Any]] = {
    "kept after the forward": {"reshard_after_forward": False},
    "activation checkpointing": {"activation_checkpointing": True},
    "no layers by themselves": {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_version_2_change_no_number(name: str) -> None:
    expected = alone(lambda rank: accelerated(1))
    found = run(2, lambda rank: accelerated(2, 2, **OPTIONS[name]))[0]
    assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)


@pytest.mark.parametrize("version", DOORS)
def test_the_plugin_trains_in_mixed_precision(version: int) -> None:
    expected = alone(lambda rank: accelerated(1))
    found = run(2, lambda rank: accelerated(2, version, mixed_precision="bf16"))[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-2)
    assert found["losses"] != pytest.approx(expected["losses"], abs=SAME)
    assert {value.dtype for value in found["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("version", DOORS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_loads_what_it_saved(kind: str, version: int, tmp_path: Path) -> None:
    def twice(world_size: int) -> dict[str, Any]:
        folder = str(tmp_path / f"of {world_size}")
        options = {"state_dict_type": kind} if world_size > 1 else {}
        run(world_size, lambda rank: accelerated(world_size, version, save=folder, **options))
        return run(world_size, lambda rank: accelerated(world_size, version, load=folder, seed=1, **options))[0]

    expected, found = twice(1), twice(2)
    assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)
    assert largest_difference(found["weights"], expected["weights"]) < WEIGHTS


WRAPPED: dict[str, dict[str, Any]] = {
    "whole": {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None},
    "by layer": {},
}


def with_adapters(**more: Any) -> Any:
    return peft.get_peft_model(make_model(0), peft.LoraConfig(r=2, target_modules=".*[qv]_proj", init_lora_weights=False, **more))


def adapted(kind: str, wrapped: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """The adapters of a peft model before they were saved, after they were changed and loaded, and the names left over."""
    install("torch_fsdp")
    plugin = plugin_of(1, state_dict_type=kind, **WRAPPED[wrapped])
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = accelerator.prepare(with_adapters())
    before = {name: fsdp.full_tensor(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_fsdp_model(plugin, accelerator, model, str(folder), adapter_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 if parameter.requires_grad else 0.0)
    result = load_fsdp_model(plugin, accelerator, model, str(folder), adapter_only=True)
    after = {name: fsdp.full_tensor(p).detach() for name, p in model.named_parameters() if p.requires_grad}
    return before, after, [*result.unexpected_keys, *(name for name in result.missing_keys if "lora" in name)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_adapters_alone_are_saved_and_loaded(kind: str, wrapped: str, tmp_path: Path) -> None:
    for before, after, left_over in run(2, lambda rank: adapted(kind, wrapped, tmp_path)):
        assert before and not left_over
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("version", DOORS)
def test_adapters_that_peft_has_saved_are_those_that_were_trained(version: int, tmp_path: Path) -> None:
    def saved(rank: int) -> dict[str, torch.Tensor]:
        install(DOORS[version])
        model = with_adapters(modules_to_save=["lm_head"])
        accelerator = Accelerator(fsdp_plugin=plugin_of(version, auto_wrap_policy=fsdp_auto_wrap_policy(model)))  # as a Trainer
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        state = accelerator.get_state_dict(model)
        if rank == 0:
            accelerator.unwrap_model(model).save_pretrained(str(tmp_path), state_dict=state)
        return {name: value for name, value in state.items() if ".lora_" in name or "modules_to_save" in name}

    state = run(2, saved)[0]
    assert len(state) == 9
    loaded = peft.PeftModel.from_pretrained(make_model(0), str(tmp_path)).state_dict()
    torch.testing.assert_close({name: loaded[name] for name in state}, state, rtol=0, atol=0)


def test_a_later_version_of_the_plugin_is_refused_by_name() -> None:
    with install(), pytest.raises(fsdp.ShardingError, match="fsdp_version=3: this version of fsdp does not know it"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=3))


BROADCASTS = {1: {"sync_module_states": True}, 2: {"cpu_ram_efficient_loading": True}}


@pytest.mark.parametrize("version", DOORS)
def test_rank_0_broadcasts_its_weights(version: int) -> None:
    expected = alone(lambda rank: accelerated(1))
    found = run(2, lambda rank: accelerated(2, version, seed=rank, **BROADCASTS[version]))[0]
    assert found["losses"] == pytest.approx(expected["losses"], abs=SAME)


def test_without_its_door_a_version_of_the_plugin_is_refused() -> None:
    def refused(rank: int, version: int) -> str:
        install(DOORS[3 - version])
        with pytest.raises(fsdp.ShardingError) as caught:
            Accelerator(fsdp_plugin=plugin_of(version))
        return str(caught.value)

    for version in DOORS:
        for text in run(2, lambda rank: refused(rank, version)):  # noqa: B023
            assert f'fsdp_version={version} needs the door "{DOORS[version]}"' in text


def launched(version: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `launched.py` in two processes by `accelerate launch`, with the options of the plugin on the command line."""
    options = "--num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no --dynamo_backend no --use_fsdp "
    options += f"--fsdp_version {version} --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    options += f"--fsdp_transformer_layer_cls_to_wrap {LAYER} --fsdp_state_dict_type SHARDED_STATE_DICT"
    program = str(Path(__file__).with_name("launched.py"))
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options.split(), program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "examples"))), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def losses_in(ended: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize("version", DOORS)
def test_a_job_of_accelerate_launch_is_killed_and_resumes_as_one_process_goes_on(version: int, tmp_path: Path) -> None:
    expected = alone(lambda rank: accelerated(1))["losses"]
    killed = launched(version, str(tmp_path), "dies")
    assert killed.returncode != 0 and losses_in(killed) == pytest.approx(expected[:3], abs=SAME), killed.stderr
    resumed = launched(version, str(tmp_path), "resumes")
    assert resumed.returncode == 0, resumed.stderr
    assert losses_in(resumed) == pytest.approx(expected[2:], abs=SAME)
    assert f"{ENGINES[version]} DistributedType.FSDP" in resumed.stdout


class Dies(TrainerCallback):
    """Kills the process after the fourth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(
    world_size: int, out: Path, resume: bool = False, dies: bool = False, kind: str = KINDS[0], version: int = 1
) -> dict[str, Any]:
    """Train two epochs with Trainer, then save the model, evaluate and generate."""
    config = None
    if world_size > 1:
        install(DOORS[version])
        config = {"version": version, "transformer_layer_cls_to_wrap": [LAYER], "state_dict_type": kind}
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


@pytest.mark.parametrize("version", DOORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_that_was_killed_resumes_as_one_process_goes_on(kind: str, version: int, tmp_path: Path) -> None:
    expected = alone(lambda rank: trained(1, tmp_path / "one"))
    run(2, lambda rank: trained(2, tmp_path / "two", dies=True, kind=kind, version=version), exits=KILLED)
    for found in run(2, lambda rank: trained(2, tmp_path / "two", resume=True, kind=kind, version=version)):
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
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "accelerate.md").read_text(encoding="utf-8")
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


def test_the_fields_of_the_plugin_are_known() -> None:
    assert {one.name for one in dataclasses.fields(FullyShardedDataParallelPlugin)} == {*PLUGIN_FIELDS}


@pytest.mark.parametrize("version", [1, 2])
def test_a_field_that_a_later_plugin_has_is_refused_by_name(version: int) -> None:
    later = dataclasses.make_dataclass("Later", [("later", int, 0)], bases=(FullyShardedDataParallelPlugin,))
    with install(), pytest.raises(fsdp.ShardingError, match="Later: later=3: this version of fsdp does not know it"):
        Accelerator(fsdp_plugin=later(fsdp_version=version, later=3))
    _check_fields(later(fsdp_version=version))
