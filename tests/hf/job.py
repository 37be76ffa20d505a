"""A small training job with the Trainer, in every variation that the tests need. Started by ``launch.Server``.

Usage: job.py CONFIG.json. It trains in the working directory, writes checkpoints to ``out`` and its trace to
``trace.<rank>``.
"""

from __future__ import annotations

import collections
import copy
import itertools
import os
import random
import time
from typing import Any

import numpy as np
import torch
import transformers.trainer
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import cycles
from waiting import until

from training import (
    CONFIG,
    Ema,
    accelerate_shards_on_cpu,
    begin,
    configure,
    deepspeed_on_cpu,
    digest,
    draws,
    dump_loaded,
    engine_facts,
    event,
    generator,
    load_by_hand,
    noise,
    policy,
    resume_option,
    trace,
    whole_weights,
)

TOKENS, LENGTH = 64, 12

WRAPPED = ("skip_first_batches", "rotate_checkpoints", "sort_checkpoints")
"""Functions of the trainer's module that importing the adapter wraps, where they are there."""


# ---- Data


def sample(index: int) -> torch.Tensor:
    return torch.randint(0, TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(index))


def augment(tokens: torch.Tensor) -> torch.Tensor:
    """Change a token by each of the three generators."""
    tokens = tokens.clone()
    tokens[torch.randint(0, LENGTH, (1,))] = torch.randint(0, TOKENS, (1,))
    tokens[random.randrange(LENGTH)] = random.randrange(TOKENS)
    tokens[np.random.randint(LENGTH)] = np.random.randint(TOKENS)
    return tokens


def item(index: int) -> dict[str, torch.Tensor]:
    tokens = augment(sample(index)) if CONFIG["augment"] else sample(index)
    return {"input_ids": tokens, "labels": tokens}


_GENERATOR = torch.Generator().manual_seed(5)
_COUNT = itertools.count()


