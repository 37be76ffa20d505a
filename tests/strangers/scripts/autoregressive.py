"""Accelerate's example of gradient accumulation for autoregressive models: the batches of a step are read before it."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import ledger

gradient_accumulation_steps = 4
accelerator = Accelerator(cpu=True, project_dir="out")  # the example gives it the steps, and scales the loss by them
set_seed(42)
rows = [{"input_ids": torch.randint(1, 64, (int(length),))} for length in torch.randint(4, 13, (46,))]


def collate_fn(examples):
    longest = max(len(each["input_ids"]) for each in examples) + 1
    rows = [torch.nn.functional.pad(each["input_ids"], (0, longest - len(each["input_ids"]))) for each in examples]
    padded = torch.stack(rows)
    labels = padded[:, 1:]
    return {
        "input_ids": padded[:, :-1],
        "attention_mask": (padded[:, :-1] != 0).long(),
        "labels": torch.where(labels == 0, -100, labels),
    }


train_dataloader = DataLoader(rows, shuffle=True, collate_fn=collate_fn, batch_size=2)
eval_dataloader = DataLoader(rows[:8], shuffle=False, collate_fn=collate_fn, batch_size=4)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=5e-3)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 3, 18)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
num_samples_in_epoch = len(train_dataloader)
remainder = num_samples_in_epoch % gradient_accumulation_steps
remainder = remainder if remainder != 0 else gradient_accumulation_steps
total_gradient_updates = math.ceil(num_samples_in_epoch / gradient_accumulation_steps)

run = None
if ledger.ADAPTED:
    from resume_adapters.accelerate import register_for_resume

    run = register_for_resume(accelerator, save_every=2)
    run.resume()
losses = []
for epoch in run.epochs(3) if run else range(3):
    model.train()
    training_iterator = iter(run.batches(train_dataloader)) if run else iter(train_dataloader)
    begun = run.global_step - epoch * total_gradient_updates if run else 0
    for update_step in range(begun, total_gradient_updates):
        batch_samples = []
        num_batches_in_step = gradient_accumulation_steps if update_step != (total_gradient_updates - 1) else remainder
        for _ in range(num_batches_in_step):
            batch_samples += [next(training_iterator)]
        local_num_items_in_batch = sum([(batch["labels"].ne(-100)).sum() for batch in batch_samples])
        num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()
        losses = []
        for batch in batch_samples:
            outputs = model(**batch, use_cache=False, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss * gradient_accumulation_steps * accelerator.num_processes
            accelerator.backward(loss)
            losses.append(loss.detach())
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        steps = epoch * total_gradient_updates + update_step
        digests = [ledger.digest(batch["input_ids"]) for batch in batch_samples]
        ledger.step(steps, sum(losses).item(), [optimizer], batches=digests, norm=grad_norm.item())
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if run:
            run.step(loss=sum(losses))
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch, use_cache=False)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
ledger.end([model], [optimizer], losses=torch.cat(losses).tolist(), schedule=lr_scheduler.state_dict())
