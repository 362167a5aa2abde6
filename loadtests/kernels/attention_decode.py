"""Measures attention of decode steps over the paged cache, beside the time to read keys and values.

It is also compared to torch's SDPA over contiguous keys and values.

python -m loadtests.kernels.attention_decode
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import attention_decode
from engine.kernels.attention_decode import DECODE_SHAPES_8, PAGE, DecodeShape, DecodeWorkspace, decode_cluster, decode_items
from engine.kernels.cache8 import Cache8, rounded
from engine.kernels.launch import num_sms
from engine.measure.timing import CALLS, copy_bandwidth, seconds_of
from loadtests.report import write

DEVICE = torch.device("cuda", 0)
HEADS = {"Qwen3 0.6B": (16, 8, 128), "Qwen3 4B and 8B": (32, 8, 128)}
BATCHES, CONTEXTS = (1, 8, 64, 256), (128, 800, 4096)
BLOCKS_PER_SM = 2
ROTATE_BYTES = 400 << 20  # bytes of the caches that take turns, so that none is in the L2 cache
TOLERANCE = 0.02  # as a part of the largest value
# Shapes of a block for D 128. Each is measured with several numbers of blocks for each SM.
SHAPES = [DecodeShape(4, 2), DecodeShape(4, 3), DecodeShape(2, 3), DecodeShape(2, 4), DecodeShape(2, 6), DecodeShape(1, 6)]
CUTS = (1, 2, 3, 4, 6)
CLUSTERS, LONE = (1, 2, 4, 8), (128, 192, 256, 400, 800, 2048, 4096, 32768)
LONG = ((1, 4096), (8, 4096), (64, 4096), (1, 32768), (16, 32768))  # for the comparison of 16 bits and 8
STAGES_8 = (3, 4, 5, 6, 8)
TUNED = ((1, 800), (1, 4096), (8, 800), (64, 800), (256, 800))


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences of one length in several caches, with their pages in random order."""

    q: Tensor  # [B, H, D]
    caches: Sequence[Tensor | Cache8]  # [2, S, K, D] each
    pages: Tensor
    context: int

    @property
    def kv_bytes(self) -> int:
        """The bytes that each call reads."""
        cache = self.caches[0]
        if isinstance(cache, Cache8):
            return len(self.q) * self.context * (cache.values[:, 0].nbytes + cache.scales[:, :, 0].nbytes)
        return len(self.q) * self.context * cache[:, 0].nbytes

    @property
    def cluster(self) -> int:
        """As the engine chooses it."""
        return decode_cluster(self.context, torch.cuda.get_device_capability(DEVICE)) if len(self.q) == 1 else 1

    def cut(self, blocks_per_sm: int, cluster: int) -> tuple[Tensor, DecodeWorkspace]:
        """Returns the items and their workspace. As in a decode step, earlier passes have stored all keys but the last."""
        batch, n_heads, head_dim = self.q.shape
        offsets = np.arange(batch) * -(-self.context // PAGE)
        num_blocks = 1 if cluster > 1 else blocks_per_sm * num_sms(DEVICE)  # a cluster computes a whole sequence
        n_kv_heads, settled = self.caches[0].shape[2], np.ones(batch, bool)
        items = decode_items([self.context] * batch, offsets, n_kv_heads, num_blocks, settled=settled)
        return torch.from_numpy(items).to(DEVICE), DecodeWorkspace.create(len(items), n_heads, head_dim, DEVICE)

    def seconds(self, blocks_per_sm: int = BLOCKS_PER_SM, shape: DecodeShape | None = None, cluster: int | None = None) -> float:
        cluster = cluster or self.cluster
        items, workspace = self.cut(blocks_per_sm, cluster)
        count, how = len(self.caches), {"cluster": cluster, "shape": shape}
        return seconds_of(lambda i: attention_decode(self.q, self.caches[i % count], items, self.pages, workspace, **how))

    def in_8_bits(self) -> "Step":
        """The same step over caches in 8 bits. There are twice as many caches, because each is half as large."""
        caches = [
            Cache8(codes, scales.transpose(1, 2).contiguous())
            for cache in [*self.caches, *self.caches]
            if isinstance(cache, Tensor)
            for codes, scales in (rounded(cache, torch.float8_e4m3fn),)
        ]
        return replace(self, caches=caches)

    def gathered(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values in the order of their tokens: [B, K, L, D] each, contiguous."""
        rows = self.pages.long().view(len(self.q), -1, 1) * PAGE + torch.arange(PAGE, device=DEVICE)
        slots = rows.flatten(1)[:, : self.context]
        return cache[0][slots].transpose(1, 2).contiguous(), cache[1][slots].transpose(1, 2).contiguous()


def step(heads: tuple[int, int, int], batch: int, context: int) -> Step:
    n_heads, n_kv_heads, head_dim = heads
    num_pages = batch * -(-context // PAGE)
    size = 2 * num_pages * PAGE * n_kv_heads * head_dim
    count = min(CALLS, -(-ROTATE_BYTES // (2 * size)))
    caches = [torch.randn(2, num_pages * PAGE, n_kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(count)]
    q = torch.randn(batch, n_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    return Step(q, caches, torch.randperm(num_pages, device=DEVICE).int(), context)


def beside_sdpa(name: str, made: Step, bandwidth: float) -> dict[str, Any]:
    q, count = made.q.unsqueeze(2), len(made.caches)  # [B, H, 1, D]
    contiguous = [made.gathered(cache) for cache in made.caches if isinstance(cache, Tensor)]

    def sdpa(i: int) -> Tensor:
        return F.scaled_dot_product_attention(q, *contiguous[i % count], enable_gqa=True)

    items, workspace = made.cut(BLOCKS_PER_SM, made.cluster)
    ours = attention_decode(made.q, made.caches[0], items, made.pages, workspace, cluster=made.cluster).float()
    theirs = sdpa(0).squeeze(2).float()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < TOLERANCE, f"torch and ours differ by {error:.3g}"  # NaN too
    seconds, floor = made.seconds(), made.kv_bytes / bandwidth
    row = {
        "model": name,
        "sequences": len(made.q),
        "context": made.context,
        "parts of a sequence": int(items[0, 5]),
        "SDPA us": 1e6 * seconds_of(sdpa),
        "ours us": 1e6 * seconds,
        "GB/s": made.kv_bytes / seconds / 1e9,
        "floor us": 1e6 * floor,
        "floor / ours": floor / seconds,
    }
    print(row, flush=True)
    return row


def all_steps(bandwidth: float) -> Iterator[dict[str, Any]]:
    for name, heads in HEADS.items():
        for batch in BATCHES:
            for context in CONTEXTS:
                yield beside_sdpa(name, step(heads, batch, context), bandwidth)


def beside_16_bits(bandwidth: float) -> Iterator[dict[str, Any]]:
    for batch, context in LONG:
        wide = step(HEADS["Qwen3 4B and 8B"], batch, context)
        wide_us = 1e6 * wide.seconds()
        made = wide.in_8_bits()
        seconds, floor = made.seconds(), made.kv_bytes / bandwidth
        base = DECODE_SHAPES_8[128]
        stages = {f"{n} stages, us": 1e6 * made.seconds(shape=replace(base, stages=n)) for n in STAGES_8}
        row = {
            "sequences": batch,
            "context": context,
            "16 bits us": wide_us,
            "8 bits us": 1e6 * seconds,
            "16 bits / 8 bits": wide_us / 1e6 / seconds,
            "GB/s": made.kv_bytes / seconds / 1e9,
            "floor us": 1e6 * floor,
            "floor / 8 bits": floor / seconds,
            **stages,
        }
        print(row, flush=True)
        yield row


def all_clusters() -> Iterator[dict[str, Any]]:
    """Microseconds of a lone sequence, by the number of blocks that compute an item together."""
    for context in LONE:
        made = step(HEADS["Qwen3 0.6B"], 1, context)
        times = {f"{cluster} blocks, us": 1e6 * made.seconds(cluster=cluster) for cluster in CLUSTERS}
        yield {"context": context, **times}


def all_shapes() -> Iterator[dict[str, Any]]:
    """Microseconds by the shape of a block, and by blocks for each SM."""
    for batch, context in TUNED:
        made = step(HEADS["Qwen3 0.6B"], batch, context)
        for shape in SHAPES:
            times = {f"{cut} an SM, us": 1e6 * made.seconds(cut, shape, cluster=1) for cut in CUTS}
            yield {"sequences": batch, "context": context, "warps": shape.warps, "stages": shape.stages, **times}


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    tables: dict[str, Sequence[dict[str, Any]]] = {
        "A layer's attention of a decode step": list(all_steps(bandwidth)),
        "Keys and values in 8 bits, Qwen3 4B and 8B": list(beside_16_bits(bandwidth)),
        "Clusters of a lone sequence, Qwen3 0.6B": list(all_clusters()),
        "Shapes without clusters, Qwen3 0.6B": list(all_shapes()),
    }
    notes = [
        "bf16, one token a sequence; ours reads pages of 128 tokens in random order",
        "SDPA: torch's choice of backend, over contiguous keys and values [B, K, L, D], which are gathered beforehand",
        f"floor: the bytes of keys and values at the {bandwidth / 1e9:,.0f} GB/s of a large copy, read and written",
        "20 calls to a CUDA graph, over caches that take turns",
        "as in decode, earlier passes have stored all keys but the last: a call fetches some of them while the call before runs",
        "the floor of 8 bits has a byte for each value, and one for each head of a token",
        f"decode_items is to make {BLOCKS_PER_SM} blocks for each SM, in the last table as many as the column says",
    ]
    write("kernels_attention_decode", "python -m loadtests.kernels.attention_decode", tables, notes)


if __name__ == "__main__":
    main()
