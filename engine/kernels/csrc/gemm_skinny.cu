// y = x W^T for few rows of x, fused with the operation after it, for sm_90a: bf16, e4m3 or int8 in, sums in fp32 or int32,
// bf16 out. The kernel reads W once, at the rate of the memory.
//   x: tensor map of [M, K], 128 bytes a box, of each row that a block multiplies. w: tensor map of [N, K], BOX_ROWS rows and 128
//   bytes a box.
//   OPERANDS, row_scale, column_scale: as in gemm_hopper.cu. OPERANDS 4: W is in codes, and w are its records (csrc/codes.cuh).
//   FOLLOWED_BY 0: y [M, N].  1: y += x W^T, in place, rounded once.  2: y [M, N / 2], silu(gate) * up. Eight rows of gate
//   alternate with eight rows of up in W.
//   E4M3, BLOCKS, block_scale: as in gemm_hopper.cu.
//
// SPLIT blocks form a cluster and divide the K columns of BLOCK_N rows of W among themselves. A warp of each block fetches boxes of
// W and of x by TMA into a ring of STAGES stages. W does not depend on the kernel before, so the block fetches W while that kernel
// still runs. Each of WARPGROUPS warpgroups multiplies 64 rows of W with all rows of x by wgmma. The last warpgroup may have fewer rows of
// W: it also multiplies what lies behind the box, and drops the results. The launcher makes shared memory reach that far.
// Each block then finishes a part of the rows of x: all blocks of the cluster send it their sums of these rows. With INBOX_IN_RING
// the sums arrive in the ring, after all blocks of the cluster have read their rings.
// If x has more than ROWS rows, which are 128 then, neighbouring clusters take the same rows of W and other rows of x, about as many
// each. A box of x has only these rows: rows past the end of a tensor take TMA longer than others (docs/decisions/085). What lies
// behind them in shared memory is multiplied, too, and the results are dropped.
//
// Codes become bf16 in registers, which are wgmma's operand. The scale is rounded to bf16, and so is its product with the code. While
// the products of 64 columns run, the codes of the next 64 are converted. A step has the records of 128 columns. They are
// consecutive for 16 rows of W, and each lane of the fetching warp copies those of 16 rows.
//
// Floor: the N * K values of W, or their codes and scales, read once.
constexpr bool IN_8_BITS = OPERANDS == 2 || OPERANDS == 3, IN_CODES = OPERANDS == 4;
constexpr int WIDTH = 128, COLUMNS = IN_8_BITS || IN_CODES ? WIDTH : WIDTH / 2;  // bytes of a box's rows, and columns of a step
constexpr int WARPGROUPS = (BLOCK_N + 63) / 64, MULTIPLIERS = 128 * WARPGROUPS;
constexpr int BOXES = (BLOCK_N + 255) / 256, BOX_ROWS = BLOCK_N / BOXES;  // a box has at most 256 rows
constexpr int STRIPS = BLOCK_N / 16, X_BOXES = IN_CODES ? 2 : 1;
#if OPERANDS == 4
constexpr u32 PART = COLUMNS / CHUNK * RECORD;  // bytes of a strip in a step
static_assert(COLUMNS % CHUNK == 0 && PART % 16 == 0, "a copy takes whole records");
typedef const int* Weights;
#else
constexpr u32 PART = 16 * WIDTH;
typedef TensorMap Weights;
#endif
constexpr u32 X_BOX = ROWS * WIDTH, X_BYTES = X_BOXES * X_BOX;
constexpr u32 W_BYTES = (STRIPS * PART + 1023) / 1024 * 1024, STAGE_BYTES = W_BYTES + X_BYTES;  // boxes of x begin at multiples of 1 KiB
constexpr int CHUNKS = K / COLUMNS;
constexpr int PITCH = BLOCK_N + 4;  // floats; the padding puts neighbouring rows into different banks
constexpr int EACH = (ROWS + SPLIT - 1) / SPLIT;  // the most rows of x that a block finishes
constexpr int SUMS = ROWS / 2;  // of a thread
constexpr int WIDE = FOLLOWED_BY == 2 ? BLOCK_N / 2 : BLOCK_N, PAIRS = WIDE / 2;  // columns of y of a block
constexpr int MINE = (EACH * PAIRS + MULTIPLIERS - 1) / MULTIPLIERS;
constexpr int AT_ONCE = ROWS > 64 && MINE > 16 ? 16 : MINE;  // pairs of y's old values that a thread holds at a time
static_assert(K % COLUMNS == 0 && CHUNKS >= SPLIT && BLOCK_N % 16 == 0 && BLOCK_N % BOXES == 0 && BOX_ROWS % 8 == 0, "whole boxes");
// All blocks' sums of the rows of x that this block finishes.
typedef float Inbox[SPLIT > 1 ? SPLIT : 1][SPLIT > 1 ? EACH : 1][BLOCK_N];
constexpr u32 SUM_BYTES = ROWS * PITCH * 4;
constexpr bool SENDS_INTO_RING = INBOX_IN_RING && SPLIT > 1;
static_assert(!BLOCKS || (OPERANDS == 2 && BLOCK_N % 32 == 0), "a step's scales are whole vectors of 16 bytes");
static_assert(SUM_BYTES + (SENDS_INTO_RING ? sizeof(Inbox) : 0) <= STAGES * STAGE_BYTES, "the sums fit into the ring");

