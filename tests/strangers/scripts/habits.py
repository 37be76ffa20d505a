"""One habit of training in each framework: ``habits.py FRAMEWORK HABIT``."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ledger

FRAMEWORK, HABIT = sys.argv[1:]
EPOCHS, SAVE = 4, 3
LAUNCH = len(list(Path().glob("launch-*")))
"""Earlier launches in this directory: some habits build otherwise in each."""
Path(f"launch-{LAUNCH}").touch()
torch.manual_seed(1)
inputs = torch.randint(0, 20, (36, 5))
labels = (inputs.sum(1) % 2).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(20, 8, sparse=HABIT == "sparse_window")
        self.inner = nn.LazyLinear(16) if HABIT == "lazy" else nn.Linear(40, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 2)
        if HABIT == "quantized":
            inner = nn.Sequential(self.inner).train()
            inner.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
            self.inner = torch.ao.quantization.prepare_qat(inner)
        if HABIT == "scripted":
            self.inner = torch.jit.script(nn.Sequential(self.inner, nn.BatchNorm1d(16)))
        if HABIT == "tied":
            self.same = nn.Linear(16, 2)
        if HABIT == "frozen":
            with torch.random.fork_rng():
                torch.manual_seed(LAUNCH)
                self.frozen = nn.Linear(16, 16)
                self.large = nn.Linear(1100, 600, bias=False)
            self.frozen.requires_grad_(False)
            self.large.requires_grad_(False)
        if HABIT == "hidden":
            with torch.random.fork_rng():
                torch.manual_seed(LAUNCH)
                self.frozen = nn.Linear(16, 16)
            self.register_state_dict_post_hook(hide)

    def forward(self, x):
        hidden = torch.relu(self.inner(self.embed(x).flatten(1)))
        if hasattr(self, "frozen"):
            hidden = hidden + self.frozen(hidden)
        return self.head(self.drop(hidden))


class Counted(Net):
    """Scales by a count that it saves beside its tensors."""

    def __init__(self):
        super().__init__()
        self.count = {"calls": 0}

    def forward(self, x):
        self.count["calls"] += 1
        return super().forward(x) * (1 + self.count["calls"] / 100)

    def get_extra_state(self):
        return dict(self.count)

    def set_extra_state(self, state):
        self.count = dict(state)


CALLS = 0


def scale():
    """Return a factor that follows from a global."""
    global CALLS
    CALLS += 1
    return 1 + CALLS / 100


def hide(module, state, prefix, local):
    for name in [name for name in state if "frozen." in name]:
        del state[name]


class Counting(torch.optim.SGD):
    """Keeps attributes that its ``state_dict()`` lacks, and steps by them."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.calls, self.drift = 0, None

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.calls += 1
        grads = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat(grads)
        self.drift = flat if self.drift is None else 0.9 * self.drift + flat
        with torch.no_grad():
            start = 0
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] / self.calls**0.5 * self.drift[start : start + p.numel()].view_as(p))
                        start += p.numel()
        return loss


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """A schedule whose state is not in its ``state_dict()``."""

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def __init__(self, optimizer):
        self.level = 1.0
        super().__init__(optimizer)

    def get_lr(self):
        self.level *= 0.97
        return [base * self.level for base in self.base_lrs]


def make_optimizer(net):
    if HABIT == "attributes":
        return Counting(net.parameters(), lr=0.05)
    if HABIT == "sparse_window":
        return torch.optim.SGD(net.parameters(), lr=0.05)
    if HABIT == "groups":
        return torch.optim.Adam([*net.embed.parameters(), *net.inner.parameters()], lr=0.01)
    return torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=0.01)


def make_schedule(optimizer):
    return Warm(optimizer) if HABIT == "schedule" else None


def on_step(step, net, optimizer):
    """Do what the habit does on the way, before the step with this number."""
    if HABIT == "groups" and step == 5:
        getattr(optimizer, "optimizer", optimizer).add_param_group({"params": list(net.head.parameters()), "lr": 0.02})
    if HABIT == "tied" and step == 1:
        net.same.weight = net.head.weight


class Layerwise:
    """Optimizers that live in hooks of the gradients."""

    def __init__(self, net):
        self.optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in net.parameters() if p.requires_grad}
        for p in self.optimizers:
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()


