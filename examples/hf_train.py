"""Train a small byte-level GPT-2 on Python's own source code, and survive being killed at any moment.

    python hf_train.py --output-dir runs/a

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The one line that makes it so is marked below.
"""

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from resume_adapters.hf import ResumeCallback

CONTEXT = 128  # bytes that the model sees at once
TEXT = 1 << 20  # bytes of text to train on


def read_blocks() -> list[dict[str, torch.Tensor]]:
    """Cut the standard library's source files, in name order, into blocks of bytes: here a byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT])
    blocks = torch.frombuffer(text, dtype=torch.uint8).long().split(CONTEXT)[:-1]
    return [{"input_ids": block, "labels": block} for block in blocks]  # the model shifts the labels itself


def main() -> None:
    """Train, and print the final loss and a digest of the weights."""
    parser = argparse.ArgumentParser(description="Train a small language model that can be killed at any moment.")
    parser.add_argument("--output-dir", required=True, help="where checkpoints go, and where a relaunch finds them")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps to train")
    parser.add_argument("--save-steps", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--eval-steps", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the order of the data and dropout")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    parser.add_argument("--trace", type=Path, help="file to which every step's loss is appended as a line of JSON")
    options = parser.parse_args()

    class Trace(TrainerCallback):
        """Writes each step's loss where a kill cannot take it back."""

        def on_log(self, args, state, control, logs, **kwargs):
            """Append one line; the numbers keep all their digits."""
            if options.trace and "learning_rate" in logs:
                line = {"step": state.global_step, "loss": logs["loss"], "learning_rate": logs["learning_rate"]}
                with options.trace.open("a") as file:
                    file.write(json.dumps(line) + "\n")

    set_seed(options.seed)
    blocks = read_blocks()
    size = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(size),  # random weights, with dropout; nothing is downloaded
        args=TrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 10,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=options.eval_steps,
            save_steps=options.save_steps,
            save_total_limit=3,
            seed=options.seed,
            use_cpu=options.cpu,
            report_to="none",
        ),
        train_dataset=blocks[64:],
        eval_dataset=blocks[:64],
        callbacks=[ResumeCallback(), Trace()],  # ResumeCallback() is all it takes
    )
    trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + tensor.cpu().numpy().tobytes())
    print(f"final loss {losses[-1]!r}  weights sha256 {weights.hexdigest()}")


if __name__ == "__main__":
    main()
