"""A tiny Llama under Lightning's Trainer with the strategy of this engine: killed, resumed, and compared with one process."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from tiny_llama import Source, make_model
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp.integrations.lightning import FSDPStrategy
from tests.compat.frameworks.forked import KILLED, largest_difference, mean_over_ranks, run
from tests.compat.frameworks.test_lightning import BATCH, Fitted, Lit, fit_alone

pytestmark = pytest.mark.filterwarnings("ignore")


class LitLlama(Lit):
    """A tiny Llama that learns the source of the examples."""

    def __init__(self, dies_after: int | None = None) -> None:
        super().__init__(meta=True, dies_after=dies_after)
        self.net: Any = make_model()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("error", self.net(**batch).loss, sync_dist=True)


def text(rank: int, world_size: int) -> DataLoader[Any]:
    data = Subset(Source(), range(32))
    return DataLoader(data, BATCH // world_size, sampler=DistributedSampler(data, world_size, rank, shuffle=False))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_llama_whose_run_was_killed_trains_on_as_in_one_process(kind: str, tmp_path: Path) -> None:
    options = {"data": text, "epochs": 3, "gradient_clip_val": 0.5}

    def on_two(rank: int, dies_after: int | None = None, resume: Path | None = None) -> Fitted:
        keep_last = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
        strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}, state_dict_type=kind)
        module = partial(LitLlama, dies_after)
        return Fitted(rank, 2, module, strategy=strategy, callbacks=[keep_last], resume=resume, **options)

    run(2, lambda rank: on_two(rank, dies_after=8), exits=KILLED)
    expected = fit_alone(LitLlama, **options)
    ranks = run(2, lambda rank: on_two(rank, resume=tmp_path / "last.ckpt"))
    found = mean_over_ranks([rank.losses for rank in ranks])
    assert len(found) == 8 and found == pytest.approx(expected.losses[4:], abs=1e-5)
    # AdamW divides by the size of the gradient, and so magnifies rounding where that is close to zero
    assert largest_difference(ranks[0].weights, expected.weights) < 1e-4
