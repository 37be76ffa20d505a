"""State that nobody has declared: found, captured, restored, named."""

from __future__ import annotations

import logging
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import EXTRAS
from resume_adapters.core.checkpoint.parts import read_part, write_part
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.observed.when import ObservedLeaf, ObservedState
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import encoding
from resume_adapters.core.state.records import Source
from resume_adapters.core.storage.local import LocalStorage

from plain_torch import Still, StillState


class Trainer:
    """What a subclass of a trainer holds, as those of TRL do."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.window: deque[float] = deque(maxlen=3)
        self.count = 0
        self.buffered: Any = None
        self.total = torch.zeros(1)
        self.filled = torch.zeros(2)
        self.reference = torch.nn.Linear(2, 2)
        self.generator = random.Random(1)
        self.noise = torch.Generator().manual_seed(1)
        self.iterator: Any = None

    def step(self) -> None:
        self.count += 1
        self.metrics["train"]["loss"].append(self.count / 3)
        self.window.append(self.count / 7)
        self.buffered = [{"ids": torch.full((2,), self.count)}]
        self.total = self.total + self.count
        self.filled.add_(1)
        self.reference.weight.data.add_(1)
        self.generator.random()
        torch.rand((), generator=self.noise)


def observing(trainer: Any, saved: Any = None, **options: Any) -> ObservedState:
    state = ObservedState(lambda: Subjects({"trainer": trainer}, **options), "register")
    if saved is not None:
        state.load(*saved)
    state.begin()
    return state


def through_disk(state: ObservedState, directory: Path) -> tuple[list[ObservedLeaf], Any]:
    """Write and read what is observed as a checkpoint does."""
    storage, place = LocalStorage(), directory / EXTRAS
    storage.make_directory(place)
    files = CheckpointFiles(storage, directory, None)
    tree = {"observed": [each.to_tree() for each in state.capture()]}
    write_part(storage.write, place, "rank", *encoding.encode(tree))
    trees = read_part(files, "rank")["observed"]
    tensors: dict[str, Any] = {}
    for name, part in state.parts().items():
        write_part(storage.write, place, name, *encoding.encode(part.state_dict()))
        tensors = read_part(files, name)
    source = Source(directory, "rank.json", 1, "")
    return [ObservedLeaf.from_tree(tree, source) for tree in trees], tensors


def content(trainer: Trainer) -> str:
    shown = {name: each for name, each in vars(trainer).items() if name not in ("reference", "generator", "noise")}
    states = trainer.generator.getstate(), trainer.noise.get_state().sum()
    return repr([shown, trainer.reference.state_dict(), states])


def test_a_resumed_training_has_what_the_undisturbed_one_has_over_several_launches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = Trainer().reference.state_dict()

    def fresh() -> Trainer:
        trainer = Trainer()
        trainer.reference.load_state_dict(weights)
        return trainer

    undisturbed = fresh()
    for _ in range(9):
        undisturbed.step()
    saved = None
    for _ in range(3):
        trainer = fresh()
        held, train, filled = trainer.reference.weight, trainer.metrics["train"], trainer.filled
        state = observing(trainer, saved)
        assert trainer.reference.weight is held and trainer.metrics["train"] is train and trainer.filled is filled
        for _ in range(3):
            trainer.step()
        state.before_save()
        saved = through_disk(state, tmp_path)
    assert content(trainer) == content(undisturbed)


class Late:
    """Makes its generators when it first needs them."""

    def __init__(self) -> None:
        self.noise: Any = None
        self.numbers: Any = None

    def draw(self) -> list[float]:
        if self.noise is None:
            self.noise = torch.Generator().manual_seed(1)
            self.numbers = np.random.default_rng(1)
        return [torch.rand((), generator=self.noise).item(), float(self.numbers.random())]


def test_a_generator_that_is_made_when_it_is_first_needed_goes_on(tmp_path: Path) -> None:
    undisturbed = Late()
    expected = [undisturbed.draw() for _ in range(6)]
    found, saved = [], None
    for _ in range(3):
        trainer = Late()
        state = observing(trainer, saved)
        found += [trainer.draw() for _ in range(2)]
        state.before_save()
        saved = through_disk(state, tmp_path)
    assert found == expected


def test_what_is_captured_and_what_is_not_is_said() -> None:
    trainer = Trainer()
    state = observing(trainer)
    trainer.step()
    trainer.iterator = iter([1])
    state.before_save()
    state.capture()
    captured, missing = state.describe()
    assert (captured.name, captured.by) == ("observed", "core")
    expected = {
        f"trainer.{name}"
        for name in ("count", "buffered", "total", "filled", "generator", "noise", "metrics", "window")
    }
    assert set(captured.note.split(", ")) == {*expected, "tensors of trainer.reference"}
    assert (missing.name, missing.by) == ("observed", "missing")
    assert missing.note.startswith("trainer.iterator, a list_iterator, has changed since the start and is not data")


def test_before_it_begins_nothing_is_looked_at() -> None:
    looked: list[None] = []
    state = ObservedState(lambda: (looked.append(None), Subjects({}))[1], "register")
    state.before_save()
    state.before_hold(compares=True)
    assert state.capture() == looked == []


def test_what_first_changes_late_is_found_at_any_save_and_objects_are_looked_up_at_the_first_ones() -> None:
    """A phase that begins late, an average that is made late, a layer that is frozen late, a listener."""
    trainer: Any = Trainer()
    trainer.phase, trainer.best, trainer.listener, trainer.other = "warm-up", float("inf"), None, torch.nn.Linear(1, 1)
    asked: list[None] = []
    state = ObservedState(lambda: (asked.append(None), Subjects({"trainer": trainer}))[1], "register")
    state.begin()
    state.begin()
    for _ in range(4):
        state.before_save()
    assert state.capture() == [] and len(asked) == 3
    trainer.phase, trainer.best, trainer.buffered, trainer.listener = "main", 0.25, [1], len
    trainer.total.add_(1)
    trainer.reference.bias.requires_grad_(False)
    del trainer.other
    for _ in range(2):
        state.before_save()
        assert {str(each.path): each.value for each in state.capture()} == {
            "trainer.phase": "main",
            "trainer.best": 0.25,
            "trainer.buffered": [1],
            "trainer.total": torch.ones(1),
            "trainer.reference.bias.requires_grad": False,
        }
    trainer.iterator = iter([1])
    state.before_save()
    assert any("trainer.iterator" in each.note for each in state.describe() if each.by == "missing")
    assert len(asked) == 3


def test_before_it_begins_what_the_checkpoint_held_is_saved_again(tmp_path: Path) -> None:
    trainer = Trainer()
    state = observing(trainer)
    trainer.step()
    state.before_save()
    saved = through_disk(state, tmp_path)
    again = ObservedState(lambda: Subjects({"trainer": Trainer()}), "register")
    again.load(*saved)
    assert again.capture() == saved[0] and again.parts()["observed_tensors"].state_dict() == saved[1]


def test_the_first_step_after_a_failure_is_not_looked_at_and_two_later_ones_are() -> None:
    trainer: Any = Trainer()
    trainer.head = torch.nn.Linear(2, 2)
    walks: list[int] = []
    subjects = Subjects({"trainer": trainer}, stepped=list(trainer.head.parameters()))
    state = ObservedState(lambda: walks.append(0) or subjects, "register")  # type: ignore[func-returns-value]
    state.before_hold(compares=True)
    state.begin()
    trainer.count = 1
    trainer.head.weight.grad = torch.ones(2, 2)
    state.before_hold(compares=False)
    assert [str(each.path) for each in state.capture()] == ["optimizer.params[0].grad"]
    for _ in range(3):
        state.before_hold(compares=True)
        assert "trainer.count" in [str(each.path) for each in state.capture()]
    assert len(walks) == 3


def test_an_evaluation_that_is_done_again_finds_the_state_of_before() -> None:
    trainer = Trainer()
    state = ObservedState(lambda: Subjects({"trainer": trainer}), "register")
    state.hold()
    state.begin()
    trainer.count = 1
    trainer.filled.add_(1)
    state.hold()
    trainer.count = 2
    trainer.filled.add_(1)
    trainer.window.append(1.0)
    state.before_save()
    held = {str(each.path): each.value for each in state.capture()}
    assert held.keys() == {"trainer.count", "trainer.filled"}
    assert held["trainer.count"] == 1 and held["trainer.filled"].tolist() == [1, 1]
    state.release()
    state.before_save()
    assert len(state.capture()) == 3
    for _ in range(2):
        state.before_save()
    state.hold()
    assert len(state.capture()) == 3


def test_of_a_module_that_is_updated_no_tensor_stays_behind() -> None:
    trainer: Any = Trainer()
    trained = torch.nn.Linear(2, 2)
    trainer.reference = torch.nn.Sequential(trainer.reference, trained, torch.nn.BatchNorm1d(2))
    model: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model.register_buffer("own", torch.zeros(1), persistent=False)
    model[0].register_buffer("kept", torch.zeros(1), persistent=False)
    state = ObservedState(lambda: Subjects({"trainer": trainer, "model": model}, captured=[model, trained]), "register")
    state.begin()
    for tensor in (trainer.reference[0].weight, model[0].kept, model.own):
        tensor.data.add_(1)
    state.before_save()
    found = {str(each.path) for each in state.capture()}
    of_norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"trainer.reference.0.weight", "trainer.reference.0.bias", "model.0.kept", "model.own"}
    assert found == {*expected, *(f"trainer.reference.2.{name}" for name in of_norm)}


def test_a_module_that_an_optimizer_updates_is_captured_before_its_first_update() -> None:
    trainer: Any = Trainer()
    pairs, fixed = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    trainer.losses = {"pairs": pairs, "classes": torch.nn.BatchNorm1d(2), "fixed": fixed}
    model: Any = torch.nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(1), persistent=False)
    trainer.losses["classes"].model = model
    updated = [*pairs.parameters(), *trainer.losses["classes"].parameters()]
    state = observing(trainer, trained=updated, captured=[model])
    state.begin()
    state.before_save()
    of_norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {f"trainer.losses['classes'].{name}" for name in of_norm}
    expected |= {f"trainer.losses['pairs'].{name}" for name in ("weight", "bias")}
    assert {str(each.path) for each in state.capture()} == expected


def test_a_gradient_that_is_left_is_captured_while_it_is_there(tmp_path: Path) -> None:
    def held(saved: Any = None) -> tuple[torch.nn.Linear, ObservedState]:
        head = torch.nn.Linear(2, 2)
        return head, observing(Trainer(), saved, stepped=list(head.parameters()))

    head, state = held()
    for _ in range(3):
        state.before_save()
    assert state.capture() == [] == state.describe(), "all are cleared"
    head.bias.grad = torch.tensor([1.0, 2.0])
    state.before_save()
    saved = through_disk(state, tmp_path)
    assert [entry.note for entry in state.describe()] == ["gradients of optimizer.params"]
    resumed, again = held(saved)
    assert resumed.bias.grad is not None and resumed.bias.grad.tolist() == [1, 2] and resumed.weight.grad is None
    resumed.bias.grad.add_(1)
    again.hold()
    resumed.bias.grad.add_(1)
    assert [each.value.tolist() for each in again.capture()] == [[2, 3]]
    again.release()
    resumed.zero_grad()
    again.before_save()
    assert again.capture() == [] == again.describe()


def test_a_gradient_that_does_not_fit_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    state = observing(Trainer(), stepped=list(first.parameters()))
    first.weight.grad = torch.ones(2, 2)
    state.before_save()
    observing(Trainer(), through_disk(state, tmp_path), stepped=list(other.parameters()))
    assert "Not restored: optimizer.params[0].grad (RuntimeError" in caplog.text
    assert other.weight.grad is None


def test_what_is_made_of_the_weights_on_the_way_to_the_first_step_is_captured_though_it_stays(tmp_path: Path) -> None:
    def launched(weight: float, saved: Any = None) -> tuple[Any, ObservedState]:
        trainer: Any = Trainer()
        trainer.start, trainer.steps = None, None
        state = ObservedState(lambda: Subjects({"trainer": trainer}), "register")
        if saved is not None:
            state.load(*saved)
        state.prepare()
        trainer.start, trainer.steps = [torch.full((2,), weight)], 20
        trainer.named, trainer.anchor = {"a": torch.full((2,), weight)}, torch.nn.Linear(2, 2)
        torch.nn.init.constant_(trainer.anchor.weight, weight)
        state.begin()
        return trainer, state

    first, state = launched(1.0)
    for _ in range(2):
        state.before_save()
    saved = through_disk(state, tmp_path)
    paths = {f"trainer.{name}" for name in ("start", "named", "anchor.weight", "anchor.bias")}
    assert {str(each.path) for each in saved[0]} == paths
    second, state = launched(2.0, saved)
    assert second.start[0].tolist() == second.named["a"].tolist() == second.anchor.weight[0].tolist() == [1, 1]
    assert torch.equal(second.anchor.bias, first.anchor.bias)
    state.before_save()
    assert {str(each.path) for each in state.capture()} == paths and not state.describe()[1:]


class Twin(torch.nn.Linear):
    """Of another type, and with the same tensors."""


def test_a_module_that_is_made_in_training_is_named_and_one_that_is_replaced_is_captured() -> None:
    trainer: Any = Trainer()
    trainer.average = None
    state = observing(trainer)
    trainer.average, trainer.other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.BatchNorm1d(2)
    trainer.loss = torch.nn.Dropout()
    trainer.reference = Twin(2, 2)
    state.before_save()
    assert {str(each.path) for each in state.capture()} == {"trainer.reference.weight", "trainer.reference.bias"}
    missing = [entry.note for entry in state.describe() if entry.by == "missing"]
    assert [note.partition(" was made after the first step had begun")[0] for note in missing] == [
        "trainer.average, a Sequential,",
        "trainer.other, a BatchNorm1d,",
    ]


class Given:
    def __init__(self, value: Any) -> None:
        self.value = value


class Picky:
    """Its state cannot be restored."""

    def __init__(self, how: str) -> None:
        self.how, self.n = how, 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.how == "raises":
            raise KeyError("n")


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "type": (lambda it: vars(it).update(count="many"), "trainer.count .expected a int there, found a str"),
    "gone": (lambda it: vars(it).pop("count"), "trainer.count .expected a int there, found nothing"),
    "item": (lambda it: it.objects.pop(), r"trainer.objects\[0\].n .expected a Given that holds it, found nothing"),
    "owner": (
        lambda it: it.objects.__setitem__(0, Picky("")),
        r"trainer.objects\[0\].n .expected a Given that holds it, found a Picky",
    ),
    "shape": (
        lambda it: vars(it).update(reference=torch.nn.Linear(3, 3)),
        r"trainer.reference.weight .expected torch.float32 \(2, 2\), .* found torch.float32 \(3, 3\)",
    ),
    "raises": (lambda it: vars(it.picky).update(how="raises"), "trainer.picky .KeyError: 'n'"),
    "drops": (lambda it: None, "trainer.picky .it did not keep the saved value"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_named_and_the_rest_is_restored(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> Any:
        trainer: Any = Trainer()
        trainer.objects, trainer.picky = [Given(0)], Picky("drops")
        trainer.objects[0].n = 0
        return trainer

    trainer = made()
    state = observing(trainer)
    trainer.step()
    trainer.objects[0].n = trainer.picky.n = 1
    state.before_save()
    saved = through_disk(state, tmp_path)
    fresh = made()
    change, message = MISFITS[case]
    change(fresh)
    with caplog.at_level(logging.WARNING, "resume_adapters"):
        resumed = observing(fresh, saved)
    found = [record.getMessage() for record in caplog.records]
    assert any(re.search(message, each) for each in found), found
    assert fresh.window == trainer.window and len(resumed.capture()) < len(saved[0])


def test_what_stops_being_data_or_is_gone_is_named_and_no_longer_captured() -> None:
    trainer = Trainer()
    state = observing(trainer)
    trainer.count, trainer.window = 1, deque([1.0])
    state.before_save()
    assert len(state.capture()) == 2
    trainer.window.append(Given(1))  # type: ignore[arg-type]
    del trainer.count
    assert state.capture() == []
    assert [entry.note.partition(",")[0] for entry in state.describe()] == ["trainer.window", "trainer.count"]


def test_what_the_first_evaluation_changes_is_captured_however_late_it_is() -> None:
    trainer = Trainer()
    state = observing(trainer)
    for _ in range(2):
        state.before_save()
    state.release()
    for count in (1, 2):
        state.hold()
        trainer.count = count
        state.release()
        state.before_save()
        assert [(str(each.path), each.value) for each in state.capture()] == [("trainer.count", count)]


class Holder(Still):
    """A framework whose training holds more than it saves."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer

    def subjects(self) -> Subjects:
        return Subjects({"trainer": self.trainer}, captured=[self.trainer.window])


