"""A loop around an engine whose batch grows in the middle of the training."""

import deepspeed
import deepspeed_models

import ledger

stage = 1
engine, _, loader, _ = deepspeed.initialize(
    model=deepspeed_models.network(),
    training_data=deepspeed_models.dataset(),
    config=deepspeed_models.configuration("ds_config.json", stage),
)
run = None
if ledger.ADAPTED:
    from resume_adapters.deepspeed import ResumeHooks

    run = ResumeHooks(engine, "out", save_every=3)
for epoch in run.epochs(4) if run else range(4):
    loader.data_sampler.set_epoch(epoch)
    for x, y in run.batches(loader) if run else loader:
        loss = (engine(x).sum(1) - y).square().mean()
        engine.backward(loss)
        ledger.step(engine.global_steps, loss.item(), [engine.optimizer], batch=ledger.digest(x))
        engine.step()
        if engine.global_steps == 4 and engine.is_gradient_accumulation_boundary():
            engine.set_train_batch_size(3 * engine.train_micro_batch_size_per_gpu())
        if run:
            run.step(loss=loss)
steps = {"steps": engine.global_steps, "micro_steps": engine.micro_steps, "lr": engine.get_lr()}
deepspeed_models.end(engine, stage, **steps, tensorboard=ledger.scalars("logs"))