class Dummy(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__([torch.empty(0)], {"lr": 1e-3})

    def step(self, closure=None):
        return None if closure is None else closure()

    def zero_grad(self, set_to_none=True):
        pass


net = Counted() if HABIT == "extra" else Net()
if HABIT == "layerwise" and FRAMEWORK != "trainer":
    layers = Layerwise(net)
    layerwise = [layers.optimizers[p] for p in layers.optimizers]


def state(optimizer):
    found = [optimizer.state_dict()["state"]]
    if HABIT == "layerwise":
        found += [each.state_dict()["state"] for each in layerwise]
    if HABIT == "attributes":
        found.append({"calls": optimizer.calls})
    return {"all": found}


def loop():
    dataset = TensorDataset(inputs, labels)
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    optimizer = make_optimizer(net) if HABIT != "layerwise" else Dummy(net.parameters())
    schedule = make_schedule(optimizer)
    model, backward, plain = net, lambda loss: loss.backward(), optimizer
    make = {}
    if FRAMEWORK == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, project_dir="out")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if schedule is not None:
            accelerator.register_for_checkpointing(schedule)
        backward = accelerator.backward
        if ledger.ADAPTED:
            from resume_adapters.accelerate import register_for_resume

            make = register_for_resume(accelerator, save_every=SAVE)
    elif FRAMEWORK == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu")
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward = fabric.backward
        if ledger.ADAPTED:
            from resume_adapters.fabric import register_for_resume

            extra = {"schedule": schedule} if schedule is not None else {}
            make = register_for_resume(fabric, "out", save_every=SAVE, model=model, optimizer=optimizer, **extra)
    elif ledger.ADAPTED:
        from resume_adapters.loop import register_for_resume

        extra = {"schedule": schedule} if schedule is not None else {}
        make = register_for_resume("out", save_every=SAVE, model=model, optimizer=optimizer, **extra)
    run = make or None
    steps = run.resume().step if run else 0
    for _ in run.epochs(EPOCHS) if run else range(EPOCHS):
        for x, y in run.batches(loader) if run else loader:
            on_step(steps, net, optimizer)
            if HABIT != "every_other" or steps % 2 == 0:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (scale() if HABIT == "globals" else 1)
            ledger.step(steps, loss.item(), [plain])
            backward(loss)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            steps += 1
            if run:
                run.step(loss=loss)
    ledger.end([net], [state(plain)])


def trainer():
    global layerwise
    from transformers import Trainer, TrainingArguments

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(inputs)

        def __getitem__(self, index):
            return {"x": inputs[index], "labels": labels[index]}

    class Of(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, labels=None):
            out = self.net(x)
            return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

    class Mine(Trainer):
        def create_optimizer(self, *args, **kwargs):
            if self.optimizer is None:
                if HABIT == "layerwise":
                    global layerwise
                    layers = Layerwise(net)
                    layerwise = [layers.optimizers[p] for p in layers.optimizers]
                    self.optimizer = Dummy(net.parameters())
                else:
                    self.optimizer = make_optimizer(net)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            if HABIT == "schedule":
                self.lr_scheduler = Warm(self.optimizer)
                return self.lr_scheduler
            return super().create_scheduler(num_training_steps, optimizer)

        def training_step(self, model, batch, *args):
            on_step(self.state.global_step, net, self.optimizer)
            loss = super().training_step(model, batch, *args)
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            ledger.step(self.state.global_step, loss.item(), [inner])
            return loss

    if HABIT == "lazy":
        net(inputs[:2])
    arguments = TrainingArguments(
        "out", num_train_epochs=EPOCHS, per_device_train_batch_size=4, save_steps=SAVE, report_to=[], use_cpu=True,
        disable_tqdm=True, gradient_accumulation_steps=2 if HABIT == "sparse_window" else 1, max_grad_norm=0,
        label_names=["labels"],
    )  # fmt: skip
    mine = Mine(Of(), arguments, train_dataset=Data())
    mine.train()
    ledger.end([net], [state(getattr(mine.optimizer, "optimizer", mine.optimizer))])


def lightning():
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.automatic_optimization = HABIT != "every_other"
            self.strict_loading = HABIT != "hidden"  # else Lightning itself loads no checkpoint that lacks tensors

        def training_step(self, batch):
            x, y = batch
            optimizer = self.optimizers()
            step = self.trainer.global_step
            on_step(step, net, optimizer)
            loss = nn.functional.cross_entropy(self.net(x), y) * (scale() if HABIT == "globals" else 1)
            ledger.step(step, loss.item(), [getattr(optimizer, "optimizer", optimizer)])
            if not self.automatic_optimization:
                if HABIT != "every_other" or step % 2 == 0:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            optimizer = make_optimizer(net) if HABIT != "layerwise" else Dummy(net.parameters())
            schedule = make_schedule(optimizer)
            return optimizer if schedule is None else ([optimizer], [{"scheduler": schedule, "interval": "step"}])

    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint("out", every_n_train_steps=SAVE, save_last=True)],
        accumulate_grad_batches=2 if HABIT == "sparse_window" else 1,
    )  # fmt: skip
    trainer.fit(module := Module(), loader, ckpt_path="last" if os.path.exists("out") else None)
    optimizer = module.optimizers()
    ledger.end([net], [state(getattr(optimizer, "optimizer", optimizer))])


{"trainer": trainer, "lightning": lightning}.get(FRAMEWORK, loop)()
