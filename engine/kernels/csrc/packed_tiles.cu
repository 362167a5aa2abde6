// y = x W^T for up to 128 rows of x and W in 4 to 8 bits, fused with the operation after it, for sm_80 and later. Sums in fp32.
//   x [M, K] and y [M, N] in 16 bits, strided rows.
//   packed: W [N, K] in records (csrc/codes.cuh), int [N / 16, K / CHUNK, RECORD / 4].
//   FOLLOWED_BY 0: y.  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate alternate
//   with eight rows of up in W.
//   partial float [2 * grid, STRIPS, TILES, 32, 4], counters int [tiles]: the workspace. The counters are 0 before and after.
//
// A tile is 128 * TALL rows of W and all rows of x. A step multiplies PER_STEP records of each 16 rows. The steps of all tiles
// are one list, and each block takes an equal part of the list, so all blocks end at about the same time. A block that has only
// some steps of a tile leaves its sums in `partial`. The tile's last block adds the sums up in the order of the steps. So the
// result does not depend on which block is last.
// cp.async brings each step's W and x into a ring of STAGES stages. W does not depend on the kernel before, so W is fetched
// before that kernel ends. x is in boxes of 64 columns with TMA's swizzle: ldmatrix reads them without bank conflicts.
// The 16-row operand of a product has rows of W, in registers; the other operand has rows of x. The scale multiplies the fp32
// sums of a group. With MINS the sums of the group's x are computed as well, by a product with ones, and the min multiplies them.
// On Hopper gemm_skinny.cu is faster if K is a multiple of 128.
//
// Floor: N * K * BITS / 8 bytes of codes, and the scales. x is read once for each tile, from the L2 cache.
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STRIPS = WARPS * TALL;  // 16-row strips of a tile
constexpr int TILES = ROWS / 8;       // 8-row tiles of x
constexpr int COLUMNS = PER_STEP * CHUNK, BOXES = COLUMNS / 64;
constexpr int PART = PER_STEP * RECORD, UNITS = PART / 16;  // of a strip in a step: its bytes, and its copies of 16 bytes
constexpr u32 X_BOX = ROWS * 128, X_BYTES = BOXES * X_BOX, W_BYTES = STRIPS * PART;
static_assert(TILES % 2 == 0, "ldmatrix takes two tiles of x");
static_assert(PART % 16 == 0, "a copy takes 16 bytes");
static_assert(!MINS || TALL == 1, "registers hold the sums of x for one strip");
constexpr int AHEAD = STAGES - 1;  // steps to fetch ahead

// The offset in a box of one vector of 16 bytes of a row.
__device__ __forceinline__ u32 in_box(int row, int vector) { return row * 128 + ((vector ^ (row & 7)) << 4); }

struct Sums {
    float of[TALL][TILES][4];
};

// Makes the A operand of the 16 columns `j` of a lane's codes.
__device__ __forceinline__ void operand(u32 (&a)[4], const Words& words, int j, const Scales& scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = words.values_of(4 * j + i, scales.minus[i % 2]);
}
__device__ __forceinline__ Scales scales_of(u32 record, int group) {
    const u32 its = record + CODES + threadIdx.x % 32 / 4 * LANE_SCALES + group * (1 + ZEROS) * 4;
    return Scales(load_word(its), ZEROS ? load_word(its + 4) : MIDDLES);
}
__device__ __forceinline__ void add_group(float (&sums)[TILES][4], const float (&group)[TILES][4], const float (&x_sums)[TILES][4], const Scales& scales) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[t][e] = fmaf(scales.of[e / 2], group[t][e], sums[t][e]);
            if (MINS) sums[t][e] = fmaf(scales.mins[e / 2], x_sums[t][e], sums[t][e]);
        }
}

