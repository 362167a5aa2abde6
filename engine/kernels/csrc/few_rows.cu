// y = x W^T for at most 32 rows of x, fused with an RMSNorm before it and the operation after it, for sm_90 and later. The kernel
// reads W once, at the rate of the memory. bf16, e4m3 or int8 in, sums in fp32 or int32, bf16 out. W may have 4 bits.
//   x: tensor map of [M, K], ROWS rows and 128 bytes a box. w: tensor map of [N, K], BLOCK_N rows and 128 bytes a box.
//   norm [K], y [M, N].
//   OPERANDS: 0 bf16, 2 e4m3, 3 int8; x in bf16 and W in 4 bits (4) or in e4m3 (5). 2 and 3 have no norm, and row_scale
//   float [M]: row i of x has been divided by row_scale[i]. W in 8 bits has column_scale float [N]: row j of W has been divided by
//   column_scale[j].
//   W in 4 bits: w is the tensor map of its records (csrc/codes.cuh), [N / 16, bytes]. A box holds a record of each 16 rows.
//   NORM: the rows of x are normalised. x is multiplied by norm, and the sums are divided by the root mean square of the row.
//   FOLLOWED_BY 0: y.  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate alternate
//   with eight rows of up in W.
//
// SPLIT blocks form a cluster and divide the K columns among themselves. The cluster computes one tile of W's rows after another.
// In each block an extra warp fetches boxes of W and of x by TMA into a ring of STAGES stages. W and norm do not depend on the
// kernel before, so the block reads them while that kernel still runs. It reads everything else after that kernel has ended.
// Eight warps multiply with m16n8k16. The 16-row operand holds rows of W, the 8-column operand rows of x. Each warp takes a
// quarter of a box's columns and half of the box's rows of W. The block adds up the sums of its warps in shared memory.
// Each block then finishes EACH rows of x: all blocks of the cluster send it their sums of these rows.
// int8 uses m16n8k32 instead. Its operands have the same layout in registers, in bytes, as those of m16n8k16 in 16 bits.
// W in 4 bits: one logical operation makes two bf16 numbers 128 + code from two codes. If every zero is 8, the mma of a group
// start with -(128 + 8) times the sum of the group's x, which is one mma more for all rows of W. Otherwise -(128 + zero) times
// this sum is added to the sums of the group. Then scales multiply the sums of the group, and mins multiply the sum of its x.
// Hopper has no such instruction for e4m3, so e4m3 is converted to fp16, which holds every value of e4m3. The conversion changes
// the order of the columns, in the same way for x and for W.
// x in bf16 and W in e4m3: W is converted to bf16, which holds every value of e4m3. The conversion takes the even columns of each
// four first, then the odd ones. A product of x with a permutation matrix brings x into this order. Its result lies in the
// registers in which the next product expects x.
//
// Floor: the N * K values of W, read once.
// Tried: x in bf16 and W in int8, with the Hadamard matrix in place of the permutation. Slower than int8 times int8
// (docs/decisions/055).
// Tried: W from global memory into registers, with 16 rows of W and all of K for each block. With 16 rows of x this reads as much
// of x as of W. It is slower than cuBLAS from K = 2,560 on.
#if OPERANDS == 4
constexpr int COLUMNS = CHUNK;                          // columns of a box of W
constexpr u32 BOX_BYTES = BLOCK_N / 16 * RECORD;
#else
constexpr int COLUMNS = OPERANDS >= 2 ? 128 : 64;
constexpr u32 BOX_BYTES = BLOCK_N * 128;
#endif
constexpr bool X_IN_8_BITS = OPERANDS == 2 || OPERANDS == 3, W_IN_8_BITS = X_IN_8_BITS || OPERANDS >= 5;
constexpr int X_BOXES = OPERANDS >= 4 ? COLUMNS / 64 : 1;  // boxes of x with the columns of one box of W
constexpr int STEPS = X_BOXES;                             // products along a warp's columns of a box
constexpr int SLICE = K / SPLIT, CHUNKS = SLICE / COLUMNS;
constexpr int WARPS = 8, MULTIPLIERS = 32 * WARPS;
constexpr int TALL = (BLOCK_N / 16 + 1) / 2;  // 16-row tiles of W for each half of the warps; the second half may have one fewer
constexpr int TILES = ROWS / 8;       // 8-row tiles of x
constexpr int EACH = ROWS / SPLIT;    // rows of x that a block finishes
constexpr int PAIRS = (FOLLOWED_BY == 2 ? BLOCK_N / 2 : BLOCK_N) / 2, MINE = (EACH * PAIRS + MULTIPLIERS - 1) / MULTIPLIERS;  // of y
constexpr int PITCH = BLOCK_N + 4;    // floats; the padding puts neighbouring rows into different banks
constexpr u32 BOX = (BOX_BYTES + 127) / 128 * 128, X_BOX = ROWS * 128;
static_assert(K % (SPLIT * COLUMNS) == 0 && ROWS % 8 == 0 && ROWS % SPLIT == 0 && BLOCK_N % 16 == 0, "what is shared comes out even");
static_assert(SPLIT * ROWS <= MULTIPLIERS, "a thread for each sum of squares that a block sends");
static_assert(!X_IN_8_BITS || !NORM, "rows in 8 bits were normalised before");

