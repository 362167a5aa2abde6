// y = x W^T for at most 8 * X_TILES rows of x and W in 4 to 8 bits, fused with an RMSNorm before it and the operation after it, for sm_80
// and later. The kernel reads W once, at the rate of the memory. Sums in fp32.
//   x [M, K] and y [M, N] in 16 bits, strided rows. norm [K] in 16 bits.
//   packed: W [N, K] in records (csrc/codes.cuh), int [N / 16, K / CHUNK, RECORD / 4].
//   NORM: the rows of x are normalised. x is multiplied by norm, and the sums are divided by the root mean square of the row.
//   FOLLOWED_BY 0: y.  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate alternate
//   with eight rows of up in W.
//   partial float [SPLIT, N / 16, X_TILES, 32, 4], squares float [grid x, SPLIT, ROWS], counters int [tiles of 16 * TALL * ACROSS
//   rows of W]: the workspace if SPLIT > 1. The counters are 0 before and after.
//
// Grid: y is one of SPLIT slices of K, and the blocks of a slice divide the tiles of W's rows. A block keeps its slice of x in
// shared memory and computes one tile after another. A warp takes TALL * 16 rows of a tile and one of DEEP parts of the slice. It
// copies records by cp.async into a ring of STAGES steps. Each lane reads only the bytes that it has copied, so the ring needs no
// barrier. W does not depend on the kernel before, so the ring is full when that kernel ends.
// The 16-row operand of an mma has rows of W, the 8-column operand rows of x. The scale multiplies the fp32 sums of a group.
// With MINS the sums of the group's x are computed as well, by one mma with ones for all rows of W, and the min multiplies them.
// The warps that share rows add up their sums in shared memory, in the order of the warps. With SPLIT > 1 each block leaves its
// sums in `partial`, and the tile's last block adds them up in the order of the slices. So the result does not depend on which
// block is last.
//
// Floor: N * K * BITS / 8 bytes of codes, and the scales.
constexpr int SLOT = CODES + 32 * LANE_SCALES;  // a record in shared memory, where each lane has its own copy of its scales
constexpr int WARPS = ACROSS * DEEP, THREADS = 32 * WARPS, PARTS = SPLIT * DEEP;
constexpr int ROWS = 8 * X_TILES;  // of x; an mma has 8
constexpr int CHAINS = GROUP > 16 && X_TILES == 1 ? 2 : 1;  // independent sums of a group, so that products wait less for each other
constexpr u32 RING = STAGES * TALL * SLOT;
static_assert(WARPS == 16, "1 to 16 warps share a row of x");

// Lies in shared memory after the rings. The sums and then the slice of x follow.
struct alignas(16) Shared {
    float part_squares[ROWS][WARPS];  // sums of x^2 of this slice, by each of the warps that share a row
    float squares[ROWS];              // 1 / root mean square of the row
    bool is_last;
};

