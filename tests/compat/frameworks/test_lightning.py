"""Lightning's Trainer and Fabric with the strategies of this engine, on two processes, against Lightning alone on one."""

import contextlib
import importlib
import inspect
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdp
from fsdp.compat.frameworks.lightning_common import INHERITED, with_mesh
from fsdp.integrations.lightning import NAME, FabricFSDPStrategy, FSDPStrategy
from tests.compat.frameworks.forked import KILLED, alone, largest_difference, mean_over_ranks, run, script_of_page

BATCH = 8
SAME = 1e-6
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), nn.Linear(8, 1))


class Lit(pl.LightningModule):
    """A module that calls its own forward in its steps, and has parameters of its root unit as well as of its blocks."""

    def __init__(self, meta: bool = False, manual: bool = False, dies_after: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.dies_after = dies_after
        self.losses: list[float] = []
        self.net = None if meta else net()

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("error", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        if self.trainer.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Gan(pl.LightningModule):
    """Two networks that step in turn within one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 4))
        self.critics = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 1))])
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        generates, judges = self.optimizers()  # type: ignore[misc]  # the stubs do not know of two
        self.toggle_optimizer(generates)
        loss = -self.critics[0](self.generator(batch[0])).mean()
        generates.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generates, 0.5, "norm")
        generates.step()
        self.untoggle_optimizer(generates)
        self.toggle_optimizer(judges)
        judged = (self.critics[0](self.generator(batch[0]).detach()) - self.critics[0](batch[0])).mean()
        judges.zero_grad()
        self.manual_backward(judged)
        judges.step()
        self.untoggle_optimizer(judges)
        self.losses += [loss.item(), judged.item()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.generator.parameters(), 0.1), torch.optim.Adam(self.critics.parameters(), 1e-2)]


class Bare(Lit):
    """Optimizes manually, and has a parameter that is in no child."""

    def __init__(self) -> None:
        super().__init__(manual=True)
        self.scale = nn.Parameter(torch.ones(1))


class Meddling(Lit):
    """Puts values where a folder does not take them from."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {"a": torch.ones(1)}


def loader(rank: int, world_size: int) -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, BATCH // world_size, sampler=DistributedSampler(data, world_size, rank, shuffle=False))


def make_trainer(world_size: int, strategy: Any = None, epochs: int = 2, **options: Any) -> pl.Trainer:
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")}
    options = {"enable_checkpointing": "callbacks" in options, **options}
    if world_size > 1 and strategy is None:
        strategy = FSDPStrategy(auto_wrap_policy={Block})
    return pl.Trainer(accelerator="cpu", devices=world_size, strategy=strategy or "auto", max_epochs=epochs, **quiet, **options)


class Fitted:
    """The results of a fit on one rank."""

    def __init__(
        self, rank: int, world_size: int, module: Any, resume: Any = None, save: Any = None, data: Any = loader, **options: Any
    ) -> None:
        torch.manual_seed(0)
        module = module()
        trainer = make_trainer(world_size, **options)
        evaluates = isinstance(module, Lit)
        trainer.fit(module, data(rank, world_size), data(rank, world_size) if evaluates else None, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        weights = fsdp.full_state_dict(module, rank0_only=False) if world_size > 1 else module.state_dict()
        self.weights = {name: value.clone() for name, value in weights.items()}
        self.losses: list[float] = module.losses
        self.error = trainer.callback_metrics.get("error")


def fit_alone(module: Any = Lit, **options: Any) -> Fitted:
    torch.manual_seed(0)
    return alone(lambda rank: Fitted(rank, 1, module, **options))


def fit_on_two(module: Any = Lit, **options: Any) -> list[Fitted]:
    return run(2, lambda rank: Fitted(rank, 2, module, **options))


def assert_same(ranks: list[Fitted], expected: Fitted) -> None:
    assert largest_difference(ranks[0].weights, expected.weights) < SAME
    assert largest_difference(ranks[1].weights, expected.weights) < SAME
    assert mean_over_ranks([rank.losses for rank in ranks]) == pytest.approx(expected.losses[-len(ranks[0].losses) :], abs=SAME)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "in double precision": {"precision": "64-true"},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_two_ranks_train_as_one_process_does(options: dict[str, Any]) -> None:
    expected, ranks = fit_alone(**options), fit_on_two(**options)
    assert_same(ranks, expected)
    assert float(ranks[0].error) == pytest.approx(float(expected.error), abs=SAME)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_two_ranks_train_in_a_precision_of_lightning(precision: str) -> None:
    expected, ranks = fit_alone(precision=precision), fit_on_two(precision=precision)
    assert mean_over_ranks([rank.losses for rank in ranks]) == pytest.approx(expected.losses, rel=2e-2)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {value.dtype for value in ranks[0].weights.values()} == {dtype}


def test_gradients_can_be_accumulated_without_communication() -> None:
    expected = fit_alone(accumulate_grad_batches=2)
    strategy = FSDPStrategy(auto_wrap_policy={Block}, sync_each_backward=False)
    assert_same(fit_on_two(accumulate_grad_batches=2, strategy=strategy), expected)


def test_manual_optimization_trains_networks_in_turn() -> None:
    assert_same(fit_on_two(Gan), fit_alone(Gan))


def test_several_optimizers_are_resumed_from_a_file(tmp_path: Path) -> None:
    fit_on_two(Gan, save=tmp_path / "gan.ckpt", epochs=1)
    assert_same(fit_on_two(Gan, resume=tmp_path / "gan.ckpt"), fit_alone(Gan))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_that_was_killed_is_resumed(kind: str, tmp_path: Path) -> None:
    def dying(rank: int) -> None:
        keep_last = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
        strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type=kind)
        Fitted(rank, 2, lambda: Lit(dies_after=12), strategy=strategy, epochs=4, callbacks=[keep_last])

    run(2, dying, exits=KILLED)
    assert (tmp_path / "last.ckpt").is_dir() is (kind == "sharded")
    assert_same(fit_on_two(resume=tmp_path / "last.ckpt", epochs=4), fit_alone(epochs=4))


def test_a_file_goes_from_one_process_to_two_and_back(tmp_path: Path) -> None:
    fit_alone(save=tmp_path / "one.ckpt", epochs=1)
    fit_on_two(lambda: Lit(meta=True), resume=tmp_path / "one.ckpt", save=tmp_path / "two.ckpt", epochs=2)
    resumed = fit_alone(resume=tmp_path / "two.ckpt", epochs=3)
    assert largest_difference(resumed.weights, fit_alone(epochs=3).weights) < SAME


def test_a_model_that_is_made_on_the_meta_device_gets_its_values_when_it_is_sharded() -> None:
    first, second = fit_on_two(lambda: Lit(meta=True))
    assert largest_difference(first.weights, second.weights) == 0
    assert first.losses[-1] < first.losses[0]


def test_a_folder_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    def twice(rank: int) -> list[str]:
        trainer = make_trainer(2, FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded"), epochs=1)
        trainer.fit(Lit(), loader(rank, 2))
        trainer.save_checkpoint(tmp_path / "a")
        (tmp_path / "a" / "old").touch()
        trainer.strategy.barrier()
        trainer.save_checkpoint(tmp_path / "a")
        trainer.strategy.barrier()
        return sorted(path.name for path in tmp_path.rglob("*"))

    names = run(2, twice)[0]
    assert "old" not in names and "manifest.json" in names and [name for name in names if name.startswith(".")] == [".metadata"]


def test_a_module_is_validated_and_fitted_again_after_its_fit() -> None:
    def again(rank: int) -> list[float]:
        torch.manual_seed(0)
        module = Lit()
        for _ in range(2):
            make_trainer(2, NAME, epochs=1).fit(module, loader(rank, 2))
        (found,) = make_trainer(2, NAME).validate(module, loader(rank, 2), verbose=False)
        predicted = make_trainer(2, NAME).predict(module, loader(rank, 2))
        assert predicted is not None and len(predicted) == 4
        return [*module.losses, found["error"]]

    first, second = run(2, again)
    assert len(first) == 9 and first[-1] == second[-1]


def test_modules_that_configure_model_wraps_are_units() -> None:
    class Wrapping(Lit):
        def configure_model(self) -> None:
            from torch.distributed.fsdp.wrap import wrap

            assert self.net is not None
            self.net[1] = wrap(self.net[1])
            fsdp.fully_shard(self.net[2])

    def names(rank: int) -> str:
        module = Wrapping()
        make_trainer(2, FSDPStrategy(), epochs=1).fit(module, loader(rank, 2))
        return fsdp.story(module)

    story = run(2, names)[0]
    assert "net.1" in story and "net.2" in story


def refusal(make: Any) -> str:
    with pytest.raises(fsdp.ShardingError) as caught:
        make()
    return str(caught.value)


def test_wrong_options_are_refused() -> None:
    assert "did you mean mp_policy" in refusal(lambda: FSDPStrategy(mp_polcy=1))
    assert "give offload_policy=fsdp.OffloadPolicy()" in refusal(lambda: FabricFSDPStrategy(cpu_offload=True))
    assert "plain_shards" in refusal(lambda: FSDPStrategy(plain_shards=True))
    assert "'full' or 'sharded'" in refusal(lambda: FSDPStrategy(state_dict_type="half"))
    plugin = lightning.pytorch.plugins.FSDPPrecision("bf16-mixed")
    assert "belongs to another engine" in refusal(lambda: FSDPStrategy(precision_plugin=plugin))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "several optimizers in a folder": (Gan, "sharded", "the state of one optimizer"),
    "a parameter outside of children": (Bare, "full", "has the parameter 'scale' itself"),
    "values for a folder from a hook": (Meddling, "sharded", "on_save_checkpoint has put values"),
    "a file where a folder is": (Lit, "full", "is a folder"),
}


@pytest.mark.parametrize(("module", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_on_every_rank(module: Any, kind: str, text: str, tmp_path: Path) -> None:
    def refused(rank: int) -> str:
        strategy = FSDPStrategy(state_dict_type=kind)
        save = tmp_path if module is Lit else tmp_path / "a"
        return refusal(lambda: Fitted(rank, 2, module, strategy=strategy, save=save, epochs=1))

    assert all(text in found for found in run(2, refused))


def fabric_run(rank: int, ranks: int, to: int, load: Any = None, save: Any = None, **options: Any) -> dict[str, Tensor]:
    """Train to a number of steps with Fabric, and return the weights."""
    accumulates, meta = options.pop("accumulates", False), options.pop("meta", False)
    strategy = FabricFSDPStrategy(auto_wrap_policy={Block}, **options) if ranks > 1 else "auto"
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module(empty_init=meta):
        module = net()
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if load is not None:
        assert fabric.load(load, state) == {}
    batches = list(loader(rank, ranks)) * 2
    for x, y in batches[state["step"] : to]:
        if accumulates:
            with fabric.no_backward_sync(model) if ranks > 1 else contextlib.nullcontext():
                fabric.backward((model(x) - y).square().mean())
        fabric.backward((model(x) - y).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
    if save is not None:
        fabric.save(save, state)
    weights = fsdp.full_state_dict(module, rank0_only=False) if ranks > 1 else module.state_dict()
    return {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize("accumulates", [False, True], ids=["plain", "accumulated"])
def test_fabric_trains_as_one_process_does(accumulates: bool) -> None:
    expected = alone(lambda rank: fabric_run(rank, 1, 4, accumulates=accumulates))
    for weights in run(2, lambda rank: fabric_run(rank, 2, 4, accumulates=accumulates)):
        assert largest_difference(weights, expected) < SAME


def test_hybrid_sharding_without_a_mesh_shards_inside_a_host_and_replicates_between_hosts() -> None:
    expected = alone(lambda rank: fabric_run(rank, 1, 4))
    for weights in run(2, lambda rank: fabric_run(rank, 2, 4, sharding_strategy="HYBRID_SHARD")):
        assert largest_difference(weights, expected) < SAME
    assert_same(fit_on_two(strategy=FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="HYBRID_SHARD")), fit_alone())
    hybrid = {"sharding_strategy": "HYBRID_SHARD"}
    assert with_mesh(hybrid, num_nodes=3, num_processes=8) == {**hybrid, "mesh": (3, 8)}
    assert with_mesh({**hybrid, "mesh": (2, 12)}, num_nodes=3, num_processes=8) == {**hybrid, "mesh": (2, 12)}
    assert with_mesh({}, num_nodes=3, num_processes=8) == {}


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fabric_resumes_from_what_it_saved(kind: str, tmp_path: Path) -> None:
    run(2, lambda rank: fabric_run(rank, 2, 4, save=tmp_path / "a", state_dict_type=kind))
    expected = alone(lambda rank: fabric_run(rank, 1, 8))
    for weights in run(2, lambda rank: fabric_run(rank, 2, 8, load=tmp_path / "a", meta=True)):
        assert largest_difference(weights, expected) < SAME
    if kind == "full":
        weights = alone(lambda rank: fabric_run(rank, 1, 8, load=tmp_path / "a"))
        assert largest_difference(weights, expected) < SAME


def test_fabric_knows_the_strategy_by_name() -> None:
    assert isinstance(lightning.Fabric(accelerator="cpu", devices=2, strategy=NAME).strategy, FabricFSDPStrategy)


def test_without_lightning_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['lightning'] = None; import fsdp.integrations.lightning"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package lightning: pip install 'fsdp[lightning]'" in ended.stderr


@pytest.mark.parametrize("name", ["train_with_lightning", "train_with_fabric"])
def test_an_example_learns_and_resumes(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module(name)
    run(2, lambda rank: example.main())
    printed = capfd.readouterr().out
    assert "on 2 ranks: loss 5." in printed and "are the same" in printed


@pytest.mark.parametrize("title", ["lightning_trainer.py", "lightning_fabric.py"])
def test_the_scripts_of_the_page_run(title: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    script = script_of_page("lightning", title)
    run(2, lambda rank: exec(compile(script, title, "exec"), {"__name__": "__main__"}))
    assert (tmp_path / ("fabric.ckpt" if "fabric" in title else "after-fit")).exists()


STRATEGIES = {"trainer": (FSDPStrategy, pl.strategies.FSDPStrategy), "fabric": (FabricFSDPStrategy, FabricStrategy)}


@pytest.mark.parametrize("of", STRATEGIES)
def test_an_argument_of_lightnings_strategy_is_known_or_may_be_left_at_its_default(of: str) -> None:
    ours, theirs = STRATEGIES[of]
    known = {*inspect.signature(ours.__init__).parameters, *inspect.signature(fsdp.fully_shard).parameters, "kwargs"}
    for name, one in inspect.signature(theirs.__init__).parameters.items():
        if name in known:
            continue
        ours(**{name: one.default})
        with pytest.raises(fsdp.ShardingError, match=name):
            ours(**{name: object()})


@pytest.mark.parametrize("of", STRATEGIES)
def test_what_is_inherited_from_lightning_is_known(of: str) -> None:
    ours, _ = STRATEGIES[of]
    base = ours.__mro__[1]
    inherited = {name for name in dir(base) if not name.startswith("_")} - {*vars(ours)}
    assert inherited <= INHERITED


@pytest.mark.parametrize("of", STRATEGIES)
def test_a_method_that_a_later_strategy_has_is_refused_by_name(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = STRATEGIES[of]
    monkeypatch.setattr(ours.__mro__[2], "save_later", lambda self: None, raising=False)
    with pytest.raises(fsdp.ShardingError, match=r"Strategy\.save_later: this version of fsdp does not know it"):
        ours().save_later()

    class Mine(ours):  # type: ignore[misc, valid-type]
        def save_later(self) -> int:
            return 3

    assert Mine().save_later() == 3


@pytest.mark.parametrize("of", STRATEGIES)
def test_an_argument_that_a_later_strategy_has_is_refused_by_name(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = STRATEGIES[of]
    monkeypatch.setattr(theirs, "__init__", lambda self, later=0: None)
    ours(later=0)
    with pytest.raises(fsdp.ShardingError, match="Strategy: later=3: this version of fsdp does not know it"):
        ours(later=3)
