// Varlen attention, forward, for sm_90a. Computes the same as attention.cu, on wgmma and TMA.
//   q: tensor map of [T, K * GROUP, D]. k, v: tensor maps of [T, K, D]. A box has 64 columns.
//   queue: see Queue. The other arguments, PREFIX, PAGED and E4M3 are those of attention.cu. BIAS is not supported.
//
// A block has three warpgroups and computes many tiles. One thread of the first warpgroup fetches. For each tile it looks up the
// range of keys and fetches Q and the blocks of keys and values, as far ahead as the stages in shared memory allow.
// Each of the other two warpgroups computes 64 rows, in the order of FlashAttention 3: it multiplies the values of one block
// while it computes the softmax of the next block. The two warpgroups alternate: one runs its products while the other runs its
// softmax.
// If the last block of keys is at most half full, only half a block is computed.
// Operands are in shared memory in panels of 64 columns, 128 bytes a row. TMA swizzles them in the pattern that wgmma reads.
// P stays in registers.
// With PAGED, a block of keys is a page: a box of the cache. Keys are counted by their positions.
//
// Floor: 4 * D * (visible query-key pairs) flops per query head at the wgmma rate.
// Tried: 176 keys a step, the most that the registers allow. 9 % slower at 8,192 tokens, 6 % slower on ragged batches.
#define D HEAD_DIM

static_assert(D == 128 && BLOCK_N == 128, "the products below are of so many columns");
#if PAGED
static_assert(BLOCK_N == 128, "a block of keys is a page");
#endif
static_assert(BLOCK_M == 128, "two warpgroups compute 64 rows each");
constexpr int TILE_TOKENS = BLOCK_M / GROUP;
constexpr int PANELS = D / 64;
constexpr u32 Q_PANEL = BLOCK_M * 128, KV_PANEL = BLOCK_N * 128;  // bytes
constexpr u32 Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
constexpr float RAISE = 8.f;  // an exponent of two
constexpr int O_TILES = D / 8;

template <int KEYS>
struct Size {
    static constexpr int keys = KEYS;
};
constexpr Size<BLOCK_N> WHOLE;
constexpr Size<BLOCK_N / 2> HALF_A_BLOCK;

#if PREFIX || PAGED
typedef int4 Tile;
#else
typedef int2 Tile;
#endif

// This is in shared memory after Q and the stages of K and V.
struct Control {
    // `span` and `rest` describe the tile whose Q is in shared memory.
    int4 span;  // [x, y): its tokens; [z, w): the keys after the prefix that some of its rows see. x = -1: no more tiles
    int4 rest;  // [x, y): the keys after the prefix that all of its rows see; z: the length of the prefix; w: the key head
              // With PAGED there is no prefix, and z is a token's position minus its row.
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// ---- wgmma ----

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#define OUT_8(x, i)                                                                                                    \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
#define OUT_32(x, i) OUT_8(x, i), OUT_8(x, i + 8), OUT_8(x, i + 16), OUT_8(x, i + 24)
#define OUT_64(x) OUT_32(x, 0), OUT_32(x, 32)

// x += A B^T. A and B are in shared memory. Each of their rows holds the 16 values of the summed dimension.
// If `accumulate` is 0, the old value of x is ignored.
#define SS_PRODUCT(N, REGS, OUT, A, B, ACCUMULATE)                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE \
                 "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, 0, 0;}"                                                  \
                 : OUT                                                                                                 \
                 : "l"(a), "l"(b), "r"(accumulate))
