// y = x W^T for many rows of x, with x and W in NVFP4: codes in e2m1, a scale in e4m3 for 16 columns, and a scale in fp32 for each row.
// The block-scaled mma of sm_120a and sm_121a multiplies codes and scales. Its sums are fp32.
//   nvfp4_rows: x [M, K] 16-bit, strided rows -> codes int [M, K / 8], scales u8 [M, K / 16], row_scale float [M].
//   nvfp4_tiles: y [M, N] 16-bit, strided rows; packed: W [N, K] in the records of csrc/codes.cuh; w_scale float [N].
//   A record has the products of e4m3 scales and w_scale, rounded to fp16. Divided by w_scale and rounded to e4m3 they are the
//   e4m3 scales again. The engine checks this for each matrix at load.
//   FOLLOWED_BY: as in packed_tiles.cu.
//   PER_STEP: records of a strip in a step, 1 or 2. K is a multiple of 64 * PER_STEP.  STAGES: steps in shared memory, at least 2.
//   EMULATED: 1 replaces the instruction by plain fp32, for tests on other cards (sm_89 and later).
//
// Fragments of mma.m16n8k64 with scale_vec::4X (PTX ISA, "Matrix Fragments for mma.m16n8k64" and "Block Scaling"; the same in CUTLASS,
// cute/atom/mma_traits_sm120.hpp, SM120_16x8x64_TN_VS). Lane l has g = l / 4 and t = l % 4. Nibble i of a register is at bit 4 i:
//   A [16, 64]: nibble i of register r is row g + r % 2 * 8, place 8 t + i + r / 2 * 32.
//   B [64, 8]: nibble i of register r is place 8 t + i + 32 r, column g.
//   scales of A: byte b of lane 4 g + h (h is 0 or 1) is of row g + 8 h, places 16 b to 16 b + 15.
//   scales of B: byte b of lane 4 g is of column g, places 16 b to 16 b + 15.
//   sums [16, 8]: element e is row g + e / 2 * 8, column 2 t + e % 2.
// So lane t needs eight places of one row from the groups t / 2 and t / 2 + 2. In a record, word j of lane t has four columns of row g
// in its even nibbles, and of row g + 8 in its odd nibbles: columns 16 j + 2 t + {0, 8, 1, 9}. The two words of two lanes make two
// registers by four logical operations. The order of 64 columns of W is therefore another one, and x is quantised into the same order:
//   place 16 b + 8 s + i is column 16 (b % 2 * 2 + b / 2) + 4 s + i % 2 * 2 + i / 2 % 2 * 8 + i / 4.
// The places of a group of 16 columns stay together, because they share a scale. Groups 1 and 2 are exchanged, so that a lane's two
// words of a record are neighbours.
//
// A block computes 128 rows of W and 128 rows of x. cp.async brings W and x into a ring of STAGES stages. W is fetched before the
// kernel before has ended. The blocks of 2,048 rows of x follow one another, so that these rows stay in the L2 cache while all of W is
// read.
// Floor: 2 M N K operations at the rate of e2m1; N * K * 5 / 8 bytes of W, M * K * 9 / 16 bytes of x, 2 * M * N bytes of y.
typedef unsigned char u8;
constexpr int W_WARPS = 4, X_WARPS = 2, THREADS = 32 * W_WARPS * X_WARPS;
constexpr int TALL = 2, TILES = 8;                                  // of a warp: 16-row strips of W, 8-row tiles of x
constexpr int STRIPS = W_WARPS * TALL, ROWS = X_WARPS * TILES * 8;  // of a block: strips of W, rows of x
constexpr int VECTORS = 2 * PER_STEP;                               // 16 bytes each, of a row of x in a step
constexpr int PART = PER_STEP * RECORD, UNITS = PART / 16;          // of a strip in a step: its bytes, and its copies of 16 bytes
constexpr u32 W_BYTES = STRIPS * PART, X_BYTES = ROWS * VECTORS * 16, STAGE = W_BYTES + X_BYTES + ROWS * PER_STEP * 4;
static_assert(GROUP == 16 && FLOATS, "the scales are those of NVFP4");
constexpr int AHEAD = STAGES - 1;  // steps to fetch ahead
constexpr int BAND = 16;           // blocks of rows of x that are computed with all of W before the next ones
constexpr int ROW_THREADS = 128;   // of a row in nvfp4_rows
constexpr float MOST_CODE = 6.f, MOST_SCALE = 448.f;
constexpr float LEAST = 1e-30f;  // the least largest value of a row: the reciprocal of its scale is finite