class Mapped(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size
        if CONFIG["own_generator"] is True:
            self.generator = generator()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.size:
            raise IndexError(index)  # the length-grouped sampler iterates over the dataset
        found = item(index)
        if CONFIG["own_generator"]:
            found["input_ids"] = found["input_ids"].clone()
            is_counted = CONFIG["own_generator"] == "count"
            drawn = noise((), getattr(self, "generator", _GENERATOR)) if not is_counted else next(_COUNT) * 0.618 % 1
            found["input_ids"][0] = int(TOKENS * drawn)
        if CONFIG["ragged"]:
            keep = 4 + index % (LENGTH - 4)
            found = {name: value[:keep] for name, value in found.items()}
        return found


class Stream(torch.utils.data.IterableDataset):
    """A stream without a length, reshuffled in each pass where it has ``set_epoch``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def __iter__(self) -> Any:
        order = list(range(self.size))
        if CONFIG["set_epoch"]:
            random.Random(self.epoch).shuffle(order)
        if CONFIG["counts_passes"]:
            random.Random(100 + self.epoch).shuffle(order)
            self.epoch += 1
        worker = torch.utils.data.get_worker_info()
        for index in order if worker is None else order[worker.id :: worker.num_workers]:
            yield item(index)


class ShuffledStream(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def elastic(size: int) -> Any:
    """Return data of ``resume_adapters.data``: map-style with augmentation by sample, or shards."""
    from resume_adapters.data import ElasticSampler, ElasticShards, SeededPerSample

    if CONFIG["data"] == "map":
        return SeededPerSample(Mapped(size), ElasticSampler(size, seed=1))
    length = CONFIG["shard"]
    return ElasticShards(
        range(size // length), lambda shard: map(item, range(length * shard, length * (shard + 1))), seed=1
    )


def dataset(size: int) -> Any:
    kind = CONFIG["data"]
    if CONFIG["elastic"]:
        return elastic(size)
    if kind == "map":
        return Mapped(size)
    if kind == "stream":
        return ShuffledStream(size) if CONFIG["set_epoch"] else Stream(size)
    import datasets

    columns = {"input_ids": [sample(index).tolist() for index in range(size)]}
    columns["labels"] = columns["input_ids"]
    if kind == "datasets":
        return datasets.Dataset.from_dict(columns).with_format("torch")
    streamed = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
    if CONFIG["set_epoch"]:
        streamed = streamed.shuffle(seed=7, buffer_size=16)
    return streamed.map(_augment_columns) if CONFIG["augment"] else streamed.with_format("torch")


def _augment_columns(columns: dict[str, Any]) -> dict[str, Any]:
    tokens = augment(torch.tensor(columns["input_ids"]))
    return {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(each["input_ids"]) for each in items)
    batch = {}
    for name in ("input_ids", "labels"):
        rows = [torch.as_tensor(each[name]) for each in items]
        batch[name] = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    if CONFIG["mask"]:
        masked = torch.rand(batch["input_ids"].shape) < 0.2
        batch["input_ids"] = batch["input_ids"].masked_fill(masked, 0)
    return batch


# ---- Model


def experts() -> torch.nn.Module:
    """Return a model whose experts transformers 5 saves under other names, one by one."""
    width = CONFIG["width"]
    config = MixtralConfig(
        vocab_size=TOKENS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=CONFIG["layers"],
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        attention_dropout=CONFIG["dropout"],
    )
    return MixtralForCausalLM(config)


def model() -> torch.nn.Module:
    torch.manual_seed(CONFIG["seed"])
    if CONFIG["experts"]:
        return experts()
    width = CONFIG["width"]
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=CONFIG["layers"],
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=CONFIG["fsdp"] is None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), CONFIG["dropout"]),
    )
    made: Any = GPT2LMHeadModel(config)
    if CONFIG["lora"] == "pruned":
        from peft import AdaLoraConfig, get_peft_model

        ranks = {"init_r": 4, "target_r": 1, "tinit": 2, "tfinal": 5, "deltaT": 1, "total_step": 21}
        return get_peft_model(made, AdaLoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **ranks))
    if CONFIG["lora"]:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True))
    if CONFIG["half"]:
        made.bfloat16()
    if CONFIG["beside_lora"] or CONFIG["running_mean"]:
        gpt = made.base_model.model if CONFIG["lora"] else made
        last = gpt.transformer.ln_f.requires_grad_(True)
        last.register_buffer("mean", torch.zeros(()))
        last.register_buffer("means", torch.zeros(0))
        last.register_forward_hook(_normalize)
    if CONFIG["user_compile"]:
        made = torch.compile(made, backend="eager")
        if not CONFIG["traced"]:
            torch.compiler.set_stance("force_eager")
    return made


def _normalize(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Subtract a running mean, as a batch norm does, and what the latest batches had in the mean."""
    if module.training:
        module.mean.lerp_(output.detach().mean(), 0.1)
        module.means = torch.cat([module.means, output.detach().mean().reshape(1)])[-9:]
    return output - module.mean - module.means.sum()


# ---- Watching


class TracedTrainer(Trainer):
    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> torch.Tensor:
        time.sleep(CONFIG["slow"])
        if CONFIG["device"] != "cpu":  # tokens are masked on the device, too
            inputs["input_ids"] = inputs["input_ids"] * (torch.rand(LENGTH, device=CONFIG["device"]) < 0.9)
        batch = digest(*(value for _, value in sorted(inputs.items())))
        loss = super().training_step(model, inputs, *rest)
        rate = self.optimizer.param_groups[0]["lr"]
        self.micro = getattr(self, "micro", 0) + 1 if self.last_step() == self.state.global_step else 0
        self.previous = self.state.global_step
        line = {"step": self.state.global_step, "micro": self.micro, "loss": loss.item().hex(), "batch": batch}
        if CONFIG["elastic"] or CONFIG["rows"]:
            line["rows"] = [digest(row) for row in inputs["input_ids"]]
            line["mean"] = loss.item() * self.args.gradient_accumulation_steps
        trace(**line, lr=float(rate).hex())
        return loss

    def _get_train_sampler(self, *rest: Any) -> Any:
        return getattr(self.train_dataset, "sampler", None) or super()._get_train_sampler(*rest)

    def last_step(self) -> int:
        return getattr(self, "previous", -1)


class HoldingTrainer(TracedTrainer):
    """Holds what trainers of public packages hold: a window of generations, metrics, a reference model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._step = 0
        self._buffered_inputs: list[dict[str, torch.Tensor]] | None = None
        self._metrics = {"train": collections.defaultdict(list)}
        self._logs = {"rewards": collections.defaultdict(lambda: collections.deque(maxlen=3))}
        self.reference = copy.deepcopy(self.model).eval()
        self.counted = next(each for each in self.callback_handler.callbacks if isinstance(each, Syncing))

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        if self._step % 12 == 0:
            self._buffered_inputs = [{"weight": torch.rand(())} for _ in range(12)]
        assert self._buffered_inputs is not None
        weight = self._buffered_inputs[self._step % 12]["weight"]
        self._step += 1
        loss = super().compute_loss(model, inputs, *rest, **options)
        with torch.no_grad():
            other = self.reference(**inputs).loss
        self._metrics["train"]["distance"].append((loss - other).item())
        self._logs["rewards"]["weight"].append(weight.item())
        return loss * (1 + weight + self.counted.steps / 50) + (loss - other).square()

    def held(self) -> Any:
        logs = {name: list(values) for name, values in self._logs["rewards"].items()}
        return [self._step, self._metrics["train"], logs, digest(*self.reference.state_dict().values())]


class Syncing(TrainerCallback):
    """Moves a trainer's reference model every few steps, and counts them; it has no ``state_dict()``."""

    def __init__(self) -> None:
        self.steps = self.epochs = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps % 4 == 0:
            for one, other in zip(self.reference().parameters(), model.parameters(), strict=True):
                one.data.lerp_(other.data, 0.5)
        if self.steps == 11:
            model.transformer.wpe.requires_grad_(False)


class Dumping(TrainerCallback):
    """Writes down what was loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        dump_loaded(given["model"], given["optimizer"])


class Striking(TrainerCallback):
    """Reports to the job's shared part where the trainer is, at one kind of event."""

    def __init__(self, name: str) -> None:
        setattr(self, name, lambda args, state, control, **kwargs: event(name, state.global_step))


class Starting(TrainerCallback):
    """Takes some time between the start of the run and its first batch, as compiling does, in which it looks often.

    With ``until_asked`` it takes until the run is asked to stop.
    """

    def __init__(self, resume: Any) -> None:
        from resume_adapters.core.run import monitor

        monitor._PERIOD = CONFIG["startup"] / 8
        self.resume = resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(CONFIG["startup"])
        if CONFIG["until_asked"]:
            until(lambda: self.resume.active_run.flag.reason)


class Averaging(TrainerCallback):
    def __init__(self, ema: Ema) -> None:
        self.ema = ema

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ema.update()


class Halting(TrainerCallback):
    """Asks for a stop that a human must look at, after a step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == CONFIG["halt"]:
            self.resume.halt("look at this")


class Counting(TrainerCallback):
    """A callback with state, by the usual two methods."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Scores(TrainerCallback):
    """Sets the evaluation's metric to what the test says, by step."""

    def __init__(self, scores: dict[str, float]) -> None:
        self.scores = scores

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_score"] = self.scores.get(str(state.global_step), 99.0)


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "width": 16,
    "layers": 1,
    "samples": 52,
    "data": "map",
    "augment": False,
    "elastic": False,
    "rows": False,
    "shard": 7,
    "dropout": 0.1,
    "own_generator": False,
    "register_generator": False,
    "ragged": False,
    "mask": False,
    "set_epoch": False,
    "counts_passes": False,
    "lora": False,  # "pruned": AdaLoRA
    "half": False,
    "beside_lora": False,
    "running_mean": False,  # further weights and a buffer change, which peft does not save
    "experts": False,
    "fsdp": None,
    "fsdp_version": 2,
    "dump": False,
    "parallel": {},
    "user_compile": False,
    "traced": True,
    "ema": False,
    "scaler": False,
    "counting": False,
    "holding": False,
    "looks_at_all": False,
    "patience": None,
    "halt": None,
    "startup": 0.0,
    "until_asked": False,
    "scores": None,
    "late": False,
    "resume_from": None,
    "refuses_full_output": False,
    "callback": {},
    "zero": None,
    "engine": {},
    "args": {},
}


