"""A DCGAN as in PyTorch's examples, with Accelerate: two models, two optimizers, drawn noise, TensorBoard."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ledger

torch.manual_seed(999)
images = torch.rand(44, 1, 8, 8) * 2 - 1
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="out")
generator = nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2),
    nn.Dropout(0.2),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
    generator, discriminator, optimizer_g, optimizer_d, loader
)
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(4, 6, 1, 1)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=6)
    run.resume()
accelerator.init_trackers("gan")
for epoch in run.epochs(3) if run else range(3):
    for (real,) in run.batches(loader) if run else loader:
        steps = int(optimizer_d.state_dict()["state"].get(0, {"step": 0})["step"])
        optimizer_d.zero_grad()
        label = torch.ones(len(real))
        loss_real = criterion(discriminator(real).view(-1), label)
        accelerator.backward(loss_real)
        fake = generator(torch.randn(len(real), 6, 1, 1))
        loss_fake = criterion(discriminator(fake.detach()).view(-1), 1 - label)
        accelerator.backward(loss_fake)
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake).view(-1), label)
        accelerator.backward(loss_g)
        optimizer_g.step()
        ledger.step(steps, loss_real.item(), [optimizer_d, optimizer_g], fake=loss_fake.item(), g=loss_g.item())
        accelerator.log({"loss_d": (loss_real + loss_fake).item(), "loss_g": loss_g.item()}, step=steps)
        if run:
            run.step(loss=loss_g)
    with torch.no_grad():
        accelerator.log({"sample": generator(fixed_noise).mean().item()}, step=epoch)
accelerator.end_training()
ledger.end([generator, discriminator], [optimizer_g, optimizer_d], tensorboard=ledger.scalars("out"))