// The value of bits 0 to 6 as a number in e4m3. All of them set are NaN.
__device__ __forceinline__ float value_of_e4m3(u32 bits) {
    const float value = __uint_as_float((bits & 0x7f) << 20) * __uint_as_float(0x7b800000u);  // 2^120, exact
    return (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : value;
}

// The number in e2m1 that is nearest to `value`, and the even one of two. At most 6.
__device__ __forceinline__ u32 e2m1_of(float value) {
    const float size = fabsf(value);
    // The sum with 2^22, 2^23 or 2^24 rounds to a multiple of 0.5, 1 or 2. Its lowest bits count the multiples.
    const u32 above = size < 2.f ? 0x4a800000u : size < 4.f ? 0x4b000000u : 0x4b800000u;
    const u32 count = __float_as_uint(__fadd_rn(fminf(size, MOST_CODE), __uint_as_float(above))) - above;
    const u32 code = count + (size < 2.f ? 0 : size < 4.f ? 2 : 4);
    return code | (__float_as_uint(value) >> 28 & 8);
}

// Quantises one row a block. The row's largest value becomes 6 * 448. A row with a value that is not finite gets a scale that is not
// finite, so all of its results are not finite.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
nvfp4_rows(const u16* __restrict__ x, int* __restrict__ codes, u8* __restrict__ scales, float* __restrict__ row_scale, i64 k_, i64 x_stride) {
    overlap();
    __shared__ float scratch[ROW_THREADS / 32];
    const int k = static_cast<int>(k_), groups = k / 16;
    const i64 row = blockIdx.x;
    x += row * x_stride;
    float most = 0.f;
    auto load = [&](float (&values)[16], int group) {
        unpack(load8(x, 2 * group), values);
        unpack(load8(x, 2 * group + 1), values + 8);
        float largest = 0.f;
#pragma unroll
        for (int e = 0; e < 16; ++e) largest = larger(largest, fabsf(values[e]));
        return largest;
    };
    for (int group = threadIdx.x; group < groups; group += ROW_THREADS) {
        float values[16];
        most = larger(most, load(values, group));
    }
    most = block_largest<ROW_THREADS / 32>(most, scratch);
    if (most > 0.f) most = fmaxf(most, LEAST);  // NaN stays NaN
    const float scale = most * (1.f / (MOST_CODE * MOST_SCALE)), factor = scale > 0.f ? 1.f / scale : 0.f;
    if (threadIdx.x == 0) row_scale[row] = scale;
    for (int group = threadIdx.x; group < groups; group += ROW_THREADS) {
        float values[16];
        const float largest = load(values, group);
        const u32 of_group = pack_e4m3(__fmul_rn(__fmul_rn(largest, factor), 1.f / MOST_CODE), 0.f) & 0xff;
        const float its = value_of_e4m3(of_group), inverse = its > 0.f ? factor / its : 0.f;
        u32 words[2] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int i = 0; i < 8; ++i) words[s] |= e2m1_of(__fmul_rn(values[4 * s + i % 2 * 2 + i / 2 % 2 * 8 + i / 4], inverse)) << 4 * i;
        const int chunk = group / 4, block = group % 4 / 2 + group % 2 * 2;  // the group's block of 16 places
        reinterpret_cast<uint2*>(codes)[(row * (k / 64) + chunk) * 4 + block] = make_uint2(words[0], words[1]);
        scales[(row * (k / 64) + chunk) * 4 + block] = static_cast<u8>(of_group);
    }
}