// Lies in shared memory after the boxes of x and of W.
struct alignas(16) Shared {
    u32 norm[NORM ? SLICE / 2 : 4];
    float partial[4][ROWS][PITCH];
    float inbox[2][SPLIT][EACH][BLOCK_N];
    float part_squares[4][ROWS], squares[SPLIT][ROWS];  // sums of x^2: by each quarter of the warps' columns; by each block
    u64 full[STAGES], empty[STAGES], inbox_full[2], squares_full;
};

#if OPERANDS == 3
typedef int Sum;
#else
typedef float Sum;
#endif

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// Returns the offset of one vector of 16 bytes of a row in a box that TMA has swizzled.
__device__ __forceinline__ u32 in_box(int row, int vector) { return row * 128 + ((vector ^ (row & 7)) << 4); }

#if OPERANDS == 4
// A warp's part of a record: a quarter of the columns.
struct Rows {
    u32 words[STEPS], scales, zeros;
    __device__ __forceinline__ void load(u32 box, int strip, int part) {
        const u32 lane = threadIdx.x % 32, record = box + strip * RECORD;
        if (STEPS == 2)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(words[0]), "=r"(words[STEPS - 1])
                         : "r"(record + part / 2 * 512 + lane * 16 + part % 2 * 8));
        else
            words[0] = load_word(record + lane * 16 + part * 4);
        const u32 group = record + CODES + lane / 4 * LANE_SCALES + part * GROUPS / 4 * 4 * (1 + ZEROS);
        scales = load_word(group);
        if (ZEROS) zeros = load_word(group + 4);
    }
};