// x += A B. A is in registers, B in shared memory. B has a row for each of the 16 values of the summed dimension.
#define RS_PRODUCT(N, REGS, OUT, A, B)                                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A "}, " B ", 1, 1, 1, 1;" \
                 : OUT                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ __forceinline__ void product(float (&x)[32], u64 a, u64 b, int accumulate) {
    SS_PRODUCT("64", REGS_32, OUT_32(x, 0), "%32", "%33", "%34");
}
__device__ __forceinline__ void product(float (&x)[64], u64 a, u64 b, int accumulate) {
    SS_PRODUCT("128", REGS_64, OUT_64(x), "%64", "%65", "%66");
}
__device__ __forceinline__ void product(float (&x)[64], const u32 (&a)[4], u64 b) {
    RS_PRODUCT("128", REGS_64, OUT_64(x), "%64, %65, %66, %67", "%68");
}

// Keeps the compiler from moving reads and writes of `x` across this point: wgmma writes `x` asynchronously.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Returns the wgmma descriptor of a matrix in panels. The rows of a panel have 128 bytes and are swizzled in groups of eight.
// `across`: bytes from one panel to the next. wgmma reads `across` only if B's rows are the summed dimension (RS_PRODUCT).
__device__ __forceinline__ u64 descriptor(u32 shared, u32 across) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, GROUP_OF_8 = (1024ull >> 4) << 32;
    return SWIZZLE_128 | GROUP_OF_8 | static_cast<u64>(across >> 4) << 16 | (shared >> 4);
}

// ---- the two roles ----

// Blocks take items, (tile, key head) pairs, from this queue as they become free. Both numbers are 0 between two kernels.
// A fixed assignment in serpentine order was slower: a mixed batch of 8,192 tokens took 16 % longer, causal sequences of 2,048
// tokens a third longer.
struct Queue {
    int taken, done;  // items taken, without the first item of each block; blocks that found no item left
};

struct Work {
    const Tile* tiles;
    Queue* queue;
    const int2* bounds;
    const int* pages;
    int num_items, kv_heads;
    int left, right;
};

__device__ __forceinline__ void fetch_all(const TensorMap& q, const TensorMap& k, const TensorMap& v, const Work& work, u32 q_tile,
                                          u32 k_tiles, u32 v_tiles, Control& control) {
    Ring<STAGES> ring{0, 1};  // for the empty barriers: with parity 1 the first wait on each barrier returns at once
    u32 q_parity = 1;
    int next;
    for (int item = blockIdx.x; item < work.num_items; item = next) {
        next = gridDim.x + atomicAdd(&work.queue->taken, 1);  // early: the atomic takes as long as a fetch
        const Tile tile = work.tiles[item / work.kv_heads];
        if (tile.x == tile.y) continue;
        const int kv_head = item % work.kv_heads;
#if PAGED
        constexpr int prefix = 0;
        auto first_key = [&](int token) { return max(0, token + tile.w - work.left); };
        const int4 span = {tile.x, tile.y, first_key(tile.x) & -BLOCK_N, tile.y + tile.w};
        const int4 rest = {first_key(tile.y - 1), tile.x + tile.w + 1, tile.w, kv_head};
#elif PREFIX  // attention is causal here and has no window, so `left` and `right` are not needed
        const int2 front = work.bounds[tile.x], back = work.bounds[tile.y - 1];
        const int prefix = tile.w - tile.z;
        const int4 span = {tile.x, tile.y, front.x, tile.y};
        const int4 rest = {back.x, tile.x + 1, prefix, kv_head};
#else
        const int2 front = work.bounds[tile.x], back = work.bounds[tile.y - 1];
        constexpr int prefix = 0;
        const int4 span = {tile.x, tile.y, max(front.x, tile.x - work.left), min(back.y, tile.y + work.right)};
        const int4 rest = {max(back.x, tile.y - 1 - work.left), min(front.y, tile.x + work.right + 1), 0, kv_head};
#endif
        const int begin = span.z, end = span.w;
        const int first = begin - (prefix + BLOCK_N - 1) / BLOCK_N * BLOCK_N;
        for (int key = first; key < end; key += BLOCK_N) {
#if PAGED
            const int row = work.pages[tile.z + key / BLOCK_N] * BLOCK_N;
#elif PREFIX
            const int row = key < begin ? tile.z + key - first : key;
#else
            const int row = key;
#endif
            wait(control.k_empty[ring.stage], ring.parity);
            arrive_expecting(control.k_full[ring.stage], KV_BYTES);
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                fetch(k_tiles + ring.stage * KV_BYTES + panel * KV_PANEL, k, panel * 64, kv_head, row, control.k_full[ring.stage]);
            if (key == first) {
                wait(control.q_empty, q_parity);
                q_parity ^= 1;
                control.span = span;
                control.rest = rest;
                arrive_expecting(control.q_full, PANELS * TILE_TOKENS * GROUP * 128);
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel)
                    fetch(q_tile + panel * Q_PANEL, q, panel * 64, kv_head * GROUP, tile.x, control.q_full);
            }
            wait(control.v_empty[ring.stage], ring.parity);
            arrive_expecting(control.v_full[ring.stage], KV_BYTES);
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                fetch(v_tiles + ring.stage * KV_BYTES + panel * KV_PANEL, v, panel * 64, kv_head, row, control.v_full[ring.stage]);
            ring.advance();
        }
    }
    // The last block to find the queue empty resets the queue for the next kernel.
    if (atomicAdd(&work.queue->done, 1) == gridDim.x - 1) *work.queue = {0, 0};
    wait(control.q_empty, q_parity);
    control.span.x = -1;
    arrive(control.q_full);
}

