"""Train a small byte-level transformer with Lightning on Python's own source code, and survive being killed.

    python lightning_train.py --output-dir runs/a

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The two lines that make it so are marked below.
"""

import argparse
import hashlib
import math
import sysconfig
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

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


class Training(pl.LightningModule):
    """Trains the model."""

    def __init__(self, model: LanguageModel, steps: int) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def training_step(self, batch, batch_idx):
        """Train on one batch."""
        return self.model(batch)

    def validation_step(self, batch, batch_idx):
        """Log the loss on text that was not trained on."""
        self.log("val_loss", self.model(batch))

    def configure_optimizers(self):
        """Return the optimizer, and a schedule that steps with it."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up_and_decay, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, and print the final loss and a digest of the weights."""
    options = parse_options()
    pl.seed_everything(options.seed)
    blocks = read_blocks()
    model = LanguageModel()
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        val_check_interval=options.eval_steps,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        accelerator="cpu" if options.cpu else "auto",
        devices=1,
        logger=False,
        callbacks=[
            ModelCheckpoint(dirpath=options.output_dir, every_n_train_steps=options.save_steps, save_top_k=-1),
            ResumeCallback(),  # this is all it takes
        ],
        plugins=[ResumeCheckpointIO()],  # and this writes each file so that no crash can tear it
    )

    loader = DataLoader(blocks[64:], batch_size=8, shuffle=True)
    held_out = DataLoader(blocks[:64], batch_size=8)
    trainer.fit(Training(model, options.steps), loader, held_out, ckpt_path="last")

    if trainer.is_global_zero:
        print(f"final loss {evaluate(model, blocks[:64])!r}  weights sha256 {digest(model)}")


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
