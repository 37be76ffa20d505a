"""Lightning's basic example of a language model: its own demo Transformer, clipped, then tested on the best weights."""

import lightning.pytorch as pl
import lightning_models
import torch
from lightning.pytorch.demos import Transformer
from torch.nn import functional
from torch.utils.data import DataLoader, random_split


class LanguageModel(pl.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=16, nhead=2, nhid=16, nlayers=1)

    def common_step(self, batch, name):
        input, target = batch
        loss = functional.nll_loss(self.model(input, target), target.view(-1))
        self.log(name, loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.common_step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        return self.common_step(batch, "val_loss")

    def test_step(self, batch, batch_idx):
        return self.common_step(batch, "test_loss")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


checkpoints = lightning_models.checkpoints(every_n_train_steps=None, monitor="val_loss", save_top_k=1, save_last=True)
trainer = lightning_models.trainer(checkpoints, max_epochs=4, gradient_clip_val=0.25, val_check_interval=4)
text = torch.randint(33, (301,))
dataset = [(text[i : i + 6], text[i + 1 : i + 7]) for i in range(0, 290, 5)]
train_dataset, val_dataset, test_dataset = random_split(dataset, [42, 8, 8])
model = LanguageModel(33)
trainer.fit(model, DataLoader(train_dataset, batch_size=4, shuffle=True), DataLoader(val_dataset, batch_size=4))
tested = trainer.test(model, DataLoader(test_dataset, batch_size=4), ckpt_path="best", verbose=False)
lightning_models.end(trainer, model, tested=tested)
