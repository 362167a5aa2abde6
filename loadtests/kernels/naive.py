"""A simple attention kernel for comparison: one thread block for each query row and head, no tensor cores, no tiles."""

from functools import cache

import numpy as np
import torch
from cuda.core import Kernel, LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, launch
from torch import Tensor

from engine.kernels.launch import arch_of

THREADS = 128
MOST_KEYS = 8192  # their scores fit into the shared memory that a block has by default

SOURCE = """
// Scores of one row in shared memory (fp32), a thread a key; their softmax; then a thread a column of the output.
// bf16 is the upper half of an fp32. Loads are 16 bytes wide, so that the comparison is with plain code and not with bad code.
typedef unsigned short u16;
typedef unsigned int u32;

__device__ float block_reduce(float x, bool largest) {
    __shared__ float scratch[THREADS];
    scratch[threadIdx.x] = x;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) {
            const float other = scratch[threadIdx.x + step];
            scratch[threadIdx.x] = largest ? fmaxf(scratch[threadIdx.x], other) : scratch[threadIdx.x] + other;
        }
        __syncthreads();
    }
    x = scratch[0];
    __syncthreads();
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
naive_attention(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ out,
                const int2* __restrict__ bounds, long long q_stride, long long kv_stride, long long causal, float scale) {
    extern __shared__ float scores[];
    __shared__ float query[D];
    const int token = blockIdx.x, head = blockIdx.y, first = bounds[token].x;
    const int keys = (causal ? token + 1 : bounds[token].y) - first;
    q += token * q_stride + head * D;
    k += first * kv_stride + head / GROUP * D;
    v += first * kv_stride + head / GROUP * D;
    for (int d = threadIdx.x; d < D; d += THREADS) query[d] = scale * __uint_as_float(q[d] << 16);
    __syncthreads();

    float largest = -1e30f;
    for (int key = threadIdx.x; key < keys; key += THREADS) {
        const uint4* row = reinterpret_cast<const uint4*>(k + key * kv_stride);
        float score = 0.f;
        for (int d = 0; d < D / 8; ++d) {
            const uint4 eight = row[d];
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
            for (int w = 0; w < 4; ++w) {
                score += query[8 * d + 2 * w] * __uint_as_float(words[w] << 16);
                score += query[8 * d + 2 * w + 1] * __uint_as_float(words[w] & 0xffff0000u);
            }
        }
        scores[key] = score;
        largest = fmaxf(largest, score);
    }
    largest = block_reduce(largest, true);
    float sum = 0.f;
    for (int key = threadIdx.x; key < keys; key += THREADS) sum += scores[key] = __expf(scores[key] - largest);
    sum = block_reduce(sum, false);

    for (int d = threadIdx.x; d < D; d += THREADS) {
        float value = 0.f;
        for (int key = 0; key < keys; ++key) value += scores[key] * __uint_as_float(v[key * kv_stride + d] << 16);
        u16 rounded;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value / sum));
        out[(static_cast<long long>(token) * gridDim.y + head) * D + d] = rounded;
    }
}
"""


def naive_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, causal: bool) -> Tensor:
    """Like `engine.kernels.attention`, in bf16. `longest` is the longest sequence, at most MOST_KEYS tokens."""
    num_tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        _stream(torch.cuda.current_stream(q.device).cuda_stream),
        LaunchConfig(grid=(num_tokens, heads), block=THREADS, shmem_size=4 * longest),
        _kernel(head_dim, heads // k.shape[1], arch_of(q.device)),
        *(x.data_ptr() for x in (q, k, v, out, bounds)),
        q.stride(0),
        k.stride(0),
        int(causal),
        np.float32(head_dim**-0.5),
    )
    return out


@cache
def _kernel(head_dim: int, group: int, arch: str) -> Kernel:
    return _code(head_dim, group, arch).get_kernel("naive_attention")


@cache  # keeps the module loaded
def _code(head_dim: int, group: int, arch: str) -> ObjectCode:
    macros = [("D", str(head_dim)), ("GROUP", str(group)), ("THREADS", str(THREADS))]
    return Program(SOURCE, "c++", ProgramOptions(arch=arch, std="c++17", define_macro=macros)).compile("cubin")


@cache
def _stream(handle: int) -> Stream:
    return Stream.from_handle(handle)
