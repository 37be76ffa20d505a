"""The tiny model that the scripts of sentence-transformers beside this one train."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, set_seed

from words import VOCABULARY, tokenizer


def embedding_model() -> SentenceTransformer:
    set_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    BertModel(config).save_pretrained("base")
    tokenizer().save_pretrained("base")
    words = Transformer("base", max_seq_length=16)
    return SentenceTransformer(modules=[words, Pooling(16)], device="cpu")
