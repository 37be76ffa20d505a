"""Start a job of the adapter that is named with each of some options, and print what each was refused with."""

import importlib.util
import json
import os
import sys
from datetime import timedelta

import torch

import training

CASES = {
    "no steps": {"save_every": 0},
    "fewer than none": {"save_every": -5},
    "a truth": {"save_every": True},
    "no time": {"save_every": timedelta()},
    "a word": {"save_every": "often"},
    "failures, but a fixed cadence": {"save_every": 5, "mtbf": timedelta(hours=1)},
    "failures, but no cadence": {"mtbf": timedelta(hours=1)},
    "no time between failures": {"save_every": "auto", "mtbf": timedelta()},
    "a number that is no policy": {"keep": 3},
    "zero, which is no policy either": {"keep": 0},
    "a number that is no StopOn": {"stop": 15},
    "a word that is no way": {"on_batch_change": "keep"},
    "a word that is no way either": {"on_save_error": "ignore"},
    "a stage that is none": {"stage": "tape"},
    "a mirror that is none": {"mirror": "s3://bucket/a"},
    "a path that is none": {"resume": "nowhere"},
    "a word that is no path": {"resume": "Auto"},
    "a part without a state": {"ema": 3},
    "a part's name that is no file's": {"EMA": torch.nn.Linear(1, 1)},
}
TAKEN = ("architecture", "buffers", "callbacks", "manifest", "metrics", "registered", "scaler", "trackers")
CASES |= {f"a part's name that is taken: {name}": {name: torch.nn.Linear(1, 1)} for name in TAKEN}


ON_NODES = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 0},
    "checkpoint": {"use_node_local_storage": True},
}
"""A configuration of DeepSpeed that scatters a checkpoint, which only a loop of its own follows."""


def hf(options, engine=None):
    from transformers import Trainer, TrainingArguments

    from resume_adapters.hf import ResumeCallback

    quiet = {"report_to": "none", "disable_tqdm": True}
    args = TrainingArguments("run", max_steps=1, per_device_train_batch_size=1, use_cpu=True, deepspeed=engine, **quiet)
    Trainer(torch.nn.Linear(1, 1), args, train_dataset=[1], callbacks=[ResumeCallback(**options)]).train()


def lightning(options, engine=None):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

    callbacks = [ModelCheckpoint(dirpath="run"), ResumeCallback(**options)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = training.lightning_deepspeed_on_cpu(config=engine) if engine else "auto"
    plugins = [] if engine else [ResumeCheckpointIO()]
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", strategy=strategy, callbacks=callbacks, plugins=plugins, **quiet
    )
    trainer.fit(BoringModel())


def accelerate(options, engine=None):
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    from resume_adapters.accelerate import register_for_resume

    if engine is None:
        register_for_resume(Accelerator(cpu=True), run_dir="run", **options).resume()
        return
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=engine), kwargs_handlers=[gloo])
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    register_for_resume(accelerator, run_dir="run", **options)


def deepspeed(options):
    import deepspeed

    from resume_adapters.deepspeed import ResumeHooks

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ResumeHooks(engine, "run", **options).resume()


def refusal(options, **engine):
    try:
        globals()[sys.argv[1]](options, **engine)
    except Exception as error:
        return [type(error).__name__, str(error).replace(os.getcwd(), "")]
    return None


def main():
    if sys.argv[1] == "deepspeed":
        training.deepspeed_on_cpu()
    found = {name: refusal(options) for name, options in CASES.items()}
    if sys.argv[1] != "deepspeed" and importlib.util.find_spec("deepspeed") is not None:
        training.deepspeed_on_cpu()
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        found["an engine that scatters its files"] = refusal({}, engine=ON_NODES)
    with open("refusals.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
