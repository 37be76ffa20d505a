"""Blocks that fail at given places: what the jobs of the recovery tests share, and how a test starts and judges them.

A job runs its cases one after the other in the same processes; the first has no fault.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from device.compiled import require_test_device
from resume_adapters.core.recovery import block

from launch import LONG, Server

CASES = {
    "whole": [],
    "in turn": [["forward", 1, 3], ["data", 0, 4], ["backward", 1, 9], ["evaluation", 0, 8]],
    "updating": [["before", 1, 6], ["optimizer", 0, 11]],
    "clipped": [["clipped", 1, 6], ["hook", 1, 9], ["clipped", 0, 11]],
    "at once": [["forward", 0, 7], ["backward", 1, 7]],
    "given up": [["forward", 1, 7], ["forward", 1, 7]],
}
"""Faults by the name of a case: the place, the rank, and the optimizer steps done. A block that is given up is begun
once more, as by another launch."""


ON_DEVICE = {"DEVICE": "walled"}
"""The setting of a job whose ranks each have a test device."""


# ---- In a test


@contextlib.contextmanager
def agent_store() -> Iterator[dict[str, str]]:
    """Give the environment of ranks that torchrun has started, with the store that it keeps."""
    from torch._C._distributed_c10d import TCPStore

    kept = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(kept.port),
    }


def results(
    server: Server,
    job: Path,
    directory: Path,
    ranks: int,
    cases: Mapping[str, Any],
    timeout: float = LONG,
    settings: Mapping[str, str] = MappingProxyType({}),
    nodes: int = 1,
) -> list[dict[str, Any]]:
    """Run the cases on some ranks, and return what each rank found. A job reads its settings in its environment.

    On several nodes it has called :func:`use_memory_of_node`.
    """
    if "DEVICE" in settings:
        require_test_device()
    with agent_store() as environment:
        env = {**environment, **settings, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // nodes)}
        server.start(job, [json.dumps(cases)], directory, ranks, env, nodes).wait(timeout).require_success()
    return [json.loads((directory / f"result.{rank}").read_text()) for rank in range(ranks)]


def require_undisturbed(found: dict[str, Any]) -> dict[str, list[str | None]]:
    """Assert that each case ended as the first one; return how its attempts went on."""
    whole = found["whole"]
    for name, other in found.items():
        assert "error" not in other, (name, other)
        differing = [key for key in whole["end"] if whole["end"][key] != other["end"].get(key)]
        assert not differing, (name, differing, other["end"])
        for key in whole["steps"].keys() | other["steps"].keys():
            assert other["steps"].get(key) == whole["steps"].get(key), (name, key, other["levels"])
    return {name: each["levels"] for name, each in found.items()}


def failures_change_nothing(
    server: Server,
    job: Path,
    directory: Path,
    ranks: int,
    settings: Mapping[str, str] = MappingProxyType({}),
    *,
    replicated: bool = True,
) -> None:
    """Run all cases of a trainer that evaluates, and assert that each ended as if nothing had failed.

    Where the weights are replicated, a rank that has ended the step goes back to it with those of the one that failed.
    """
    for found in results(server, job, directory, ranks, CASES, settings=settings):
        levels = require_undisturbed(found)
        assert levels["in turn"] == [None, "memory", "memory", "memory", "memory"]
        assert levels["updating"] == [None, "disk", "disk"]
        assert levels["clipped"] == [None, "memory", "memory", "memory"] or not replicated
        assert set(levels["at once"][1:]) == {"memory"}  # the later of the two faults may come in the second attempt
        assert levels["given up"] == [None, "memory", None]
    require_last_step(directory)


def require_last_step(directory: Path) -> None:
    """Assert that the block that was given up has committed its last whole step, and the next one went on from it."""
    (file,) = Path(directory, "given-up").rglob("journal.jsonl")
    journal = [json.loads(line) for line in file.read_text().splitlines()]
    assert 7 in [each["step"] for each in journal if each["event"] == "commit"]
    assert [each["step"] for each in journal if each["event"] == "resume"][-1] == 7


def failures_change_nothing_with_deepspeed(server: Server, job: Path, directory: Path, stage: str) -> None:
    """Run some cases with ZeRO on two ranks, and assert that each ended as if nothing had failed."""
    settings, names = {"ZERO": stage, "DS_ACCELERATOR": "cpu"}, ("whole", "in turn", "updating", "given up")
    for found in results(server, job, directory, 2, {name: CASES[name] for name in names}, settings=settings):
        levels = require_undisturbed(found)
        assert levels["in turn"] == [None, "memory", "memory", "memory", "memory"]
        assert levels["updating"] == [None, "disk", "disk"]
        assert levels["given up"] == [None, "memory", None]
    require_last_step(directory)


def a_failure_in_a_save_changes_nothing(server: Server, job: Path, directory: Path) -> None:
    """Fail within the framework's own save on one of two ranks, and assert that the run ended as if it had not."""
    for found in results(server, job, directory, 2, {"whole": [], "saving": [["save", 0, 5]]}):
        assert require_undisturbed(found)["saving"] == [None, "memory"]


