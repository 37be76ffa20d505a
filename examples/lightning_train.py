"""Train a small byte-level transformer on Python's own source code, and survive being killed at any moment.

    python lightning_train.py --output-dir runs/a

Kill it whenever you like and launch the same command again: it goes on from the last committed checkpoint, and ends
with the losses and the weights of a run that was never killed. The two lines that make it so are marked below.
"""

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

CONTEXT = 128  # bytes that the model sees at once
TEXT = 1 << 20  # bytes of text to train on
WIDTH = 96


def read_blocks() -> torch.Tensor:
    """Cut the standard library's source files, in name order, into blocks of bytes: here a byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[:TEXT])
    return torch.frombuffer(text, dtype=torch.uint8).long()[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)


class Model(pl.LightningModule):
    """A transformer of two layers with dropout, which predicts the next byte."""

    def __init__(self, steps: int, trace: Path | None) -> None:
        super().__init__()
        self.steps = steps
        self.trace = trace
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each byte from those before it."""
        tokens, length = batch[:, :-1], batch.shape[1] - 1
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=batch.device)
        hidden = self.embed(tokens) + self.place(torch.arange(length, device=batch.device))
        logits = self.head(self.body(hidden, mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        """Train on one batch, and write its loss where a kill cannot take it back."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        if self.trace is not None:
            rate = self.optimizers().param_groups[0]["lr"]
            line = {"step": self.global_step + 1, "loss": loss.item(), "learning_rate": rate}
            with self.trace.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the loss on text that was not trained on."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        """Warm up for a tenth of the steps, then follow a cosine to zero."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        warm = max(1, self.steps // 10)
        warming = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, warm)
        cooling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps - warm))
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warming, cooling], [warm])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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

    pl.seed_everything(options.seed)
    blocks = read_blocks()
    model = Model(options.steps, options.trace)
    checkpoint = ModelCheckpoint(dirpath=options.output_dir, every_n_train_steps=options.save_steps, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        val_check_interval=options.eval_steps,
        check_val_every_n_epoch=None,
        accelerator="cpu" if options.cpu else "auto",
        devices=1,
        logger=False,
        callbacks=[checkpoint, ResumeCallback()],  # ResumeCallback() is all it takes
        plugins=[ResumeCheckpointIO()],  # writes each file so that no crash can tear it
    )
    train = DataLoader(blocks[64:], batch_size=8, shuffle=True)
    trainer.fit(model, train, DataLoader(blocks[:64], batch_size=8), ckpt_path="last")

    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode() + tensor.cpu().numpy().tobytes())
    print(f"final loss {trainer.callback_metrics['train_loss'].item()!r}  weights sha256 {weights.hexdigest()}")


if __name__ == "__main__":
    main()
