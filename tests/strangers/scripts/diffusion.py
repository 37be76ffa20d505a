"""Unconditional training as in diffusers' example: an EMA with a class of its own, accumulation, TensorBoard."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

import ledger


class EMAModel:
    """The shape of diffusers' EMAModel: a decay with a warm-up, and weights that the model borrows for sampling."""

    def __init__(self, parameters, decay=0.99, power=2 / 3):
        self.shadow_params = [each.clone().detach() for each in parameters]
        self.decay, self.power, self.optimization_step, self.cur_decay_value = decay, power, 0, None
        self.temp_stored_params = None

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        step = max(0, self.optimization_step - 1)
        self.cur_decay_value = min(1 - (1 + step) ** -self.power, self.decay)
        for shadow, each in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - self.cur_decay_value) * (shadow - each))

    def store(self, parameters):
        self.temp_stored_params = [each.detach().clone() for each in parameters]

    def copy_to(self, parameters):
        for shadow, each in zip(self.shadow_params, parameters, strict=True):
            each.data.copy_(shadow)

    def restore(self, parameters):
        for stored, each in zip(self.temp_stored_params, parameters, strict=True):
            each.data.copy_(stored)
        self.temp_stored_params = None

    def state_dict(self):
        return {
            "decay": self.decay,
            "power": self.power,
            "optimization_step": self.optimization_step,
            "shadow_params": self.shadow_params,
        }

    def load_state_dict(self, state):
        self.decay, self.power = state["decay"], state["power"]
        self.optimization_step = state["optimization_step"]
        self.shadow_params = [each.clone() for each in state["shadow_params"]]


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(100, 8)
        self.inward, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.outward = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, sample, timesteps):
        hidden = self.norm(self.inward(sample)) + self.time(timesteps)[:, :, None, None]
        return self.outward(nn.functional.dropout(nn.functional.silu(hidden), 0.1, self.training))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir="out")
set_seed(0)
images = [{"input": torch.rand(1, 8, 8) * 2 - 1} for _ in range(44)]
model = Unet()
ema_model = EMAModel(model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
train_dataloader = DataLoader(images, batch_size=4, shuffle=True, num_workers=1)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 6) * (1 - min(step, 23) / 24)
)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 100), 0)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=4, ema=ema_model)
    run.resume()
accelerator.init_trackers("train_unconditional")
global_step = run.global_step if run else 0
for _ in run.epochs(4) if run else range(4):
    model.train()
    for batch in run.batches(train_dataloader) if run else train_dataloader:
        clean_images = batch["input"]
        noise = torch.randn(clean_images.shape)
        timesteps = torch.randint(0, 100, (len(clean_images),)).long()
        alpha = alphas[timesteps].view(-1, 1, 1, 1)
        noisy_images = alpha.sqrt() * clean_images + (1 - alpha).sqrt() * noise
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(noisy_images, timesteps).float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        ledger.step(global_step, loss.item(), [optimizer], batch=ledger.digest(clean_images))
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            global_step += 1
        logs = {"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0], "step": global_step}
        logs["ema_decay"] = ema_model.cur_decay_value or 0.0
        if accelerator.sync_gradients:
            accelerator.log(logs, step=global_step)
        if run:
            run.step(loss=loss)
    ema_model.store(model.parameters())
    ema_model.copy_to(model.parameters())
    with torch.no_grad():
        sample = model(torch.randn(2, 1, 8, 8), torch.tensor([50, 50])).mean().item()
    ema_model.restore(model.parameters())
    accelerator.log({"sample": sample}, step=global_step)
accelerator.end_training()
average = [ledger.digest(each) for each in ema_model.shadow_params]
ledger.end([model], [optimizer], ema=average, tensorboard=ledger.scalars("out"))
