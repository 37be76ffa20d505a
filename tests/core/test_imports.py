"""Who may import whom, and who may touch what: the rules of the design, each as a test."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import resume_adapters

PACKAGE = Path(resume_adapters.__file__).parent
CORE = sorted((PACKAGE / "core").rglob("*.py"))
ADAPTERS = {
    "hf": {"transformers", "accelerate", "peft"},
    "lightning": {"lightning", "pytorch_lightning"},
    "accelerate": {"accelerate"},
    "deepspeed": {"deepspeed"},
    "fabric": {"lightning"},
}
"""The frameworks that each adapter may import. The Trainer trains through accelerate, and peft saves its adapters."""
FRAMEWORKS = {
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "datasets",
}
TRACKERS = {"mlflow", "tensorboard", "wandb"}
"""They train nothing, and an adapter leaves them to ``_trackers``."""
PURE = (
    "errors",
    "core.checkpoint.manifest",
    "core.checkpoint.retention",
    "core.state.keys",
    "core.dataloader.cursor",
    "core.saving.cadence",
)
WRITES = {
    "copy", "copy2", "copyfile", "copytree", "fdopen", "fsync", "hardlink_to", "link", "makedirs", "mkdir", "mkstemp",
    "mkdtemp", "move", "open", "remove", "removedirs", "rename", "renames", "rmdir", "rmtree", "symlink",
    "symlink_to", "touch", "truncate", "unlink", "utime", "write_bytes", "write_text", "save_file",
}  # fmt: skip
"""Calls that open a file or change a disk, under whatever module they go."""


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all that a file is made of."""
    return tuple(ast.walk(tree(file)))


@functools.cache
def imported(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere, by full name."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} has a relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(file)}


def calls(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield each call of a file: the receiver as written, the name called, the line."""
    for node in nodes(file):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield ast.unparse(node.func.value), node.func.attr, node.lineno
            elif isinstance(node.func, ast.Name):
                yield "", node.func.id, node.lineno


@pytest.mark.parametrize("file", CORE, ids=lambda file: module_name(file))
def test_the_core_names_no_framework(file: Path) -> None:
    allowed = {
        "torch",
        "numpy",
        "safetensors",
        "msgspec",
        "xxhash",
        "psutil",
        "packaging",
        "obstore",
        "huggingface_hub",
        "resume_adapters",
    } | sys.stdlib_module_names
    assert roots(file) <= allowed


def test_the_core_imports_no_framework_when_it_runs_and_changes_nothing_when_it_is_imported(tmp_path: Path) -> None:
    """Every module of the core is imported and a checkpoint saved while importing a framework is an error.

    The jobs of the other tests find the core imported, and one without the package must train as if it was not.
    """
    program = f"""
import logging, os, random, signal, sys, importlib, threading
import numpy, torch
import torch.utils.data, torch.distributed
def outline():
    return [
        random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        [signal.getsignal(number) for number in signal.valid_signals()], threading.enumerate(), dict(os.environ),
        sys.excepthook, logging.root.handlers, logging.root.level, torch.get_num_threads(),
        *[dict(vars(each)) for each in (torch.load, torch.save, torch.optim.Optimizer, torch.nn.Module,
                                        torch.utils.data.DataLoader, torch.utils.data.RandomSampler)],
        torch.load, torch.save,
    ]
before = outline()
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(FRAMEWORKS)!r}:
            raise AssertionError(f"the core imports {{name}}")
sys.meta_path.insert(0, Refuse())
for name in {sorted(name for name in ALL if name.startswith("core"))!r}:
    importlib.import_module("resume_adapters." + name)
assert outline() == before, "importing the core changes something"
import miniature, pathlib
miniature.Miniature(pathlib.Path({str(tmp_path)!r})).commit(1)
assert miniature.Miniature(pathlib.Path({str(tmp_path)!r})).step == 1
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=240)


LEVELS = (
    {"errors", "_version"},
    {"core.choices", "core.devices", "core.ranks", "core.log", "core.requirements", "core.patching", "core.state"},
    {"core.observed"},
    {"core.storage", "core.stop", "core.dataloader", "unedited"},
    {"core.checkpoint"},
    {"core.trace"},
    {"core.run_directory"},
    {"core.tiers"},
    {"core.saving"},
    {"core.recovery"},
    {"core.run"},
    {"core.session"},
    {"core.loop"},
    {"integrations"},
    {*ADAPTERS, "cli", "data", "loop", "recovery"},
    {"axolotl"},
)
"""Who may import whom: a package imports from its own level and from those before it, never upwards."""

OUTSIDE = {"", "core", "entry.resume_adapters_entry"}
"""What belongs to no level: the package root and the core's docstring; what stands alone on the search path."""