// Adds the products of a warp's part of a box to the sums.
template <typename IsMine>
__device__ __forceinline__ void multiply(Sum (&sums)[TALL][TILES][4], const Rows (&rows)[TALL], const u32 (&x)[STEPS][TILES * 2], IsMine is_mine) {
    constexpr u32 EVERY = ZEROS ? ONES : ABOVE | MIDDLES | SIGNS;
    const u32 every[4] = {EVERY, EVERY, EVERY, EVERY};
    float start[TILES][4] = {};  // sums of x: times -(128 + 8), or plain if there are zeros or mins
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma(start[t], every, x[step][2 * t], x[step][2 * t + 1]);
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
        if (!is_mine(i)) continue;
        u32 a[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int e = 0; e < 4; ++e) a[step][e] = above_of(rows[i].words[step] >> 4 * e);
        const float scale[2] = {float_of_half(rows[i].scales), float_of_half(rows[i].scales >> 16)};
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            float group[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) group[e] = ZEROS ? 0.f : start[t][e];
#pragma unroll
            for (int step = 0; step < STEPS; ++step) mma(group, a[step], x[step][2 * t], x[step][2 * t + 1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 zero = MINS ? 0 : e < 2 ? rows[i].zeros & 0xffff : rows[i].zeros >> 16;
                if (ZEROS) group[e] = fmaf(-128.f - zero, start[t][e], group[e]);
                sums[i][t][e] = fmaf(scale[e / 2], group[e], sums[i][t][e]);
                if (MINS) sums[i][t][e] = fmaf(float_of_half(rows[i].zeros >> e / 2 * 16), start[t][e], sums[i][t][e]);
            }
        }
    }
}
#else
constexpr int WORDS = OPERANDS == 2 ? 8 : 4;  // registers in which a lane holds its part of W
// Adds the product of [16 x COLUMNS / 4] of W and [8 x COLUMNS / 4] of x to c.
__device__ __forceinline__ void multiply(Sum (&c)[4], const u32 (&a)[WORDS], const u32 (&b)[WORDS / 2]) {
#if OPERANDS == 3
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif OPERANDS == 2
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[4 * i]), "r"(a[4 * i + 2]), "r"(a[4 * i + 1]), "r"(a[4 * i + 3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
#else
    mma(c, a, b[0], b[1]);
#endif
}

// Converts the result of `ldmatrix` to the operand of `multiply`. In e4m3 each word becomes two words of fp16.
template <int COUNT>
__device__ __forceinline__ void widen(const u32* from, u32 (&to)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#if OPERANDS == 2
        if (i % 2 == 0)
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
                : "=r"(to[i]), "=r"(to[i + 1])
                : "r"(from[i / 2]));
#else
        to[i] = from[i];
#endif
    }
}

#endif
#if OPERANDS != 4
// A warp's part of 16 rows of a box: a quarter of the columns.
struct Rows {
    u32 words[4];
    __device__ __forceinline__ void load(u32 box, int strip, int part) {
        const int lane = threadIdx.x % 32;
        ldmatrix(words, box + in_box(strip * 16 + lane % 16, part * 2 + lane / 16));
    }
};

#if OPERANDS < 4
// Adds the products of a warp's part of a box to the sums.
template <typename IsMine>
__device__ __forceinline__ void multiply(Sum (&sums)[TALL][TILES][4], const Rows (&rows)[TALL], const u32 (&x)[STEPS][TILES * 2], IsMine is_mine) {
    u32 wide_x[TILES][WORDS / 2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) widen(x[0] + 2 * t, wide_x[t]);
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
        if (!is_mine(i)) continue;
        u32 wide_w[WORDS];
        widen(rows[i].words, wide_w);
#pragma unroll
        for (int t = 0; t < TILES; ++t) multiply(sums[i][t], wide_w, wide_x[t]);
    }
}
#else
// Converts two of the four values of e4m3 in a word to a pair of bf16, exactly: the bytes ODD and ODD + 2.
template <int ODD>
__device__ __forceinline__ u32 pair_of(u32 word) {
    // Exponent and mantissa of e4m3, read as those of bf16, are 2^120 times too small.
    const u32 magnitude = ODD ? (word & 0x7f007f00u) >> 4 : (word & 0x007f007fu) << 4;
    return times(((ODD ? word : word << 8) & 0x80008000u) | magnitude, 0x7b807b80u);
}

// The 16 x 16 permutation matrix by which x is multiplied, as the operands of two products. Result j of a lane has the columns
// 4 (lane % 4) + j and 4 (lane % 4) + j + 2.
struct Order {
    u32 words[2][2];
    __device__ __forceinline__ Order() {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int far = 0; far < 2; ++far) {
                const int row = far * 8 + lane % 4 * 2, column = lane / 8 * 4 + lane / 4 % 2 * 2 + j;
                words[j][far] = pack(row == column, row + 1 == column);
            }
    }
};

