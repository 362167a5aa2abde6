// Code that every kernel shares. compile.py puts it before each source. NVRTC has no headers, so none are included.
//   HALF: 1 for fp16, 0 for bf16. Both are handled as bit patterns; arithmetic is fp32.
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#ifndef HALF
#define HALF 0
#endif

// a * b + c for pairs, each rounded once.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}

struct alignas(16) Vec8 {  // eight 16-bit values, the widest load there is
    u32 word[4];
};

__device__ __forceinline__ float low(u32 pair) {
#if HALF
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
    return x;
#else
    return __uint_as_float(pair << 16);
#endif
}

__device__ __forceinline__ float high(u32 pair) {
#if HALF
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(pair));
    return x;
#else
    return __uint_as_float(pair & 0xffff0000u);
#endif
}

__device__ __forceinline__ u32 pack(float a, float b) {  // a in the low half
    u32 pair;
#if HALF && __CUDA_ARCH__ < 800
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(pair) : "f"(a), "f"(b));
#elif HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
#endif
    return pair;
}

__device__ __forceinline__ void unpack(const Vec8& v, float x[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low(v.word[i]);
        x[2 * i + 1] = high(v.word[i]);
    }
}

__device__ __forceinline__ Vec8 pack(const float x[8]) {
    Vec8 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = pack(x[2 * i], x[2 * i + 1]);
    return v;
}

// [i] of a row of 16-bit values, in steps of eight.
__device__ __forceinline__ Vec8 load8(const u16* row, i64 i) { return reinterpret_cast<const Vec8*>(row)[i]; }
__device__ __forceinline__ void store8(u16* row, i64 i, const Vec8& v) { reinterpret_cast<Vec8*>(row)[i] = v; }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Counts this block at `counter`. Returns whether it is the last of `blocks` blocks. Then its threads see what the other blocks have
// written, and the counter is 0 again. One thread makes this call, between two barriers of the block. A `__threadfence` of all threads
// would take longer.
__device__ __forceinline__ bool is_last_of(u32* counter, u32 blocks) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(blocks - 1) : "memory");
    return before == blocks - 1;
}
// Loads past the L1 cache, because the L1 cache does not see other multiprocessors' writes.
__device__ __forceinline__ float4 load_of_blocks(const float* x) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(x) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_of_blocks(const float2* x) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(x) : "memory");
    return v;
}

// The type of attention's results: 16 bits, or e4m3 (sm_89 and later).
#ifndef E4M3
#define E4M3 0
#endif
#if E4M3
typedef unsigned char Out;
#else
typedef u16 Out;
#endif

// Two values in e4m3, a in the low half, at most 448. Values that are not finite become NaN: saturation would hide an infinity.
__device__ __forceinline__ u32 pack_e4m3(float a, float b) {
    u32 pair;
    asm("{.reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, %2, %1; cvt.u32.u16 %0, p;}"
        : "=r"(pair)
        : "f"(fmaf(a, 0.f, a)), "f"(fmaf(b, 0.f, b)));
    return pair;
}

__device__ __forceinline__ float larger(float a, float b) {  // NaN if either is NaN; sm_80 and later
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

template <int WIDTH>
__device__ __forceinline__ float lanes_sum(float x) {  // over aligned groups of WIDTH lanes
#pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Over the WARPS warps of a block; `scratch` holds WARPS floats and may be used again only after a barrier.
template <int WARPS>
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = lanes_sum<32>(x);
    if (WARPS == 1) return x;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x += scratch[i];
    return x;
}

// The same for the largest value.
template <int WARPS>
__device__ __forceinline__ float block_largest(float x, float* scratch) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (WARPS == 1) return x;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) x = larger(x, scratch[i]);
    return x;
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float silu_of(float x) { return x / (1.f + __expf(-x)); }
// The division has an error of at most 2 ulp. The exact division would limit the kernel's speed.
__device__ __forceinline__ float silu_fast(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// packed_tiles.cu and nvfp4.cu write their results with these functions. Their 16-row operand has rows of W. A lane has the sums of rows lane / 4 and
// lane / 4 + 8 of W, and of rows lane % 4 * 2 and lane % 4 * 2 + 1 of eight rows of x.
#ifdef FOLLOWED_BY
// The address in y of a lane's two columns of `strip`, for eight rows of x from `first_row` on. Null past the end of y.
__device__ __forceinline__ u32* place_of(u16* __restrict__ y, int strip, int strips, int first_row, int m, i64 y_stride) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 4 * 2 + lane / 4 % 2;
    const bool is_there = strip < strips && row < m;
    return is_there ? reinterpret_cast<u32*>(y + row * y_stride + strip * (FOLLOWED_BY == 2 ? 8 : 16) + lane / 8 * 2) : nullptr;
}
__device__ __forceinline__ void write(u32* to, const float (&sums)[4], const u32 (&before)[2]) {
    const bool odd = threadIdx.x / 4 % 2;
    // Neighbouring columns are in lanes 4 apart. Two lanes exchange values, so that each has two columns of one row.
    auto pair = [&](float even_row, float odd_row) {
        const float other = __shfl_xor_sync(0xffffffffu, odd ? even_row : odd_row, 4);
        return odd ? make_float2(other, odd_row) : make_float2(even_row, other);
    };
    if (FOLLOWED_BY == 2) {
        const float2 its = pair(silu_of(sums[0]) * sums[2], silu_of(sums[1]) * sums[3]);
        if (to) to[0] = pack(its.x, its.y);
        return;
    }
    const float2 near = pair(sums[0], sums[1]), far = pair(sums[2], sums[3]);
    if (!to) return;
    to[0] = pack(near.x + low(before[0]), near.y + high(before[0]));
    to[4] = pack(far.x + low(before[1]), far.y + high(before[1]));
}
#endif
