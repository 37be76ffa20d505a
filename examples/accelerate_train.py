"""Train a small byte-level GPT-2 with Accelerate on Python's own source code, and survive being killed.

    accelerate launch accelerate_train.py --output-dir runs/a
    accelerate launch --num_processes 2 accelerate_train.py --output-dir runs/a
    python accelerate_train.py --output-dir runs/a --cpu

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The five lines that make it so are marked below.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from resume_adapters.accelerate import register_for_resume  # 1

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
    blocks = read_blocks()
    size = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, eos_token_id=0)
    model = GPT2LMHeadModel(size)  # random weights, with dropout; nothing is downloaded
    limit = ProjectConfiguration(total_limit=3)
    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=2, project_config=limit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = options.steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    loader = torch.utils.data.DataLoader(blocks[64:], batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    run = register_for_resume(accelerator, run_dir=options.output_dir, save_every=options.save_steps)  # 2
    for _ in run.epochs(max_steps=options.steps):  # 3
        for batch in run.batches(loader):  # 4
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss  # the model shifts the labels itself
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.step(loss=loss)  # 5: these five lines are all it takes
            if accelerator.sync_gradients and run.global_step % options.eval_steps == 0:
                accelerator.print(f"step {run.global_step}: evaluation loss {evaluate(model, blocks[:64]):.4f}")

    final = evaluate(model, blocks[:64])
    accelerator.print(f"final loss {final!r}  weights sha256 {digest(accelerator.unwrap_model(model))}")


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