// Adds the products of a warp's part of a box to the sums.
template <typename IsMine>
__device__ __forceinline__ void multiply(Sum (&sums)[TALL][TILES][4], const Rows (&rows)[TALL], const u32 (&x)[STEPS][TILES * 2], const Order& order, IsMine is_mine) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 ordered[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; t += 2) {
            constexpr int LAST = TILES - 1;
            const int next = t < LAST ? t + 1 : t;  // if the number of tiles is odd, the last tile is computed twice
            const u32 a[4] = {x[step][2 * t], x[step][2 * next], x[step][2 * t + 1], x[step][2 * next + 1]};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float c[4] = {};
                mma(c, a, order.words[j][0], order.words[j][1]);
                ordered[t][j] = pack(c[0], c[1]);
                ordered[next][j] = pack(c[2], c[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < TALL; ++i) {
            if (!is_mine(i)) continue;
            const u32 near = rows[i].words[2 * step], far = rows[i].words[2 * step + 1];
            const u32 a[4] = {pair_of<0>(near), pair_of<0>(far), pair_of<1>(near), pair_of<1>(far)};
#pragma unroll
            for (int t = 0; t < TILES; ++t) mma(sums[i][t], a, ordered[t][0], ordered[t][1]);
        }
    }
}
#endif
#endif

// Writes x to the place in block `rank` that corresponds to `to` in this block. The barrier of block `rank` counts the bytes.
// Without a cluster this is an ordinary store, and a barrier of the block replaces the wait for the bytes.
__device__ __forceinline__ void send(int rank, float4& to, const float4& x, u64& barrier) {
    if (SPLIT == 1)
        to = x;
    else
        send_to(rank, to, x, barrier);
}
__device__ __forceinline__ void send(int rank, float& to, float x, u64& barrier) {
    if (SPLIT == 1)
        to = x;
    else
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                         address_in(rank, address(&to))),
                     "r"(__float_as_uint(x)), "r"(address_in(rank, address(&barrier)))
                     : "memory");
}

__device__ __forceinline__ float squares_of(u32 pair) { return low(pair) * low(pair) + high(pair) * high(pair); }