__device__ __forceinline__ float load_of_blocks_1(const float* x) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(x) : "memory");
    return v;
}
__device__ __forceinline__ void add(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// A warp's sums for its rows of a tile and its part of K.
struct Sums {
    float4 of[TALL][X_TILES];
};

__device__ __forceinline__ float& element(float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Adds the product of one step: TALL records at `slot` and the columns of x at `x_rows`, this lane's addresses for ldmatrix.
__device__ __forceinline__ void multiply(Sums& sums, u32 slot, const u32 (&x_rows)[X_TILES], u32 offset) {
    const u32 lane = threadIdx.x % 32;
    float group[CHAINS][TALL][X_TILES][4], x_sums[X_TILES][4];
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    Scales scales[TALL];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        Words words[TALL];
        u32 rows[X_TILES][4];
#pragma unroll
        for (int r = 0; r < TALL; ++r) words[r].load(slot + r * SLOT, h);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 columns each
            const int column = h * 64 + j * 16;
            if (column % GROUP == 0) {
                const int at = column / GROUP * (1 + ZEROS) * 4;
#pragma unroll
                for (int t = 0; t < X_TILES; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x_sums[t][e] = 0.f;
#pragma unroll
                for (int r = 0; r < TALL; ++r) {
                    const u32 its = slot + r * SLOT + CODES + lane * LANE_SCALES + at;
                    scales[r] = Scales(load_word(its), ZEROS ? load_word(its + 4) : MIDDLES);
#pragma unroll
                    for (int e = 0; e < 4 * CHAINS * X_TILES; ++e) group[e / 4 % CHAINS][r][e / 4 / CHAINS][e % 4] = 0.f;
                }
            }
#pragma unroll
            for (int t = 0; t < X_TILES; ++t) {
                if (j % 2 == 0) ldmatrix(rows[t], x_rows[t] + offset + column * 2);  // four 8 x 8 matrices of x: 32 columns
                if (MINS) mma(x_sums[t], ones, rows[t][j % 2 * 2], rows[t][j % 2 * 2 + 1]);
            }
#pragma unroll
            for (int r = 0; r < TALL; ++r) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = words[r].values_of(4 * j + i, scales[r].minus[i % 2]);
#pragma unroll
                for (int t = 0; t < X_TILES; ++t) mma(group[j % CHAINS][r][t], a, rows[t][j % 2 * 2], rows[t][j % 2 * 2 + 1]);
            }
            if ((column + 16) % GROUP == 0) {
#pragma unroll
                for (int i = 0; i < TALL * X_TILES * 4; ++i) {
                    const int r = i / (4 * X_TILES), t = i / 4 % X_TILES, e = i % 4;
                    float& sum = element(sums.of[r][t], e);
                    const float its = CHAINS == 2 ? group[0][r][t][e] + group[CHAINS - 1][r][t][e] : group[0][r][t][e];
                    sum = fmaf(scales[r].of[e / 2], its, sum);
                    if (MINS) sum = fmaf(scales[r].mins[e / 2], x_sums[t][e], sum);
                }
            }
        }
    }
}

