"""Sentence embeddings in several sizes, evaluated by similarity: sentence-transformers' matryoshka_sts.py."""

import random

import datasets
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import CoSENTLoss, MatryoshkaLoss
from sentences_model import embedding_model

from words import sentences

model = embedding_model()
scores = [random.Random(at).random() for at in range(100)]
rows = {"first": sentences(100, 6, 1), "second": sentences(100, 6, 2), "score": scores}
data = datasets.Dataset.from_dict(rows).train_test_split(20, seed=0)
test = data["test"]
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        save_total_limit=2,
        logging_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_similar_spearman_cosine",
        greater_is_better=True,
        batch_sampler="no_duplicates",
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data["train"],
    eval_dataset=test,
    loss=MatryoshkaLoss(model, CoSENTLoss(model), [16, 8, 4], n_dims_per_step=2),
    evaluator=EmbeddingSimilarityEvaluator(test["first"], test["second"], test["score"], name="similar"),
)
trainer.train()
model.save_pretrained("final")
