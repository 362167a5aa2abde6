// y = x W^T, fused with the operation after it, for sm_90a: bf16, fp16, e4m3 or int8 in, sums in fp32 or int32, 16 bits out.
//   x: tensor map of [M, K], BLOCK_M rows and 128 bytes a box. w: tensor map of [N, K], BLOCK_N / 2 rows and 128 bytes a box.
//   OPERANDS: 0 bf16, 1 fp16, 2 e4m3, 3 int8. e4m3 and int8 have row_scale float [M] and column_scale float [N]: row i of x has
//   been divided by row_scale[i], row j of W by column_scale[j].
//   BLOCKS: 1 for e4m3 whose W has block_scale float [K / 128, N / 8] instead of column_scale: 8 rows and 128 columns of W share a
//   scale. The sums of 128 columns are multiplied by it and added up in fp32.
//   BLOCK_N: columns of a tile: 128, 160, 192, 224 or 256. STAGES: steps in flight.
//   FOLLOWED_BY 0: y [M, N].  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate
//   alternate with eight rows of up in W, so that one thread holds both values of a result.  3: y [M, N], gelu(x W^T), for operands
//   in 8 bits.
//   BIAS: 1 if bias [N] in bf16 is added to x W^T, for operands in 8 bits and FOLLOWED_BY 0 or 3.
//   E4M3: with FOLLOWED_BY 2 or 3, y is in e4m3, and y_scale float [M] becomes 1 for each row.
//   THROUGH_SHARED: results in 16 bits of operands in 8 bits go through shared memory, in slices of 64 or 32 columns. TMA stores them,
//   or adds them to y, while the next slice or the next tile is computed.
//
// A block has three warpgroups and computes many tiles of BLOCK_M x BLOCK_N. One thread of the first warpgroup fetches, up to
// STAGES steps of 128 bytes of K ahead. Each of the other two warpgroups computes 64 rows by wgmma from shared memory and writes
// its results.
// The two blocks of a cluster compute tiles one below the other, which need the same rows of W. Each block fetches half of these
// rows for both blocks.
// The tiles are computed in bands of GROUP_M clusters, column by column. So the tiles in work at one time form about a square of
// the result, and their operands stay in L2.
//
// A tile's time is nearly in proportion to its columns. So the launcher chooses the columns with which the last wave of tiles is
// full (docs/decisions/069).
//
// Floor: 2 M N K flops at the wgmma rate of the operands, or (M K + N K + M N) bytes moved.
// Tried: clusters of four blocks. They fill 120 of 132 multiprocessors, and are seldom faster.
// Tried: filling the ring with W before the previous kernel has ended. From 8 % faster to 25 % slower.
// Tried with BLOCKS: scaling the sums of a step while the products of the next step run. From 2 % faster to 11 % slower.
// Tried: releasing a stage with cluster scope. A quarter slower, because it waits for all of memory.
constexpr int BLOCK_M = 128, CLUSTER = 2, GROUP_M = 8;
constexpr int K_BYTES = 128;  // of each row, in one step
constexpr int BYTES = OPERANDS >= 2 ? 1 : 2, STEP_K = K_BYTES / BYTES;
constexpr u32 X_BYTES = BLOCK_M * K_BYTES, W_BYTES = BLOCK_N * K_BYTES, W_PART = W_BYTES / CLUSTER;
constexpr int ACCUMULATORS = BLOCK_N / 2;
constexpr int GATED = FOLLOWED_BY == 2 ? 2 : 1;  // columns of W for a column of results
// Columns of a slice, and slices of a warpgroup that are in shared memory at one time.
constexpr int SLICE = BLOCK_N / GATED % 64 == 0 ? 64 : 32, SLICES = 2;
constexpr u32 SLICE_BYTES = 64 * SLICE * 2;
constexpr int RELEASING = BLOCKS ? 32 : 128;  // threads that release a stage together: a warp reads scales when its sums are done
static_assert(!THROUGH_SHARED || BLOCK_N % (GATED * SLICE) == 0, "a tile has whole slices");
static_assert(OPERANDS >= 2 || (!BIAS && FOLLOWED_BY != 3), "only products of operands in 8 bits have a bias or GeLU");
static_assert(!BIAS || FOLLOWED_BY == 0 || FOLLOWED_BY == 3, "SwiGLU and sums have no bias");
static_assert(!BLOCKS || (OPERANDS == 2 && BLOCK_N <= 192), "more columns need too many registers");
#if THROUGH_SHARED
typedef TensorMap Results;  // of y, 64 rows and SLICE columns a box
#else
typedef Out* Results;
#endif

