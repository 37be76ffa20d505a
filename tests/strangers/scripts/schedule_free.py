"""Schedule-free AdamW: the optimizer keeps two sequences of weights, and swaps them for each evaluation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import ledger


class AdamWScheduleFree(torch.optim.Optimizer):
    """The algorithm of the package schedulefree, shortened: ``train()`` and ``eval()`` move the weights."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.999), eps=1e-8, warmup_steps=4):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "warmup_steps": warmup_steps}
        super().__init__(params, {**defaults, "k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def _move(self, training):
        for group in self.param_groups:
            if group["train_mode"] is not training:
                beta = group["betas"][0]
                for each in group["params"]:
                    if "z" in self.state[each]:
                        each.lerp_(self.state[each]["z"], 1 - beta if training else 1 - 1 / beta)
                group["train_mode"] = training

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "optimizer.train() was not called"
            beta, beta2 = group["betas"]
            k = group["k"]
            rate = group["lr"] * min(1.0, (k + 1) / group["warmup_steps"]) * (1 - beta2 ** (k + 1)) ** 0.5
            group["lr_max"] = max(rate, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            c = weight / group["weight_sum"]
            for each in group["params"]:
                state = self.state[each]
                if "z" not in state:
                    state["z"], state["exp_avg_sq"] = each.clone(), torch.zeros_like(each)
                state["exp_avg_sq"].mul_(beta2).addcmul_(each.grad, each.grad, value=1 - beta2)
                direction = each.grad / (state["exp_avg_sq"].sqrt() + group["eps"])
                each.lerp_(state["z"], c)
                each.add_(direction, alpha=rate * (beta * (1 - c) - 1))
                state["z"].sub_(direction, alpha=rate)
            group["k"] = k + 1


set_seed(5)
x = torch.randn(52, 6)
data = TensorDataset(x, torch.sin(x.sum(1)))
accelerator = Accelerator(cpu=True, project_dir="out")
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = AdamWScheduleFree(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=5)
steps = run.resume().step if run else 0
for _ in run.epochs(4) if run else range(4):
    model.train()
    optimizer.optimizer.train()
    for a, b in run.batches(loader) if run else loader:
        loss = (model(a).squeeze(1) - b).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(a))
        steps += 1
        if run:
            run.step(loss=loss)
    model.eval()
    optimizer.optimizer.eval()
    with torch.no_grad():
        accelerator.print(f"{(model(x).squeeze(1) - data.tensors[1]).square().mean().item():.4f}")
optimizer.optimizer.train()
ledger.end([model], [optimizer])