// Lies in shared memory after the ring.
struct alignas(16) Shared {
    float block_scale[BLOCKS ? STAGES : 1][BLOCKS ? BLOCK_N / 8 : 4];
    float inbox[INBOX_IN_RING ? 1 : sizeof(Inbox) / sizeof(float)];
    float row_scale[IN_8_BITS ? ROWS : 1], column_scale[IN_8_BITS && !BLOCKS ? BLOCK_N : 1];
    u64 full[STAGES], empty[STAGES], inbox_full;
};

// x += A B^T. If `accumulate` is 0, the old value of x is ignored.
__device__ __forceinline__ void product(Sum (&x)[SUMS], Operand a, u64 b, int accumulate) {
// The texts of W's operand, which is four registers or a descriptor, and of the two operands behind it.
#if OPERANDS == 4
#define AT(n, n1, n2, n3, n4, n5) "{" n ", " n1 ", " n2 ", " n3 "}", n4, n5
#else
#define AT(n, n1, n2, ...) n, n1, n2
#endif
#define PRODUCT_OF(...) PRODUCT(__VA_ARGS__)
#if ROWS == 8
    PRODUCT_OF("8", REGS_4, AT("%4", "%5", "%6", "%7", "%8", "%9"), OUT_4(x, 0));
#elif ROWS == 16
    PRODUCT_OF("16", REGS_8, AT("%8", "%9", "%10", "%11", "%12", "%13"), OUT_4(x, 0), OUT_4(x, 4));
#elif ROWS == 32
    PRODUCT_OF("32", REGS_16, AT("%16", "%17", "%18", "%19", "%20", "%21"), OUT_16(x, 0));
#elif ROWS == 64
    PRODUCT_OF("64", REGS_32, AT("%32", "%33", "%34", "%35", "%36", "%37"), OUT_16(x, 0), OUT_16(x, 16));
#elif ROWS == 96
    PRODUCT_OF("96", REGS_48, AT("%48", "%49", "%50", "%51", "%52", "%53"), OUT_16(x, 0), OUT_16(x, 16), OUT_16(x, 32));
#else
    static_assert(ROWS == 128, "products are of 8, 16, 32, 64, 96 or 128 rows of x");
    PRODUCT_OF("128", REGS_64, AT("%64", "%65", "%66", "%67", "%68", "%69"), OUT_64(x, 0));
#endif
}