def engine_config() -> dict[str, Any]:
    """Return a configuration of DeepSpeed, which is to train behind the trainer."""
    deepspeed_on_cpu()
    return {
        "zero_optimization": {"stage": CONFIG["zero"]},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        **CONFIG["engine"],
    }


def shard_on_cpu() -> None:
    """Let Accelerate shard here, and set what trains so."""
    accelerate_shards_on_cpu()
    CONFIG["args"] |= {
        "use_cpu": False,
        "fsdp": "full_shard",
        "fsdp_config": {
            "fsdp_version": CONFIG["fsdp_version"],
            "state_dict_type": CONFIG["fsdp"],
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            **(
                {"sync_module_states": False, "cpu_ram_efficient_loading": False} if CONFIG["fsdp_version"] == 1 else {}
            ),
        },
    }
    if not hasattr(TrainingArguments, "_process_fsdp_args"):  # before transformers 5 it is the launcher that says so
        os.environ |= {"FSDP_VERSION": str(CONFIG["fsdp_version"]), "FSDP_STATE_DICT_TYPE": CONFIG["fsdp"]}


def main() -> None:
    configure("out", DEFAULTS)
    if CONFIG["cycles"]:
        cycles.train_in_cycles(Cycles())
        return
    if CONFIG["zero"] is not None:
        CONFIG["args"]["deepspeed"] = engine_config()
    if CONFIG["fsdp"]:
        shard_on_cpu()
    if CONFIG["looks_at_all"]:
        from resume_adapters.hf import observed

        observed.IGNORED.clear()
    arguments = training_arguments()
    trained = model()
    ema = Ema(trained) if CONFIG["ema"] else None
    data = dataset(CONFIG["samples"])
    trainer = new_trainer(trained, arguments, data, ema)
    result = trainer.train(resume_from_checkpoint=last_checkpoint() or CONFIG["resume_from"])
    finish(trainer, result, ema)
    if "wandb" in arguments.report_to:
        import wandb

        wandb.finish()  # a forked job ends without what W&B registers for the end


