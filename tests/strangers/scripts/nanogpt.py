"""nanoGPT's train.py: no loader, batches from the random state, a schedule of its own, estimates of the loss."""

import math

import torch

import ledger

out_dir = "out"
eval_interval = 6
eval_iters = 2
max_iters = 30
warmup_iters = 5
batch_size = 4
block_size = 8
gradient_accumulation_steps = 2
learning_rate = 1e-2
min_lr = 1e-3
grad_clip = 1.0

torch.manual_seed(1337)
corpus = {name: torch.randint(50, (2000,)) for name in ("train", "val")}


def get_batch(split):
    data = corpus[split]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(50, 16), torch.nn.Embedding(block_size, 16)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.lm_head = torch.nn.Linear(16, 50, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(block_size)
        x = self.block(self.wte(idx) + self.wpe(torch.arange(block_size)), src_mask=mask)
        logits = self.lm_head(x)
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, 50), targets.view(-1))


model = GPT()
decayed = [each for each in model.parameters() if each.dim() >= 2]
others = [each for each in model.parameters() if each.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        out[split] = sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


if ledger.ADAPTED:
    from accelerate import Accelerator

    from resume_adapters.accelerate import register_for_resume

    accelerator = Accelerator(cpu=True, project_dir=out_dir)
    model, optimizer = accelerator.prepare(model, optimizer)
    run = register_for_resume(accelerator, save_every=4, scaler_of_script=scaler)
    run.resume()

iter_num = run.global_step if ledger.ADAPTED else 0
while iter_num < max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    losses = estimate_loss() if iter_num % eval_interval == 0 else {}
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
        ledger.step(iter_num, loss.item(), [optimizer], losses=losses)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if ledger.ADAPTED:
        run.step(loss=loss)
if ledger.ADAPTED:
    run.finish()
ledger.end([model], [optimizer])