def failures_on_two_nodes_change_nothing(
    server: Server, job: Path, directory: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Fail on each of two nodes in turn, of one rank each, and assert that nothing of it came from the disk."""
    cases = {"whole": [], "in turn": [["forward", 1, 3], ["backward", 0, 9]]}
    for found in results(server, job, directory, 2, cases, settings=settings, nodes=2):
        assert require_undisturbed(found)["in turn"] == [None, "memory", "memory"]
    assert not [each for node in range(2) for each in (directory / f"memory-of-node-{node}").iterdir()]


# ---- Where processes die


class Agent:
    """Starts ranks as torchrun does: where one dies, it asks the others to end and starts all again.

    Args:
        server: forks the ranks.
        job: their script.
        arguments: what the script is given.
        directory: where they run.
        ranks: how many.
        restarts: how often it starts them again.
        settings: what else is in their environment.
    """

    def __init__(
        self,
        server: Server,
        job: Path,
        arguments: list[str],
        directory: Path,
        ranks: int,
        restarts: int = 4,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.outputs: list[str] = []
        with agent_store() as environment:
            env = {**environment, **settings, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            for restart in range(restarts + 1):
                of_start = {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
                outcome = server.start(job, arguments, directory, ranks, env | of_start).wait_as_agent()
                self.outputs.append(outcome.output)
                self.statuses = outcome.statuses
                if set(outcome.statuses) == {0}:
                    break
            self.left_in_memory = list(_in_memory(environment))


def _in_memory(environment: dict[str, str]) -> Iterator[Path]:
    """Yield what the first block of a launch has left in memory."""
    from torch._C._distributed_c10d import TCPStore

    from resume_adapters.core.recovery.memory import MemoryDirectory
    from resume_adapters.core.recovery.options import Launch
    from resume_adapters.core.storage.local import LocalStorage

    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), None, False)
    launch = Launch(name=f"{environment['TORCHELASTIC_RUN_ID']}/0")
    yield from MemoryDirectory(LocalStorage(), launch, store.get("resume_adapters/launch").decode()).path.rglob("*")


def after_kills(
    server: Server,
    job: Path,
    directory: Path,
    ranks: int,
    faults: Any,
    restarts: int = 6,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run one case whose faults kill the process, and return what each rank found, with the levels of all starts."""
    agent = Agent(server, job, [json.dumps({"killed": faults})], directory, ranks, restarts, settings)
    assert set(agent.statuses) == {0}, "\n".join(agent.outputs)[-9000:]
    assert not agent.left_in_memory
    found = [json.loads((directory / f"result.{rank}").read_text())["killed"] for rank in range(ranks)]
    starts = [[json.loads(line) for line in (directory / f"starts.{rank}").open()] for rank in range(ranks)]
    return [{**each, "levels": levels} for each, levels in zip(found, starts, strict=True)]


KILLS = [["forward", 1, 3], ["data", 0, 7], ["save", 0, 10], ["optimizer", 1, 12]]
"""Where processes die."""


def deaths_change_nothing(
    server: Server, job: Path, directory: Path, ranks: int = 2, settings: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Kill ranks at several places, each in a start of its own, and assert that the run ended as if nobody had died.

    The others end, the launcher starts all again, and they resume from the newest checkpoint.
    """
    (directory / "whole").mkdir(parents=True)
    faults = [[*each, "kill"] for each in KILLS]
    whole = results(server, job, directory / "whole", ranks, {"whole": []}, settings=settings)
    after = after_kills(server, job, directory, ranks, faults, settings=settings)
    for before, found in zip(whole, after, strict=True):
        taken = require_undisturbed({"whole": before["whole"], "killed": found})["killed"]
        died = len(list(directory.glob("killed.*")))
        assert died > 1 and taken == [None] * (1 + died)


# ---- In a job

RANK = int(os.environ.get("RANK", "0"))


def use_memory_of_node() -> None:
    """Let the ranks of each node have a memory of their own, which is a directory beside those of the others.

    On one node, where the environment has ``MEMORY``.
    """
    if "MEMORY" in os.environ or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        memory = Path(f"memory-of-node-{os.environ['GROUP_RANK']}").absolute()
        memory.mkdir(exist_ok=True)
        block.MemoryDirectory = functools.partial(block.MemoryDirectory, root=memory)  # type: ignore[misc,assignment]


class Faults:
    """Faults that are raised once each; ``step`` is the number of optimizer steps done.

    One that kills the process has ``"kill"`` as a fourth entry, and has died once where another process finds its mark.
    One with ``"hang"`` waits for ever. One with ``"once"``, for workers of loaders, is raised where there is no mark.
    """

    def __init__(self) -> None:
        self.left: list[tuple[Any, ...]] = []
        self.step: Callable[[], int] = lambda: 0

    def at(self, place: str) -> None:
        fault = (place, RANK, self.step())
        if (*fault, "kill") in self.left and _is_first(f"killed.{place}.{RANK}.{fault[2]}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (*fault, "once") in self.left and _is_first(f"raised.{place}.{RANK}.{fault[2]}"):
            raise RuntimeError(f"{place} at {fault[2]}")
        if (*fault, "hang") in self.left:
            self.left.remove((*fault, "hang"))
            time.sleep(600)
        if fault in self.left:
            self.left.remove(fault)
            raise RuntimeError(f"{place} at {fault[2]}")


def _is_first(mark: str) -> bool:
    """Return whether no process before this one has left a mark."""
    with contextlib.suppress(FileExistsError):
        Path(mark).touch(exist_ok=False)
        return True
    return False


FAULTS = Faults()


class Data(torch.utils.data.Dataset[Any]):
    """Samples that draw random numbers."""

    def __init__(self, size: int = 64, place: str = "data") -> None:
        self.size, self.place = size, place

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        FAULTS.at(self.place)
        generator = torch.Generator().manual_seed(index)
        noise = 0.1 * torch.randn(16) if self.place == "data" else 0
        return torch.randn(16, generator=generator) + noise, torch.randint(0, 4, (), generator=generator)


class Net(nn.Module):
    """A model with buffers of its own and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        if x.requires_grad:
            FAULTS.at("forward")
            x.register_hook(lambda grad: FAULTS.at("backward"))
        return self.last(x)


class Optimizer(torch.optim.AdamW):
    """Fails in a hook, and before and after it has changed the weights."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.register_step_pre_hook(lambda *_: FAULTS.at("hook"))

    def step(self, closure: Any = None) -> Any:
        def run() -> Any:
            found = None if closure is None else closure()
            FAULTS.at("before")
            return found

        if closure is None:
            run()
        found = super().step(None if closure is None else run)
        FAULTS.at("optimizer")
        return found


class Steps(dict[str, Any]):
    """What each step did, also in the processes before this one."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> None:
        """Add what the processes before this one have done."""
        self.file.touch()
        self.update(json.loads(line) for line in self.file.open())

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        with self.file.open("a") as file:
            file.write(json.dumps([name, value]) + "\n")


def ending(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return digests of all that a training leaves behind."""
    tensors = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    tensors["random"] = torch.get_rng_state()
    here = {name: each.to_local() if hasattr(each, "placements") else each for name, each in tensors.items()}
    read = {name: each.detach().cpu().contiguous().flatten().view(torch.uint8) for name, each in here.items()}
    return {name: hashlib.sha256(each.numpy().tobytes()).hexdigest()[:12] for name, each in read.items()}


def run_cases(
    train: Callable[[Any, Path, dict[str, Any]], dict[str, str]], cases: dict[str, Any], **options: Any
) -> None:
    """Run each case as a block in its own directory, and write what this rank found.

    Args:
        train: the body of the block: trains in a directory, adds to a dict what each step did, and returns its end.
        cases: the faults of each.
        options: of the block.
    """
    import torch.distributed as dist

    from resume_adapters.core.recovery.attempt import reset_process
    from resume_adapters.recovery import Attempt, restartable

    use_memory_of_node()
    found: dict[str, Any] = {}
    for name, faults in cases.items():
        FAULTS.left = [tuple(each) for each in faults]
        levels: list[str | None] = []
        steps = Steps(Path(f"steps.{RANK}.{name.replace(' ', '-')}"))

        @restartable(**options)
        def main(attempt: Attempt, name: str, levels: list[str | None], steps: Steps) -> dict[str, str]:
            levels.append(attempt.level and attempt.level.value)
            steps.read()
            with Path(f"starts.{RANK}").open("a") as file:
                file.write(json.dumps(levels[-1]) + "\n")
            return train(attempt, Path(name.replace(" ", "-")), steps)

        for again in (name == "given up", False):
            try:
                found[name] = {"end": main(name, levels, steps)}
            except Exception as error:  # of any kind: the test looks at it
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            if dist.is_initialized():
                dist.destroy_process_group()
            reset_process()
            if not again:
                break
        found[name] |= {"levels": levels, "steps": steps}
    Path(f"result.{RANK}").write_text(json.dumps(found))