def last_checkpoint() -> str | None:
    """Return what the examples of transformers 4 pass to ``train()``, with their check of the output directory."""
    if not CONFIG["refuses_full_output"]:
        return None
    found: str | None = get_last_checkpoint("out")
    if found is None and len(os.listdir("out")) > 0:
        raise ValueError("Output directory (out) already exists and is not empty.")
    return found


def training_arguments(**more: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": "out",
            "num_train_epochs": 3,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 6,
            "weight_decay": 0.1,
            "save_steps": 5,
            "logging_steps": 4,
            "report_to": [],
            "use_cpu": CONFIG["device"] == "cpu",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": CONFIG["seed"],
            **CONFIG["args"],
            **more,
        }
    )


class Pruning(TrainerCallback):
    """Lets AdaLoRA prune its ranks."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        options["model"].base_model.update_and_allocate(state.global_step)


def new_trainer(trained: torch.nn.Module, arguments: TrainingArguments, data: Any, ema: Ema | None) -> TracedTrainer:
    trainer = (HoldingTrainer if CONFIG["holding"] else TracedTrainer)(
        model=trained,
        args=arguments,
        train_dataset=data,
        eval_dataset=Mapped(20) if arguments.eval_strategy != "no" else None,
        data_collator=collate,
        callbacks=callbacks(ema, data),
    )
    if isinstance(trainer, HoldingTrainer):
        trainer.counted.reference = lambda: trainer.reference
    # Where the Trainer divides by it and Accelerate does again, gradients depend on the split into batches.
    trainer.accelerator.gradient_accumulation_steps = 1
    if CONFIG["lora"] == "pruned":
        trainer.add_callback(Pruning())
    if CONFIG["late"]:
        trainer.add_callback(resume_callback(ema, data))
    if CONFIG["scaler"]:
        install_scaler(trainer)
    return trainer


class Cycles:
    """One model and one dataset for all runs; a run that finished is trained further by the trainer that it has."""

    event = "on_step_end"

    def __init__(self) -> None:
        self.model = model()
        self.data = dataset(CONFIG["samples"])
        self.trainer: Any = None

    def prepare(self, cycle: cycles.Cycle, run_directory: str) -> None:
        if self.trainer is not None and self.trainer.args.output_dir == run_directory and cycle.run == "longer":
            self.trainer.args.max_steps = cycle.steps
            return
        arguments = training_arguments(output_dir=run_directory, max_steps=cycle.steps)
        self.trainer = new_trainer(self.model, arguments, self.data, None)

    def train(self) -> None:
        try:
            self.trainer.train()
        finally:
            for each in self.trainer.callback_handler.callbacks:
                if getattr(each, "tb_writer", None) is not None:
                    each.tb_writer.close()  # the Trainer does it at the end of a training that was not cut short

    def outline(self) -> dict[str, Any]:
        from resume_adapters.core.observed import steps
        from resume_adapters.hf import outside, patch

        trainer, optimizers = self.trainer, []
        if trainer.optimizer is not None:
            optimizers = [getattr(trainer.optimizer, "optimizer", trainer.optimizer)]
        functions = [Trainer.train, *(vars(transformers.trainer).get(name) for name in WRAPPED)]
        return {
            # A callback watches from when it is made until its training begins: that is no hook of a training.
            "global_hooks": cycles.patches()["global_hooks"] - len(steps._hooks),
            "watchers": sum(each.__module__ != outside.__name__ for each in steps._told.values()),
            "type": type(trainer) is TracedTrainer,
            "attributes": [name for name in vars(trainer) if "resume" in name],
            "hidden": [cycles.hidden(each) for each in (trainer, *trainer.callback_handler.callbacks)],
            "wrapped": [cycles.depth(each) for each in functions],
            "managed": sorted(patch._MANAGED),
            "hooks": cycles.hooks(module=self.model),
            "optimizer_hooks": max((len(each._optimizer_step_post_hooks) for each in optimizers), default=0),
        }


class LoadingByHand(TrainerCallback):
    """Loads what another training has saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        load_by_hand(options["model"], options["optimizer"])


