"""What the training jobs of all adapters share: their configuration, their trace, and how they come to be killed.

A job is started by ``launch.Server`` as ``job.py CONFIG.json`` in a directory of its own. It appends one JSON line to
``trace.<rank>`` for every micro-step, and one for what it finds at its end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from waiting import until

from launch import free_port

RANK = int(os.environ.get("RANK", "0"))

CONFIG: dict[str, Any] = {}
"""What this job does; each job fills it at its start."""

DEFAULTS: dict[str, Any] = {
    "kill": None,
    "send": None,
    "fail": None,
    "cycles": None,
    "kill_at_operation": None,
    "file_limit": None,
    "file_limit_until": None,
    "hold_writes": None,
    "flip": None,
    "begins": False,
    "on_rank": None,
    "slow": 0.0,
    "own_disk": False,
    "bare": False,
    "keep": None,
    "resume": "auto",
    "loads": None,
    "device": "cpu",
    "grows": False,
}
"""What every job can be told."""


class Growing(torch.nn.Module):
    """Adds to its input what buffers hold that grow in training, saved or not, and one that any first batch fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saved", torch.zeros(0))
        self.register_buffer("unsaved", torch.zeros(0), persistent=False)
        self.register_buffer("first", torch.zeros(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.first.numel():
            self.first = rows.detach().mean(0)
        if self.training:
            self.saved = torch.cat([self.saved, rows.detach().mean(dim=(0, 1)).reshape(1)])[-12:]
            self.unsaved = torch.cat([self.unsaved, self.saved[-1:]])[-8:]
        return rows + self.first + self.saved.sum() - self.unsaved.sum()


def configure(run_directory: str, defaults: dict[str, Any]) -> None:
    """Read the configuration, and arrange for what is to befall the process.

    Args:
        run_directory: where the checkpoints go, relative to the working directory.
        defaults: the options of this job, in addition to :data:`DEFAULTS`.
    """
    CONFIG.update(DEFAULTS | defaults | json.loads(Path(sys.argv[1]).read_text()))
    CONFIG["run_directory"] = run_directory
    if CONFIG["device"] != "cpu":
        os.environ |= {"ACCELERATE_TORCH_DEVICE": CONFIG["device"], "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        torch.use_deterministic_algorithms(True)
    if CONFIG["device"] == "walled":
        use_walled()
    if CONFIG["own_disk"]:
        take_own_disk(run_directory)
    for options in (CONFIG.get("callback"), CONFIG.get("options")):
        if options and isinstance(options.get("verify"), dict):
            options["verify"] = importlib.import_module("resume_adapters").Audit(**options["verify"])
    if CONFIG["flip"] and RANK == 1:
        flip_a_bit(**CONFIG["flip"])
    if CONFIG["on_rank"] not in (None, RANK):
        return
    if CONFIG["kill_at_operation"]:
        kill_at_operation(f"{run_directory}/", *CONFIG["kill_at_operation"])
    if CONFIG["send"] and CONFIG["send"]["event"] in DISK_EVENTS:
        send_at_operation(CONFIG["send"]["event"], CONFIG["send"]["number"])
    if CONFIG["file_limit"]:
        os.environ.pop("JOBS_BYTECODE", None)  # a module's would be cut off, for all who import it later
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (CONFIG["file_limit"], resource.RLIM_INFINITY))


def flip_a_bit(what: str, step: int) -> None:
    """Change a bit on this rank: of a gradient before a step of the optimizer, or of a weight or a moment after it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    seen = 0

    def change(optimizer: Any, *_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            weight = next(each for each in optimizer.param_groups[0]["params"] if each.grad is not None)
            moment = next((each for each in optimizer.state[weight].values() if getattr(each, "ndim", 0)), None)
            changed = {"weights": weight.detach(), "gradients": weight.grad, "moments": moment}[what]
            changed.view(torch.int32).reshape(-1)[:1] ^= 1 << 22

    (register_optimizer_step_pre_hook if what == "gradients" else register_optimizer_step_post_hook)(change)


def begin(optimizer: Any, *, weights: bool = True) -> None:
    """Change what is trained, as some scripts do where an epoch begins, if this job does so."""
    for group in optimizer.param_groups if CONFIG["begins"] else ():
        group["weight_decay"] = 1.5 * group["weight_decay"] + 0.01
        with torch.no_grad():
            for parameter in group["params"] if weights else ():
                parameter.mul_(0.75)
            for state in [optimizer.state.get(each, {}) for each in group["params"]]:
                for moment in [each for each in state.values() if getattr(each, "ndim", 0)]:
                    moment.mul_(0.5)


def take_own_disk(place: str) -> None:
    """Let a path be another directory on each node, as on a disk that it has for itself."""
    node = os.environ.get("GROUP_RANK", "0")
    libc = ctypes.CDLL(None, use_errno=True)
    Path(place).mkdir(parents=True, exist_ok=True)
    Path(f"disk.{node}").mkdir(exist_ok=True)
    recursive, private, bind, new_namespace = 0x4000, 0x40000, 0x1000, 0x20000
    assert libc.unshare(new_namespace) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(None, b"/", None, recursive | private, None) == 0, os.strerror(ctypes.get_errno())
    source, target = os.fsencode(os.path.abspath(f"disk.{node}")), os.fsencode(os.path.abspath(place))
    assert libc.mount(source, target, None, bind, None) == 0, os.strerror(ctypes.get_errno())


def use_walled() -> None:
    """Make the test device the accelerator: of several ranks each has one, and their group takes nothing else."""
    importlib.import_module("device.walled")
    if "WORLD_SIZE" in os.environ:
        importlib.import_module("device.group")
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"walled:{torch.accelerator.current_device_index()}"
        if importlib.util.find_spec("accelerate"):
            accelerate_uses("cpu:gloo,walled:walled")


# ---- Tracing


def generator() -> torch.Generator:
    """Return a generator of the job's own, on its device."""
    return torch.Generator(CONFIG["device"]).manual_seed(5)


def noise(shape: Any, drawn_from: torch.Generator | None) -> torch.Tensor:
    """Return numbers on the CPU, drawn on the device of a generator."""
    device = drawn_from.device if drawn_from is not None else "cpu"
    return torch.rand(shape, generator=drawn_from, device=device).cpu()


def augmented_on_device(x: torch.Tensor) -> torch.Tensor:
    """Return a batch with noise from the device's own generator, where the job trains on one."""
    return x if CONFIG["device"] == "cpu" else x + 0.1 * torch.randn_like(x)


def digest(*tensors: torch.Tensor) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def trace(**line: Any) -> None:
    if CONFIG["file_limit"] and line.get("step") == CONFIG["file_limit_until"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with open(f"trace.{RANK}", "a") as file:
        file.write(json.dumps(line) + "\n")


def draws() -> list[float]:
    """Return the next number of each generator: equal only where all their states are."""
    on_device = [] if CONFIG["device"] == "cpu" else [torch.rand(1, device=CONFIG["device"]).item()]
    return [random.random(), float(np.random.random()), torch.rand(1).item(), *on_device]


# ---- Dying


def settle() -> None:
    """Wait for the commits, prunes and copies in flight, so that what a kill leaves does not depend on the load."""
    from resume_adapters.core.saving.engine import SaveEngine
    from resume_adapters.core.tiers.mirrors import TierMirror

    found = gc.get_objects()
    engines = [each for each in found if issubclass(type(each), SaveEngine)]
    assert engines or not has_running_run(), "this process leads a run, and no engine that commits is found in it"
    for engine in engines:
        for each in engine.in_flight:
            each.wait()
    mirrors = [each for each in found if issubclass(type(each), TierMirror)]
    # A thread ends by itself where another rank has died.
    until(lambda: not any(each.state.behind and each._thread.is_alive() for each in mirrors), lambda: mirrors[0].state)


def has_running_run() -> bool:
    """Return whether this process has written that its run is running."""
    file = Path(CONFIG["run_directory"]) / ".resume" / "status.json"
    status = json.loads(file.read_bytes()) if file.exists() else {}
    return status.get("state") == "running" and status["pid"] == os.getpid()


def hold_writes() -> None:
    """Let what is copied from now on not be written: the thread that commits waits until this process is killed."""
    from resume_adapters.core.saving.copied import CopiedSave

    settle()  # what it has been given already
    CopiedSave.write = lambda *_: threading.Event().wait()  # type: ignore[assignment, method-assign, return-value]


class Broken(Exception):
    """The script of the job has an error here."""


_UNTIL_EXIT: list[Any] = []


def keep_process_group() -> None:
    """Hold the default process group until the process exits, also where the job destroys it.

    DDP would drop the last reference otherwise: it joins gloo's thread while it holds the interpreter lock, for which
    that thread may wait, and the process hangs at its end.
    """
    if torch.distributed.is_initialized():
        _UNTIL_EXIT.append(torch.distributed.group.WORLD)


def event(name: str, step: int) -> None:
    """Say that the job has come here; kill, signal or fail this process where the test wants it here, once."""
    if CONFIG["fail"] == {"event": name, "step": step}:
        CONFIG["fail"] = None
        raise Broken(f"{name} of step {step}")
    if CONFIG["hold_writes"] == {"event": name, "step": step}:
        hold_writes()
    for key in ("kill", "send"):
        wanted = CONFIG[key]
        here = wanted and (wanted["event"], wanted["step"] + RANK * wanted.get("apart", 0)) == (name, step)
        if here and wanted.get("rank") in (None, RANK):
            CONFIG[key] = None
            if not wanted.get("within_a_commit"):
                settle()
            os.kill(os.getpid(), getattr(signal, wanted.get("send", "SIGKILL" if key == "kill" else "SIGTERM")))


DISK_EVENTS = {"save": "pending", "commit": "manifest.json"}
"""The file whose renaming into place, with or without its directory, stands for each of these moments."""


def send_at_operation(moment: str, number: int) -> None:
    """Signal this process in the middle of its nth save or commit; only rank zero does these operations."""
    seen = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        written = str(arguments[0]) if event == "open" else ""
        if event == "os.rename":
            written = located(arguments[1], arguments[3])
        if CONFIG["run_directory"] not in written or not written.endswith(f"/{DISK_EVENTS[moment]}"):
            return
        if event == "open" and arguments[1] != "w":
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), getattr(signal, CONFIG["send"].get("send", "SIGTERM")))

    sys.addaudithook(audit)


def located(path: Any, directory: int) -> str:
    """Return a path that may be relative to the descriptor of a directory."""
    return str(path) if directory < 0 else f"{os.readlink(f'/proc/self/fd/{directory}')}/{path}"


CHANGING = {"os.mkdir": 0, "os.rename": 0, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "open": 0}
"""The audit events of what changes a directory, and which of their arguments is the path."""

CHANGED_IN = {"os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.symlink": 2}
"""Which of their arguments is the descriptor that the path is relative to."""


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """Return what an operation is done to."""
    path = arguments[CHANGING[event]]
    return located(path, arguments[CHANGED_IN[event]]) if event in CHANGED_IN else str(path)


def kill_at_operation(within: str, event: str, path: str, number: int, by: str = "SIGKILL") -> None:
    """Kill this process, or freeze it, before it does something to a path in a directory for the nth time.

    Args:
        within: the directory, with a slash at its end.
        event: what it does, as the audit event is called.
        path: a regular expression of the path in that directory.
        number: counted from 1.
        by: the signal.
    """
    from resume_adapters.core.run import monitor

    if by == "SIGSTOP":  # else it may be frozen between its look whose the run is and its write of the live status
        monitor._PERIOD = 3600.0
    pattern, seen = re.compile(f"(.*/)?{re.escape(within)}{path}"), 0
    assert event in CHANGING

    def audit(found: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if found != event or not pattern.fullmatch(_path(event, arguments)):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            return
        if threading.current_thread().name == monitor.THREAD_NAME:
            return  # when it writes the live status is the clock's affair, and the others must be counted alike
        seen += 1
        if seen == number:
            signal.pthread_kill(threading.get_ident(), getattr(signal, by))  # to this thread, which goes no further

    sys.addaudithook(audit)


# ---- What jobs train with


def deepspeed_on_cpu() -> None:
    """Let DeepSpeed train on the CPU, uncompiled: with gloo alone, in fp16 too, and on one rank without a launcher."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})


def engine_facts(engine: Any) -> dict[str, Any]:
    """Return the samples of an optimizer step of a DeepSpeed engine, on all ranks together, and its loss scale."""
    scaler = getattr(engine.optimizer, "loss_scale_config", engine.optimizer)
    return {"batch": engine.train_batch_size(), "scale": float(getattr(scaler, "cur_scale", 0.0))}


def whole_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights and the buffers of a module whose weights ZeRO 3 has partitioned."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


def lightning_deepspeed_on_cpu(**options: Any) -> Any:
    """Return Lightning's DeepSpeedStrategy, persuaded to train without a GPU."""
    import deepspeed
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import deepspeed as strategies

    deepspeed_on_cpu()
    strategies.CUDAAccelerator = pl.accelerators.CPUAccelerator
    strategies._validate_device_index_selection = lambda devices: None
    initialize = deepspeed.initialize
    index = int(os.environ["LOCAL_RANK"])  # a CPU has none, and DeepSpeed wants one
    deepspeed.initialize = lambda args, **rest: initialize(args=argparse.Namespace(device_rank=index), **rest)
    return strategies.DeepSpeedStrategy(**options)


def accelerate_shards_on_cpu() -> None:
    """Lead Accelerate, which shards on accelerators alone, to do it here, over the dimensions of ``parallel``."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if CONFIG.get("parallel"):
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in CONFIG["parallel"].items()}
    if "RANK" not in os.environ:  # one process, that is led to it too
        os.environ["LOCAL_RANK"] = "0"
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    accelerate_uses("gloo")


def accelerate_uses(backend: str) -> None:
    """Lead Accelerate, which knows a list of accelerators, to this backend of several ranks."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    states: Any = PartialState
    states._prepare_backend = lambda *_, **__: (backend, DistributedType.MULTI_GPU)


def dump_loaded(model: Any, optimizer: Any) -> None:
    """Write what is trained, gathered from its shards, to ``loaded.pt``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    found = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if RANK == 0 and not os.path.exists("loaded.pt"):  # what is trained later is of no interest
        torch.save(found, "loaded.pt")


class Ema:
    """An exponential moving average of the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for shadow, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            shadow.lerp_(parameter.detach().to(shadow.device), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = list(state["shadow"]), state["updates"]


def policy() -> Any:
    """Return the retention policy that the configuration names, as a user would write it."""
    import resume_adapters

    return eval(CONFIG["keep"], vars(resume_adapters).copy()) if CONFIG["keep"] else None


def resume_option() -> Any:
    """Return what a run is told to resume from, as a user would write it."""
    from resume_adapters import Fork

    return Fork(**CONFIG["resume"]) if isinstance(CONFIG["resume"], dict) else CONFIG["resume"]


def load_by_hand(model: torch.nn.Module, optimizer: Any) -> None:
    """Load what a fork takes of a checkpoint of any framework, as a script does that knows nothing of this package."""
    if CONFIG["loads"] is None:
        return
    path, take = Path(CONFIG["loads"]["path"]), CONFIG["loads"]["take"]
    one = next((each for each in (path, path / "training.pt", path / "fabric.ckpt") if each.is_file()), None)
    if one is not None:
        content = torch.load(one, weights_only=True)
        weights = content["state_dict" if one == path else "model"]
        state = content["optimizer_states"][0] if one == path else content["optimizer"]
    else:
        weights = load_file(path / "model.safetensors")
        file = next(each for each in (path / "optimizer.pt", path / "optimizer.bin") if each.is_file())
        state = torch.load(file, weights_only=True)
    if hasattr(model, "peft_config"):
        plain = {
            name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in model.state_dict()
        }
        weights = {plain[name]: each for name, each in weights.items()}
    model.load_state_dict(weights, strict=False)  # of tied weights one is saved
    if take == "weights+optimizer":
        optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})