// c = A B^T, without an old value.
__device__ __forceinline__ void mma_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
#endif
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Adds the products of a step.
__device__ __forceinline__ void multiply(Sums& sums, u32 x, u32 w) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 x_row = x + in_box(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 1
    for (int i = 0; i < PER_STEP; ++i) {
        float group[TALL][TILES][4], x_sums[TILES][4];
        Scales scales[TALL];
        Words words[TALL];
#pragma unroll
        for (int column = 0; column < CHUNK; column += 16) {
            const bool begins = column % GROUP == 0;
#pragma unroll
            for (int r = 0; r < TALL; ++r) {
                const u32 record = w + (warp * TALL + r) * PART + i * RECORD;
                if (column % 64 == 0) words[r].load(record, column / 64);
                if (begins) scales[r] = scales_of(record, column / GROUP);
            }
            u32 a[TALL][4];
#pragma unroll
            for (int r = 0; r < TALL; ++r) operand(a[r], words[r], column / 16 % 4, scales[r]);
#pragma unroll
            for (int t = 0; t < TILES; t += 2) {
                u32 rows[4];  // 16 columns of two tiles
                ldmatrix(rows, ((x_row + (i * HALVES + column / 64) * X_BOX) ^ (column % 64 * 2)) + t * 1024);
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const u32 near = rows[2 * u], far = rows[2 * u + 1], ones[4] = {ONES, ONES, ONES, ONES};
                    if (begins) {
                        if (MINS) mma_first(x_sums[t + u], ones, near, far);
#pragma unroll
                        for (int r = 0; r < TALL; ++r) mma_first(group[r][t + u], a[r], near, far);
                    } else {
                        if (MINS) mma(x_sums[t + u], ones, near, far);
#pragma unroll
                        for (int r = 0; r < TALL; ++r) mma(group[r][t + u], a[r], near, far);
                    }
                }
            }
            if ((column + 16) % GROUP == 0) {
#pragma unroll
                for (int r = 0; r < TALL; ++r) add_group(sums.of[r], group[r], x_sums, scales[r]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
packed_tiles(const u16* __restrict__ x, const int* __restrict__ packed, u16* __restrict__ y, float* __restrict__ partial,
                int* __restrict__ counters, i64 m_, i64 n_, i64 k_, i64 x_stride, i64 y_stride) {
    extern __shared__ __align__(1024) unsigned char ring[];
    bool& is_last = *reinterpret_cast<bool*>(ring + STAGES * (X_BYTES + W_BYTES));
    const u32 x_stages = address_of(ring), w_stages = x_stages + STAGES * X_BYTES;
    const int m = static_cast<int>(m_), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int strips = static_cast<int>(n_) / 16, steps = static_cast<int>(k_) / COLUMNS;  // steps of a tile
    const int tiles = (strips + STRIPS - 1) / STRIPS, all = tiles * steps, blocks = gridDim.x;
    auto block_of = [&](int unit) { return ((unit + 1) * blocks - 1) / all; };
    const int begin = blockIdx.x * all / blocks, end = (blockIdx.x + 1) * all / blocks;
    auto strip_of = [&](int tile, int r) { return tile * STRIPS + warp * TALL + r; };

    let_next_begin();
    const unsigned char* const codes = reinterpret_cast<const unsigned char*>(packed);
    const i64 strip_bytes = static_cast<i64>(steps) * PART;
    auto fetch_w = [&](int unit, int stage) {
        const int tile = unit / steps, step = unit % steps;
        const unsigned char* from = codes + static_cast<i64>(step) * PART;
        const u32 to = w_stages + stage * W_BYTES + warp * TALL * PART;
#pragma unroll
        for (int i = 0; i < (TALL * UNITS + 31) / 32; ++i) {
            const int unit_of_warp = i * 32 + lane, r = unit_of_warp / UNITS;
            const int strip = min(strip_of(tile, r), strips - 1);  // past the end the last strip is copied, but not used
            if (unit_of_warp < TALL * UNITS) copy_async<16>(to + unit_of_warp * 16, from + strip * strip_bytes + (unit_of_warp - r * UNITS) * 16);
        }
    };
    auto fetch_x = [&](int unit, int stage) {
        const int step = unit % steps;
        constexpr int VECTORS = COLUMNS / 8;
#pragma unroll
        for (int i = 0; i < (ROWS * VECTORS + THREADS - 1) / THREADS; ++i) {
            const int at = i * THREADS + threadIdx.x, row = at / VECTORS, vector = at % VECTORS;
            if (row < m) copy_async<16>(x_stages + stage * X_BYTES + vector / 8 * X_BOX + in_box(row, vector % 8), x + row * x_stride + step * COLUMNS + vector * 8);
        }
    };
    for (int i = 0; i < AHEAD; ++i)
        if (begin + i < end) fetch_w(begin + i, i);
    wait_for_previous();
    for (int i = 0; i < AHEAD; ++i) {
        if (begin + i < end) fetch_x(begin + i, i);
        copy_commit();
    }

    copy_wait<AHEAD - 1>();
    __syncthreads();
    int stage = 0;
    for (int unit = begin; unit < end;) {
        const int tile = unit / steps, first = unit % steps, num = min(steps - first, end - unit);
        Sums sums = {};
        for (const int behind = unit + num; unit < behind; ++unit) {
            const u32 x_stage = x_stages + stage * X_BYTES, w_stage = w_stages + stage * W_BYTES;
            const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
            if (++stage == STAGES) stage = 0;
            multiply(sums, x_stage, w_stage);
            if (unit + 1 == end) continue;
            copy_wait<AHEAD - 2>();
            __syncthreads();  // the next stage is there, and all warps have left the stage before
            if (unit + AHEAD < end) {
                fetch_w(unit + AHEAD, free_stage);
                fetch_x(unit + AHEAD, free_stage);
            }
            copy_commit();
        }

        if (num < steps) {
            const int first_block = block_of(tile * steps), last_block = block_of(tile * steps + steps - 1);
            auto of_block = [&](int block, int r, int t) {
                const int slot = 2 * block + (block == first_block);
                return partial + (((static_cast<i64>(slot) * STRIPS + warp * TALL + r) * TILES + t) * 32 + lane) * 4;
            };
#pragma unroll
            for (int r = 0; r < TALL; ++r)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const float(&its)[4] = sums.of[r][t];
                    *reinterpret_cast<float4*>(of_block(blockIdx.x, r, t)) = make_float4(its[0], its[1], its[2], its[3]);
                }
            __syncthreads();
            if (threadIdx.x == 0) is_last = is_last_of(reinterpret_cast<u32*>(counters) + tile, last_block - first_block + 1);
            __syncthreads();
            if (!is_last) continue;
            sums = {};
#pragma unroll 2
            for (int block = first_block; block <= last_block; ++block) {
#pragma unroll
                for (int r = 0; r < TALL; ++r)
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        const float4 its = load_of_blocks(of_block(block, r, t));
                        sums.of[r][t][0] += its.x, sums.of[r][t][1] += its.y, sums.of[r][t][2] += its.z, sums.of[r][t][3] += its.w;
                    }
            }
        }
        // All loads before the first store: the compiler may not reorder them.
        u32 before[TALL][TILES][2] = {};
        auto place = [&](int r, int t) { return place_of(y, tile * STRIPS + warp * TALL + r, strips, t * 8, m, y_stride); };
#pragma unroll
        for (int i = 0; i < TALL * TILES && FOLLOWED_BY == 1; ++i) {
            const u32* const from = place(i / TILES, i % TILES);
            if (from) before[i / TILES][i % TILES][0] = from[0], before[i / TILES][i % TILES][1] = from[4];
        }
#pragma unroll
        for (int i = 0; i < TALL * TILES; ++i) write(place(i / TILES, i % TILES), sums.of[i / TILES][i % TILES], before[i / TILES][i % TILES]);
    }
}