__device__ __forceinline__ void compute_all(const Work& work, Out* __restrict__ out, i64 out_stride, float scale_log2, u32 q_tile,
                                            u32 k_tiles, u32 v_tiles, Control& control) {
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool leader = threadIdx.x % 128 == 0;
    const int my_row = group * 64 + warp * 16 + lane / 4;
    const u64 q_rows = descriptor(q_tile + group * 64 * 128, 0);
    const u64 k_rows = descriptor(k_tiles, 0), v_rows = descriptor(v_tiles, KV_PANEL);
    constexpr int MY_TURN = 1, ZEROED = 3;  // numbers of named barriers: group 0 uses this number, group 1 the next number
    if (group == 1) named_arrive(MY_TURN, 256);

    Ring<STAGES> keys{0, 0}, values{0, 0};
    u32 q_parity = 0;
    while (true) {
        wait(control.q_full, q_parity);
        q_parity ^= 1;
        const int4 span = control.span, rest = control.rest;
        if (span.x < 0) break;
        const int begin = span.z, end = span.w, all_begin = rest.x, all_end = rest.y, kv_head = rest.w;
        const int prefix = PAGED ? 0 : rest.z;
        const int first = begin - (prefix + BLOCK_N - 1) / BLOCK_N * BLOCK_N;
        auto in_prefix = [&](int key) { return PREFIX && key < begin; };
        auto stop = [&](int key) { return in_prefix(key) ? first + prefix : end; };

        float o[D / 2];
        u32 p[BLOCK_N / 16][4];
        float row_max[2] = {-1e30f, -1e30f}, row_sum[2] = {0.f, 0.f}, shrink[2];
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

        auto multiply_keys = [&](auto& s) {
            products_begin();
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                const u32 at = d / 4, within = d % 4 * 32;
                product(s, q_rows + ((at * Q_PANEL + within) >> 4),
                        k_rows + ((keys.stage * KV_BYTES + at * KV_PANEL + within) >> 4), d > 0);
            }
            products_commit();
        };
        auto multiply_values = [&](auto size) {
            products_begin();
#pragma unroll
            for (int n = 0; n < size.keys / 16; ++n) product(o, p[n], v_rows + ((values.stage * KV_BYTES + n * 2048) >> 4));
            products_commit();
        };
        auto keys_done = [&](int key) {
            if (leader) arrive(control.k_empty[keys.stage]);
            if (leader && key + BLOCK_N >= end) arrive(control.q_empty);
            keys.advance();
        };
        auto values_done = [&] {
            pin(o);
            if (leader) arrive(control.v_empty[values.stage]);
            values.advance();
        };
        // Waits for the values. Rows after the last key belong to other sequences. Their weights are 0, but 0 times NaN or
        // infinity is NaN. So zeros replace these rows.
        auto values_there = [&](auto size, int key) {
            wait(control.v_full[values.stage], values.parity);
            if (key + size.keys <= stop(key)) return;
            const u32 at = v_tiles + values.stage * KV_BYTES;
            for (int i = (stop(key) - key) * 8 + threadIdx.x % 128; i < size.keys * 8; i += 128)
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel)
                    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + panel * KV_PANEL + i * 16), "r"(0));
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            named_sync(ZEROED + group, 128);
        };
        // Replaces each score by its weight, exp2(score * scale_log2 - row_max). Raises row_max only if a scaled score of the
        // warp exceeds row_max by more than RAISE. Returns whether it raised row_max. If so, the caller multiplies
        // `o` by `shrink`.
        auto softmax = [&](auto size, auto& s, int key) {
            if (in_prefix(key) ? key + BLOCK_N > stop(key) : key < all_begin || key + size.keys > all_end) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int token = min(span.x + (my_row + h * 8) / GROUP, span.y - 1);
                    int seen, last;
                    if (in_prefix(key)) {
                        seen = key, last = stop(key);
                    } else {
#if PAGED
                        const int position = token + rest.z;
                        seen = max(0, position - work.left), last = position + 1;
#else
                        const int2 own = work.bounds[token];
#if PREFIX
                        seen = own.x, last = token + 1;
#else
                        seen = max(own.x, token - work.left), last = min(own.y, token + work.right + 1);
#endif
#endif
                    }
                    const int from = seen - key - lane % 4 * 2;
                    const u32 width = last - seen;
#pragma unroll
                    for (int n = 0; n < size.keys / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (static_cast<u32>(n * 8 + e - from) >= width) s[4 * n + 2 * h + e] = __int_as_float(0xff800000);
                }
            }
            float most[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                most[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
                for (int n = 1; n < size.keys / 8; ++n) most[h] = fmaxf(most[h], fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
                most[h] *= scale_log2;
            }
            const bool raise = __any_sync(0xffffffffu, most[0] > row_max[0] + RAISE || most[1] > row_max[1] + RAISE);
            if (raise) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], 1));
                    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                    x = fmaxf(x, row_max[h]);
                    shrink[h] = exp2_fast(row_max[h] - x);
                    row_max[h] = x;
                    row_sum[h] *= shrink[h];
                }
            }
