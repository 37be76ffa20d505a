"""Translation that is evaluated by generating, also at the start; the shape of transformers' run_translation.py."""

import numpy as np
import torch
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(0)
sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
config = T5Config(**sizes, dropout_rate=0.1, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
rows = torch.randint(2, 40, (100, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row.flip(0)} for row in rows]


def metrics(prediction):
    width = min(prediction.predictions.shape[1], prediction.label_ids.shape[1])
    equal = prediction.predictions[:, :width] == prediction.label_ids[:, :width]
    return {"equal": float(equal.mean()), "length": float(np.count_nonzero(prediction.predictions, axis=1).mean())}


trainer = Seq2SeqTrainer(
    model=T5ForConditionalGeneration(config),
    args=Seq2SeqTrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=4,
        save_steps=4,
        logging_steps=3,
        predict_with_generate=True,
        generation_max_length=10,
        generation_num_beams=2,
        load_best_model_at_end=True,
        metric_for_best_model="equal",
        greater_is_better=True,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data[:80],
    eval_dataset=data[80:],
    compute_metrics=metrics,
    callbacks=[EarlyStoppingCallback(4)],
)
trainer.train()
