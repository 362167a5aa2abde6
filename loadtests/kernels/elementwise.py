"""Measures the kernels that only move data, at real shapes, against the bandwidth of a copy and against torch.

python -m loadtests.kernels.elementwise
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import reference
from engine.measure.timing import CALLS, copy_bandwidth, seconds_of
from engine.run.batch import PackedBatch
from loadtests.checkpoints import PUBLISHED
from loadtests.kernels.batches import DEVICE, packed
from loadtests.report import write
from loadtests.traces import mixed_lengths

TOKENS = (16384, 512, 16)  # the first measures bandwidth from memory, the others latency
ROTATED_BYTES = 400 << 20  # eight times the L2 cache of an H200
EPS = 1e-6
Call = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    num_bytes: int  # each input read once, each output written once
    ours: Call
    theirs: Call  # torch's way to compute the op


class Rotating:
    """Random tensors of one shape; `[i]` repeats after the last one. `cold` tensors together exceed the cache many times."""

    def __init__(self, *size: int, cold: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.nbytes = dtype.itemsize * torch.Size(size).numel()
        count = min(CALLS, -(-ROTATED_BYTES // self.nbytes)) if cold else 1
        self._tensors = [torch.randn(size, dtype=dtype, device=DEVICE) for _ in range(count)]

    def __getitem__(self, i: int) -> Tensor:
        return self._tensors[i % len(self._tensors)]


def qwen3_cases(config: Any, num_tokens: int) -> Iterator[Case]:
    """Every op of a Qwen3 layer except the linear ones, then embedding and pooling. `config` is transformers' config."""
    size, cold = config.hidden_size, num_tokens == TOKENS[0]
    batch = packed(mixed_lengths(num_tokens, seed=0))
    x, residual, weight = Rotating(num_tokens, size, cold=cold), Rotating(num_tokens, size, cold=cold), random(size)
    yield Case(
        "rms_norm",
        2 * x.nbytes + weight.nbytes,
        lambda i: kernels.rms_norm(x[i], weight, EPS),
        lambda i: F.rms_norm(x[i], (size,), weight, EPS),
    )
    yield Case(
        "residual + rms_norm",
        4 * x.nbytes + weight.nbytes,
        lambda i: kernels.rms_norm(x[i], weight, EPS, residual[i]),
        lambda i: F.rms_norm(residual[i].add_(x[i]), (size,), weight, EPS),
    )
    yield norm_rope_case(config, batch, cold)
    gate_up = Rotating(num_tokens, 2 * config.intermediate_size, cold=cold)
    yield Case("swiglu", gate_up.nbytes * 3 // 2, lambda i: kernels.swiglu(gate_up[i]), lambda i: reference.swiglu(gate_up[i]))
    ids, words = random_ids(config, num_tokens), Rotating(config.vocab_size, size, cold=cold)
    yield Case(
        "embed",
        2 * x.nbytes + ids[0].nbytes,
        lambda i: kernels.embed(ids[i], batch.positions, words[i]),
        lambda i: F.embedding(ids[i], words[i]),
    )
    yield from pooling_cases(x, batch, Rotating(num_tokens, size, cold=cold))


def bert_cases(config: Any, num_tokens: int) -> Iterator[Case]:
    size, cold = config.hidden_size, num_tokens == TOKENS[0]
    batch = packed(mixed_lengths(num_tokens, seed=0, most=512))
    x, residual = Rotating(num_tokens, size, cold=cold), Rotating(num_tokens, size, cold=cold)
    weight, shift, bias = random(size), random(size), random(size)
    yield Case(
        "bias + layer_norm",
        2 * x.nbytes + 3 * weight.nbytes,
        lambda i: kernels.layer_norm(x[i], weight, shift, EPS, bias),
        lambda i: reference.layer_norm(x[i], weight, shift, EPS, bias),
    )
    yield Case(
        "bias + residual + layer_norm",
        3 * x.nbytes + 3 * weight.nbytes,
        lambda i: kernels.layer_norm(x[i], weight, shift, EPS, bias, residual[i]),
        lambda i: reference.layer_norm(x[i], weight, shift, EPS, bias, residual[i]),
    )
    wide, wide_bias = Rotating(num_tokens, config.intermediate_size, cold=cold), random(config.intermediate_size)
    yield Case(
        "bias + gelu",
        2 * wide.nbytes + wide_bias.nbytes,
        lambda i: kernels.gelu(wide[i], wide_bias),
        lambda i: reference.gelu(wide[i], wide_bias),
    )
    ids, words = random_ids(config, num_tokens), Rotating(config.vocab_size, size, cold=cold)
    table = random(512, size)
    yield Case(
        "embed + positions",
        2 * x.nbytes + ids[0].nbytes + batch.positions.nbytes + table[: max(batch.lengths)].nbytes,
        lambda i: kernels.embed(ids[i], batch.positions, words[i], table),
        lambda i: F.embedding(ids[i], words[i]) + F.embedding(batch.positions, table),
    )
    yield from pooling_cases(x, batch, Rotating(num_tokens, size, cold=cold, dtype=torch.float32))


def norm_rope_case(config: Any, batch: PackedBatch, cold: bool) -> Case:
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = Rotating(batch.num_tokens, heads + 2 * kv_heads, size, cold=cold)
    q_weight, k_weight = random(size), random(size)
    table = reference.rope_table(size, 1e6, max(batch.lengths), DEVICE)
    # transformers computes the cosines of a batch once for all layers, so they are not timed.
    angles = table[batch.positions].to(torch.bfloat16).unsqueeze(1)
    cos, sin = (torch.cat((part, part), dim=-1) for part in angles.unbind(-1))  # [T, 1, D]

    def theirs(i: int) -> list[Tensor]:
        rotated = []
        for part, weight in ((qkv[i][:, :heads], q_weight), (qkv[i][:, heads : heads + kv_heads], k_weight)):
            normed = F.rms_norm(part, (size,), weight, EPS)
            first, second = normed.chunk(2, dim=-1)
            rotated.append(normed * cos + torch.cat((-second, first), dim=-1) * sin)
        return rotated

    return Case(
        "norm_rope",
        2 * qkv[0][:, : heads + kv_heads].nbytes + table.nbytes + batch.positions.nbytes,
        lambda i: kernels.norm_rope(qkv[i], q_weight, k_weight, table, batch.positions, EPS, heads),
        theirs,
    )


def pooling_cases(hidden: Rotating, batch: PackedBatch, rows: Rotating) -> Iterator[Case]:
    """`rows` [T, C] is the input of pool_finish: one row for each token, so that the kernel has enough data to move."""
    num_rows, size = rows[0].shape
    dimensions = torch.full((num_rows,), size, dtype=torch.int32, device=DEVICE)
    normalize = torch.ones_like(dimensions)
    yield Case(
        "pool_mean",
        hidden.nbytes + batch.cu_seqlens.nbytes + 4 * len(batch.lengths) * size,
        lambda i: kernels.pool_mean(hidden[i], batch.cu_seqlens),
        lambda i: reference.pool_mean(hidden[i], batch.cu_seqlens),
    )
    yield Case(
        f"pool_finish, {'fp32' if rows[0].dtype == torch.float32 else 'bf16'} rows",
        rows.nbytes + 4 * num_rows * size + 2 * dimensions.nbytes,
        lambda i: kernels.pool_finish(rows[i], dimensions, normalize),
        lambda i: reference.pool_finish(rows[i], dimensions, normalize),
    )


def random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def random_ids(config: Any, num_tokens: int) -> list[Tensor]:
    return [torch.randint(config.vocab_size, (num_tokens,), dtype=torch.int32, device=DEVICE) for _ in range(CALLS)]


def measure(full: Case, latencies: dict[int, Case], bandwidth: float) -> dict[str, Any]:
    seconds, theirs = seconds_of(full.ours), seconds_of(full.theirs)
    row = {
        "op": full.op,
        "MB": full.num_bytes / 1e6,
        "floor µs": full.num_bytes / bandwidth * 1e6,
        "µs": seconds * 1e6,
        "GB/s": full.num_bytes / seconds / 1e9,
        "% of copy": 100 * full.num_bytes / bandwidth / seconds,
        "% of torch.neg, as many bytes": 100 * seconds_of(same_size(full.num_bytes)) / seconds,
        "torch µs": theirs * 1e6,
        "times torch's speed": theirs / seconds,
    }
    for num_tokens, case in latencies.items():
        row[f"{num_tokens} tokens µs"] = seconds_of(case.ours) * 1e6
        row[f"torch, {num_tokens} µs"] = seconds_of(case.theirs) * 1e6
    return row


def same_size(num_bytes: int) -> Call:
    """torch's simplest kernel for this number of bytes: it reads half of them and writes half."""
    x = Rotating(num_bytes // 4, cold=True)
    return lambda i: torch.neg(x[i])


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    tables: dict[str, Sequence[dict[str, Any]]] = {}
    for name, published in PUBLISHED.items():
        cases = bert_cases if published.is_encoder else qwen3_cases
        sizes = zip(*(cases(published.config, num_tokens) for num_tokens in TOKENS), strict=True)
        tables[f"{name}, {TOKENS[0]:,} tokens"] = [
            measure(full, dict(zip(TOKENS[1:], rest, strict=True)), bandwidth) for full, *rest in sizes
        ]
    notes = [
        f"copy: {bandwidth / 1e9:,.0f} GB/s, 2 GiB on the device, bytes read and written; floor µs: the op's bytes at this rate",
        "bytes: each input read once, each output written once; time on the GPU, calls captured in one CUDA graph, median",
        f"{TOKENS[0]:,} tokens: inputs rotate over {ROTATED_BYTES >> 20} MiB or more, outputs are new memory; fewer: in cache",
        "bf16; lengths lognormal, median 150 tokens; pool_finish is given one row a token, far more than it has in a model",
        "torch: its fused norms, F.embedding, else the plain composition; norm_rope with the cosines computed beforehand",
    ]
    write("kernels_elementwise", "python -m loadtests.kernels.elementwise", tables, notes)


if __name__ == "__main__":
    main()