def begun(directory: Path, trainer: Trainer) -> tuple[Session, Holder]:
    framework = Holder(trainer)
    options = ResumeOptions(parts={"reference": trainer.reference})
    session = Session(
        ResumableRun(directory, ranks=SingleProcess()), framework, options, StillState, Rescale("refuse", 1)
    )
    session.open()
    return session, framework


def test_a_session_saves_and_restores_it_but_not_what_parts_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Trainer()
    session, framework = begun(tmp_path, first)
    session.begin_observing()
    first.step()
    with caplog.at_level(logging.INFO, "resume_adapters"):
        session.save("checkpoint-1", 1, framework)
        (entry,) = session.observed.describe()
        assert (entry.name, entry.by) == ("observed", "core") and entry.note.startswith(
            "trainer.metrics, trainer.count"
        )
        first.iterator = iter([1])
        session.save("checkpoint-2", 2, framework)
    assert [line.partition(",")[0] for line in caplog.messages if "MISSING" in line] == [
        "observed MISSING: trainer.iterator"
    ]
    session.run.saver.flush()
    session.run.close()
    second = Trainer()
    session, framework = begun(tmp_path, second)
    session.prepare_observing()
    session.begin_observing()
    session.begin_observing()
    assert (second.count, second.metrics) == (first.count, first.metrics)
    saved = session.context.launch.observed if session.context and session.context.launch else []
    assert "window" not in {each.path.steps[0].key for each in saved or ()}
    assert "reference" not in {each.path.steps[0].key for each in saved or ()}
    session.run.close()