def module_name(file: Path) -> str:
    """Return the dotted name of a file within the package; empty for the package root."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


# A wheel also brings the examples, which are scripts: the demo trains them.
ALL = {module_name(file): file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE / "examples"}


def level(name: str) -> int:
    return next(number for number, names in enumerate(LEVELS) for each in names if f"{name}.".startswith(f"{each}."))


@functools.cache
def ours(file: Path) -> set[str]:
    """Return the modules of this package that a file imports, under TYPE_CHECKING or in a function too."""
    names = {name.removeprefix("resume_adapters").lstrip(".") for name in imported(file) if roots_of(name)}
    found = {name if name in ALL else name.rpartition(".")[0] for name in names}
    # `from package import module` names both: of the package, only its docstring is meant.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def roots_of(name: str) -> bool:
    return name == "resume_adapters" or name.startswith("resume_adapters.")


@pytest.mark.parametrize("name", sorted(ALL.keys() - OUTSIDE))
def test_a_module_imports_from_its_level_or_from_below(name: str) -> None:
    for other in ours(ALL[name]):
        assert other not in OUTSIDE, f"{name} imports the root"
        assert level(other) <= level(name), f"{name} imports {other}, which is above it"
        if level(name) == level("hf"):
            assert other.split(".")[0] == name.split(".")[0] or level(other) < level(name), f"{name} imports {other}"


@pytest.mark.parametrize("package", sorted({file.parent.name for file in CORE} - {"core"}))
def test_a_package_says_in_which_order_to_read_its_modules(package: str) -> None:
    directory = PACKAGE / "core" / package
    named = set(re.findall(r"``(\w+)(?:\.py)?``", ast.get_docstring(tree(directory / "__init__.py")) or ""))
    assert {file.stem for file in directory.glob("*.py")} - {"__init__"} <= named


def test_the_map_of_the_core_names_files_that_exist() -> None:
    paths = re.findall(r"``([\w/]+\.py)``", ast.get_docstring(tree(PACKAGE / "core" / "__init__.py")) or "")
    assert len(paths) > len(LEVELS)
    assert [path for path in paths if not any((each / path).is_file() for each in (PACKAGE, PACKAGE / "core"))] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: ours(file) & ALL.keys() for name, file in ALL.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_import_from_this_package_has_an_alias(name: str) -> None:
    """An alias hides a clash of names."""
    for node in ast.walk(tree(ALL[name])):
        if isinstance(node, ast.ImportFrom) and roots_of(node.module or ""):
            assert not any(alias.asname for alias in node.names), ast.unparse(node)


def test_what_adapters_share_imports_no_framework_but_its_own() -> None:
    """An engine may be driven by a loop or by another framework, and any of them logs to a tracker."""
    for name, file in ALL.items():
        if name.startswith("integrations.deepspeed_engine"):
            assert not roots(file) & (FRAMEWORKS - {"deepspeed"}), name
        elif name.startswith("integrations.lightning_files"):
            assert not roots(file) & (FRAMEWORKS - {"lightning"}), name
        elif name.startswith("integrations.trackers"):
            assert roots(file) <= TRACKERS | {"torch", "resume_adapters"} | sys.stdlib_module_names, name


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_imports_its_framework_only(adapter: str) -> None:
    for file in (PACKAGE / adapter).glob("*.py"):
        assert not roots(file) & (FRAMEWORKS | TRACKERS) - ADAPTERS[adapter], file.name


def test_importing_the_package_imports_neither_torch_nor_a_framework() -> None:
    heavy = sorted(FRAMEWORKS | {"torch", "numpy", "safetensors", "msgspec", "psutil", "packaging", "typer", "rich"})
    program = f"import sys, resume_adapters; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == []


def test_importing_the_package_takes_less_than_150_milliseconds() -> None:
    """Processor time, the median of several interpreters: the clock on the wall also measures the neighbours."""
    program = "import time; began = time.process_time(); import resume_adapters; print(time.process_time() - began)"

    def seconds() -> float:
        return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)

    measured = [seconds() for _ in range(6)][1:]
    assert statistics.median(measured) < 0.15, measured


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_knows_no_clock_no_disk_and_no_environment(name: str) -> None:
    file = ALL[name]
    forbidden = {"os", "time", "io", "shutil", "tempfile", "random", "socket", "subprocess", "sys", "torch", "glob"}
    assert not roots(file) & forbidden
    assert not {"datetime.datetime", "datetime.date"} & imported(file)
    of_paths = {each for each in imported(file) if each.startswith("pathlib.")}
    # An error carries a Path as a value.
    assert of_paths <= ({"pathlib.Path"} if name == "errors" else {"pathlib.PurePosixPath"})
    assert ours(file) <= {"errors"}, "what a pure module imports is pure"
    disk = {*WRITES, "read", "read_bytes", "read_text", "stat", "exists", "is_file", "is_dir", "resolve", "input"}
    assert not {called for _, called, _ in calls(file)} & disk


@pytest.mark.parametrize("file", CORE, ids=lambda file: module_name(file))
def test_only_storage_changes_a_disk(file: Path) -> None:
    """No other module of the core opens a file, or creates, changes, moves or removes one, but through a Storage."""
    if file.parent.name == "storage":
        pytest.skip("storage does")
    through = ("storage", "self.storage", "pending", "self.run", "self._run", "self._session")
    offending = [
        f"line {line}: {receiver}.{called}"
        for receiver, called, line in calls(file)
        if called in WRITES
        and receiver not in through
        # A copy of a dict or the removal of a hook is no matter of files; those of files are reached through a module.
        and not (called in ("copy", "move", "remove") and receiver not in ("shutil", "os"))
    ]
    offending += [
        f"line {line}: os.replace" for receiver, called, line in calls(file) if (receiver, called) == ("os", "replace")
    ]
    assert not offending
    assert not roots(file) & {"shutil", "tempfile", "io"}


def test_one_module_knows_devices() -> None:
    """What an accelerator is called, and what its module has, is asked in one place: there is more than CUDA."""
    asking = re.compile(r"torch\.(accelerator|cuda|get_device_module|hpu|mps|mtia|npu|xpu)\b")
    for name, file in ALL.items():
        named = {ast.unparse(node) for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)}
        asked = {match[0] for each in named | imported(file) if (match := asking.match(each))}
        assert not asked or name == "core.devices", f"{name} asks {sorted(asked)}: let core.devices do it"


READS = {
    "access", "exists", "getsize", "glob", "is_dir", "is_file", "is_mount", "is_symlink", "isdir", "isfile", "islink",
    "iterdir", "lexists", "listdir", "lstat", "open", "read_bytes", "read_text", "readlink", "realpath", "rglob",
    "samefile", "scandir", "stat", "walk",
}  # fmt: skip
"""Calls that look at a disk, under whatever module they go."""


@pytest.mark.parametrize("file", CORE, ids=lambda file: module_name(file))
def test_only_storage_looks_at_a_disk(file: Path) -> None:
    """No other module of the core reads a file, a directory or a link but through a Storage.

    ``torch.load``, ``load_file``, ``safe_open`` and ``zipfile`` are libraries that open files themselves.
    """
    if file.parent.name == "storage":
        pytest.skip("storage does")
    through = (
        "storage",
        "self.storage",
        "self._storage",
        "pending",
        "pending.storage",
        "self.run",
        "self._run",
        "self._session",
    )
    offending = [
        f"line {line}: {receiver}.{called}"
        for receiver, called, line in calls(file)
        if called in READS and receiver not in (*through, "ast")
    ]
    assert not offending


@functools.cache
def callers_by_name() -> dict[str, set[str]]:
    """Return the functions of the core that call something, as module.function, by the name that they call."""
    found: dict[str, set[str]] = {}
    for file in CORE:
        for scope in nodes(file):
            if isinstance(scope, ast.FunctionDef):
                for node in ast.walk(scope):
                    called = node.func if isinstance(node, ast.Call) else None
                    for name in (getattr(called, "attr", None), getattr(called, "id", None)):
                        if name is not None:
                            found.setdefault(name, set()).add(f"{file.stem}.{scope.name}")
    return found


def callers(function: str) -> set[str]:
    """Return the functions of the core in which a name is called, as module.function."""
    return callers_by_name().get(function, set())


def test_only_commit_writes_the_marker() -> None:
    """The marker's path is made in one place, and one function writes there, after the fence."""
    for file in CORE:
        writes = [
            ast.unparse(node)
            for node in nodes(file)
            if isinstance(node, ast.Call)
            and (getattr(node.func, "attr", None) or getattr(node.func, "id", ""))
            in ("write", "write_atomically", "replace")
            and "MANIFEST" in ast.unparse(node)
        ]
        assert len(writes) == (1 if file.stem == "commit" else 0), (file.name, writes)
    spelled = {file.stem for file in CORE if '"manifest.json"' in file.read_text()}
    assert spelled == {"layout"}


def test_only_pruning_removes_a_committed_checkpoint() -> None:
    """What removes a checkpoint is called for uncommitted ones by commit and sweep, for committed ones by prune."""
    assert callers("delete") == {
        "commit._free_name",
        "commit._abandon",
        "upkeep.sweep",
        "prune.prune",
        "upkeep.remove",
        "memory._remove",  # of the copies in memory
        "object_store.discard",  # objects of a tier, by the client's function of that name
    }
    assert callers("delete_all") == {"memory.clear", "memory.give_back"}
    assert callers("delete_leftover") == {"upkeep.sweep"}
    assert callers("delete_begun") == {"commit._abandon", "commit._delete_emptied"}
    assert callers("remove_tree") == {
        "remove._remove",
        "remove.delete_all",  # of the copies in memory
        "remove.delete_begun",
        "remove.delete_leftover",
        "base.remove_tree",
    }
    assert callers("remove_directory") == set(), "remove_tree hands it on"
    assert callers("remove_file") <= {
        "upkeep.prepare",
        "upkeep._complete",
        "upkeep._remove_temporary_files",
        "commit.complete",
        "control.withdraw",
        "status.remove",
        "discovery._probe",
        "discovery.take_away",
        "base.find_disk_error",
    }
