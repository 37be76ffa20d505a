"""What a file of Lightning may hold that only code could load: it is left where nothing reads it, else refused."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from resume_adapters.cli.commands.export import export
from resume_adapters.errors import CheckpointDamaged, NotSerialisable, StateMismatch
from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO, files

from fits import Interrupted, Line, trainer_of

RUN: list[str] = []
"""Which code ran as an object was loaded."""


class Normalizer:
    """An object whose loading runs code."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        RUN.append("__setstate__")
        self.__dict__.update(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return normalizer, (self.scale,), self.__dict__


def normalizer(scale: float) -> Normalizer:
    RUN.append("normalizer")
    return Normalizer(scale)


class Settings(dict[str, Any]):
    """A dict of a library."""

    def __setitem__(self, key: str, value: Any) -> None:
        RUN.append("__setitem__")
        super().__setitem__(key, value)


class Composed(pl.LightningModule):
    """Is given its parts, as configuration libraries do, and saves them all as hyperparameters."""

    def __init__(
        self, net: torch.nn.Module, optimizer: Any, normalizer: Normalizer, loss: type[torch.nn.Module]
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        nested = Settings(loss=loss, deeper=Settings(normalizer=normalizer))
        names = np.array(["a", None, normalizer], dtype=object)
        self.save_hyperparameters({"nested": nested, "names": names, "words": np.array(["a", "b"])}, logger=False)
        self.net = net
        self.loss = loss()
        self.interrupted_at: int | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupted_at:
            raise Interrupted
        return self.loss(self.net(batch), self.hparams.normalizer.scale * batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.hparams.optimizer(params=self.parameters())


class Saving(Composed):
    """Adds an object of its own to each checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["normalizers"] = {"target": [Normalizer()]}


class Loading(Saving):
    """Reads it again."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["normalizers"]["target"][0], Normalizer)


class Kept:
    """What scales the data, and counts."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.used = 0


class Library(Composed):
    """Saves objects that it holds, as they are, and takes them back."""

    def __init__(self, net: Any, optimizer: Any, normalizer: Any, loss: Any) -> None:
        super().__init__(net, optimizer, normalizer, loss)
        self.kept, self.kind = {"target": Kept()}, Kept
        self.is_replaced = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.kept["target"].used += 1
        return super().training_step(batch, index) * self.kept["target"].scale / self.kept["target"].used

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {name: copy.copy(each) for name, each in self.kept.items()} if self.is_replaced else self.kept
        checkpoint.update(kept=kept, parts=[self.loss, self.kept["target"]], kind=self.kind)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]
        self.loss, again = checkpoint["parts"]
        assert again is self.kept["target"] and type(again) is checkpoint["kind"]


class Replacing(Library):
    """Begins to save copies."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.is_replaced = self.global_step >= 4


class Lacking(Library):
    """No longer has what it had."""

    def setup(self, stage: str) -> None:
        self.kept = {}


class Holding(torch.optim.Adam):
    """Has an object in its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.param_groups[0]["normalizer"] = Normalizer()


def fit(
    directory: Path,
    kind: type[Composed] = Composed,
    interrupted_at: int | None = None,
    adapter: list[Any] | None = None,
    optimizer: Any = torch.optim.Adam,
    **options: Any,
) -> Composed:
    """Train eight steps."""
    torch.manual_seed(0)
    module = kind(torch.nn.Linear(2, 2), functools.partial(optimizer, lr=0.1), Normalizer(), torch.nn.MSELoss)
    module.interrupted_at = interrupted_at
    parts = [ResumeCallback()] if adapter is None else adapter
    saving = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    callbacks = [each for each in parts if isinstance(each, pl.Callback)]
    plugins = [each for each in parts if each not in callbacks]
    trainer = trainer_of(saving, *callbacks, plugins=plugins, max_epochs=2)
    RUN.clear()
    trainer.fit(module, DataLoader(torch.rand(16, 2), batch_size=4, shuffle=True), **options)
    return module


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("kind", [Composed, Saving])
@pytest.mark.parametrize("parts", [1, 2], ids=["callback", "both"])
def test_hyperparameters_may_be_any_objects(tmp_path: Path, kind: type[Composed], parts: int) -> None:
    """Only ``load_from_checkpoint`` reads them, and what a module adds if no hook of it does."""
    adapter = lambda: [ResumeCallback(), ResumeCheckpointIO()][:parts]  # noqa: E731
    whole = fit(tmp_path / "whole", kind, adapter=adapter())
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", kind, 5, adapter())
    resumed = fit(tmp_path / "run", kind, adapter=adapter())
    assert RUN == [], "no code of the checkpoint runs"
    assert resumed.global_step == 8 and same(resumed, whole)
    assert isinstance(resumed.hparams.normalizer, Normalizer)
    again = kind.load_from_checkpoint(tmp_path / "run" / "step=8.ckpt", weights_only=False)
    assert same(again, whole), "the bare framework reads the file as ever"


class WithCallbacks(Line):
    """Keeps the arguments of its trainer among its hyperparameters, as libraries of models do that make it."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__(None)
        self.save_hyperparameters(logger=False)


@pytest.mark.parametrize("parts", [1, 2], ids=["callback", "both"])
def test_hyperparameters_may_be_the_callbacks_of_the_trainer(tmp_path: Path, parts: int) -> None:
    """They are pickled while their methods are wrapped, and are as they were where the bare framework reads them."""

    def train(directory: Path, interrupted_at: int | None = None) -> WithCallbacks:
        torch.manual_seed(0)
        saving = ModelCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        module = WithCallbacks([ResumeCallback(save_every=100, ema=torch.nn.Linear(1, 1)), saving])
        module.interrupted_at = interrupted_at
        plugins = [ResumeCheckpointIO()][: parts - 1]
        trainer = trainer_of(callbacks=module.hparams.callbacks, plugins=plugins, max_epochs=2)
        trainer.fit(module, DataLoader(torch.rand(16, 1), batch_size=4, shuffle=True))
        return module

    whole = train(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(tmp_path / "run", 5)
    resumed = train(tmp_path / "run")
    assert resumed.global_step == 8 and same(resumed, whole)
    again = WithCallbacks.load_from_checkpoint(tmp_path / "run" / "step=8.ckpt", weights_only=False)
    resuming, saving, *_ = again.hparams.callbacks
    assert type(resuming) is ResumeCallback and resuming.options.save_every == 100 and resuming.session is None
    assert callable(resuming.on_train_batch_start) and callable(resuming.on_before_zero_grad)
    assert saving.dirpath == str(tmp_path / "run") and callable(saving.on_train_batch_end)


@pytest.mark.parametrize("parts", [1, 2], ids=["callback", "both"])
def test_a_hook_takes_the_objects_of_this_launch_back(tmp_path: Path, parts: int) -> None:
    """What they have counted is observed state; the bare framework reads the file as ever."""
    adapter = lambda: [ResumeCallback(), ResumeCheckpointIO()][:parts]  # noqa: E731
    whole = fit(tmp_path / "whole", Library, adapter=adapter())
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", Library, 5, adapter())
    resumed = fit(tmp_path / "run", Library, adapter=adapter())
    assert resumed.global_step == 8 and same(resumed, whole)
    assert resumed.kept["target"].used == whole.kept["target"].used == 8
    again = Library.load_from_checkpoint(tmp_path / "run" / "step=8.ckpt", weights_only=False)
    assert same(again, whole) and again.kept["target"].used == 8


def test_an_object_that_a_hook_begins_to_copy_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(NotSerialisable, match=r"a hook saves an object at kept\.target .* and is another now"):
        fit(tmp_path, Replacing)


def test_an_object_that_this_launch_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fit(tmp_path, Library, 5)
    words = r"was saved with Kept at module\.kept\['target'\] \(absent now\).*: a hook takes it back from this launch"
    with pytest.raises(StateMismatch, match=words):
        fit(tmp_path, Lacking)


def test_what_a_hook_reads_is_refused_at_the_first_save(tmp_path: Path) -> None:
    words = r"holds \S*test_contents\.normalizer \(at normalizers\.target\.0\), which would have to run code"
    with pytest.raises(NotSerialisable, match=words):
        fit(tmp_path, Loading)


def test_what_lightning_reads_is_refused_at_the_first_save(tmp_path: Path) -> None:
    words = r"holds \S*test_contents\.normalizer \(at optimizer_states\.0\.param_groups\.0\.normalizer\)"
    with pytest.raises(NotSerialisable, match=words):
        fit(tmp_path, optimizer=Holding)


@pytest.mark.parametrize("adapter", [[ResumeCallback()], [ResumeCheckpointIO()]], ids=["callback", "plugin"])
def test_a_checkpoint_of_bare_lightning_is_read_without_running_code(tmp_path: Path, adapter: list[Any]) -> None:
    fit(tmp_path / "whole", adapter=[])
    resumed = fit(tmp_path / "run", adapter=adapter, ckpt_path=tmp_path / "whole" / "step=4.ckpt")
    assert RUN == []
    # Lightning 2.4 counts the last batch before its own checkpoint twice, with and without the package.
    assert resumed.global_step == (9 if pl.__version__.startswith("2.4.") else 8)


def test_the_plugin_alone_reads_no_object_that_lightning_uses(tmp_path: Path) -> None:
    fit(tmp_path / "whole", adapter=[], optimizer=Holding)
    words = r"it holds \S*test_contents\.normalizer at optimizer_states\.0\.param_groups\.0\.normalizer"
    with pytest.raises(CheckpointDamaged, match=words):
        fit(tmp_path / "run", adapter=[ResumeCheckpointIO()], ckpt_path=tmp_path / "whole" / "step=4.ckpt")
    assert RUN == []


def test_its_weights_are_exported(tmp_path: Path) -> None:
    module = fit(tmp_path / "run")
    export(tmp_path / "run", output=tmp_path / "weights.safetensors")
    assert RUN == []
    exported = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(exported["net.weight"], module.net.weight)


@pytest.mark.parametrize("value", [np.array(["a", "b"]), np.str_("a")], ids=["array", "number"])
@pytest.mark.parametrize("is_zip", [True, False], ids=["today's format", "older format"])
def test_text_of_numpy_is_refused_where_it_is_read(tmp_path: Path, value: Any, is_zip: bool) -> None:
    """Torch makes none, and a stand-in must not take its place unseen."""
    file = tmp_path / "file.ckpt"
    torch.save({"callbacks": {"mine": value}}, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises((CheckpointDamaged, pickle.UnpicklingError)):
        ResumeCheckpointIO().load_checkpoint(file)


def test_an_older_format_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "file.ckpt"
    torch.save({"callbacks": {"mine": Normalizer()}}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(pickle.UnpicklingError, match="normalizer"):
        ResumeCheckpointIO().load_checkpoint(file)
    torch.save({"callbacks": {"mine": 3}}, file, _use_new_zipfile_serialization=False)
    assert ResumeCheckpointIO().load_checkpoint(file) == {"callbacks": {"mine": 3}}


def test_files_that_were_not_looked_at_get_no_stand_in(tmp_path: Path) -> None:
    """As those of an engine, which a strategy finds by itself."""
    file = tmp_path / "file.ckpt"
    torch.save({"mine": Normalizer()}, file)
    with files.standing_in([], lambda place: True), pytest.raises(pickle.UnpicklingError, match="normalizer"):
        torch.load(file, weights_only=True)


class Counted(pl.Callback):
    """Counts batches, and takes its count back."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Dropped(Counted):
    """Takes its count back only where it was told of a checkpoint before the load, as Lightning does for nobody."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop it."""


@pytest.mark.parametrize("parts", [1, 2], ids=["callback", "both"])
def test_a_callback_that_does_not_take_back_what_it_saved_is_named(
    tmp_path: Path, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = lambda: [*[ResumeCallback(), ResumeCheckpointIO()][:parts], Counted(), Dropped()]  # noqa: E731
    with pytest.raises(Interrupted):
        fit(tmp_path, interrupted_at=5, adapter=adapter())
    assert "Not restored" not in caplog.text
    fit(tmp_path, adapter=adapter())
    assert "these callbacks is not what they were given to load: Dropped (count: saved 4, restored 0)." in caplog.text


def test_a_callback_may_load_again_in_the_middle_of_a_training(tmp_path: Path) -> None:
    """As one that returns to the best checkpoint between two phases; what is in the background is written before."""

    class Returning(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            connector = trainer._checkpoint_connector
            best = tmp_path / f"step={trainer.global_step}.ckpt"
            connector.resume_start(checkpoint_path=best, weights_only=False)
            read = connector._loaded_checkpoint
            assert read["global_step"] == trainer.global_step
            assert all(torch.equal(read["state_dict"][name], each) for name, each in module.state_dict().items())
            connector.resume_end()

    assert fit(tmp_path, adapter=[ResumeCallback(stage="memory"), Returning()]).global_step == 8