struct alignas(16) Control {
    float block_scale[BLOCKS ? STAGES : 1][BLOCKS ? BLOCK_N / 8 : 4];
    u64 full[STAGES], empty[STAGES];
};

// Fetches a box into the same place of both blocks of the cluster. Each block's barrier counts the bytes that the block receives.
__device__ __forceinline__ void fetch_for_both(u32 shared, const TensorMap& map, int column, int row, u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(address(&barrier)), "h"(static_cast<u16>(3))
        : "memory");
}

// ---- wgmma ----

#define REGS_80 REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REGS_96 REGS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_112 REGS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define REGS_128 REGS_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT_80(x) OUT_64(x, 0), OUT_16(x, 64)
#define OUT_96(x) OUT_80(x), OUT_16(x, 80)
#define OUT_112(x) OUT_96(x), OUT_16(x, 96)
#define OUT_128(x) OUT_112(x), OUT_16(x, 112)

// x += A B^T. If `accumulate` is 0, the old value of x is ignored.
__device__ __forceinline__ void product(Sum (&x)[ACCUMULATORS], u64 a, u64 b, int accumulate) {
#if BLOCK_N == 128
    PRODUCT("128", REGS_64, "%64", "%65", "%66", OUT_64(x, 0));
#elif BLOCK_N == 160
    PRODUCT("160", REGS_80, "%80", "%81", "%82", OUT_80(x));
#elif BLOCK_N == 192
    PRODUCT("192", REGS_96, "%96", "%97", "%98", OUT_96(x));
#elif BLOCK_N == 224
    PRODUCT("224", REGS_112, "%112", "%113", "%114", OUT_112(x));
#else
    static_assert(BLOCK_N == 256, "products have 128, 160, 192, 224 or 256 columns");
    PRODUCT("256", REGS_128, "%128", "%129", "%130", OUT_128(x));
#endif
}

// ---- the two roles ----

// The tiles of the clusters, CLUSTER * BLOCK_M x BLOCK_N, in the order in which they are computed.
struct Tiles {
    int rows, columns;
    __device__ __forceinline__ Tiles(int m, int n)
        : rows((m + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M)), columns((n + BLOCK_N - 1) / BLOCK_N) {}
    __device__ __forceinline__ int2 at(int index) const {  // the first row and the first column of a tile
        const int band = index / (GROUP_M * columns), within = index % (GROUP_M * columns);
        const int depth = min(GROUP_M, rows - band * GROUP_M);
        return {(band * GROUP_M + within % depth) * CLUSTER * BLOCK_M, within / depth * BLOCK_N};
    }
};

// A load that keeps its place in the source. To save registers, the compiler would wait for each load before it issues the next
// one. But there are enough registers for all loads.
__device__ __forceinline__ void load_at_once(Vec8& x, const u16* from) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(from)
                 : "memory");
}

// silu(x), with an absolute error of |x| / 4096 at most. The results are rounded to 8 bits, which changes all but the smallest ones
// more. The special function unit limits the rate of results: silu_fast takes two of its operations, this takes one.
__device__ __forceinline__ float silu_tanh(float x) {
    const float half = 0.5f * x;
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(half));
    return fmaf(half, tanh, half);
}

// gelu(x), with an absolute error of 0.0003 + |x| / 4096 at most. The tanh form has an error of 0.0005; these two constants were
// fitted to the exact form, with erf.
__device__ __forceinline__ float gelu_fitted(float x) {
    const float half = 0.5f * x;
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x * fmaf(x * x, 0.0347017f, 0.8001544f)));
    return fmaf(half, tanh, half);
}

// The results of two neighbouring columns of a row. At `at` in the bias are the two columns of this lane.
__device__ __forceinline__ float2 finished(float2 x, const u16* __restrict__ bias, int at) {
    if (BIAS) {
        const u32 pair = *reinterpret_cast<const u32*>(bias + at);
        x = {x.x + low(pair), x.y + high(pair)};
    }
    return FOLLOWED_BY == 3 ? float2{gelu_fitted(x.x), gelu_fitted(x.y)} : x;
}

