"""PyTorch's MNIST example, as Lightning's documentation converts it to Fabric, with local images."""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import ledger


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(4 * 5 * 5, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = self.dropout2(functional.relu(self.fc1(self.dropout1(x).flatten(1))))
        return functional.log_softmax(self.fc2(x), dim=1)


fabric = Fabric(accelerator="cpu", devices=1)
seed_everything(1, verbose=False)
images = torch.rand(44, 1, 12, 12)
train_set = torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) * 1000).long() % 10)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=4, shuffle=True, num_workers=1)
test_loader = torch.utils.data.DataLoader(train_set, batch_size=11)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
model, optimizer = fabric.setup(model, optimizer)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

run = None
if ledger.ADAPTED:
    from resume_adapters.fabric import register_for_resume

    run = register_for_resume(fabric, "out", save_every=4, model=model, optimizer=optimizer, scheduler=scheduler)
steps = run.resume().step if run else 0
losses = []
for _ in run.epochs(4) if run else range(4):
    model.train()
    for data, target in run.batches(train_loader) if run else train_loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        fabric.backward(loss)
        optimizer.step()
        ledger.step(steps, loss.item(), [optimizer], batch=ledger.digest(data))
        steps += 1
        if run:
            run.step(loss=loss)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        losses = [functional.nll_loss(model(data), target).item() for data, target in test_loader]
ledger.end([model], [optimizer], losses=losses, schedule=scheduler.last_epoch)
