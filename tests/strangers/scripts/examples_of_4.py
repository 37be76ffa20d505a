"""A script that sets logging up and refuses an output directory without a checkpoint: transformers 4's run_glue.py."""

import logging
import os
import sys

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

logger = logging.getLogger(__name__)

WORDS = """--output_dir out --do_train True --do_eval True --per_device_train_batch_size 4 --num_train_epochs 2
--learning_rate 1e-2 --save_steps 24 --logging_steps 3 --eval_strategy epoch --warmup_steps 4 --report_to none
--use_cpu True --log_level info"""


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(WORDS.split())
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is None and len(os.listdir(training_args.output_dir)) > 0:
            raise ValueError(f"Output directory ({training_args.output_dir}) already exists and is not empty.")

    set_seed(training_args.seed)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=2)
    rows = torch.randint(0, 64, (100, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": int(row[0] > 32)} for row in rows]
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=data[:80],
        eval_dataset=data[80:],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
