"""Start a job of the adapter that is named with each of some options, and print what each was refused with."""

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
    "a path that is none": {"resume": "nowhere"},
    "a word that is no path": {"resume": "Auto"},
    "a part without a state": {"ema": 3},
    "a part's name that is no file's": {"EMA": torch.nn.Linear(1, 1)},
    "a part's name that is taken": {"trackers": torch.nn.Linear(1, 1)},
}


def hf(options):
    from transformers import Trainer, TrainingArguments

    from resume_adapters.hf import ResumeCallback

    args = TrainingArguments(output_dir="run", max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    Trainer(torch.nn.Linear(1, 1), args, train_dataset=[1], callbacks=[ResumeCallback(**options)]).train()


def lightning(options):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

    callbacks = [ModelCheckpoint(dirpath="run"), ResumeCallback(**options)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    io = ResumeCheckpointIO()
    pl.Trainer(max_steps=1, accelerator="cpu", callbacks=callbacks, plugins=[io], **quiet).fit(BoringModel())


def accelerate(options):
    from accelerate import Accelerator

    from resume_adapters.accelerate import register_for_resume

    register_for_resume(Accelerator(cpu=True), run_dir="run", **options).resume()


def deepspeed(options):
    training.deepspeed_on_cpu()
    import deepspeed

    from resume_adapters.deepspeed import ResumeHooks

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ResumeHooks(engine, "run", **options).resume()


def refusal(options):
    try:
        globals()[sys.argv[1]](options)
    except Exception as error:
        return [type(error).__name__, str(error).replace(os.getcwd(), "").partition(", and none of")[0]]
    return None


if __name__ == "__main__":
    with open("refusals.json", "w") as file:
        json.dump({name: refusal(options) for name, options in CASES.items()}, file)
