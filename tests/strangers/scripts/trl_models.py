"""The tiny language model that the scripts of TRL beside this one train."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from words import VOCABULARY


def language_model() -> GPT2LMHeadModel:
    set_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes = {"vocab_size": len(VOCABULARY), "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **special))
