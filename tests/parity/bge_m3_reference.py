"""Computes BGE-M3's outputs for a text in plain torch, with transformers' XLMRobertaModel.

Source: Chen et al., "BGE M3-Embedding", arXiv:2402.03216, section 3.2. A token's weight is relu(w . h + b), and a word's weight
is the largest of its tokens. A text's ColBERT vectors are a linear layer of all its tokens except the first, normalised.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

NO_WORDS = {0, 1, 2, 3}  # [PAD], [UNK], [CLS] and [SEP] of the tiny tokenizer


@dataclass
class Given:
    dense: Tensor  # [C], normalised
    lexical: dict[int, float]
    colbert: Tensor  # [L - 1, dims]


def save_layers(folder: Path, hidden_size: int, colbert_size: int) -> None:
    """Saves random layers in the form of FlagEmbedding."""
    torch.manual_seed(7)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", colbert_size)):
        torch.save(torch.nn.Linear(hidden_size, rows).state_dict(), folder / f"{name}.pt")


def bge_m3(folder: Path, ids: list[int]) -> Given:
    body = transformers.XLMRobertaModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sparse, colbert = (torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert"))
    with torch.inference_mode():
        hidden = body(input_ids=torch.tensor([ids])).last_hidden_state[0]
    weights = (hidden @ sparse["weight"][0] + sparse["bias"]).clamp(min=0).tolist()
    lexical: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in NO_WORDS and weight > 0:
            lexical[token] = max(weight, lexical.get(token, 0.0))
    vectors = hidden[1:] @ colbert["weight"].T + colbert["bias"]
    return Given(hidden[0] / hidden[0].norm(), lexical, vectors / vectors.norm(dim=1, keepdim=True))