// Writes the results of this thread to y in e4m3. It holds sums as in `write`.
__device__ __forceinline__ void write_e4m3(Sum (&sums)[ACCUMULATORS], unsigned char* __restrict__ y, const float* __restrict__ row_scale,
                                           const float* __restrict__ column_scale, const u16* __restrict__ bias,
                                           float* __restrict__ y_scale, int row, int column, int m, int n, i64 y_stride) {
    constexpr int WIDE = BLOCK_N / GATED / 16;  // chunks of 16 results, each 16 bytes
    static_assert(!E4M3 || WIDE % 4 == 0, "four neighbouring lanes exchange four chunks");
    const int lane = threadIdx.x % 32;
    const float scales[2] = {row_scale[min(row, m - 1)], row_scale[min(row + 8, m - 1)]};
#pragma unroll
    for (int first = 0; first < WIDE; first += 4) {
        u32 words[2][4] = {};  // of two rows: of each chunk columns lane % 4 * 2 and the next, then those eight columns later
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int eight = GATED * (2 * first + i);  // with SwiGLU of gate; the next eight columns are of up
            const int its = min(column + 8 * eight, n - 8 * GATED);
            const float2 scale = reinterpret_cast<const float2*>(column_scale + its)[lane % 4];
            float2 of_up;
            if (GATED == 2) of_up = reinterpret_cast<const float2*>(column_scale + its + 8)[lane % 4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                auto sum = [&](int at) { return static_cast<float>(sums[4 * eight + 2 * h + at]); };
                float2 x = {sum(0) * (scales[h] * scale.x), sum(1) * (scales[h] * scale.y)};
                if (GATED == 2) {
                    const float2 up = {sum(4) * (scales[h] * of_up.x), sum(5) * (scales[h] * of_up.y)};
                    x = {silu_tanh(x.x) * up.x, silu_tanh(x.y) * up.y};
                } else {
                    x = finished(x, bias, its + lane % 4 * 2);
                }
                words[h][i / 2] |= pack_e4m3(x.x, x.y) << i % 2 * 16;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + h * 8, to = column / GATED + 16 * (first + lane % 4);
            transpose(words[h], lane);
            Vec8 out;
#pragma unroll
            for (int i = 0; i < 4; ++i) out.word[i] = __byte_perm(words[h][i % 2 * 2], words[h][i % 2 * 2 + 1], i < 2 ? 0x5410 : 0x7632);
            if (r < m && to < n / GATED) *reinterpret_cast<Vec8*>(y + r * y_stride + to) = out;
            if (r < m && column == 0 && first == 0 && lane % 4 == 0) y_scale[r] = 1.f;
        }
    }
}

// Writes the results of this thread to y. It holds two rows, eight rows apart, and two neighbouring columns of each eight.
__device__ __forceinline__ void write(Sum (&sums)[ACCUMULATORS], u16* __restrict__ y, int row, int column, int m, int n, i64 y_stride) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int r = row + h * 8;
        // Column 8 i + lane % 4 * 2 and the column after it.
        auto pair = [&](int i) { return float2{static_cast<float>(sums[4 * i + 2 * h]), static_cast<float>(sums[4 * i + 2 * h + 1])}; };
        u16* to = y + r * y_stride + (FOLLOWED_BY == 2 ? column / 2 : column);
        constexpr int WIDE = FOLLOWED_BY == 2 ? BLOCK_N / 16 : BLOCK_N / 8;  // chunks of eight results
        auto is_there = [&](int chunk) {
            return r < m && chunk < WIDE && (FOLLOWED_BY == 2 ? column / 2 + 8 * chunk < n / 2 : column + 8 * chunk < n);
        };
        Vec8 before[FOLLOWED_BY == 1 ? (WIDE + 3) / 4 : 1] = {};
        if (FOLLOWED_BY == 1) {
#pragma unroll
            for (int c = 0; c < WIDE; c += 4)
                if (is_there(c + lane % 4)) load_at_once(before[c / 4], to + (c + lane % 4) * 8);
        }
#pragma unroll
        for (int c = 0; c < WIDE; c += 4) {
            Vec8 out;
            if (FOLLOWED_BY == 1) {
                out = before[c / 4];
                transpose(out.word, lane);
            }
#pragma unroll
            for (int i = 0; i < 4 && c + i < WIDE; ++i) {
                const float2 x = pair(FOLLOWED_BY == 2 ? 2 * (c + i) : c + i);
                if (FOLLOWED_BY == 2) {
                    const float2 up = pair(2 * (c + i) + 1);
                    out.word[i] = pack(silu_fast(x.x) * up.x, silu_fast(x.y) * up.y);
                } else if (FOLLOWED_BY == 1) {
                    out.word[i] = pack(low(out.word[i]) + x.x, high(out.word[i]) + x.y);
                } else {
                    out.word[i] = pack(x.x, x.y);
                }
            }
            transpose(out.word, lane);
            if (is_there(c + lane % 4)) store8(to, c + lane % 4, out);
        }
    }
}

