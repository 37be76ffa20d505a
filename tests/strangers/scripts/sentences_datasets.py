"""Sentence embeddings with two datasets and a loss for each; the shape of sentence-transformers' multi-task examples.

One of the losses has weights of its own, which are trained as well.
"""

import datasets
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss, SoftmaxLoss
from sentences_model import embedding_model

from words import sentences

model = embedding_model()
pairs = {"anchor": sentences(60, 6, 1), "positive": sentences(60, 6, 2)}
classes = {"first": sentences(44, 5, 3), "second": sentences(44, 7, 4), "label": [at % 3 for at in range(44)]}
data = datasets.DatasetDict(
    pairs=datasets.Dataset.from_dict(pairs),
    classes=datasets.Dataset.from_dict(classes),
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=4,
        logging_steps=3,
        multi_dataset_batch_sampler="round_robin",
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data,
    eval_dataset={name: each.select(range(8)) for name, each in data.items()},
    loss={
        "pairs": MultipleNegativesRankingLoss(model),
        "classes": SoftmaxLoss(model, sentence_embedding_dimension=16, num_labels=3),
    },
)
trainer.train()
model.save_pretrained("final")