constexpr int MOST_REGISTERS = (OPERANDS == 2 && TALL * TILES >= 12) || (OPERANDS >= 4 && TALL * TILES >= 6);
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, MOST_REGISTERS ? 1 : 2)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
few_rows(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* __restrict__ norm, u16* __restrict__ y,
         const float* __restrict__ row_scale, const float* __restrict__ column_scale, i64 m_, i64 n_, i64 y_stride, float eps) {
    extern __shared__ __align__(1024) unsigned char x_boxes[];
    unsigned char* const boxes = x_boxes + STAGES * X_BOXES * X_BOX;
    Shared& shared = *reinterpret_cast<Shared*>(boxes + STAGES * BOX);
    const int m = static_cast<int>(m_), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = cluster_rank(), first_column = rank * SLICE;
    const int tiles = static_cast<int>(n_) / BLOCK_N, first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;

    let_next_begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], WARPS);
        }
        barrier_init(shared.inbox_full[0], 1);
        barrier_init(shared.inbox_full[1], 1);
        barrier_init(shared.squares_full, 1);
        barriers_are_there();
        if (SPLIT > 1) arrive_expecting(shared.squares_full, SPLIT * ROWS * sizeof(float));
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive();  // the wait comes before the first `send`

    if (warp == WARPS) {
        if (lane == 0) {
            const int steps = (tiles - first + stride - 1) / stride * CHUNKS;
            Ring<STAGES> ring{0, 1};
            auto fetch_w = [&](int step) {
                wait(shared.empty[ring.stage], ring.parity);
                arrive_expecting(shared.full[ring.stage], BOX_BYTES + X_BOXES * X_BOX);
                const int tile = first + step / CHUNKS * stride;
#if OPERANDS == 4
                const int column = (first_column / COLUMNS + step % CHUNKS) * (RECORD / 8), row = tile * (BLOCK_N / 16);
#else
                const int column = first_column + step % CHUNKS * COLUMNS, row = tile * BLOCK_N;
#endif
                fetch(address(boxes) + ring.stage * BOX, w, column, row, shared.full[ring.stage]);
            };
            auto fetch_x = [&](int stage, int step) {
#pragma unroll
                for (int i = 0; i < X_BOXES; ++i)
                    fetch(address(x_boxes) + (stage * X_BOXES + i) * X_BOX, x, first_column + step % CHUNKS * COLUMNS + i * 64, 0,
                          shared.full[stage]);
            };
            fetch_all(ring, steps, fetch_w, fetch_x);
        } else {
            wait_for_previous();
        }
        if (SPLIT > 1) cluster_wait();
    } else {
        if (NORM) {
            for (int i = threadIdx.x; i < SLICE / 8; i += MULTIPLIERS)
                reinterpret_cast<Vec8*>(shared.norm)[i] = load8(norm + first_column, i);
            named_sync(1, MULTIPLIERS);
        }
        wait_for_previous();

        const int part = warp % 4, half = warp / 4;
        auto is_mine = [&](int i) { return BLOCK_N % 32 == 0 || half * TALL + i < BLOCK_N / 16; };
        // The vector of 16 bytes whose address this lane gives to ldmatrix. x_single is for the last tile of an odd number of
        // tiles, and covers all of the warp's columns of a box.
        const int x_vector = STEPS == 2 ? part % 2 * 4 : part * 2;
        const u32 x_box_0 = address(x_boxes) + (STEPS == 2 ? part / 2 * X_BOX : 0);
        const u32 x_row = x_box_0 + in_box(lane % 8 + lane / 16 * 8, x_vector + lane / 8 % 2);
        const u32 x_single = x_box_0 + in_box(lane % 8, x_vector + (STEPS == 2 ? lane / 8 : lane / 8 % 2));
#if OPERANDS >= 5
        const Order order;
#endif
        Ring<STAGES> ring{0, 0};
        int turn = 0;
        for (int tile = first; tile < tiles; tile += stride, ++turn) {
            // This block finishes EACH rows of x. A thread computes MINE times two neighbouring columns of y.
            auto row_of = [&](int j) { return rank * EACH + (threadIdx.x + j * MULTIPLIERS) / PAIRS; };
            auto column_of = [&](int j) { return static_cast<int>(threadIdx.x + j * MULTIPLIERS) % PAIRS * 2; };
            auto is_there = [&](int j) { return threadIdx.x + j * MULTIPLIERS < EACH * PAIRS && row_of(j) < m; };
            auto place = [&](int j) { return reinterpret_cast<u32*>(y + row_of(j) * y_stride + tile * PAIRS * 2 + column_of(j)); };
            u32 before[FOLLOWED_BY == 1 ? MINE : 1];
            if (FOLLOWED_BY == 1) {  // now, because a load takes half a microsecond
#pragma unroll
                for (int j = 0; j < MINE; ++j) before[j] = is_there(j) ? *place(j) : 0;
            }

            Sum sums[TALL][TILES][4] = {};
            float squares[TILES] = {};
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                wait(shared.full[ring.stage], ring.parity);
                const u32 x_box = ring.stage * X_BOXES * X_BOX;
                u32 its[STEPS][TILES * 2];
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int t = 0; t + 1 < TILES; t += 2) {
                        u32 two[4];
                        ldmatrix(two, ((x_row + x_box) ^ step << 5) + t * 1024);
#pragma unroll
                        for (int i = 0; i < 4; ++i) its[step][2 * t + i] = two[i];
                    }
                if (TILES % 2 == 1) {
                    u32 last[4];
                    ldmatrix(last, x_single + x_box + (TILES - 1) * 1024);
#pragma unroll
                    for (int i = 0; i < 2 * STEPS; ++i) its[i / 2][2 * TILES - 2 + i % 2] = last[i];
                }
                Rows rows[TALL];
#pragma unroll
                for (int i = 0; i < TALL; ++i)
                    if (is_mine(i)) rows[i].load(address(boxes) + ring.stage * BOX, half * TALL + i, part);
                __syncwarp();
                if (lane == 0) arrive(shared.empty[ring.stage]);
                ring.advance();
                if (NORM) {
#pragma unroll
                    for (int step = 0; step < STEPS; ++step) {
                        const u32* const weights = shared.norm + chunk * (COLUMNS / 2) + (part * STEPS + step) * 8 + lane % 4;
                        const u32 near = weights[0], far = weights[4];
#pragma unroll
                        for (int t = 0; t < TILES; ++t) {
                            u32* const pair = its[step] + 2 * t;
                            squares[t] += squares_of(pair[0]) + squares_of(pair[1]);
                            pair[0] = times(pair[0], near);
                            pair[1] = times(pair[1], far);
                        }
                    }
                }
#if OPERANDS >= 5
                multiply(sums, rows, its, order, is_mine);
#else
                multiply(sums, rows, its, is_mine);
#endif
            }

            if (turn > 0) named_sync(1, MULTIPLIERS);  // all threads have read the sums of the tile before
