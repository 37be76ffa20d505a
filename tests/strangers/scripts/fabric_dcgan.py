"""Fabric's example of a DCGAN: two models, two optimizers, a batch that is read before the loop, lists of losses."""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn

import ledger

seed_everything(999)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
images = torch.rand(44, 1, 8, 8) * 2 - 1
dataloader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=4, shuffle=True)
real_batch = next(iter(dataloader))
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
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, 6, 1, 1)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)
generator, optimizer_g = fabric.setup(generator, optimizer_g)
dataloader = fabric.setup_dataloaders(dataloader)

run = None
losses_g, losses_d, iteration = [], [], 0
if ledger.ADAPTED:
    from resume_adapters.fabric import register_for_resume

    state = {"generator": generator, "discriminator": discriminator, "optimizer_d": optimizer_d}
    run = register_for_resume(fabric, "out", save_every=5, optimizer_g=optimizer_g, **state)
    losses_g = run.memory.setdefault("losses_g", [])
    losses_d = run.memory.setdefault("losses_d", [])
    iteration = run.resume().step
for epoch in run.epochs(3) if run else range(3):
    for i, data in run.enumerate(dataloader) if run else enumerate(dataloader):
        discriminator.zero_grad()
        real = data[0]
        label = torch.full((real.size(0),), 1.0)
        err_d_real = criterion(discriminator(real).view(-1), label)
        fabric.backward(err_d_real)
        fake = generator(torch.randn(real.size(0), 6, 1, 1))
        label.fill_(0.0)
        err_d_fake = criterion(discriminator(fake.detach()).view(-1), label)
        fabric.backward(err_d_fake)
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        err_g = criterion(discriminator(fake).view(-1), label)
        fabric.backward(err_g)
        optimizer_g.step()
        losses_g.append(err_g.item())
        losses_d.append((err_d_real + err_d_fake).item())
        ledger.step(iteration, losses_d[-1], [optimizer_d, optimizer_g], epoch=epoch, i=i, g=losses_g[-1])
        if iteration % 10 == 0:
            with torch.no_grad():
                generator(fixed_noise)
        iteration += 1
        if run:
            run.step(loss=err_g)
ledger.end([generator, discriminator], [optimizer_d, optimizer_g], g=losses_g, d=losses_d)
