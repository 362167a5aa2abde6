"""Measures varlen attention against FlashAttention 2, cuDNN, eager torch and a naive CUDA kernel, on batches of 32,768 tokens.

python -m loadtests.kernels.attention
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine import kernels
from engine.kernels import reference
from engine.measure.timing import gemm_rate, seconds_of
from loadtests.kernels.batches import AttentionBatch, attention_batch
from loadtests.kernels.naive import naive_attention
from loadtests.report import write
from loadtests.traces import mixed_lengths

TOKENS = 32768
HEADS = {"32 query heads, 8 key heads, D 128": (32, 8, 128), "16, 8, D 128": (16, 8, 128), "12, 12, D 64": (12, 12, 64)}
LENGTHS = (128, 512, 2048, 8192)
BERT_LONGEST = 512
EXACT_TOKENS = 8192  # the tokens of a batch that are compared with fp32
NAIVE_LONGEST = 2048
EAGER_SCORES = 1 << 31  # the most scores of eager's matrix: 4 GiB in bf16
TOLERANCE = 0.05  # eager rounds its weights to bf16


@dataclass(frozen=True, slots=True)
class Method:
    run: Callable[[], Any]
    packed: Callable[[Any], Tensor]  # turns the result of `run` into [T, H, D]; not timed


def ours(batch: AttentionBatch, causal: bool) -> Method:
    tiles, shape, bounds, queue = batch.packed.tiles, batch.packed.tile_shape, batch.packed.bounds, batch.packed.queue
    assert shape is not None, "our kernel runs on this GPU"

    def run() -> Tensor:
        return kernels.attention(batch.q, batch.k, batch.v, tiles, shape, bounds, causal, queue=queue)

    return Method(run, lambda out: out)


def flash_attention_2(batch: AttentionBatch, causal: bool) -> Method:
    cu, longest = batch.packed.cu_seqlens, batch.longest
    forward = torch.ops.aten._flash_attention_forward
    return Method(lambda: forward(batch.q, batch.k, batch.v, cu, cu, longest, longest, 0.0, causal, False)[0], lambda out: out)


def cudnn(batch: AttentionBatch, causal: bool) -> Method | None:
    """SDPA by cuDNN. None for ragged batches, and if this cuDNN refuses the shape."""
    if len(set(batch.lengths)) > 1:
        return None
    q, k, v = (x.unflatten(0, (-1, batch.longest)).transpose(1, 2) for x in (batch.q, batch.k, batch.v))  # [B, heads, L, D]

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=batch.group > 1)

    try:
        run()
    except RuntimeError as error:
        print(f"cuDNN: {error}")
        return None
    return Method(run, lambda out: out.transpose(1, 2).flatten(0, 1))


def eager(batch: AttentionBatch, causal: bool) -> Method:
    """`eager_attention_forward` of transformers on padded sequences. Padding and mask are not timed."""
    q, k, v = (padded(x, batch.lengths) for x in (batch.q, batch.k, batch.v))  # [B, heads, longest, D]
    mask = additive_mask(batch, causal)
    most = max(1, EAGER_SCORES // (q.shape[1] * batch.longest**2))

    def some(rows: slice) -> Tensor:
        keys, values = (x[rows].unsqueeze(2).expand(-1, -1, batch.group, -1, -1).flatten(1, 2) for x in (k, v))
        scores = torch.matmul(q[rows], keys.transpose(2, 3)) * q.shape[3] ** -0.5
        if mask is not None:
            scores = scores + (mask[rows] if len(mask) > 1 else mask)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, values).transpose(1, 2).contiguous()

    def packed(parts: list[Tensor]) -> Tensor:
        rows = torch.cat(parts)
        return torch.cat([row[:length] for row, length in zip(rows, batch.lengths, strict=True)])

    return Method(lambda: [some(slice(start, start + most)) for start in range(0, len(q), most)], packed)


def naive_cuda(batch: AttentionBatch, causal: bool) -> Method | None:
    if batch.longest > NAIVE_LONGEST:
        return None
    bounds, longest = batch.packed.bounds, batch.longest
    return Method(lambda: naive_attention(batch.q, batch.k, batch.v, bounds, longest, causal), lambda out: out)


METHODS: dict[str, Callable[[AttentionBatch, bool], Method | None]] = {
    "ours": ours,
    "FlashAttention 2": flash_attention_2,
    "cuDNN": cudnn,
    "eager": eager,
    "naive CUDA": naive_cuda,
}


def padded(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[T, heads, D] -> [B, heads, longest, D], with zeros after each sequence."""
    return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2).contiguous()


