"""A trainer with a loss of its own and an average of the weights; what many a public training script does."""

import copy

import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
rows = torch.randint(0, 64, (120, 10), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": (row // 7) % 3} for row in rows]


class WeightedTrainer(Trainer):
    """Weighs classes by how often it has seen them, and pulls the weights towards those of the start."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = torch.ones(3)
        self.hardest = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**inputs)
        if model.training:
            self.seen += torch.bincount(labels.flatten(), minlength=3)
        weight = self.seen.sum() / self.seen
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=weight)
        if model.training:
            self.hardest = max(self.hardest, loss.item())
            loss = loss + 0.01 * loss.detach() / self.hardest * self.anchored(model)
        return (loss, outputs) if return_outputs else loss

    def anchored(self, model):
        return sum((one - other).square().sum() for one, other in zip(model.parameters(), self.start, strict=True))


class Averaging(TrainerCallback):
    """Evaluates with averaged weights."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.shadow = copy.deepcopy(model).eval()
        trainer.start = [each.detach().clone() for each in model.parameters()]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for one, other in zip(self.shadow.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.2)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        weights = [each.double().sum().item() for each in self.shadow.parameters()]
        state.log_history[-1]["eval_average"] = metrics["eval_average"] = sum(weights)

    def on_train_end(self, args, state, control, **kwargs):
        self.shadow.save_pretrained("averaged")


trainer = WeightedTrainer(
    model=BertForTokenClassification(config),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=5,
        logging_steps=4,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data[:100],
    eval_dataset=data[100:],
    callbacks=[Averaging()],
)
trainer.train()
