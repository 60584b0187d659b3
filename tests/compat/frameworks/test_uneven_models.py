"""Models of transformers whose ranks go different ways train like a single process that averages over the ranks."""

import os
from collections.abc import Callable
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import fsdp
from tests.compat.frameworks.forked import run

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 4
WORDS = 24
IMAGE = WORDS - 1
"""The word that stands for one part of an image."""
STILL: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def words(rank: int, length: int = 8) -> Tensor:
    return torch.randint(4, IMAGE, (2, length), generator=torch.Generator().manual_seed(rank))


def opt() -> nn.Module:
    config = OPTConfig(
        **STILL, vocab_size=WORDS, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=4, ffn_dim=32, num_attention_heads=2,
        max_position_embeddings=16, layerdrop=0.4, pad_token_id=1, bos_token_id=2, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return OPTForCausalLM(config)


def m2m_100() -> nn.Module:
    config = M2M100Config(
        **STILL, vocab_size=WORDS, d_model=16, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_layerdrop=0.4, decoder_layerdrop=0.4,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    config = Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(8, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.4,
        mask_time_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, feat_extract_norm="layer",
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


def llava() -> nn.Module:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE))


def text_alone(step: int, rank: int) -> dict[str, Tensor]:
    ids = words(10 * step + rank)
    return {"input_ids": ids, "labels": ids}


def sound(step: int, rank: int) -> dict[str, Tensor]:
    wave = torch.randn(2, 160, generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_values": wave.double(), "labels": words(10 * step + rank, 3)}


def picture_on_some_ranks(step: int, rank: int) -> dict[str, Tensor]:
    """Rank 0 has text alone, and in the last step no rank has a picture."""
    ids = words(10 * step + rank, 10)
    if rank == 0 or step == STEPS - 1:
        return {"input_ids": ids, "labels": ids}
    ids[:, 1:5] = IMAGE
    pictures = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": ids, "labels": ids, "pixel_values": pictures.double()}


Batch = Callable[[int, int], dict[str, Tensor]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "opt": (opt, text_alone),
    "m2m_100": (m2m_100, text_alone),
    "wav2vec2": (wav2vec2, sound),
    "llava": (llava, picture_on_some_ranks),
}
KINDS = {"all at once": None, "checkpointed": False, "checkpointed, reentrant": True}
"""Whether layers are recomputed in the backward, and with which kind of checkpoint."""


def train(name: str, ranks: int, kind: str, rank: int | None) -> tuple[list[float], dict[str, Tensor], list[tuple[str, ...]]]:
    """Train on one rank, or (None) on the batches of all ranks in one process.

    Returns the loss of each batch, the weights at the end, and which layers each batch went through.
    """
    make, batch = MODELS[name]
    torch.manual_seed(0)
    # in which sums in another order show far less
    model = make().train().double()
    paths: list[list[str]] = []
    for path, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_hook(lambda *_, path=path: paths[-1].append(path))
    if (reentrant := KINDS[kind]) is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    if rank is not None:
        fsdp.fully_shard(model, auto_wrap_policy={GradientCheckpointingLayer}, uneven_paths=True)
    mine = range(ranks) if rank is None else [rank]
    # AdamW would magnify rounding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for one in mine:
            torch.manual_seed(100 * step + one)  # for LayerDrop
            paths.append([])
            loss = model(**batch(step, one)).loss
            losses.append(float(loss.detach()))
            loss.backward()
        if rank is None:  # a third of the loss, which these models compute in fp32, would be another number
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(ranks)
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict() if rank is None else fsdp.full_state_dict(model, rank0_only=False)
    return losses, {key: value.clone() for key, value in weights.items()}, [tuple(dict.fromkeys(path)) for path in paths]


def compare(name: str, ranks: int, kind: str, found: list[Any]) -> None:
    losses, weights, paths = train(name, ranks, kind, None)
    assert any(len(set(paths[step * ranks : (step + 1) * ranks])) > 1 for step in range(STEPS)), "all ranks went one way"
    for rank, (mine, full, way) in enumerate(found):
        assert way == paths[rank::ranks]
        torch.testing.assert_close(mine, losses[rank::ranks], rtol=1e-9, atol=1e-12)
        assert full.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(full[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_like_a_single_process(name: str, ranks: int, kind: str) -> None:
    compare(name, ranks, kind, fsdp.simulate(ranks, lambda rank: train(name, ranks, kind, rank)))


@pytest.mark.parametrize("name", ["opt", "llava"])
def test_a_model_trains_like_a_single_process_over_gloo(name: str) -> None:
    def one(rank: int) -> Any:
        torch.distributed.init_process_group("gloo")
        try:
            return train(name, 2, "checkpointed", rank)
        finally:
            torch.distributed.destroy_process_group()

    compare(name, 2, "checkpointed", run(2, one))


@pytest.mark.parametrize("name", ["opt", "m2m_100", "llava"])  # wav2vec2 drops no layers then
def test_without_the_option_the_error_names_it(name: str) -> None:
    make, batch = MODELS[name]

    def one(rank: int) -> None:
        torch.manual_seed(0)
        model = make().train().double()
        fsdp.fully_shard(model, auto_wrap_policy={GradientCheckpointingLayer})
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            model(**batch(step, rank)).loss.backward()

    with pytest.raises(fsdp.WorldError, match="uneven_paths=True"):
        fsdp.simulate(2, one)
