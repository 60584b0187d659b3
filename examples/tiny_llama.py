"""A tiny Llama over bytes and its tokenizer, made without a hub. The examples of Hugging Face's libraries import it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 64
ROWS = 128
LAYER = "LlamaDecoderLayer"
END = "<end>"


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """Two layers over the 256 bytes and one mark of the end."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT, bos_token_id=None, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate([*letters, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


class Source(Dataset[dict[str, Tensor]]):
    """Stretches of the source of the examples, as rows of tokens and labels."""

    def __init__(self) -> None:
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
        self.tokens = torch.tensor(make_tokenizer()(text)["input_ids"])

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * 997 % (len(self.tokens) - CONTEXT)  # 997 is prime, so the stretches are spread over all of the text
        row = self.tokens[start : start + CONTEXT]
        return {"input_ids": row, "labels": row}
