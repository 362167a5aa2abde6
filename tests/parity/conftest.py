"""Registers the networks that transformers lacks. They read checkpoints that pytest's cache kept."""

from parity import gte_reference, jina_bert_reference, nomic_bert_reference  # noqa: F401
