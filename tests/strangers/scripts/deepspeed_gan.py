"""DeepSpeed's example of a GAN: two engines, each with an optimizer of the script."""

import deepspeed
import deepspeed_models  # noqa: F401 - lets DeepSpeed train on a CPU
import torch
from torch import nn

import ledger

deepspeed.init_distributed("gloo")
torch.manual_seed(3)
dataset = torch.utils.data.TensorDataset(torch.randn(44, 8))
dataloader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
config = {"train_batch_size": 4, "zero_allow_untested_optimizer": True}
engine_d, optimizer_d, _, _ = deepspeed.initialize(model=discriminator, optimizer=optimizer_d, config=config)
engine_g, optimizer_g, _, _ = deepspeed.initialize(model=generator, optimizer=optimizer_g, config=config)
run = None
if ledger.ADAPTED:
    from resume_adapters.deepspeed import ResumeHooks

    run = ResumeHooks(engine_d, "out", save_every=5, generator=generator, optimizer_g=optimizer_g)
for _ in run.epochs(3) if run else range(3):
    for (real,) in run.batches(dataloader) if run else dataloader:
        discriminator.zero_grad()
        label = torch.ones(len(real))
        err_d_real = criterion(engine_d(real).view(-1), label)
        engine_d.backward(err_d_real)
        fake = generator(torch.randn(len(real), 6))
        err_d_fake = criterion(engine_d(fake.detach()).view(-1), 1 - label)
        engine_d.backward(err_d_fake)
        engine_d.step()
        generator.zero_grad()
        err_g = criterion(discriminator(fake).view(-1), label)
        engine_g.backward(err_g)
        engine_g.step()
        ledger.step(engine_d.global_steps - 1, err_d_real.item(), [engine_d.optimizer], g=err_g.item())
        if run:
            run.step(loss=err_g)
ledger.end([generator, discriminator], [optimizer_d, optimizer_g])