class Beginning(TrainerCallback, ExportableState):
    """Changes what is trained, and counts, where the training and an epoch begin."""

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.begun += 1
        for _ in range(self.begun):
            begin(given["optimizer"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.on_train_begin(args, state, control, **given)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"begun": self.begun}}


def resume_callback(ema: Ema | None, data: Any) -> Any:
    from resume_adapters.hf import ResumeCallback

    parts = {"ema": ema} if ema else {}
    if CONFIG["register_generator"]:
        parts["generator"] = data.generator
    return ResumeCallback(resume=resume_option(), keep=policy(), **CONFIG["callback"], **parts)


def callbacks(ema: Ema | None, data: Any) -> list[TrainerCallback]:
    found: list[TrainerCallback] = [Scores(CONFIG["scores"])] if CONFIG["scores"] is not None else []
    if CONFIG["loads"]:
        found.append(LoadingByHand())
    if CONFIG["patience"]:
        found.append(EarlyStoppingCallback(early_stopping_patience=CONFIG["patience"]))
    if ema:
        found.append(Averaging(ema))
    if CONFIG["counting"]:
        found.append(Counting())
    if CONFIG["dump"]:
        found.append(Dumping())
    if CONFIG["holding"]:
        found.append(Syncing())
    found += [Striking(CONFIG[name]["event"]) for name in ("kill", "send", "fail", "hold_writes") if CONFIG[name]]
    if not CONFIG["bare"] and not CONFIG["late"]:
        found.append(resume_callback(ema, data))
    if CONFIG["startup"]:
        found.append(Starting(found[-1]))
    if CONFIG["begins"]:
        found.append(Beginning())
    if CONFIG["halt"]:
        found.append(Halting())
        found[-1].resume = found[-2]
    return found


def install_scaler(trainer: Any) -> None:
    """Give Accelerate the GradScaler that it makes only where there is an accelerator; its scale moves in the run."""
    trainer.accelerator.scaler = torch.amp.GradScaler(CONFIG["device"], init_scale=1024.0, growth_interval=3)
    trainer.accelerator.native_amp = False


def finish(trainer: Any, result: Any, ema: Ema | None) -> None:
    timed = ("runtime", "per_second")
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in trainer.state.log_history
    ]
    module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    saved = whole_weights(module) if CONFIG["zero"] == 3 and CONFIG["rows"] else module.state_dict().values()
    weights = [each.full_tensor() if CONFIG["fsdp"] else each for each in saved]
    counting = [each.steps for each in trainer.callback_handler.callbacks if isinstance(each, Counting)]
    scaler = trainer.accelerator.scaler
    trace(
        final=True,
        weights=digest(*weights),
        values=[value for each in weights for value in each.flatten().tolist()]
        if CONFIG["elastic"] or CONFIG["rows"]
        else None,
        engine=engine_facts(trainer.deepspeed) if CONFIG["zero"] is not None else None,
        best_weights=best_weights(trainer) if CONFIG["experts"] else None,
        global_step=result.global_step,
        train_loss=result.training_loss,
        logs=logs,
        best=[trainer.state.best_metric, trainer.state.best_global_step, trainer.state.best_model_checkpoint],
        ema=[digest(*ema.shadow), ema.updates] if ema else None,
        counting=counting,
        held=[trainer.held(), trainer.counted.epochs] if CONFIG["holding"] else None,
        scaler=scaler.state_dict() if scaler else None,
        draws=draws(),
    )


def best_weights(trainer: Any) -> str | None:
    """Return the digest of the best weights as transformers reads them, by a random state of its own."""
    if trainer.state.best_model_checkpoint is None:
        return None
    with torch.random.fork_rng():
        found = MixtralForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    return digest(*found.state_dict().values())


if __name__ == "__main__":
    main()
