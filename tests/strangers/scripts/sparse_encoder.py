"""Sparse embeddings whose regularizer grows step by step; the shape of sentence-transformers' train_splade.py."""

import datasets
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling
from transformers import BertConfig, BertForMaskedLM, set_seed

from words import VOCABULARY, sentences, tokenizer

set_seed(0)
sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0)).save_pretrained("base")
words = tokenizer()
words.mask_token = "<unk>"
words.save_pretrained("base")
model = SparseEncoder(modules=[MLMTransformer("base", max_seq_length=16), SpladePooling("max")], device="cpu")
rows = {"anchor": sentences(80, 6, 1), "positive": sentences(80, 6, 2)}
trainer = SparseEncoderTrainer(
    model=model,
    args=SparseEncoderTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=2e-2,
        save_steps=4,
        logging_steps=3,
        warmup_steps=5,
        router_mapping={},
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=datasets.Dataset.from_dict(rows),
    loss=SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
    ),
)
trainer.train()
model.save_pretrained("final")
