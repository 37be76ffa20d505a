"""Sentence embeddings with one loss; the shape of sentence-transformers' training examples."""

import datasets
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentences_model import embedding_model

from words import sentences

model = embedding_model()
rows = {"anchor": sentences(100, 6, 1), "positive": sentences(100, 6, 2)}
data = datasets.Dataset.from_dict(rows).train_test_split(20, seed=0)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=5e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        logging_steps=3,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
model.save_pretrained("final")
