"""Train a small byte-level transformer with DeepSpeed on Python's own source code, and survive being killed.

    deepspeed deepspeed_train.py --output-dir runs/a
    torchrun --nproc-per-node 2 deepspeed_train.py --output-dir runs/a
    python deepspeed_train.py --output-dir runs/a --cpu

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The four lines that make it so are marked below.
"""

import argparse
import hashlib
import math
import os
import socket
import sysconfig
from functools import partial
from pathlib import Path

import torch

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
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage, 0 to 3")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    return parser.parse_args()


def read_blocks() -> list[torch.Tensor]:
    """Cut the standard library's source files, in name order, into blocks of bytes: here a byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT])
    return list(torch.frombuffer(text, dtype=torch.uint8).long().split(CONTEXT)[:-1])


class LanguageModel(torch.nn.Module):
    """Predicts each byte from those before it, with dropout."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.positions = torch.nn.Embedding(CONTEXT, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 256)

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a batch of blocks."""
        seen, wanted = blocks[:, :-1], blocks[:, 1:]
        length = seen.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=blocks.device)
        hidden = self.bytes(seen) + self.positions(torch.arange(length, device=blocks.device))
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def main() -> None:
    """Train, and print the final loss and a digest of the weights."""
    options = parse_options()
    prepare_environment(options.cpu)

    import deepspeed  # only now: DeepSpeed chooses its accelerator when it is imported

    from resume_adapters import KeepLast
    from resume_adapters.deepspeed import ResumeHooks

    if options.cpu:  # plain gloo, so that nothing has to be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    torch.manual_seed(options.seed)
    blocks = read_blocks()
    model = LanguageModel()
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(warm_up_and_decay, options.steps))
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        lr_scheduler=schedule,
        training_data=blocks[64:],
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    run = ResumeHooks(engine, options.output_dir, save_every=options.save_steps, keep=KeepLast(3))  # 1
    for epoch in run.epochs(max_steps=options.steps):  # 2
        loader.data_sampler.set_epoch(epoch)
        for batch in run.batches(loader):  # 3
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            run.step(loss=loss)  # 4: these lines and their import are all it takes
            if run.global_step % options.eval_steps == 0:
                run.best(evaluate(engine, blocks[:64]), name="eval_loss")

    final = evaluate(engine, blocks[:64])
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if engine.global_rank == 0:
            print(f"final loss {final!r}  weights sha256 {digest(model)}")


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


def warm_up_and_decay(steps: int, step: int) -> float:
    """Return what the learning rate is multiplied by: up for a tenth of the steps, then down along a cosine."""
    return min((step + 1) / max(1, steps // 10), 0.5 * (1 + math.cos(math.pi * step / steps)))


def evaluate(model: torch.nn.Module, blocks: list[torch.Tensor]) -> float:
    """Return the mean loss over held-out blocks."""
    model.eval()
    batch = torch.stack(blocks).to(next(model.parameters()).device)
    with torch.no_grad():
        loss = model(batch)
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
