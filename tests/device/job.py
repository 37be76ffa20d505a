"""A hand-written loop that draws all its numbers on the device, and trains in half precision.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints below ``project`` and its trace to
``trace.0``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from device.compiled import NAME

from training import CONFIG, configure, digest, draws, event, trace

FEATURES = 8

DEFAULTS: dict[str, Any] = {
    "steps": 20,
    "without_random_state": False,
    "side_stream": False,
    "repeats": True,
    "leaks_at": None,
    "options": {},
}


class Half(torch.nn.Linear):
    """A layer that computes in fp16, whose gradients overflow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.half(), self.weight.half(), self.bias.half()).float()


def main() -> None:
    configure("project/checkpoints", DEFAULTS)
    device = torch.device(CONFIG["device"])
    torch.use_deterministic_algorithms(CONFIG["repeats"] and device.type != "cpu")
    with torch.Stream(device) if CONFIG["side_stream"] else contextlib.nullcontext():
        train(device)
    if CONFIG["device"] == NAME:
        Path("peak").write_text(str(torch.ops.walled.peak_bytes()))


def train(device: torch.device) -> None:
    if CONFIG["without_random_state"]:
        del torch.get_device_module(device).get_rng_state
    set_seed(0)
    layers = Half(FEATURES, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), Half(16, 1), torch.nn.Flatten(0)
    plain = torch.nn.Sequential(*layers).to(device)
    noise = torch.Generator(device).manual_seed(7)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, growth_interval=4)
    accelerator = Accelerator(project_dir="project")
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=5e-3))

    from resume_adapters.accelerate import register_for_resume

    options = {"save_every": 3, **CONFIG["options"]}
    run = register_for_resume(accelerator, scaler_of_script=scaler, noise=noise, **options)
    run.resume()
    while run.global_step < CONFIG["steps"]:
        step, scale = run.global_step, scaler.get_scale()
        x = torch.randn(4, FEATURES, device=device)
        y = x.sum(1).sin()
        x = x + 0.1 * torch.randn(x.shape, generator=noise, device=device)
        if step == CONFIG["leaks_at"]:
            torch.empty(1 << 30, device=device)
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace(step=step, loss=loss.item().hex(), batch=digest(x, y), scale=scale)
        event("batch_end", step)
        run.step(loss=loss)
        event("step_end", run.global_step)
    run.finish()
    trace(
        final=True,
        weights=digest(*plain.state_dict().values()),
        scaler=scaler.state_dict(),
        noise=torch.rand(1, generator=noise, device=device).item(),
        draws=draws(),
    )


if __name__ == "__main__":
    main()