#pragma unroll
            for (int i = 0; i < size.keys / 2; ++i) s[i] = exp2_fast(fmaf(s[i], scale_log2, -row_max[i / 2 % 2]));
            return raise;
        };
        auto weigh = [&](auto size, auto& s) {
#pragma unroll
            for (int n = 0; n < size.keys / 16; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = 4 * (2 * n + e / 2) + e % 2 * 2;
                    p[n][e] = pack(s[i], s[i + 1]);
                    row_sum[e % 2] += low(p[n][e]) + high(p[n][e]);  // the rounded weights: normalised, they sum to one
                }
        };

        auto start = [&](auto size) {
            float s[size.keys / 2];
            wait(control.k_full[keys.stage], keys.parity);
            multiply_keys(s);
            products_wait<0>();
            pin(s);
            keys_done(first);
            softmax(size, s, first);
            weigh(size, s);
        };
        auto step = [&](auto size, int key) {
            float s[size.keys / 2];
            wait(control.k_full[keys.stage], keys.parity);
            named_sync(MY_TURN + group, 256);
            multiply_keys(s);
            values_there(WHOLE, key - BLOCK_N);
            multiply_values(WHOLE);
            named_arrive(MY_TURN + 1 - group, 256);
            products_wait<1>();
            pin(s);
            const bool raised = softmax(size, s, key);
            keys_done(key);  // this branch keeps the assembler from moving the exponentials after the wait
            products_wait<0>();
            values_done();
            if (raised) {
#pragma unroll
                for (int i = 0; i < D / 2; ++i) o[i] *= shrink[i / 2 % 2];
            }
            weigh(size, s);
        };
        auto finish = [&](auto size, int key) {
            values_there(size, key);
            multiply_values(size);
            products_wait<0>();
            values_done();
        };

        // The last block of keys is often mostly empty. Half a block is enough if the keys fit.
        const int last = first + (end - first - 1) / BLOCK_N * BLOCK_N;
        const bool halved = end - last <= HALF_A_BLOCK.keys;
        if (halved && first == last)
            start(HALF_A_BLOCK);
        else
            start(WHOLE);
        for (int key = first + BLOCK_N; key < (halved ? last : end); key += BLOCK_N) step(WHOLE, key);
        if (halved) {
            if (first < last) step(HALF_A_BLOCK, last);
            finish(HALF_A_BLOCK, last);
        } else {
            finish(WHOLE, last);
        }

