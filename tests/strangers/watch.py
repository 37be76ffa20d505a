"""Run a script that knows nothing of this: ``watch.py SCRIPT``, in the working directory.

What its trainer ended with is written to ``end.RANK.json``. ``STRANGERS_CALLBACK`` adds the one line before each
``train()``; ``STRANGERS_KILL=N`` kills the process when its trainer begins the step after step N.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import CallbackHandler

from ledger import digest, random_state

TRAIN = re.compile(r"^(\s*)(.*?)(\w+)\.train\(", re.MULTILINE)
ONE_LINE = r"\1from resume_adapters.hf import ResumeCallback; \3.add_callback(ResumeCallback())" + "\n"
TIMED = ("runtime", "per_second", "time")

trained: list[Trainer] = []


def watch() -> None:
    """Keep each trainer that trains, and kill the process where that is asked for."""
    train, begin = Trainer.train, CallbackHandler.on_step_begin
    kill = int(os.environ.get("STRANGERS_KILL", "-1"))

    def kept(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        trained.append(self)
        return train(self, *args, **kwargs)

    def killed(self: CallbackHandler, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, args, state, control)

    Trainer.train, CallbackHandler.on_step_begin = kept, killed  # type: ignore[method-assign]


def end() -> dict[str, Any]:
    """Return what the last trainer ended with."""
    trainer = trained[-1]
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in TIMED)}
        for entry in trainer.state.log_history
    ]
    weights = {name: digest(value) for name, value in trainer.model.state_dict().items()}
    optimizer = trainer.optimizer.state_dict()["state"] if trainer.optimizer is not None else {}
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    of_model = {id(each) for each in trainer.model.parameters()}
    updated = [each for group in groups for each in group["params"] if id(each) not in of_model]
    return {
        "steps": trainer.state.global_step,
        "weights": best_weights(trainer) or weights,
        "weights beside the model's": [digest(each) for each in updated],
        "optimizer": [digest(value) for _, each in sorted(optimizer.items()) for _, value in sorted(each.items())],
        "logs": logs,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "random": random_state(),
        "files": final_files(),
    }


def final_files() -> dict[str, str]:
    """Return the digests of the weights that the script has written, other than in checkpoints."""
    found = [file for file in Path().rglob("*.safetensors") if "checkpoint-" not in str(file)]
    return {str(file): digest(file.read_bytes()) for file in found if not file.is_relative_to("out/.resume")}


def best_weights(trainer: Trainer) -> dict[str, str] | None:
    """Return the best weights as transformers reads them, where the bare Trainer loads none of them, and only warns.

    It has saved them under other names than the model's.
    """
    best = trainer.state.best_model_checkpoint
    if os.environ.get("STRANGERS_CALLBACK") or best is None or not trainer.args.load_best_model_at_end:
        return None
    if trainer.is_fsdp_enabled or not isinstance(trainer.model, PreTrainedModel):
        return None
    with torch.random.fork_rng():
        found = type(trainer.model).from_pretrained(best)
    return {name: digest(value) for name, value in found.state_dict().items()}


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(script.parent))
    watch()
    if os.environ.get("STRANGERS_CALLBACK"):
        changed, count = TRAIN.subn(lambda found: found.expand(ONE_LINE) + found[0], script.read_text())
        assert count, f"{script.name} trains nothing"
        script = Path("with_callback.py")
        script.write_text(changed)
    runpy.run_path(str(script), run_name="__main__")
    Path(f"end.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(end(), indent=1, sort_keys=True, default=str))


if __name__ == "__main__":
    main()