#if OPERANDS == 4
// Two operands of W, of 64 columns each: for the products that run, and for the next ones.
struct Operands {
    u32 of[2][4][4];
    Words words;
    u32 scale_words[4][2];
    // Loads 64 columns of a strip. `strip`: the address of its records.
    __device__ __forceinline__ void load(u32 strip, int part) {
        const int column = part * 64 % CHUNK;
        const u32 record = strip + part * 64 / CHUNK * RECORD;
        words.load(record, column / 64);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j * 16 % GROUP) continue;
            const u32 its = record + CODES + threadIdx.x % 32 / 4 * LANE_SCALES + (column + j * 16) / GROUP * (1 + ZEROS) * 4;
            scale_words[j][0] = load_word(its), scale_words[j][1] = ZEROS ? load_word(its + 4) : MIDDLES;
        }
    }
    // Converts the 64 columns that have been loaded.
    __device__ __forceinline__ void convert(u32 (&to)[4][4]) {
        PairScales scales;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j * 16 % GROUP == 0) scales = PairScales(Scales(scale_words[j][0], scale_words[j][1]));
#pragma unroll
            for (int i = 0; i < 4; ++i) to[j][i] = scaled(words, 4 * j + i, scales);
        }
    }
    // Keeps the compiler from giving the registers away before this point: wgmma reads them asynchronously.
    __device__ __forceinline__ void pin(int at) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" ::"r"(of[at][j][0]), "r"(of[at][j][1]), "r"(of[at][j][2]), "r"(of[at][j][3]) : "memory");
    }
};
#endif

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
#if SPLIT > 1
    __cluster_dims__(SPLIT, 1, 1)
