"""Words, a tokenizer of words, and sentences of random words: what the scripts beside this one train on."""

from __future__ import annotations

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = [chr(97 + index) for index in range(26)]
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
VOCABULARY = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **SPECIAL)
    found.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return found


def sentences(count: int, length: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=length)) for _ in range(count)]
