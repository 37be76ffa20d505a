"""Lightning's GAN example: manual optimization, two optimizers that are toggled, a sample in each validation."""

import lightning.pytorch as pl
import lightning_models
import torch
from torch import nn


class GAN(pl.LightningModule):
    def __init__(self, latent_dim=6, lr=0.002, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 8)
        )
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
        self.validation_z = torch.randn(8, latent_dim)

    def adversarial_loss(self, scores, real):
        return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def training_step(self, batch):
        points, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(points.shape[0], self.hparams.latent_dim)
        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self.generator(z)), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(points), True)
        fake_loss = self.adversarial_loss(self.discriminator(self.generator(z).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True, on_epoch=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        return {"loss": g_loss.detach()}

    def validation_step(self, batch):
        pass

    def on_validation_epoch_end(self):
        self.log("sample", self.generator(self.validation_z).mean())

    def configure_optimizers(self):
        rates = {"lr": self.hparams.lr, "betas": (self.hparams.b1, self.hparams.b2)}
        each = [torch.optim.Adam(part.parameters(), **rates) for part in (self.generator, self.discriminator)]
        return each, []


trainer = lightning_models.trainer(lightning_models.checkpoints(every_n_train_steps=6), max_epochs=4)
lightning_models.fit(trainer, GAN(), lightning_models.Blobs())