#if THROUGH_SHARED
__device__ __forceinline__ void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {  // four of 8 x 8
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Stores a box, or adds it to y: then the result is rounded a second time.
__device__ __forceinline__ void store_box(const TensorMap& y, u32 shared, int column, int row) {
#if FOLLOWED_BY == 1
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
#else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
#endif
                 ::"l"(&y), "r"(column), "r"(row), "r"(shared)
                 : "memory");
}

// Writes the results of a warpgroup, 64 rows from `row` on, through its SLICES slices of shared memory.
__device__ __forceinline__ void write_slices(Sum (&sums)[ACCUMULATORS], const TensorMap& y, u32 slices, const float* __restrict__ row_scale,
                                             const float* __restrict__ column_scale, const u16* __restrict__ bias, int row, int column, int m,
                                             int n) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int mine = row + thread / 32 * 16 + lane / 4;  // and eight rows later
    const float scales[2] = {row_scale[min(mine, m - 1)], row_scale[min(mine + 8, m - 1)]};
    auto columns = [&](int eight) {
        return BLOCKS ? float2{1.f, 1.f} : reinterpret_cast<const float2*>(column_scale + min(column + 8 * eight, n - 8))[lane % 4];
    };
    auto sum = [&](int eight, int h, int at, float scale) { return static_cast<float>(sums[4 * eight + 2 * h + at]) * scales[h] * scale; };
    const int its = thread / 32 * 16 + lane % 16;  // the row whose place this lane gives to store_matrices
#pragma unroll
    for (int slice = 0; slice < BLOCK_N / GATED / SLICE; ++slice) {
        const u32 shared = slices + slice % SLICES * SLICE_BYTES;
        if (thread == 0) {
            // With an odd number of slices the last slice of the tile before lies where the first one goes.
            if (slice == 0 && BLOCK_N / GATED / SLICE % SLICES != 0)
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            else
                asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(SLICES - 1) : "memory");
        }
        named_sync(group, 128);  // the results before have left this place
