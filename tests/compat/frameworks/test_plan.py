"""The command `plan` reads the config.json of a model of transformers."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from fsdp.commands.main import main

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    architectures=["LlamaForCausalLM"],
    tie_word_embeddings=False,
)
GPT2 = GPT2Config(vocab_size=512, n_embd=128, n_layer=3, n_head=4, architectures=["GPT2LMHeadModel"])
COMMAND = ("--world-size", "4", "--length", "64", "--strategies", "FULL_SHARD", "--device", "a100-40")


def written(folder: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["Llama", "GPT-2"])
def test_a_config_is_a_target(config: PretrainedConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(written(tmp_path, config)), *COMMAND, "--json", str(out)]) == 0
    plan = json.loads(out.read_text())
    best = plan["candidates"][0]
    assert best["fits"] and best["collectives"] >= 3 and best["seconds"] > 0
    assert "Recommended: FULL_SHARD" in capsys.readouterr().out


def test_the_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    path = str(written(tmp_path, LLAMA))
    assert main(["plan", path, *COMMAND, "--json", str(out), "--units", "LlamaDecoderLayer", "auto"]) == 0
    plan = json.loads(out.read_text())
    assert plan["parameters"] == sum(p.numel() for p in LlamaForCausalLM(LLAMA).parameters())
    by_layer = next(one for one in plan["candidates"] if one["units"] == "LlamaDecoderLayer" and not one["checkpointing"])
    assert by_layer["unit_count"] == 1 + LLAMA.num_hidden_layers


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json: not JSON"),
        ("[]", "has no 'model_type'"),
        ("{}", "has no 'model_type'"),
        ('{"model_type": "of nobody"}', "transformers makes no language model of it"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers makes no language model of it"),
    ],
)
def test_a_config_that_is_none_is_named(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["plan", str(path), *COMMAND]) == 1
    told = capsys.readouterr().err
    assert said in told and told.startswith("fsdp: ") and told.count("\n") == 1
