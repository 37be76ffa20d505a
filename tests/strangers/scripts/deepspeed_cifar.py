"""DeepSpeed's example on CIFAR-10, with local images. Its arguments are the stage of ZeRO, a dtype, and "offload"."""

import sys

import deepspeed
import deepspeed_models
import torch
from torch import nn
from torch.nn import functional

import ledger

stage, dtype, offload = int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["offload"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


ds_config = {
    "train_batch_size": 8,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": dtype == "bf16"},
    "fp16": {
        "enabled": dtype == "fp16",
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": stage,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
}
if offload:
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
deepspeed.init_distributed("gloo")
torch.manual_seed(2)
images = torch.rand(48, 3, 32, 32) * 2 - 1
trainset = torch.utils.data.TensorDataset(images, images.mean((1, 2, 3)).argsort().argsort() % 10)
net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, __ = deepspeed.initialize(
    model=net, model_parameters=parameters, training_data=trainset, config=ds_config
)
target_dtype = {"bf16": torch.bfloat16, "fp16": torch.half}.get(dtype)
criterion = nn.CrossEntropyLoss()
run = None
if ledger.ADAPTED:
    from resume_adapters.deepspeed import ResumeHooks

    run = ResumeHooks(model_engine, "out", save_every=4)
for epoch in run.epochs(4) if run else range(4):
    running_loss = 0.0
    for i, (inputs, labels) in run.enumerate(trainloader) if run else enumerate(trainloader):
        if target_dtype is not None:
            inputs = inputs.to(target_dtype)
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        ledger.step(model_engine.global_steps, loss.item(), [model_engine.optimizer], batch=ledger.digest(inputs))
        model_engine.step()
        running_loss += loss.item()
        if i % 5 == 4:
            print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 5:.3f}")
            running_loss = 0.0
        if run:
            run.step(loss=loss)
steps = {"steps": model_engine.global_steps, "skipped": model_engine.skipped_steps, "lr": model_engine.get_lr()}
deepspeed_models.end(model_engine, stage, **steps)