// c += A B, with the scales of A and B.
#if EMULATED
__device__ __forceinline__ float value_of_e2m1(u32 word, int i) {
    const u32 code = word >> 4 * i & 15;
    return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * __uint_as_float(0x7e800000u);  // 2^126, exact
}
__device__ __noinline__ float4 emulated(float4 c, uint4 a, u32 b0, u32 b1, u32 a_scales, u32 b_scales) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 a_words[4] = {a.x, a.y, a.z, a.w}, b_words[2] = {b0, b1};
    float sums[4] = {c.x, c.y, c.z, c.w};
    u32 of_rows[2], of_columns[2];
    for (int half = 0; half < 2; ++half) {
        of_rows[half] = __shfl_sync(0xffffffffu, a_scales, 4 * g + half);
        of_columns[half] = __shfl_sync(0xffffffffu, b_scales, 4 * (2 * t + half));
    }
    for (int from = 0; from < 4; ++from)
        for (int half_of_k = 0; half_of_k < 2; ++half_of_k) {
            const int byte = 8 * (2 * half_of_k + from / 2);
            for (int e = 0; e < 4; ++e) {
                const u32 a_word = __shfl_sync(0xffffffffu, a_words[2 * half_of_k + e / 2], 4 * g + from);
                const u32 b_word = __shfl_sync(0xffffffffu, b_words[half_of_k], 4 * (2 * t + e % 2) + from);
                float sum = 0.f;
                for (int i = 0; i < 8; ++i) sum = fmaf(value_of_e2m1(a_word, i), value_of_e2m1(b_word, i), sum);
                sums[e] = fmaf(sum, value_of_e4m3(of_rows[e / 2] >> byte) * value_of_e4m3(of_columns[e % 2] >> byte), sums[e]);
            }
        }
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}
#endif
__device__ __forceinline__ void mma_scaled(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 a_scales, u32 b_scales) {
#if EMULATED
    const float4 sums = emulated(make_float4(c[0], c[1], c[2], c[3]), make_uint4(a[0], a[1], a[2], a[3]), b0, b1, a_scales, b_scales);
    c[0] = sums.x, c[1] = sums.y, c[2] = sums.z, c[3] = sums.w;
#else
    // The two numbers behind each scale choose the byte and the lanes of a quad that give the scales. Here all lanes have them.
    asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, %12}, {%11}, {%12, %12};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "h"(static_cast<u16>(0)));
#endif
}

// The offset of one vector of a row of x in a stage. Eight rows' vectors are in different banks.
__device__ __forceinline__ u32 vector_at(int row, int vector) { return (row * VECTORS + (vector ^ (row / (8 / VECTORS) % VECTORS))) * 16; }

// Makes a lane's A operand and scales from a record in shared memory. `inverse`: 1 / w_scale of row lane / 4 + lane % 2 * 8.
__device__ __forceinline__ void operand(u32 (&a)[4], u32& scales, u32 record, float inverse) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 from = record + (4 * g + t % 2 * 2) * 16 + t / 2 * 8;
    // The words of lanes t % 2 * 2 and t % 2 * 2 + 1. Half of the quads load them in the other order, to use all banks.
    const bool swaps = g & 2;
    u32 first[2], second[2];
    load_pair(first, from + (swaps ? 16 : 0));
    load_pair(second, from + (swaps ? 0 : 16));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 near = swaps ? second[half] : first[half], far = swaps ? first[half] : second[half];
        a[2 * half] = (near & 0x0f0f0f0fu) | (far & 0x0f0f0f0fu) << 4;
        a[2 * half + 1] = (near >> 4 & 0x0f0f0f0fu) | (far & 0xf0f0f0f0u);
    }
    u32 halves[4];  // the scales in fp16 of rows g and g + 8, for each group
    load_words(halves, record + CODES + g * LANE_SCALES);
    auto scale = [&](int group) { return float_of_half(halves[group] >> (t % 2 * 16)) * inverse; };
    scales = pack_e4m3(scale(0), scale(2)) | pack_e4m3(scale(1), scale(3)) << 16;
}