__device__ __forceinline__ float one(u16 x) { return low(x); }
__device__ __forceinline__ u16 rounded(float x) { return static_cast<u16>(pack(x, x)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
packed_rows(const u16* __restrict__ x, const int* __restrict__ packed, const u16* __restrict__ norm, u16* __restrict__ y,
            float* __restrict__ partial, float* __restrict__ all_squares, int* __restrict__ counters, i64 m_, i64 n_, i64 k_,
            i64 x_stride, i64 y_stride, float eps) {
    extern __shared__ __align__(16) unsigned char rings[];
    Shared& shared = *reinterpret_cast<Shared*>(rings + WARPS * RING);
    float4* const to_add = reinterpret_cast<float4*>(&shared + 1);
    unsigned char* const slice = reinterpret_cast<unsigned char*>(to_add + (DEEP > 1 ? WARPS * TALL * X_TILES * 32 : 0));
    const int m = static_cast<int>(m_), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int across = warp / DEEP, deep = warp % DEEP, rank = blockIdx.y;
    const int strips = static_cast<int>(n_) / 16, chunks = static_cast<int>(k_) / CHUNK;  // a strip is 16 rows of W
    const int tiles = (strips + TALL * ACROSS - 1) / (TALL * ACROSS);
    const int first_tile = blockIdx.x * tiles / gridDim.x, end_tile = (blockIdx.x + 1) * tiles / gridDim.x;
    auto chunk_of = [&](int part) { return part * chunks / PARTS; };
    const int begin = chunk_of(rank * DEEP), width = (chunk_of(rank * DEEP + DEEP) - begin) * CHUNK;
    const int first = chunk_of(rank * DEEP + deep), steps = chunk_of(rank * DEEP + deep + 1) - first;
    const u32 ring = address_of(rings) + warp * RING;

    let_next_begin();
    int left = (end_tile - first_tile) * steps, next_step = 0, next_tile = first_tile, next_stage = 0;
    const unsigned char* from[TALL];
    auto strip_of = [&](int tile, int r) { return (tile * ACROSS + across) * TALL + r; };
    auto fetch = [&] {
        if (left > 0) {
            --left;
#pragma unroll
            for (int r = 0; r < TALL; ++r) {
                if (next_step == 0) {
                    const int strip = min(strip_of(next_tile, r), strips - 1);  // past the end the last strip is copied, but not used
                    from[r] = reinterpret_cast<const unsigned char*>(packed) + (static_cast<i64>(strip) * chunks + first) * RECORD;
                }
                const u32 slot = ring + (next_stage * TALL + r) * SLOT;
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    copy_async<16>(slot + h * 512 + lane * 16, from[r] + h * 512 + lane * 16);
                    if (HIGH > 0) {
                        const u32 its = LOW_CODES + h * 128 * HIGH + lane * 4 * HIGH;
                        copy_async<(HIGH > 0 ? 4 * HIGH : 4)>(slot + its, from[r] + its);
                    }
                }
                copy_async<LANE_SCALES>(slot + CODES + lane * LANE_SCALES, from[r] + CODES + lane / 4 * LANE_SCALES);
                from[r] += RECORD;
            }
            if (++next_step == steps) next_step = 0, ++next_tile;
            if (++next_stage == STAGES) next_stage = 0;
        }
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch();

    wait_for_previous();
    const u32 pitch = width * 2 + 16;  // eight rows that ldmatrix reads together are in different banks
    const int bits = m > 8 ? 0 : m > 4 ? 1 : m > 2 ? 2 : m > 1 ? 3 : 4;  // shifts, because divisions delay x
    const int sharing = 1 << bits, its_part = warp & (sharing - 1);       // warps that share a row
    for (int row = warp >> bits; row < m; row += WARPS >> bits) {
        float squares = 0.f;
#pragma unroll 8
        for (int i = its_part * 32 + lane; i < width / 8; i += sharing * 32) {
            Vec8 v = load8(x + row * x_stride + begin * CHUNK, i);
            if (NORM) {
                float its[8], weights[8];
                unpack(v, its);
                unpack(load8(norm + begin * CHUNK, i), weights);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    squares = fmaf(its[e], its[e], squares);
                    its[e] *= weights[e];
                }
                v = pack(its);
            }
            *reinterpret_cast<Vec8*>(slice + row * pitch + i * 16) = v;
        }
        if (NORM) {
            squares = lanes_sum<32>(squares);
            if (lane == 0) shared.part_squares[row][its_part] = squares;
        }
    }
    __syncthreads();
    if (NORM) {
        if (threadIdx.x < m) {
            float squares = 0.f;
            for (int part = 0; part < sharing; ++part) squares += shared.part_squares[threadIdx.x][part];
            shared.squares[threadIdx.x] = rsqrtf(squares / k_ + eps);  // of the whole row if SPLIT is 1
            if (SPLIT > 1) all_squares[(blockIdx.x * SPLIT + rank) * ROWS + threadIdx.x] = squares;
        }
        if (SPLIT == 1) __syncthreads();  // else a barrier comes before they are read
    }

    u32 x_rows[X_TILES];
#pragma unroll
    for (int t = 0; t < X_TILES; ++t)
        x_rows[t] = address_of(slice) + (first - begin) * CHUNK * 2 + min(8 * t + lane % 8, m - 1) * pitch + lane / 8 * 16;
    int stage = 0;
    for (int tile = first_tile; tile < end_tile; ++tile) {
        Sums sums = {};
        for (int step = 0; step < steps; ++step) {
            copy_wait<STAGES - 2>();
            fetch();
            multiply(sums, ring + stage * TALL * SLOT, x_rows, step * CHUNK * 2);
            if (++stage == STAGES) stage = 0;
        }

        if (DEEP > 1) {
            if (tile > first_tile) __syncthreads();  // all warps have read the sums of the tile before
#pragma unroll
            for (int i = 0; i < TALL * X_TILES; ++i) to_add[(warp * TALL * X_TILES + i) * 32 + lane] = sums.of[i / X_TILES][i % X_TILES];
            __syncthreads();
        }
        // Each of the warps that share rows finishes some of the strips' tiles of x.
        auto for_my_tiles = [&](auto&& work) {
#pragma unroll
            for (int i = 0; i < TALL * X_TILES; ++i) {
                const int strip = strip_of(tile, i / X_TILES);
                const i64 at = (static_cast<i64>(strip) * X_TILES + i % X_TILES) * 128 + lane * 4;
                if (i % DEEP == deep && strip < strips) work(i, strip, at);
            }
        };
        auto sum_of = [&](int i) {
            if (DEEP == 1) return sums.of[i / X_TILES][i % X_TILES];
            float4 sum = to_add[(across * DEEP * TALL * X_TILES + i) * 32 + lane];
#pragma unroll
            for (int d = 1; d < DEEP; ++d) add(sum, to_add[((across * DEEP + d) * TALL * X_TILES + i) * 32 + lane]);
            return sum;
        };
        auto finish = [&](int i, int strip, float4 sum) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = i % X_TILES * 8 + lane % 4 * 2 + e;
                if (row >= m) break;
                float near = e == 0 ? sum.x : sum.y, far = e == 0 ? sum.z : sum.w;
                if (NORM) near *= shared.squares[row], far *= shared.squares[row];
                if (FOLLOWED_BY == 2) {
                    y[row * y_stride + strip * 8 + lane / 4] = rounded(silu_of(near) * far);
                } else {
                    u16* const to = y + row * y_stride + strip * 16 + lane / 4;
                    if (FOLLOWED_BY == 1) near += one(to[0]), far += one(to[8]);
                    to[0] = rounded(near), to[8] = rounded(far);
                }
            }
        };
        if (SPLIT == 1) {
            for_my_tiles([&](int i, int strip, i64) { finish(i, strip, sum_of(i)); });
            continue;
        }
        const i64 slice_sums = static_cast<i64>(strips) * X_TILES * 128;  // floats
        for_my_tiles([&](int i, int, i64 at) { *reinterpret_cast<float4*>(partial + rank * slice_sums + at) = sum_of(i); });
        __syncthreads();
        if (threadIdx.x == 0) shared.is_last = is_last_of(reinterpret_cast<u32*>(counters) + tile, SPLIT);
        __syncthreads();
        if (!shared.is_last) continue;
        if (NORM) {
            if (threadIdx.x < m) {
                float squares = 0.f;
                for (int s = 0; s < SPLIT; ++s) squares += load_of_blocks_1(all_squares + (blockIdx.x * SPLIT + s) * ROWS + threadIdx.x);
                shared.squares[threadIdx.x] = rsqrtf(squares / k_ + eps);
            }
            __syncthreads();
        }
        for_my_tiles([&](int i, int strip, i64 at) {
            float4 sum = load_of_blocks(partial + at);
#pragma unroll
            for (int s = 1; s < SPLIT; ++s) add(sum, load_of_blocks(partial + s * slice_sums + at));
            finish(i, strip, sum);
        });
    }
}