class Memory(torch.nn.Module):
    """A queue of embeddings: torch saves its entries, and not where the next one goes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(4))
        self.place = 0
        self.is_full = False

    def add(self, value: float) -> None:
        self.entries[self.place] = value
        self.is_full = self.is_full or self.place == 3
        self.place = (self.place + 1) % 4


def test_of_a_part_that_is_a_module_the_attributes_are_captured_which_torch_does_not_save(tmp_path: Path) -> None:
    def opened(memory: Memory) -> tuple[Session, Holder]:
        framework, options = Holder(Trainer()), ResumeOptions(parts={"memory": memory})
        run = ResumableRun(tmp_path, ranks=SingleProcess())
        session = Session(run, framework, options, StillState, Rescale("refuse", 1))
        session.open()
        session.prepare_observing()
        session.begin_observing()
        return session, framework

    first = Memory()
    session, framework = opened(first)
    for value in range(5):
        first.add(value)
    session.save("checkpoint-1", 1, framework)
    session.run.saver.flush()
    session.run.close()
    second = Memory()
    session, _ = opened(second)
    session.run.close()
    assert (second.place, second.is_full) == (first.place, first.is_full) == (1, True)


class Shared:
    """What several objects know: a view, two names, what an optimizer holds, a tuple in a dict."""

    def __init__(self) -> None:
        self.base = torch.zeros(4)
        self.view = self.base[2:]
        self.first = self.second = torch.zeros(2)
        self.temperature = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.temperature], lr=0.5)
        self.states: dict[str, Any] = {"average": (torch.zeros(2), [torch.zeros(2)])}
        self.average = self.states["average"][1][0]
        self.array = np.zeros(3)
        self.window = self.array[1:]
        self.initial = self.current = torch.zeros(3)
        self.ids = torch.zeros(2, dtype=torch.int64)

    def step(self) -> None:
        self.view += 1
        self.second += 2
        self.temperature.grad = torch.ones(1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average += 3
        self.window += 4
        self.current = self.current + 5
        self.ids = self.ids + 6

    def content(self) -> str:
        return repr([each for name, each in vars(self).items() if name != "optimizer"])


def test_what_is_restored_is_the_object_that_is_there(tmp_path: Path) -> None:
    undisturbed = Shared()
    for _ in range(6):
        undisturbed.step()
    saved = None
    for _ in range(3):
        trainer = Shared()
        before = dict(vars(trainer))
        state = observing(trainer, saved, captured=[trainer.optimizer])
        changed = {name for name, each in vars(trainer).items() if each is not before[name]}
        assert changed <= {"current"}, "others need what was there"
        assert trainer.average is trainer.states["average"][1][0]
        for _ in range(2):
            trainer.step()
        state.before_save()
        saved = through_disk(state, tmp_path)
        assert not trainer.initial.any()
    assert trainer.content() == undisturbed.content()


class Scaling(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", batch + torch.rand(2), persistent=False)
        return batch / self.scale


def test_a_buffer_that_the_first_forward_makes_is_there_before_that_of_the_next_launch(tmp_path: Path) -> None:
    saved, scale = None, None
    for _ in range(3):
        module = Scaling()
        state = ObservedState(lambda module=module: Subjects({"model": module}, [module]), "register")  # type: ignore[misc]
        if saved is not None:
            state.load(*saved)
        state.begin()
        assert scale is None or torch.equal(module.scale, scale)
        module(torch.ones(2))
        state.before_save()
        saved, scale = through_disk(state, tmp_path), module.scale
        assert not module.state_dict()


class Watched(torch.nn.Module):
    """Puts hooks on its layer at its first forward, as models of transformers do, or sets itself up by the batch."""

    def __init__(self, hooks: bool) -> None:
        super().__init__()
        self.layer, self.hooks = torch.nn.Linear(1, 1), hooks
        self.calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "is_set_up", False):
            self.is_set_up = True
            if self.hooks:
                self.layer.register_forward_hook(self.count)
        return self.layer(batch)

    def count(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("hooks", [True, False])
def test_a_flag_that_tells_of_hooks_is_not_restored_without_them(hooks: bool, tmp_path: Path) -> None:
    """One that tells of anything else is."""
    saved: Any = None
    for launch in range(3):
        module = Watched(hooks)
        state = ObservedState(lambda module=module: Subjects({"model": module}, [module]), "register")  # type: ignore[misc]
        if saved is not None:
            state.load(*saved)
        state.begin()
        assert hasattr(module, "is_set_up") is (launch > 0 and not hooks)
        module(torch.ones(1))
        assert module.calls == hooks * (launch + 1)
        state.before_save()
        saved = through_disk(state, tmp_path)


def test_what_a_check_before_the_first_step_changes_is_observed(tmp_path: Path) -> None:
    trainer, again = Trainer(), Trainer()
    state = ObservedState(lambda: Subjects({"trainer": trainer}), "register")
    with state.checking():
        trainer.count, trainer.buffered = 3, 1.5
        trainer.window.append(2.0)
        vars(trainer)["new"] = [1]
    state.begin()
    state.before_save()
    observing(again, through_disk(state, tmp_path))
    assert (again.count, again.buffered, *again.window, *vars(again)["new"]) == (3, 1.5, 2.0, 1)
    assert {str(each.path) for each in state.capture()} == {
        f"trainer.{each}" for each in ("count", "buffered", "window", "new")
    }


def test_a_lazy_module_is_restored_before_its_first_batch(tmp_path: Path) -> None:
    saved, module = None, torch.nn.Linear(1, 1)
    for _ in range(2):
        trainer: Any = Trainer()
        trainer.lazy = torch.nn.LazyLinear(2)
        state = observing(trainer, saved)
        if saved:
            assert torch.equal(trainer.lazy.weight, module.weight)
        trainer.lazy(torch.ones(1, 3))
        state.before_save()
        saved, module = through_disk(state, tmp_path), trainer.lazy
