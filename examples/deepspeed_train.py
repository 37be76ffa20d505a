"""Train a small byte-level language model with DeepSpeed on Python's own source code, and survive being killed.

    deepspeed deepspeed_train.py --output-dir runs/a
    torchrun --nproc-per-node 2 deepspeed_train.py --output-dir runs/a
    python deepspeed_train.py --output-dir runs/a --cpu

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The lines that make it so are marked below.
"""

import argparse
import hashlib
import json
import math
import os
import socket
import sysconfig
from pathlib import Path

import torch
from torch import nn

CONTEXT = 128  # bytes that the model sees at once
TEXT = 1 << 20  # bytes of text to train on


def read_blocks() -> list[torch.Tensor]:
    """Cut the standard library's source files, in name order, into blocks of bytes: here a byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT])
    return list(torch.frombuffer(text, dtype=torch.uint8).long().split(CONTEXT)[:-1])


class LanguageModel(nn.Module):
    """Predicts each byte from those before it, with dropout."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, block: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch of blocks."""
        seen, wanted = block[:, :-1], block[:, 1:]
        length = seen.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=block.device)
        hidden = self.bytes(seen) + self.positions(torch.arange(length, device=block.device))
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main() -> None:
    """Train, and print the final loss and a digest of the weights."""
    parser = argparse.ArgumentParser(description="Train a small language model that can be killed at any moment.")
    parser.add_argument("--output-dir", required=True, help="where checkpoints go, and where a relaunch finds them")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps to train")
    parser.add_argument("--save-steps", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--eval-steps", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the order of the data and dropout")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage, 0 to 3")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is an accelerator")
    parser.add_argument("--trace", type=Path, help="file to which every step's loss is appended as a line of JSON")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    options = parser.parse_args()
    prepare_environment(options.cpu)

    import deepspeed  # only now: DeepSpeed chooses its accelerator when it is imported

    from resume_adapters import KeepLast
    from resume_adapters.deepspeed import ResumeHooks

    if options.cpu:  # plain gloo, so that nothing has to be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    torch.manual_seed(options.seed)
    blocks = read_blocks()
    model = LanguageModel()
    warmup = max(1, options.steps // 10)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        ),
        training_data=blocks[64:],
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    run = ResumeHooks(engine, options.output_dir, save_every=options.save_steps, keep=KeepLast(3))  # this, and
    for epoch in run.epochs(max_steps=options.steps):  # run.epochs,
        loader.data_sampler.set_epoch(epoch)
        for block in run.batches(loader):  # run.batches
            loss = engine(block.to(engine.device))
            engine.backward(loss)
            rate = engine.get_lr()[0]
            engine.step()
            run.step(loss=loss)  # and run.step are all it takes
            note(options.trace, engine, loss, rate)
            if run.global_step % options.eval_steps == 0:
                run.best(evaluate(engine, blocks[:64]), name="eval_loss")

    weights = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, tensor in sorted(engine.module.state_dict().items()):
            weights.update(name.encode() + tensor.cpu().numpy().tobytes())
    final = evaluate(engine, blocks[:64])
    if engine.global_rank == 0:
        print(f"final evaluation loss {final!r}  weights sha256 {weights.hexdigest()}")


def prepare_environment(cpu: bool) -> None:
    """Choose the CPU where that is asked for, and be one rank of one where no launcher says otherwise."""
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)


def note(file: Path | None, engine, loss: torch.Tensor, rate: float) -> None:
    """Write the step's loss where a kill cannot take it back; the numbers keep all their digits."""
    if file is not None and engine.global_rank == 0:
        line = {"step": engine.global_steps, "loss": loss.item(), "learning_rate": rate}
        with file.open("a") as trace:
            trace.write(json.dumps(line) + "\n")


def evaluate(engine, blocks: list[torch.Tensor]) -> float:
    """Return the mean loss over held-out blocks, alike on every rank."""
    engine.eval()
    with torch.no_grad():
        loss = engine(torch.stack(blocks).to(engine.device))
    engine.train()
    return loss.item()


if __name__ == "__main__":
    main()
