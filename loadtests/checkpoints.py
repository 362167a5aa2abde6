"""Makes model folders with random weights in the shapes of published models. So a benchmark on a GPU needs no download."""

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.model.config import Pooling

SHARD_BYTES = 5_000_000_000  # as on the Hub


@dataclass(frozen=True, slots=True)
class Published:
    config: Any
    model_class: Any
    pooling: Pooling

    @property
    def is_encoder(self) -> bool:
        return self.model_class is transformers.BertModel

    @property
    def longest(self) -> int:
        """Tokens of the longest text of a mixed batch."""
        return min(2048, self.config.max_position_embeddings)

    @property
    def body_parameters(self) -> int:
        """Parameters of the linear layers. Every token is multiplied with all of them."""
        c = self.config
        if self.is_encoder:
            return c.num_hidden_layers * (4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size)
        heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads
        return c.num_hidden_layers * (heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size)

    def flops(self, lengths: list[int]) -> float:
        """FLOPs of forward passes over these sequences. Causal attention counts as half."""
        c = self.config
        width = c.hidden_size if self.is_encoder else c.num_attention_heads * c.head_dim
        pairs = sum(length**2 for length in lengths) / (1 if self.is_encoder else 2)
        return 2 * self.body_parameters * sum(lengths) + 4 * pairs * width * c.num_hidden_layers


def _qwen3(
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    vocab: int,
    positions: int,
    model_class: Any = transformers.Qwen3Model,
) -> Published:
    config = transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        head_dim=128, intermediate_size=intermediate, max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
    )  # fmt: skip
    return Published(config, model_class, "last_token")


PUBLISHED = {
    "Qwen3-Embedding-0.6B": _qwen3(1024, 28, 16, 3072, 151669, 32768),
    "Qwen3-Embedding-4B": _qwen3(2560, 36, 32, 9728, 151665, 40960),
    "Qwen3-Embedding-8B": _qwen3(4096, 36, 32, 12288, 151665, 40960),
    "Qwen3-Reranker-0.6B": _qwen3(1024, 28, 16, 3072, 151669, 40960, transformers.Qwen3ForCausalLM),
    "BERT-base": Published(transformers.BertConfig(), transformers.BertModel, "mean"),
}


def save_random(name: str, folder: Path, device: str = "cuda") -> Published:
    """Writes a bf16 checkpoint of that shape, in shards like published checkpoints."""
    return save(PUBLISHED[name], folder, device)


def save(published: Published, folder: Path, device: str = "cuda") -> Published:
    """As `save_random`."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in published.model_class(published.config).state_dict().items()}
    if published.config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for key, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        is_norm = "norm" in key.lower() and key.endswith("weight")
        values = torch.randn(shape, device=device) * 0.02 + is_norm
        shards[-1][key] = values.to(torch.bfloat16).cpu()
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = published.config.to_dict() | {"architectures": [published.model_class.__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    words = {"[UNK]": 0, "warm": 1, "up": 2, "yes": 3, "no": 4}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return published


def save_small_reranker(folder: Path) -> None:
    """A BERT cross-encoder of random weights, with the embedded model's tokenizer."""
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        num_labels=1,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(resolve_model(EMBEDDED_MODEL) / name, folder / name)