// Adds the products of a step.
__device__ __forceinline__ void multiply(float (&sums)[TALL][TILES][4], u32 stage, const float (&inverse)[TALL]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 w = stage + warp % W_WARPS * TALL * PART, x = stage + W_BYTES, x_scales = x + X_BYTES;
    const int first_row = warp / W_WARPS * TILES * 8;
#pragma unroll
    for (int i = 0; i < PER_STEP; ++i) {
        u32 a[TALL][4], scales[TALL];
#pragma unroll
        for (int r = 0; r < TALL; ++r) operand(a[r], scales[r], w + r * PART + i * RECORD, inverse[r]);
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {
            u32 b[4];  // both registers of two tiles
            ldmatrix(b, x + vector_at(first_row + t * 8 + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 of_x = load_word(x_scales + ((first_row + (t + u) * 8 + lane / 4) * PER_STEP + i) * 4);
#pragma unroll
                for (int r = 0; r < TALL; ++r) mma_scaled(sums[r][t + u], a[r], b[2 * u], b[2 * u + 1], scales[r], of_x);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
nvfp4_tiles(const int* __restrict__ x, const int* __restrict__ x_scales, const float* __restrict__ row_scale, const int* __restrict__ packed,
            const float* __restrict__ w_scale, u16* __restrict__ y, i64 m_, i64 n_, i64 k_, i64 y_stride) {
    extern __shared__ __align__(1024) unsigned char ring[];
    const u32 stages = address_of(ring);
    const int m = static_cast<int>(m_), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int strips = static_cast<int>(n_) / 16, chunks = static_cast<int>(k_) / 64, steps = chunks / PER_STEP;
    const int block = blockIdx.y * gridDim.x + blockIdx.x, band = block / (BAND * gridDim.y);
    const int wide = min(BAND, static_cast<int>(gridDim.x) - band * BAND), in_band = block - band * BAND * gridDim.y;
    const int first_row = (band * BAND + in_band % wide) * ROWS, first_strip = in_band / wide * STRIPS;
    auto strip_of = [&](int r) { return first_strip + warp % W_WARPS * TALL + r; };

    let_next_begin();
    auto fetch_w = [&](int step, int stage) {
        const unsigned char* const codes = reinterpret_cast<const unsigned char*>(packed);
#pragma unroll
        for (int i = 0; i < (STRIPS * UNITS + THREADS - 1) / THREADS; ++i) {
            const int unit = i * THREADS + threadIdx.x, r = unit / UNITS;
            const i64 strip = min(first_strip + r, strips - 1);  // past the end the last strip is copied, but not used
            const unsigned char* const from = codes + (strip * steps + step) * PART + (unit - r * UNITS) * 16;
            if (unit < STRIPS * UNITS) copy_async<16>(stages + stage * STAGE + unit * 16, from);
        }
    };
    auto fetch_x = [&](int step, int stage) {
        const u32 to = stages + stage * STAGE + W_BYTES;
#pragma unroll
        for (int i = 0; i < ROWS * VECTORS / THREADS; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / VECTORS, vector = at % VECTORS;
            const int* const from = x + (static_cast<i64>(first_row + row) * steps + step) * VECTORS * 4 + vector * 4;
            if (first_row + row < m) copy_async<16>(to + vector_at(row, vector), from);
        }
        const int row = threadIdx.x;
        const int* const from = x_scales + (static_cast<i64>(first_row + row) * steps + step) * PER_STEP;
        if (row < ROWS && first_row + row < m) copy_async<4 * PER_STEP>(to + X_BYTES + row * PER_STEP * 4, from);
    };
    for (int i = 0; i < AHEAD; ++i)
        if (i < steps) fetch_w(i, i);
    float inverse[TALL];
#pragma unroll
    for (int r = 0; r < TALL; ++r) inverse[r] = 1.f / w_scale[min(strip_of(r), strips - 1) * 16 + lane / 4 + lane % 2 * 8];
    wait_for_previous();
    for (int i = 0; i < AHEAD; ++i) {
        if (i < steps) fetch_x(i, i);
        copy_commit();
    }
    float sums[TALL][TILES][4] = {};
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        copy_wait<AHEAD - 1>();
        __syncthreads();  // this step's stage is there, and all warps have left the stage before
        const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
        if (step + AHEAD < steps) {
            fetch_w(step + AHEAD, free_stage);
            fetch_x(step + AHEAD, free_stage);
        }
        copy_commit();
        multiply(sums, stages + stage * STAGE, inverse);
        if (++stage == STAGES) stage = 0;
    }

#pragma unroll
    for (int r = 0; r < TALL; ++r) {
        const int strip = strip_of(r), its = min(strip, strips - 1) * 16 + lane / 4;
        const float of_w[2] = {w_scale[its], w_scale[its + 8]};
        const int of_warp = first_row + warp / W_WARPS * TILES * 8;
        auto place = [&](int t) { return place_of(y, strip, strips, of_warp + t * 8, m, y_stride); };
        u32 before[TILES][2] = {};  // all loads before the first store: the compiler may not reorder them
#pragma unroll
        for (int t = 0; t < TILES && FOLLOWED_BY == 1; ++t) {
            const u32* const from = place(t);
            if (from) before[t][0] = from[0], before[t][1] = from[4];
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = min(of_warp + t * 8 + lane % 4 * 2 + e % 2, m - 1);
                sums[r][t][e] *= of_w[e / 2] * row_scale[row];
            }
            write(place(t), sums[r][t], before[t]);
        }
    }
}
