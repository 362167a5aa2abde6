"""Registers the networks that transformers lacks.

`tiny_checkpoints` registers them too, but a checkpoint from pytest's cache is loaded without it.
"""

from parity import gte_reference, jina_bert_reference, nomic_bert_reference  # noqa: F401