def additive_mask(batch: AttentionBatch, causal: bool) -> Tensor | None:
    """[B or 1, 1, longest or 1, longest] bf16: 0 for visible keys, the least value for others. None if all keys are visible."""
    ragged = len(set(batch.lengths)) > 1
    if not ragged and not causal:
        return None
    lengths = torch.tensor(batch.lengths, device=batch.q.device)
    at = torch.arange(batch.longest, device=batch.q.device)
    seen = (at < lengths[:, None] if ragged else at[None] >= 0)[:, None, None]
    if causal:
        seen = seen & (at[:, None] >= at)
    return torch.where(seen, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def error_of(out: Tensor, batch: AttentionBatch, causal: bool) -> float:
    """The error of our output against SDPA in fp32, on the batch's first sequences."""
    lengths = batch.lengths[: sum(end <= EXACT_TOKENS for end in accumulate(batch.lengths))]
    q, k, v = (x[: sum(lengths)].float() for x in (batch.q, batch.k, batch.v))
    return relative_error(out[: len(q)], reference.attention(q, k, v, lengths, causal))


def teraflops(name: str, method: Method, expected: Tensor, flops: float) -> float:
    error = relative_error(method.packed(method.run()), expected)
    assert error < TOLERANCE, f"{name} and ours differ by {error:.3g}"  # NaN too
    return flops / seconds_of(lambda _: method.run()) / 1e12


def measure(lengths: str, batch: AttentionBatch, causal: bool, gemm: float) -> dict[str, Any]:
    expected = ours(batch, causal).run()
    flops = batch.flops(causal)
    row: dict[str, Any] = {"lengths": lengths, "mask": "causal" if causal else "bidirectional"}
    for name, make in METHODS.items():
        method = make(batch, causal)
        row[name] = "-" if method is None else teraflops(name, method, expected, flops)
    for name, short in (("eager", "eager"), ("naive CUDA", "naive"), ("FlashAttention 2", "FA2")):
        row[f"ours / {short}"] = "-" if row[name] == "-" else row["ours"] / row[name]
    row["% of GEMM"] = 100 * row["ours"] * 1e12 / gemm
    row["our error"] = error_of(expected, batch, causal)
    print(row, flush=True)
    return row


def batches(heads: int, kv_heads: int, head_dim: int) -> Iterator[tuple[str, AttentionBatch, bool]]:
    bert = heads == kv_heads
    longest = BERT_LONGEST if bert else LENGTHS[-1]
    named = {str(length): [length] * (TOKENS // length) for length in LENGTHS if length <= longest}
    named["mixed"] = mixed_lengths(TOKENS, seed=0, most=min(longest, 2048))
    for name, lengths in named.items():
        for causal in (False,) if bert else (True, False):
            yield name, attention_batch(lengths, heads, kv_heads, head_dim, causal), causal


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    gemm = gemm_rate()
    tables: dict[str, Sequence[dict[str, Any]]] = {
        title: [measure(*each, gemm) for each in batches(*heads)] for title, heads in HEADS.items()
    }
    notes = [
        f"TFLOP/s of useful work: 4 L² D a query head and sequence, half of it if causal; {TOKENS:,} tokens, bf16, "
        "time on the GPU, median",
        "mixed: lognormal, median 150 tokens, sigma 0.8, from 8 to 2,048 tokens (512 with D 64)",
        f"GEMM: {gemm / 1e12:,.0f} TFLOP/s, torch.mm of 8192 x 8192 bf16 matrices",
        "ours, FlashAttention 2 (torch's, varlen) and the naive kernel take the packed batch; cuDNN, through SDPA, equal "
        "lengths; eager, as in transformers, a padded batch",
        f"naive CUDA: a block a query row and head, scores in shared memory, no tensor cores; up to L = {NAIVE_LONGEST:,}",
        f"every output within {TOLERANCE} of ours; our error: largest difference from fp32 SDPA over the largest value, "
        f"on the first sequences of up to {EXACT_TOKENS:,} tokens",
    ]
    write("kernels_attention", "python -m loadtests.kernels.attention", tables, notes)


if __name__ == "__main__":
    main()
