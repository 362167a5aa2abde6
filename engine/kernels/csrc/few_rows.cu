// y = x W^T for at most 32 rows of x, fused with an RMSNorm before it and the operation after it, for sm_90 and later. The kernel
// reads W once, at the rate of the memory. bf16 in, sums in fp32, bf16 out. W may have 4 bits.
//   x: tensor map of [M, K], ROWS rows and 128 bytes a box. w: tensor map of [N, K], BLOCK_N rows and 128 bytes a box.
//   norm [K], y [M, N].
//   IN_CODES: 1 if W has 4 bits. Then w is the tensor map of its records (csrc/codes.cuh), [N / 16, bytes]. A box holds a record
//   of each 16 rows.
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
// W in 4 bits: one logical operation makes two bf16 numbers 128 + code from two codes. If every zero is 8, the mma of a group
// start with -(128 + 8) times the sum of the group's x, which is one mma more for all rows of W. Otherwise -(128 + zero) times
// this sum is added to the sums of the group. Then scales multiply the sums of the group.
//
// Floor: the N * K values of W, read once.
// Tried: W in 8 bits, with x in 8 bits or in bf16. gemm_skinny.cu is faster, except for the smallest matrices (docs/decisions/067).
// Tried: W from global memory into registers, with 16 rows of W and all of K for each block. With 16 rows of x this reads as much
// of x as of W. It is slower than cuBLAS from K = 2,560 on.
#if IN_CODES
static_assert(!MINS, "gemm_skinny.cu is faster with mins");
constexpr int COLUMNS = CHUNK;  // columns of a box of W
constexpr u32 BOX_BYTES = BLOCK_N / 16 * RECORD;
#else
constexpr int COLUMNS = 64;
constexpr u32 BOX_BYTES = BLOCK_N * 128;
#endif
constexpr int X_BOXES = COLUMNS / 64;  // boxes of x with the columns of one box of W
constexpr int STEPS = X_BOXES;         // products along a warp's columns of a box
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

// Lies in shared memory after the boxes of x and of W.
struct alignas(16) Shared {
    u32 norm[NORM ? SLICE / 2 : 4];
    float partial[4][ROWS][PITCH];
    float inbox[2][SPLIT][EACH][BLOCK_N];
    float part_squares[4][ROWS], squares[SPLIT][ROWS];  // sums of x^2: by each quarter of the warps' columns; by each block
    u64 full[STAGES], empty[STAGES], inbox_full[2], squares_full;
};

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// Returns the offset of one vector of 16 bytes of a row in a box that TMA has swizzled.
__device__ __forceinline__ u32 in_box(int row, int vector) { return row * 128 + ((vector ^ (row & 7)) << 4); }

#if IN_CODES
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
__device__ __forceinline__ void multiply(float (&sums)[TALL][TILES][4], const Rows (&rows)[TALL], const u32 (&x)[STEPS][TILES * 2], IsMine is_mine) {
    constexpr u32 EVERY = ZEROS ? ONES : ABOVE | MIDDLES | SIGNS;
    const u32 every[4] = {EVERY, EVERY, EVERY, EVERY};
    float start[TILES][4] = {};  // sums of x: times -(128 + 8), or plain if there are zeros
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
                const u32 zero = e < 2 ? rows[i].zeros & 0xffff : rows[i].zeros >> 16;
                if (ZEROS) group[e] = fmaf(-128.f - zero, start[t][e], group[e]);
                sums[i][t][e] = fmaf(scale[e / 2], group[e], sums[i][t][e]);
            }
        }
    }
}
#else
// A warp's part of 16 rows of a box: a quarter of the columns.
struct Rows {
    u32 words[4];
    __device__ __forceinline__ void load(u32 box, int strip, int part) {
        const int lane = threadIdx.x % 32;
        ldmatrix(words, box + in_box(strip * 16 + lane % 16, part * 2 + lane / 16));
    }
};

// Adds the products of a warp's part of a box to the sums.
template <typename IsMine>
__device__ __forceinline__ void multiply(float (&sums)[TALL][TILES][4], const Rows (&rows)[TALL], const u32 (&x)[STEPS][TILES * 2], IsMine is_mine) {
#pragma unroll
    for (int i = 0; i < TALL; ++i) {
        if (!is_mine(i)) continue;
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma(sums[i][t], rows[i].words, x[0][2 * t], x[0][2 * t + 1]);
    }
}
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

constexpr bool MOST_REGISTERS = IN_CODES && TALL * TILES >= 6;
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, MOST_REGISTERS ? 1 : 2)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
few_rows(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* __restrict__ norm, u16* __restrict__ y,
         i64 m_, i64 n_, i64 y_stride, float eps) {
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
#if IN_CODES
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

            float sums[TALL][TILES][4] = {};
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
                multiply(sums, rows, its, is_mine);
            }

            if (turn > 0) named_sync(1, MULTIPLIERS);  // all threads have read the sums of the tile before
#pragma unroll
            for (int i = 0; i < TALL; ++i)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int e = 0; e < 4 && is_mine(i); ++e)
                        shared.partial[part][t * 8 + lane % 4 * 2 + e % 2][(half * TALL + i) * 16 + lane / 4 + e / 2 * 8] =
                            sums[i][t][e];
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
                float scale = 1.f;
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