#pragma unroll
            for (int i = 0; i < TALL; ++i)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int e = 0; e < 4 && is_mine(i); ++e)
                        shared.partial[part][t * 8 + lane % 4 * 2 + e % 2][(half * TALL + i) * 16 + lane / 4 + e / 2 * 8] =
                            static_cast<float>(sums[i][t][e]);
            if (NORM && turn == 0 && half == 0) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const float sum = lanes_sum<4>(squares[t]);
                    if (lane % 4 == 0) shared.part_squares[part][t * 8 + lane / 4] = sum;
                }
            }
            if (SPLIT > 1 && turn == 0) cluster_wait();  // all blocks of the cluster have their barriers
            u64& inbox_full = shared.inbox_full[turn % 2];
            if (SPLIT > 1 && threadIdx.x == 0) arrive_expecting(inbox_full, SPLIT * EACH * BLOCK_N * sizeof(float));
            named_sync(1, MULTIPLIERS);
            for (int i = threadIdx.x; i < ROWS * BLOCK_N / 4; i += MULTIPLIERS) {
                const int row = i / (BLOCK_N / 4), column = i % (BLOCK_N / 4) * 4;
                float4 sum = {};
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const float4 its = *reinterpret_cast<const float4*>(&shared.partial[p][row][column]);
                    sum.x += its.x, sum.y += its.y, sum.z += its.z, sum.w += its.w;
                }
                send(row / EACH, *reinterpret_cast<float4*>(&shared.inbox[turn % 2][rank][row % EACH][column]), sum, inbox_full);
            }

            if (NORM && turn == 0 && threadIdx.x < SPLIT * ROWS) {
                const int to = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
                float sum = 0.f;
#pragma unroll
                for (int p = 0; p < 4; ++p) sum += shared.part_squares[p][row];
                send(to, shared.squares[rank][row], sum, shared.squares_full);
            }

            if (SPLIT == 1) {
                named_sync(1, MULTIPLIERS);
            } else {
                wait(inbox_full, turn / 2 % 2);
                if (NORM) wait(shared.squares_full, 0);
            }
#pragma unroll(FOLLOWED_BY == 1 ? MINE : 1)  // otherwise it would need more registers than there are
            for (int j = 0; j < MINE; ++j) {
                if (!is_there(j)) continue;
                const int row = row_of(j), mine = row - rank * EACH, column = column_of(j);
                float scale = X_IN_8_BITS ? row_scale[row] : 1.f;
                if (NORM) {
                    float sum = 0.f;
#pragma unroll
                    for (int b = 0; b < SPLIT; ++b) sum += shared.squares[b][row];
                    scale = rsqrtf(sum / K + eps);
                }
                auto total = [&](int at) {
                    float sum = 0.f;
#pragma unroll
                    for (int b = 0; b < SPLIT; ++b) sum += shared.inbox[turn % 2][b][mine][at];
                    if (W_IN_8_BITS) sum *= column_scale[tile * BLOCK_N + at];
                    return sum * scale;
                };
                if (FOLLOWED_BY == 2) {
                    auto gated = [&](int at) { return silu_of(total(at)) * total(at + 8); };
                    const int at = column / 8 * 16 + column % 8;
                    *place(j) = pack(gated(at), gated(at + 1));
                } else {
                    const u32 old = FOLLOWED_BY == 1 ? before[j] : 0;
                    *place(j) = pack(total(column) + low(old), total(column + 1) + high(old));
                }
            }
        }
    }
    cluster_sync();  // no block exits while another may still write to its shared memory
}
