"""Pairs that are scored together, evaluated by their classes; the shape of sentence-transformers' cross encoders."""

import datasets
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderClassificationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import BertConfig, BertForSequenceClassification, set_seed

from words import VOCABULARY, sentences, tokenizer

set_seed(0)
sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0, num_labels=1)
BertForSequenceClassification(config).save_pretrained("base")
tokenizer().save_pretrained("base")
model = CrossEncoder("base", num_labels=1, device="cpu")
rows = {
    "first": sentences(100, 6, 1),
    "second": sentences(100, 6, 2),
    "label": [float(at % 3 == 0) for at in range(100)],
}
data = datasets.Dataset.from_dict(rows).train_test_split(20, seed=0)
test = data["test"]
trainer = CrossEncoderTrainer(
    model=model,
    args=CrossEncoderTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        logging_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_pairs_average_precision",
        greater_is_better=True,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data["train"],
    eval_dataset=test,
    loss=BinaryCrossEntropyLoss(model),
    evaluator=CrossEncoderClassificationEvaluator(
        list(zip(test["first"], test["second"], strict=True)), [int(each) for each in test["label"]], name="pairs"
    ),
)
trainer.train()
model.save_pretrained("final")