#endif
gemm_skinny(const __grid_constant__ TensorMap x, const __grid_constant__ Weights w, Out* __restrict__ y,
            const float* __restrict__ row_scale, const float* __restrict__ column_scale, const float* __restrict__ block_scale,
            float* __restrict__ y_scale, i64 m_, i64 n_, i64 y_stride) {
    extern __shared__ __align__(1024) unsigned char ring_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(ring_bytes + STAGES * STAGE_BYTES);
    Inbox& inbox = *reinterpret_cast<Inbox*>(INBOX_IN_RING ? ring_bytes + SUM_BYTES : reinterpret_cast<unsigned char*>(shared.inbox));
    const int n = static_cast<int>(n_), row_tiles = ROWS < 128 ? 1 : (static_cast<int>(m_) + ROWS - 1) / ROWS;
    const int rows = (static_cast<int>(m_) + row_tiles - 1) / row_tiles;  // of x, in a box
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const int first_row = tile / row_tiles * BLOCK_N, first_of_x = tile % row_tiles * rows;
    const int m = min(rows, static_cast<int>(m_) - first_of_x);
    const int first = rank * CHUNKS / SPLIT, steps = (rank + 1) * CHUNKS / SPLIT - first;
    const int each = (m + SPLIT - 1) / SPLIT, begin = min(rank * each, m), count = min(each, m - begin);  // the rows that it finishes

    let_next_begin();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], IN_CODES || BLOCKS ? 4 * WARPGROUPS : WARPGROUPS);
        }
        barrier_init(shared.inbox_full, 1);
        barriers_are_there();
        if (SPLIT > 1) arrive_expecting(shared.inbox_full, SPLIT * count * BLOCK_N * sizeof(float));
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive();

    if (threadIdx.x >= MULTIPLIERS) {
        const int fetcher = threadIdx.x - MULTIPLIERS;
        if (fetcher < (IN_CODES ? 32 : 1)) {
            Ring<STAGES> ring{0, 1};
            auto fetch_w = [&](int step) {
                const u32 stage = address(ring_bytes) + ring.stage * STAGE_BYTES;
                wait(shared.empty[ring.stage], ring.parity);
                const u32 scale_bytes = BLOCKS ? min(BLOCK_N, n - first_row) / 8 * 4 : 0;
                if (fetcher == 0) arrive_expecting(shared.full[ring.stage], STRIPS * PART + X_BOXES * rows * WIDTH + scale_bytes);
                if (BLOCKS) {
                    const float* const from = block_scale + (first + step) * (n / 8) + first_row / 8;
                    copy_bulk(address(shared.block_scale[ring.stage]), from, scale_bytes, shared.full[ring.stage]);
                }
#if OPERANDS == 4
                // One thread would take longer than the warpgroups. Past the end the last strip is copied, but not used.
                const i64 strip = min(first_row / 16 + fetcher, n / 16 - 1);
                const unsigned char* const from = reinterpret_cast<const unsigned char*>(w) + (strip * CHUNKS + first + step) * PART;
                if (fetcher < STRIPS) copy_bulk(stage + fetcher * PART, from, PART, shared.full[ring.stage]);
#else
#pragma unroll
                for (int i = 0; i < BOXES; ++i)
                    fetch(stage + i * BOX_ROWS * WIDTH, w, (first + step) * COLUMNS, first_row + i * BOX_ROWS, shared.full[ring.stage]);
#endif
            };
            auto fetch_x = [&](int stage, int step) {
                if (fetcher > 0) return;
#pragma unroll
                for (int i = 0; i < X_BOXES; ++i)
                    fetch(address(ring_bytes) + stage * STAGE_BYTES + W_BYTES + i * X_BOX, x, (first + step) * COLUMNS + i * 64, first_of_x, shared.full[stage]);
            };
            fetch_all(ring, steps, fetch_w, fetch_x);
        } else {
            wait_for_previous();
        }
        if (SPLIT > 1) cluster_wait();
        if (SENDS_INTO_RING) cluster_sync();
    } else {
        wait_for_previous();
        const int group = threadIdx.x / 128, thread = threadIdx.x % 128;

        // A thread finishes MINE times two neighbouring columns of y.
        const int width = FOLLOWED_BY == 2 ? n / 2 : n, first_column = tile / row_tiles * WIDE;
        auto row_of = [&](int j) { return (threadIdx.x + j * MULTIPLIERS) / PAIRS; };
        auto column_of = [&](int j) { return (threadIdx.x + j * MULTIPLIERS) % PAIRS * 2; };
        auto is_there = [&](int j) { return row_of(j) < count && first_column + column_of(j) < width; };
        auto place = [&](int j) { return reinterpret_cast<u32*>(y + (first_of_x + begin + row_of(j)) * y_stride + first_column + column_of(j)); };
        u32 before_it[FOLLOWED_BY == 1 ? AT_ONCE : 1];
        auto load_before = [&](int from) {
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) before_it[j] = is_there(from + j) ? *place(from + j) : 0;
        };
        // Now, because a load takes half a microsecond. With more rows there are no registers left beside the sums.
        if (FOLLOWED_BY == 1 && ROWS <= 64) load_before(0);
        if (IN_8_BITS) {
            for (int i = threadIdx.x; i < m; i += MULTIPLIERS) shared.row_scale[i] = row_scale[first_of_x + i];
            for (int i = threadIdx.x; i < BLOCK_N && !BLOCKS; i += MULTIPLIERS) shared.column_scale[i] = column_scale[min(first_row + i, n - 1)];
        }

        Sum sums[SUMS];
        Ring<STAGES> ring{0, 0};
        int before = 0;
#if OPERANDS == 4
        Operands operands = {};
        const u32 strip = address(ring_bytes) + min(group * 4 + thread / 32, STRIPS - 1) * PART;
        wait(shared.full[0], 0);
        operands.load(strip, 0);
        operands.convert(operands.of[0]);
        for (int step = 0; step < steps; ++step) {
            const int stage = ring.stage;
            const u32 x_stage = address(ring_bytes) + stage * STAGE_BYTES + W_BYTES;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                // The next 64 columns. Their codes come from shared memory while the products of these columns begin.
                const bool follows = part == 0 || step + 1 < steps;
                if (part == 0) {
                    operands.load(strip + ring.stage * STAGE_BYTES, 1);
                    ring.advance();
                } else if (follows) {
                    wait(shared.full[ring.stage], ring.parity);
                    operands.load(strip + ring.stage * STAGE_BYTES, 0);
                }
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    product(sums, operands.of[part][i], descriptor(x_stage + part * X_BOX + i * 32), step + part + i > 0);
                products_commit();
                products_wait<1>();  // the products before these have read their operands
                operands.pin(1 - part);
                if (part == 0 && step > 0 && thread % 32 == 0) arrive(shared.empty[before]);
                if (follows) operands.convert(operands.of[1 - part]);
            }
            before = stage;
        }
        products_wait<0>();
        operands.pin(1);
