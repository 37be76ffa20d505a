"""A classifier of images with its best weights at the end; the shape of transformers' run_image_classification.py."""

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

set_seed(0)
config = ViTConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
    num_labels=3,
    hidden_dropout_prob=0.1,
)
images = torch.randn(100, 3, 8, 8, generator=torch.Generator().manual_seed(1))
data = [{"pixel_values": image, "labels": int(image.sum() > 0)} for image in images]


def augment(items):
    batch = torch.stack([item["pixel_values"] for item in items])
    return {"pixel_values": batch + torch.randn_like(batch) / 10, "labels": torch.tensor([i["labels"] for i in items])}


trainer = Trainer(
    model=ViTForImageClassification(config),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        logging_steps=3,
        load_best_model_at_end=True,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
    ),
    data_collator=augment,
    train_dataset=data[:80],
    eval_dataset=data[80:],
)
trainer.train()
trainer.save_model("final")
