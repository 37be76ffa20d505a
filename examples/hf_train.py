"""Train a small byte-level GPT-2 with the Trainer on Python's own source code, and survive being killed.

    python hf_train.py --output-dir runs/a
    torchrun --nproc-per-node 2 hf_train.py --output-dir runs/a

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The one line that makes it so is marked below.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from resume_adapters.hf import ResumeCallback

CONTEXT = 128  # bytes that the model sees at once
TEXT = 1 << 20  # bytes of text to train on


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model that can be killed at any moment.")
    parser.add_argument("--output-dir", required=True, help="where checkpoints go, and where a relaunch finds them")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps to train")
    parser.add_argument("--save-steps", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--eval-steps", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the order of the data and dropout")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    return parser.parse_args()


def read_blocks() -> list[torch.Tensor]:
    """Cut the standard library's source files, in name order, into blocks of bytes: here a byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT])
    return list(torch.frombuffer(text, dtype=torch.uint8).long().split(CONTEXT)[:-1])


def main() -> None:
    """Train, and print the final loss and a digest of the weights."""
    options = parse_options()
    set_seed(options.seed)
    blocks = [{"input_ids": block, "labels": block} for block in read_blocks()]  # the model shifts the labels itself
    size = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, eos_token_id=0)
    model = GPT2LMHeadModel(size)  # random weights, with dropout; nothing is downloaded
    trainer = Trainer(
        model=model,
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
        callbacks=[ResumeCallback()],  # this is all it takes
    )

    trainer.train()

    if trainer.is_world_process_zero():
        final = evaluate(model, [block["input_ids"] for block in blocks[:64]])
        print(f"final loss {final!r}  weights sha256 {digest(model)}")


def evaluate(model: torch.nn.Module, blocks: list[torch.Tensor]) -> float:
    """Return the mean loss over held-out blocks."""
    model.eval()
    batch = torch.stack(blocks).to(next(model.parameters()).device)
    with torch.no_grad():
        loss = model(input_ids=batch, labels=batch).loss  # the model shifts the labels itself
    model.train()
    return loss.item()


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of the weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
