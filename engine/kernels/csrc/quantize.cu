// Converts rows to 8 bits with a scale for each row, after the operation before a product: RMSNorm, SwiGLU or none.
//   x [T, C] 16-bit (with GATED [T, 2 C]: eight columns of gate alternate with eight columns of up), weight [C], values [T, C] e4m3
//   or int8, scale [T] fp32. With PENDING, pending [T, C] is added to x in place first. A row's largest value becomes 448 in e4m3,
//   127 in int8. One value that is not finite makes all results of its row not finite.
//   BLOCK > 0: the Hadamard matrix over sqrt(BLOCK) rotates each BLOCK neighbouring columns first. An outlier then costs the other
//   values of the block fewer of their 8 bits.
// ROW_THREADS threads hold a row in registers, VECTORS times eight values each, so the kernel reads x once.
// Floor: 3 * T * C bytes, GATED 5, PENDING 7.
//   C: columns, a multiple of 8.  NORM, GATED, PENDING: 0 or 1.  INT8: 1, or 0 for e4m3 (sm_89 and later).
//   BLOCK: 0, or 8 to 128, a power of 2.
constexpr int ROW_WARPS = ROW_THREADS / 32;
constexpr int COLUMN_VECTORS = C / 8;
constexpr int VECTORS = (COLUMN_VECTORS + ROW_THREADS - 1) / ROW_THREADS;
constexpr float MOST = INT8 ? 127.f : 448.f;
constexpr float LEAST = 1e-35f;  // the least largest value of a row: MOST divided by less is infinite, and infinity times 0 is NaN

// The Hadamard transform of BLOCK values, eight in each of BLOCK / 8 neighbouring lanes, without the division by sqrt(BLOCK).
__device__ __forceinline__ void rotate(float (&y)[8], int lane) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (!(e & step)) {
                const float a = y[e], b = y[e + step];
                y[e] = a + b;
                y[e + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < BLOCK / 8; step *= 2) {
        const float sign = lane & step ? -1.f : 1.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = fmaf(sign, y[e], __shfl_xor_sync(0xffffffffu, y[e], step));
    }
}

__device__ __forceinline__ u32 four(float a, float b, float c, float d) {  // a in the lowest byte
#if INT8
    u32 word;
    int upper, whole[4];
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole[0]) : "f"(a));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole[1]) : "f"(b));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole[2]) : "f"(c));
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(whole[3]) : "f"(d));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(whole[3]), "r"(whole[2]));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(whole[1]), "r"(whole[0]), "r"(upper));
    return word;
#else
    u32 word;
    asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
#endif
}

// With GATED a thread would take 90 registers. Then too few blocks fit to hide the memory's latency.
extern "C" __global__ void __launch_bounds__(ROW_THREADS * ROWS, GATED ? 1024 / (ROW_THREADS * ROWS) : 1)
quantize(u16* __restrict__ x, const u16* __restrict__ pending, const u16* __restrict__ weight, unsigned char* __restrict__ values,
         float* __restrict__ scale, i64 num_rows, i64 x_stride, float eps) {
    overlap();
    __shared__ float scratch[2][ROW_WARPS];
    const int lane = threadIdx.x % ROW_THREADS;
    const i64 row = static_cast<i64>(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= num_rows) return;  // whole warps: a row never shares one
    x += row * x_stride;
    pending += row * C;

    float y[VECTORS][8];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        const bool valid = COLUMN_VECTORS % ROW_THREADS == 0 || at < COLUMN_VECTORS;
        Vec8 v = {};
        if (valid) v = load8(x, GATED ? 2 * at : at);
        unpack(v, y[i]);
        if (PENDING && valid) {
            float more[8];
            unpack(load8(pending, at), more);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[i][e] += more[e];
            store8(x, at, pack(y[i]));
        }
        if (GATED) {
            Vec8 w = {};
            if (valid) w = load8(x, 2 * at + 1);
            float up[8];
            unpack(w, up);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[i][e] = silu_fast(y[i][e]) * up[e];
        }
        if (NORM) {
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += y[i][e] * y[i][e];
        }
    }
    if (NORM) {
        sum = block_sum<ROW_WARPS>(sum, scratch[0]);
        const float factor = rsqrtf(sum / C + eps);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int at = i * ROW_THREADS + lane;
            if (COLUMN_VECTORS % ROW_THREADS != 0 && at >= COLUMN_VECTORS) break;
            float w[8];
            unpack(load8(weight, at), w);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[i][e] *= factor * w[e];
        }
    }
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (BLOCK) rotate(y[i], lane);
#pragma unroll
        for (int e = 0; e < 8; ++e) most = larger(most, fabsf(y[i][e]));
    }
    most = block_largest<ROW_WARPS>(most, scratch[1]);
    if (most > 0.f) most = fmaxf(most, LEAST);  // NaN stays NaN
    const float factor = most > 0.f ? MOST / most : 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        if (COLUMN_VECTORS % ROW_THREADS != 0 && at >= COLUMN_VECTORS) break;
#pragma unroll
        for (int e = 0; e < 8; ++e) y[i][e] *= factor;
        reinterpret_cast<uint2*>(values + row * C)[at] = {four(y[i][0], y[i][1], y[i][2], y[i][3]),
                                                          four(y[i][4], y[i][5], y[i][6], y[i][7])};
    }
    if (lane == 0) scale[row] = most * (1.f / MOST) * (BLOCK ? rsqrtf(static_cast<float>(BLOCK)) : 1.f);
}