#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = 1.f / lanes_sum<4>(row_sum[h]);
            const int row = my_row + h * 8, token = span.x + row / GROUP;
            const bool valid = row < TILE_TOKENS * GROUP && token < span.y;
            Out* to = out + token * out_stride + (kv_head * GROUP + row % GROUP) * D;
            auto at = [&](int n, int e) { return o[4 * n + 2 * h + e] * inverse; };
#if E4M3
#pragma unroll
            for (int n = 0; n < O_TILES; n += 8) {
                u32 word[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int first = n + 2 * i;
                    word[i] = pack_e4m3(at(first, 0), at(first, 1)) | pack_e4m3(at(first + 1, 0), at(first + 1, 1)) << 16;
                }
                transpose(word, lane);  // word[i] now has two columns of one tile and two of the next, from lane i of four
                const Vec8 chunk = {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410),
                                    __byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632)};
                if (valid) reinterpret_cast<Vec8*>(to)[n / 2 + lane % 4] = chunk;
            }
#else
#pragma unroll
            for (int n = 0; n < O_TILES; n += 4) {
                Vec8 chunk;
#pragma unroll
                for (int i = 0; i < 4; ++i) chunk.word[i] = pack(at(n + i, 0), at(n + i, 1));
                transpose(chunk.word, lane);
                if (valid) store8(to, n + lane % 4, chunk);
            }
#endif
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
          Out* __restrict__ out, const Tile* __restrict__ tiles, Queue* queue, const int2* __restrict__ bounds, i64 num_tiles,
          i64 kv_heads, i64 out_stride, i64 left, i64 right, float scale_log2,
          const int* __restrict__ pages) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 q_tile = address(shared), k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + STAGES * KV_BYTES;
    Control& control = *reinterpret_cast<Control*>(shared + Q_BYTES + 2 * STAGES * KV_BYTES);
    if (threadIdx.x == 0) {
        barrier_init(control.q_full, 1);
        barrier_init(control.q_empty, 2);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(control.k_full[i], 1);
            barrier_init(control.k_empty[i], 2);
            barrier_init(control.v_full[i], 1);
            barrier_init(control.v_empty[i], 2);
        }
        barriers_are_there();
    }
    __syncthreads();
    overlap();
    const Work work{tiles,
                    queue,
                    bounds,
                    pages,
                    static_cast<int>(num_tiles * kv_heads),
                    static_cast<int>(kv_heads),
                    static_cast<int>(left),
                    static_cast<int>(right)};
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fetch_all(q, k, v, work, q_tile, k_tiles, v_tiles, control);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        compute_all(work, out, out_stride, scale_log2, q_tile, k_tiles, v_tiles, control);
    }
}
