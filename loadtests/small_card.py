"""Measures Qwen3-Embedding-8B in float8 on a card of 16 GB. Another process holds all but 15.5 GiB of the GPU.

python -m loadtests.small_card
"""

import tempfile
from pathlib import Path

import torch

from loadtests.checkpoints import save_random
from loadtests.footprint import MIB, in_a_process
from loadtests.report import write

MODEL, LONGEST = "Qwen3-Embedding-8B", 8192
CARD_BYTES = 31 << 29  # 15.5 GiB


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        published = save_random(MODEL, folder)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(free - CARD_BYTES, dtype=torch.uint8, device="cuda")
        left, _ = torch.cuda.mem_get_info()
        row = {"model": MODEL, "dtype": "float8", "longest input, tokens": LONGEST, "free before, MiB": left / MIB}
        row |= in_a_process(folder, published.pooling, "float8", LONGEST, LONGEST)
        del ballast
    notes = [
        "random weights at the real shape; texts of every length up to the longest, and batches of that many tokens",
        "reserved: torch.cuda.memory_reserved(); on the card: by NVML, the context included; MiB",
    ]
    write("small_card", "python -m loadtests.small_card", {"With 15.5 GiB": [row]}, notes)


if __name__ == "__main__":
    main()
