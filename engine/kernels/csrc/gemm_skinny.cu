// y = x W^T for few rows of x, fused with the operation after it, for sm_90a: bf16, e4m3 or int8 in, sums in fp32 or int32,
// bf16 out. The kernel reads W once, at the rate of the memory.
//   x: tensor map of [M, K], ROWS rows and 128 bytes a box. w: tensor map of [N, K], BOX_ROWS rows and 128 bytes a box.
//   OPERANDS, row_scale, column_scale: as in gemm_hopper.cu.
//   FOLLOWED_BY 0: y [M, N].  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate
//   alternate with eight rows of up in W.
//
// SPLIT blocks form a cluster and divide the K columns of BLOCK_N rows of W among themselves. A warp of each block fetches boxes of
// W and of x by TMA into a ring of STAGES stages. W does not depend on the kernel before, so the block fetches W while that kernel
// still runs. Each of GROUPS warpgroups multiplies 64 rows of W with all rows of x by wgmma. The last warpgroup may have fewer rows of
// W: it also multiplies what lies behind the box, and drops the results. The launcher makes shared memory reach that far.
// Each block then finishes a part of the rows of x: all blocks of the cluster send it their sums of these rows.
// If x has more than ROWS rows, which are 128 then, neighbouring clusters take the same rows of W and other rows of x.
//
// Floor: the N * K values of W, read once.
constexpr bool IN_8_BITS = OPERANDS >= 2;
constexpr int WIDTH = 128, COLUMNS = IN_8_BITS ? WIDTH : WIDTH / 2;  // bytes of a box's rows, and their values
constexpr int GROUPS = (BLOCK_N + 63) / 64, MULTIPLIERS = 128 * GROUPS;
constexpr int BOXES = (BLOCK_N + 255) / 256, BOX_ROWS = BLOCK_N / BOXES;  // a box has at most 256 rows
constexpr u32 W_BYTES = BLOCK_N * WIDTH, X_BYTES = ROWS * WIDTH, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int CHUNKS = K / COLUMNS;
constexpr int PITCH = BLOCK_N + 4;  // floats; the padding puts neighbouring rows into different banks
constexpr int EACH = (ROWS + SPLIT - 1) / SPLIT;  // the most rows of x that a block finishes
constexpr int SUMS = ROWS / 2;  // of a thread
constexpr int WIDE = FOLLOWED_BY == 2 ? BLOCK_N / 2 : BLOCK_N, PAIRS = WIDE / 2;  // columns of y of a block
constexpr int MINE = (EACH * PAIRS + MULTIPLIERS - 1) / MULTIPLIERS;
static_assert(K % COLUMNS == 0 && CHUNKS >= SPLIT && BLOCK_N % 16 == 0 && BLOCK_N % BOXES == 0 && BOX_ROWS % 8 == 0, "whole boxes");
static_assert(ROWS * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit into the ring");

// Lies in shared memory after the ring.
struct alignas(16) Shared {
    float inbox[SPLIT > 1 ? SPLIT : 1][SPLIT > 1 ? EACH : 1][BLOCK_N];
    float row_scale[IN_8_BITS ? ROWS : 1], column_scale[IN_8_BITS ? BLOCK_N : 1];
    u64 full[STAGES], empty[STAGES], inbox_full;
};

// x += A B^T. If `accumulate` is 0, the old value of x is ignored.
__device__ __forceinline__ void product(Sum (&x)[SUMS], u64 a, u64 b, int accumulate) {
#if ROWS == 8
    PRODUCT("8", REGS_4, "%4", "%5", "%6", OUT_4(x, 0));
#elif ROWS == 16
    PRODUCT("16", REGS_8, "%8", "%9", "%10", OUT_4(x, 0), OUT_4(x, 4));
#elif ROWS == 32
    PRODUCT("32", REGS_16, "%16", "%17", "%18", OUT_16(x, 0));
#elif ROWS == 64
    PRODUCT("64", REGS_32, "%32", "%33", "%34", OUT_16(x, 0), OUT_16(x, 16));
#else
    static_assert(ROWS == 128, "products are of 8, 16, 32, 64 or 128 rows of x");
    PRODUCT("128", REGS_64, "%64", "%65", "%66", OUT_64(x, 0));
#endif
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
gemm_skinny(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, u16* __restrict__ y,
            const float* __restrict__ row_scale, const float* __restrict__ column_scale, i64 m_, i64 n_, i64 y_stride) {
    extern __shared__ __align__(1024) unsigned char ring_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(ring_bytes + STAGES * STAGE_BYTES);
    const int n = static_cast<int>(n_), row_tiles = ROWS < 128 ? 1 : (static_cast<int>(m_) + ROWS - 1) / ROWS;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const int first_row = tile / row_tiles * BLOCK_N, first_of_x = tile % row_tiles * ROWS;
    const int m = min(ROWS, static_cast<int>(m_) - first_of_x);
    const int first = rank * CHUNKS / SPLIT, steps = (rank + 1) * CHUNKS / SPLIT - first;
    const int each = (m + SPLIT - 1) / SPLIT, begin = min(rank * each, m), count = min(each, m - begin);  // the rows that it finishes

    let_next_begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], GROUPS);
        }
        barrier_init(shared.inbox_full, 1);
        barriers_are_there();
        if (SPLIT > 1) arrive_expecting(shared.inbox_full, SPLIT * count * BLOCK_N * sizeof(float));
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive();

    if (threadIdx.x >= MULTIPLIERS) {
        if (threadIdx.x == MULTIPLIERS) {
            Ring<STAGES> ring{0, 1};
            auto fetch_w = [&](int step) {
                const u32 stage = address(ring_bytes) + ring.stage * STAGE_BYTES;
                wait(shared.empty[ring.stage], ring.parity);
                arrive_expecting(shared.full[ring.stage], STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < BOXES; ++i)
                    fetch(stage + i * BOX_ROWS * WIDTH, w, (first + step) * COLUMNS, first_row + i * BOX_ROWS, shared.full[ring.stage]);
            };
            auto fetch_x = [&](int stage, int step) {
                fetch(address(ring_bytes) + stage * STAGE_BYTES + W_BYTES, x, (first + step) * COLUMNS, first_of_x, shared.full[stage]);
            };
            fetch_all(ring, steps, fetch_w, fetch_x);
        } else {
            wait_for_previous();
        }
        if (SPLIT > 1) cluster_wait();
    } else {
        wait_for_previous();
        const int group = threadIdx.x / 128, thread = threadIdx.x % 128;

        // A thread finishes MINE times two neighbouring columns of y.
        const int width = FOLLOWED_BY == 2 ? n / 2 : n, first_column = tile / row_tiles * WIDE;
        auto row_of = [&](int j) { return (threadIdx.x + j * MULTIPLIERS) / PAIRS; };
        auto column_of = [&](int j) { return (threadIdx.x + j * MULTIPLIERS) % PAIRS * 2; };
        auto is_there = [&](int j) { return row_of(j) < count && first_column + column_of(j) < width; };
        auto place = [&](int j) { return reinterpret_cast<u32*>(y + (first_of_x + begin + row_of(j)) * y_stride + first_column + column_of(j)); };
        u32 before_it[FOLLOWED_BY == 1 ? MINE : 1];
        auto load_before = [&] {
#pragma unroll
            for (int j = 0; j < MINE; ++j) before_it[j] = is_there(j) ? *place(j) : 0;
        };
        // Now, because a load takes half a microsecond. With 128 rows there are no registers left beside the sums.
        if (FOLLOWED_BY == 1 && ROWS < 128) load_before();
        if (IN_8_BITS) {
            for (int i = threadIdx.x; i < m; i += MULTIPLIERS) shared.row_scale[i] = row_scale[first_of_x + i];
            for (int i = threadIdx.x; i < BLOCK_N; i += MULTIPLIERS) shared.column_scale[i] = column_scale[min(first_row + i, n - 1)];
        }

        Sum sums[SUMS];
        Ring<STAGES> ring{0, 0};
        int before = 0;
        for (int step = 0; step < steps; ++step) {
            const u32 stage = address(ring_bytes) + ring.stage * STAGE_BYTES;
            wait(shared.full[ring.stage], ring.parity);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                product(sums, descriptor(stage + group * 64 * WIDTH + i * 32), descriptor(stage + W_BYTES + i * 32), step + i > 0);
            products_commit();
            if (step > 0) {
                products_wait<1>();
                if (thread == 0) arrive(shared.empty[before]);
            }
            before = ring.stage;
            ring.advance();
        }
        products_wait<0>();
        pin(sums);

        named_sync(1, MULTIPLIERS);  // all warpgroups have read the ring, which now takes the sums
        float(*const partial)[PITCH] = reinterpret_cast<float(*)[PITCH]>(ring_bytes);  // [ROWS]
        const int lane = thread % 32, w_row = group * 64 + thread / 32 * 16;
        if (w_row < BLOCK_N) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i)
                partial[i / 4 * 8 + lane % 4 * 2 + i % 2][w_row + lane / 4 + i / 2 % 2 * 8] = static_cast<float>(sums[i]);
        }
        if (FOLLOWED_BY == 1 && ROWS == 128) load_before();
        named_sync(1, MULTIPLIERS);
        if (SPLIT > 1) {
            cluster_wait();  // all blocks of the cluster have their barriers
            for (int i = threadIdx.x; i < m * (BLOCK_N / 4); i += MULTIPLIERS) {
                const int row = i / (BLOCK_N / 4), column = i % (BLOCK_N / 4) * 4, owner = row / each;
                send_to(owner, *reinterpret_cast<float4*>(&shared.inbox[rank][row - owner * each][column]),
                     *reinterpret_cast<const float4*>(&partial[row][column]), shared.inbox_full);
            }
            wait(shared.inbox_full, 0);
        }

#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            if (!is_there(j)) continue;
            const int row = row_of(j), column = column_of(j);
            auto total = [&](int at) {
                float sum = 0.f;
                if (SPLIT == 1) sum = partial[row][at];
#pragma unroll
                for (int b = 0; b < SPLIT && SPLIT > 1; ++b) sum += shared.inbox[b][row][at];
                return IN_8_BITS ? sum * shared.row_scale[begin + row] * shared.column_scale[at] : sum;
            };
            if (FOLLOWED_BY == 2) {
                auto gated = [&](int at) { return silu_of(total(at)) * total(at + 8); };
                const int at = column / 8 * 16 + column % 8;
                *place(j) = pack(gated(at), gated(at + 1));
            } else {
                const u32 old = FOLLOWED_BY == 1 ? before_it[j] : 0;
                *place(j) = pack(total(column) + low(old), total(column + 1) + high(old));
            }
        }
    }
    if (SPLIT > 1) cluster_sync();  // no block exits while another may still write to its shared memory
}
