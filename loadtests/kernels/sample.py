"""Measures the choice of next tokens from logits, beside the time to read the logits and beside transformers' torch operations.

python -m loadtests.kernels.sample
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine import kernels
from engine.draws import Row, uniform
from engine.measure.timing import copy_bandwidth, seconds_of
from engine.options import SamplingOptions
from loadtests.report import write

VOCAB_SIZE = 151_936  # Qwen3's
ROWS = (1, 8, 64, 256)
OPTIONS = {
    "greedy": SamplingOptions(max_tokens=1, temperature=0.0),
    "temperature": SamplingOptions(max_tokens=1, temperature=0.7),
    "top-k 20, top-p 0.95": SamplingOptions(max_tokens=1, temperature=0.7, top_k=20, top_p=0.95),
    "top-p 0.95": SamplingOptions(max_tokens=1, temperature=0.7, top_p=0.95),
}
# The standard deviation of random normal logits. The first is as peaked as a model's logits. Rows of the second have thousands
# of candidates, and top-p without top-k has to read them several times.
SCALES = {"peaked": 4.0, "flat": 0.5}


def in_torch(logits: Tensor, options: SamplingOptions) -> Tensor:
    """The operations of transformers' logits warpers and of its draw."""
    if options.temperature == 0:
        return logits.argmax(1)
    scores = logits.float() / options.temperature
    if options.top_k:
        kth = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if options.top_p < 1:
        values, ids = scores.sort(1)
        removed = values.softmax(1).cumsum(1) <= 1 - options.top_p
        removed[:, -1] = False
        scores = scores.masked_fill(removed.scatter(1, ids, removed), -torch.inf)
    return torch.multinomial(scores.softmax(1), 1)


def measured(dtype: torch.dtype, scale: float, bandwidth: float) -> Iterator[dict[str, Any]]:
    for num_rows in ROWS:
        logits = (torch.randn(num_rows, VOCAB_SIZE, device="cuda") * scale).to(dtype)
        for name, options in OPTIONS.items():
            rows = [Row(options, uniform(0, number)) for number in range(num_rows)]
            choices = torch.from_numpy(kernels.choices_of(rows, range(num_rows))).cuda()
            last = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
            ours: Callable[[int], Tensor] = lambda _: kernels.sample(logits, choices, last)  # noqa: B023, E731
            theirs: Callable[[int], Tensor] = lambda _: in_torch(logits, options)  # noqa: B023, E731
            seconds, floor = seconds_of(ours), logits.nbytes / bandwidth
            yield {
                "rows": num_rows,
                "options": name,
                "ours us": 1e6 * seconds,
                "floor us": 1e6 * floor,
                "floor / ours": floor / seconds,
                "torch us": 1e6 * seconds_of(theirs),
            }


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    tables = {
        f"{str(dtype).removeprefix('torch.')} logits, {name}": list(measured(dtype, scale, bandwidth))
        for dtype in (torch.bfloat16, torch.float32)
        for name, scale in SCALES.items()
    }
    notes = [
        f"{VOCAB_SIZE:,} tokens; random normal logits times " + ", ".join(f"{scale} ({name})" for name, scale in SCALES.items()),
        f"floor: the logits' bytes at the {bandwidth / 1e9:,.0f} GB/s of a large copy; few rows lie in the L2 cache",
        "torch: argmax, or topk, sort, softmax and multinomial in the order of transformers; 20 calls to a CUDA graph",
    ]
    write("kernels_sample", "python -m loadtests.kernels.sample", tables, notes)


if __name__ == "__main__":
    main()
