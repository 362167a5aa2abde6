"""The torch path on a GPU: tokens/s and short-query latency beside sentence-transformers, random weights at real shapes.

python -m loadtests.gpu_check
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from engine import Engine
from engine.model_config import Pooling
from loadtests.report import write

SHAPES: dict[str, tuple[Any, Any, Pooling]] = {
    "BERT-base": (transformers.BertConfig(), transformers.BertModel, "mean"),
    "Qwen3-Embedding-0.6B": (
        transformers.Qwen3Config(
            vocab_size=151669, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=3072, max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        transformers.Qwen3Model,
        "last_token",
    ),
}  # fmt: skip


def sequences(count: int, seed: int, longest: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(150), 0.8, count), 8, longest).astype(int)
    return [rng.integers(1000, 30000, size=length).astype(np.int32) for length in lengths]


def seconds_of(step: Callable[[], Any], repeats: int = 5) -> float:
    step()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return median(seconds)


def save(folder: Path, config: Any, model_class: Any) -> None:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "warm": 1, "up": 2}, unk_token="[UNK]"))
    tokenizer.save(str(folder / "tokenizer.json"))
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"architectures": [model_class.__name__]}))


@torch.inference_mode()
def measure(name: str, config: Any, model_class: Any, pooling: Pooling) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        save(folder, config, model_class)
        engine = Engine.load(folder, pooling=pooling)
        peer = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().eval()
    batch = sequences(64, 0, min(2048, config.max_position_embeddings))
    batch.sort(key=len)
    num_tokens = sum(map(len, batch))

    def padded(part: list[NDArray[np.int32]]) -> None:
        ids = torch.zeros(len(part), max(map(len, part)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(part):
            ids[row, : len(each)], mask[row, : len(each)] = torch.from_numpy(each), 1
        peer(input_ids=ids.cuda(), attention_mask=mask.cuda()).last_hidden_state.float().cpu()

    ours = seconds_of(lambda: engine.launch(batch).wait())
    theirs = seconds_of(lambda: [padded(batch[i : i + 32]) for i in range(0, len(batch), 32)])
    query = [np.arange(1000, 1016, dtype=np.int32)]
    return [
        {
            "model": name,
            "engine, one batch: k tokens/s": num_tokens / ours / 1e3,
            "transformers sdpa, padded b32, sorted: k tokens/s": num_tokens / theirs / 1e3,
            "16-token query ms": seconds_of(lambda: engine.launch(query).wait(), 30) * 1e3,
            "transformers ms": seconds_of(lambda: padded(query), 30) * 1e3,
        }
    ]


if __name__ == "__main__":
    rows = [row for name, (config, model_class, pooling) in SHAPES.items() for row in measure(name, config, model_class, pooling)]
    notes = ["bf16, random weights, 64 ragged sequences (lognormal, median 150 tokens), ids in, pooled vectors on the host"]
    write("gpu_check", "python -m loadtests.gpu_check", {"The engine on a GPU": rows}, notes)