#pragma unroll
        for (int i = 0; i < SLICE / 8; i += 2) {
            u32 words[2][2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int eight = GATED * (slice * SLICE / 8 + i + j);
                const float2 scale = columns(eight);
                float2 up;
                if (GATED == 2) up = columns(eight + 1);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float2 x = {sum(eight, h, 0, scale.x), sum(eight, h, 1, scale.y)};
                    if (GATED == 2) x = {silu_tanh(x.x) * sum(eight + 1, h, 0, up.x), silu_tanh(x.y) * sum(eight + 1, h, 1, up.y)};
                    else x = finished(x, bias, min(column + 8 * eight, n - 8) + lane % 4 * 2);
                    words[j][h] = pack(x.x, x.y);
                }
            }
            const u32 swizzle = SLICE == 64 ? its % 8 : its / 2 % 4;  // as TMA expects it, so that no rows share a bank
            const u32 place = its * SLICE * 2 + ((i + lane / 16) ^ swizzle) * 16;
            store_matrices(shared + place, words[0][0], words[0][1], words[1][0], words[1][1]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_sync(group, 128);
        const int to = column / GATED + slice * SLICE;
        if (thread == 0) {
            if (row < m && to < n / GATED) store_box(y, shared, to, row);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");  // a group may be empty; the waits count groups
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    __cluster_dims__(CLUSTER, 1, 1)
gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ Results y,
     const float* __restrict__ row_scale, const float* __restrict__ column_scale, const float* __restrict__ block_scale,
     const u16* __restrict__ bias, float* __restrict__ y_scale, i64 m_, i64 n_, i64 k_, i64 y_stride) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int m = static_cast<int>(m_), n = static_cast<int>(n_), steps = (static_cast<int>(k_) + STEP_K - 1) / STEP_K;
    const u32 x_tiles = address(shared), w_tiles = x_tiles + STAGES * X_BYTES;
    constexpr u32 RING_BYTES = STAGES * (X_BYTES + W_BYTES);
    Control& control = *reinterpret_cast<Control*>(shared + RING_BYTES + (THROUGH_SHARED ? 2 * SLICES * SLICE_BYTES : 0));
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(control.full[i], 1);
            barrier_init(control.empty[i], 2 * CLUSTER * 128 / RELEASING);
        }
        barriers_are_there();
    }
    cluster_sync();
    overlap();

    const Tiles tiles(m, n);
    const int num_tiles = tiles.rows * tiles.columns, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < 32) {
            const bool leader = threadIdx.x == 0;
            Ring<STAGES> ring{0, 1};
            for (int index = first; index < num_tiles; index += stride) {
                const int2 at = tiles.at(index);
                const int row = at.x + rank * BLOCK_M;
#if FOLLOWED_BY == 1 && !THROUGH_SHARED
                // Prefetch this tile of y into L2 while the product runs.
                constexpr int LINES = (BLOCK_N + 63) / 64;  // of 128 bytes, in a row of the tile
                for (int i = threadIdx.x; i < BLOCK_M * LINES; i += 32) {
                    const int r = row + i / LINES, column = at.y + i % LINES * 64;
                    if (r < m && column < n) asm volatile("prefetch.global.L2 [%0];" ::"l"(y + r * y_stride + column));
                }
#endif
                for (int step = 0; step < steps; ++step) {
                    u64& full = control.full[ring.stage];
                    wait(control.empty[ring.stage], ring.parity);
                    if (leader) {
                        const u32 scale_bytes = BLOCKS ? min(BLOCK_N, n - at.y) / 8 * 4 : 0;
                        arrive_expecting(full, X_BYTES + W_BYTES + scale_bytes);
                        if (BLOCKS) copy_bulk(address(control.block_scale[ring.stage]), block_scale + step * (n / 8) + at.y / 8, scale_bytes, full);
                        fetch(x_tiles + ring.stage * X_BYTES, x, step * STEP_K, row, full);
                        const u32 part = w_tiles + ring.stage * W_BYTES + rank * W_PART;
                        const int w_row = at.y + rank * (BLOCK_N / CLUSTER);
                        fetch_for_both(part, w, step * STEP_K, w_row, full);
                    }
                    ring.advance();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
        const u64 x_rows = descriptor(x_tiles + group * 64 * K_BYTES), w_rows = descriptor(w_tiles);
        Ring<STAGES> ring{0, 0};
        auto release = [&](int stage) {
            if (thread % RELEASING < CLUSTER) arrive_at(control.empty[stage], thread % RELEASING);
        };
        for (int index = first; index < num_tiles; index += stride) {
            const int2 at = tiles.at(index);
            Sum sums[ACCUMULATORS];
#if BLOCKS
#pragma unroll
            for (int i = 0; i < ACCUMULATORS; ++i) sums[i] = 0.f;
            for (int step = 0; step < steps; ++step) {
                Sum part[ACCUMULATORS];
                wait(control.full[ring.stage], ring.parity);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    product(part, x_rows + ((ring.stage * X_BYTES + i * 32) >> 4), w_rows + ((ring.stage * W_BYTES + i * 32) >> 4), i > 0);
                products_commit();
                float4 scales[BLOCK_N / 32];
#pragma unroll
                for (int i = 0; i < BLOCK_N / 32; ++i) scales[i] = reinterpret_cast<const float4*>(control.block_scale[ring.stage])[i];
                products_wait<0>();
                pin(part);
                __syncwarp();  // all lanes have the scales
                release(ring.stage);
                ring.advance();
#pragma unroll
                for (int i = 0; i < ACCUMULATORS; ++i) {
                    const float4 four = scales[i / 16];
                    const int at = i / 4 % 4;
                    sums[i] = fmaf(at == 0 ? four.x : at == 1 ? four.y : at == 2 ? four.z : four.w, part[i], sums[i]);
                }
            }
#else
            int before = 0;
            for (int step = 0; step < steps; ++step) {
                wait(control.full[ring.stage], ring.parity);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    product(sums, x_rows + ((ring.stage * X_BYTES + i * 32) >> 4), w_rows + ((ring.stage * W_BYTES + i * 32) >> 4),
                            step + i > 0);
                products_commit();
                if (step > 0) {
                    products_wait<1>();
                    release(before);
                }
                before = ring.stage;
                ring.advance();
            }
            products_wait<0>();
            pin(sums);
            release(before);
#endif
            const int first_row = at.x + rank * BLOCK_M + group * 64, row = first_row + thread / 32 * 16 + thread % 32 / 4;
#if THROUGH_SHARED
            const u32 slices = x_tiles + RING_BYTES + group * SLICES * SLICE_BYTES;
            write_slices(sums, y, slices, row_scale, column_scale, bias, first_row, at.y, m, n);
#elif E4M3
            write_e4m3(sums, y, row_scale, column_scale, bias, y_scale, row, at.y, m, n, y_stride);
#else
            write(sums, y, row, at.y, m, n, y_stride);
#endif
        }
        if (THROUGH_SHARED && thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    cluster_sync();  // no block exits while the other may still write to its shared memory
}