// Writes W [N, K] in 16 bits, as `packed` has it. A warp writes a record.
extern "C" __global__ void __launch_bounds__(256)
packed_unpack(const int* __restrict__ packed, u16* __restrict__ w, i64 records, i64 chunks, i64 k) {
    overlap();
    const i64 record = static_cast<i64>(blockIdx.x) * 8 + threadIdx.x / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32;
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(packed) + record * RECORD;
    u16* const to = w + (record / chunks * 16 + lane / 4) * k + record % chunks * CHUNK + lane % 4 * 8;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        Words words;
        words.load(from, h, lane);
        u32 values[4][4];  // [word][register]
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Scales scales = scales_in_memory(from, lane / 4, h * 64 + j * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) values[j][i] = rounded(words, 4 * j + i, scales);
        }
        // Four neighbouring lanes have pairs of 32 columns of one row. They exchange pairs, so that each has eight neighbouring
        // columns.
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int far = 0; far < 2; ++far) {
                u32 eight[4] = {values[2 * part][far], values[2 * part][far + 2], values[2 * part + 1][far], values[2 * part + 1][far + 2]};
                transpose(eight, lane);
                *reinterpret_cast<Vec8*>(to + far * 8 * k + h * 64 + part * 32) = {eight[0], eight[1], eight[2], eight[3]};
            }
    }
}