#elif BLOCKS
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.f;
        for (int step = 0; step < steps; ++step) {
            const u32 stage = address(ring_bytes) + ring.stage * STAGE_BYTES;
            Sum part[SUMS];
            wait(shared.full[ring.stage], ring.parity);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                product(part, descriptor(stage + group * 64 * WIDTH + i * 32), descriptor(stage + W_BYTES + i * 32), i > 0);
            products_commit();
            // Eight rows of W share a scale. A thread has sums of two such groups. The last warpgroup may have fewer rows.
            const int strip = min(group * 4 + thread / 32, STRIPS - 1);
            const float2 scale = *reinterpret_cast<const float2*>(&shared.block_scale[ring.stage][strip * 2]);
            products_wait<0>();
            pin(part);
            __syncwarp();  // all lanes have their scales
            if (thread % 32 == 0) arrive(shared.empty[ring.stage]);
            ring.advance();
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = fmaf(i / 2 % 2 ? scale.y : scale.x, part[i], sums[i]);
        }
#else
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
#endif
        pin(sums);

        named_sync(1, MULTIPLIERS);  // all warpgroups have read the ring, which now takes the sums
        if (SENDS_INTO_RING) {
            cluster_wait();
            cluster_arrive();
        }
        float(*const partial)[PITCH] = reinterpret_cast<float(*)[PITCH]>(ring_bytes);  // [ROWS]
        const int lane = thread % 32, w_row = group * 64 + thread / 32 * 16;
        if (w_row < BLOCK_N) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i)
                partial[i / 4 * 8 + lane % 4 * 2 + i % 2][w_row + lane / 4 + i / 2 % 2 * 8] = static_cast<float>(sums[i]);
        }
        if (FOLLOWED_BY == 1 && ROWS > 64) load_before(0);
        named_sync(1, MULTIPLIERS);
        if (SPLIT > 1) {
            cluster_wait();  // all blocks of the cluster have their barriers, and have read the ring if they get sums there
            for (int i = threadIdx.x; i < m * (BLOCK_N / 4); i += MULTIPLIERS) {
                const int row = i / (BLOCK_N / 4), column = i % (BLOCK_N / 4) * 4, owner = row / each;
                send_to(owner, *reinterpret_cast<float4*>(&inbox[rank][row - owner * each][column]),
                     *reinterpret_cast<const float4*>(&partial[row][column]), shared.inbox_full);
            }
            wait(shared.inbox_full, 0);
        }

#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            if (FOLLOWED_BY == 1 && j > 0 && j % AT_ONCE == 0) load_before(j);
            if (!is_there(j)) continue;
            const int row = row_of(j), column = column_of(j);
            auto total = [&](int at) {
                float sum = 0.f;
                if (SPLIT == 1) sum = partial[row][at];
#pragma unroll
                for (int b = 0; b < SPLIT && SPLIT > 1; ++b) sum += inbox[b][row][at];
                return IN_8_BITS ? sum * shared.row_scale[begin + row] * (BLOCKS ? 1.f : shared.column_scale[at]) : sum;
            };
            if (FOLLOWED_BY == 2) {
                auto gated = [&](int at) { return silu_of(total(at)) * total(at + 8); };
                const int at = column / 8 * 16 + column % 8;
                if (E4M3) {
                    *reinterpret_cast<u16*>(place(j)) = static_cast<u16>(pack_e4m3(gated(at), gated(at + 1)));
                    if (first_column + column == 0) y_scale[first_of_x + begin + row] = 1.f;
                } else {
                    *place(j) = pack(gated(at), gated(at + 1));
                }
            } else {
                const u32 old = FOLLOWED_BY == 1 ? before_it[j % AT_ONCE] : 0;
                *place(j) = pack(total(column) + low(old), total(column + 1) + high(old));
            }
        }
    }
    if (SPLIT > 1) cluster_sync();  // no block exits while another may still write to its shared memory
}
