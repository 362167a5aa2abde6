// Attention of one token for each sequence over the paged cache: softmax(q K^T / sqrt(D)) V.
//   q [B, K * GROUP, D] in 16 bits, strided rows. cache [2, S, K, D]: keys, then values. A page is 128 slots.
//   items int [n, 8], one for each part of a sequence's keys: the row of q, the place in `pages` of the part's first page, the first
//   key and the end of the keys (counted from the start of that page), the part's index, the number of parts, the item of the
//   sequence's first part, whether all keys but the sequence's last are settled. first == end is padding: the block does nothing. A
//   row without an item is not written.
//   KV8: cache is in 8 bits and has scales u8 [2, K, S] (cache8.cuh).
//   out [B, K * GROUP, D]. With E4M3, `out` is e4m3, and values that are not finite become NaN.
//   partial float [n, H, D], weights float2 [n, H] (running maximum and sum), counters int [n, grid x]: the workspace of sequences
//   with several parts. The counters are 0 before and after.
//
// One block, or a cluster of blocks, computes one item for one key head and up to BLOCK_ROWS query heads of the key head. Memory is
// the limit, so the bytes in flight decide. Each warp takes every WARPS-th group of 16 keys. A warp has its own ring of STAGES groups
// of K and V in shared memory, so it fills and empties the ring by cp.async without a barrier of the block. Each warp has a running
// maximum, a sum and a result. The block merges them at the end. The page of a group is read one step before its cp.async.
//
// The products are transposed: S^T = K Q^T and O^T = V^T P^T, on mma.sync m16n8k16. The 16 rows of an mma are keys or columns of V,
// the 8 columns are query heads. A group of up to 8 query heads thus takes half the registers and products of a 16-row tile.
// S^T leaves the first product as rows of keys, and the second product takes P^T as columns of keys: movmatrix transposes it.
// The running maximum is raised only when a score exceeds it by more than 2^8, as in attention.cu.
//
// With KV8, a lane widens the codes that it needs after ldmatrix, which moves two neighbouring codes as one 16-bit value. The first
// product sums over the columns of K, so their order does not matter: Q is loaded in the order in which K's columns arrive. In the
// second product a transposed pair is two columns of V: the even columns are the upper eight rows of O^T, the odd ones the lower.
//
// Keys outside [first, end) are not read: cp.async fills their rows with zeros, because 0 * NaN would be NaN in P V.
//
// CLUSTER: if it is more than 1, so many blocks compute an item together, and the items are whole sequences. Each warp takes every
// CLUSTER * WARPS-th group. Each block sends a slice of its result to each block, and adds up the slices that it gets.
//
// Several parts: each block leaves its result in the workspace and counts itself. The last block of a sequence and key head adds
// up the parts in their order, so the sum does not depend on which block is last.
//
// Items and pages come from the host. They are read while the kernel before still runs, so that kernel must not write them. Settled
// keys and values were stored by an earlier pass. The first of them are fetched while the kernels before this one still run.
//
// Floor: the bytes of the keys and values, and of their scales.
#define D HEAD_DIM

constexpr int WARPS = NUM_WARPS, THREADS = 32 * WARPS;
constexpr int KEYS = 16, PAGE = 128;  // keys of a group, slots of a page
constexpr int ROW = D * sizeof(KV), CHUNKS = ROW / 16;  // bytes of a row, and its 16-byte chunks
constexpr bool SWIZZLED = ROW % 128 == 0;
constexpr int PITCH = SWIZZLED ? ROW : ROW + 16;  // bytes
constexpr u32 TILE = KEYS * PITCH;
constexpr u32 STAGE = 2 * TILE + (KV8 ? 128 : 0);  // with room for the scales of 16 keys and 16 values
constexpr u32 RING = STAGES * STAGE;               // of a warp
constexpr int MOST_ROWS = GROUP < BLOCK_ROWS ? GROUP : BLOCK_ROWS;               // query heads of a block
constexpr int HEAD_TILES = (GROUP + BLOCK_ROWS - 1) / BLOCK_ROWS;                // blocks that share a key head
constexpr int Q_TILES = (MOST_ROWS + 7) / 8;
constexpr int SUMS_PITCH = D + 4;  // floats; the padding puts the values that a warp stores at once into different banks
constexpr float RAISE = 8.f;       // in powers of two
constexpr int VECTORS = D / 4;     // float4 of a row
constexpr int SLICE = (MOST_ROWS * VECTORS + CLUSTER - 1) / CLUSTER;  // float4 that a block of a cluster finishes

// This is in shared memory after the rings.
struct alignas(16) Shared {
    float2 weights[WARPS][8 * Q_TILES];  // running maximum and sum of each warp
    float inverses[MOST_ROWS];
    bool is_last;
#if CLUSTER > 1
    u64 inbox_full;
    float2 inbox_weights[CLUSTER][MOST_ROWS];  // running maximum and sum of each block
    float4 inbox[CLUSTER][SLICE];
#endif
};
static_assert(D % 32 == 0 && STAGES >= 2, "the chains of products are even, and a stage is fetched while one is used");
static_assert(sizeof(Shared) <= EXTRA_BYTES, "the launcher allocates it");
static_assert(8 * Q_TILES * SUMS_PITCH * 4 <= RING, "a warp's results fit into its ring");
static_assert(MOST_PARTS * MOST_ROWS * 8 <= WARPS * RING, "the parts' factors fit into the rings");

__device__ __forceinline__ void copy_async(u32 shared, const KV* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
// Transposes an 8 x 8 matrix of 16-bit values that a warp holds: two neighbours of a row in each lane.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// The byte offset of chunk `c` of row `r` in a tile. Eight rows that ldmatrix reads together are in eight different 16-byte bank
// groups: by XOR if a row is a multiple of 128 bytes, otherwise by an odd pitch.
__device__ __forceinline__ u32 place(int r, int c) { return r * PITCH + 16 * (SWIZZLED ? c ^ (r & 7) : c); }

// `at` two chunks further, `steps` times.
__device__ __forceinline__ u32 advance(u32 at, int steps) {
    return SWIZZLED ? (at ^ (steps % 4 * 32)) + steps / 4 * 128 : at + steps * 32;
}

// A lane copies one 16-byte chunk of every ROW_STEP-th row. Some lanes idle if the number of a row's chunks is no power of two.
constexpr int ROW_LANES = CHUNKS <= 4 ? 4 : CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;
constexpr int ROW_STEP = 32 / ROW_LANES;

// Fetches the rows of K and of V of one group. `x` is this lane's chunk of its first row of K, and row i of the group is valid if
// begin <= i < end.
__device__ __forceinline__ void fetch_keys(u32 stage, const KV* x, i64 stride, i64 to_values, int begin, int end) {
    const int lane = threadIdx.x % 32, r = lane / ROW_LANES, c = lane % ROW_LANES;
    if (ROW_LANES != CHUNKS && c >= CHUNKS) return;
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int i = 0; i < KEYS; i += ROW_STEP)
            copy_async(stage + part * TILE + place(i + r, c), x + i * stride + part * to_values, i + r >= begin && i + r < end);
}

#if KV8
// The scales of a group for one lane: those of keys lane / 4 and eight further, each in both halves, and those of values
// 2 * (lane % 4) and the next, and eight further. Scales of invalid keys are 0, because the memory may hold a scale of NaN.
struct GroupScales {
    u32 keys[2], values[2];
    __device__ __forceinline__ GroupScales(u32 at, int lane, int begin, int end) {
        auto scale = [&](int i, u32 from) {
            u32 byte;
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from + i) : "memory");
            return i >= begin && i < end ? scale16(byte) : 0;
        };
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int value = lane % 4 * 2 + 8 * h;
            keys[h] = scale(lane / 4 + 8 * h, at) * 0x10001;
            values[h] = scale(value, at + 16) | scale(value + 1, at + 16) << 16;
        }
    }
};
#endif

__device__ __forceinline__ void store4(Out* out, const float4& x, float scale) {
    const float a = x.x * scale, b = x.y * scale, c = x.z * scale, d = x.w * scale;
#if E4M3
    *reinterpret_cast<u32*>(out) = (pack_e4m3(a, b) & 0xffff) | pack_e4m3(c, d) << 16;
#else
    *reinterpret_cast<uint2*>(out) = make_uint2(pack(a, b), pack(c, d));
#endif
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float scale) {
    sum.x = fmaf(x.x, scale, sum.x), sum.y = fmaf(x.y, scale, sum.y);
    sum.z = fmaf(x.z, scale, sum.z), sum.w = fmaf(x.w, scale, sum.w);
}

// Adds up the parts of a sequence for `rows` query heads from `head` on. `factors` holds 2 * rows * parts floats.
__device__ __forceinline__ void combine(const float* partial, const float2* weights, Out* out, float* factors, float* inverses, int head,
                                        int rows, i64 first_item, int parts, i64 n_heads) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int TOGETHER = 16;  // parts that are loaded together: the latency of one load
    auto load = [&](int e, int p, float4(&x)[TOGETHER]) {
        const float* mine = partial + ((first_item * n_heads + head) * D + e * 4);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) x[i] = load_of_blocks(mine + min(p + i, parts - 1) * n_heads * D);
    };
    float4 x[TOGETHER];
    if (threadIdx.x < rows * VECTORS) load(threadIdx.x, 0, x);  // before the factors are known
    float* sums = factors + rows * parts;
    for (int r = warp; r < rows; r += WARPS) {
        const float2* mine = weights + first_item * n_heads + head + r;
        float* factor = factors + r * parts;
        float most = -1e30f, sum = 0.f;
        for (int p = lane; p < parts; p += 32) {
            const float2 weight = load_of_blocks(mine + p * n_heads);
            most = fmaxf(most, weight.x);
            factor[p] = weight.x, sums[r * parts + p] = weight.y;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        for (int p = lane; p < parts; p += 32) {
            factor[p] = exp2_fast(factor[p] - most);
            sum = fmaf(factor[p], sums[r * parts + p], sum);
        }
        sum = lanes_sum<32>(sum);
        if (lane == 0) inverses[r] = 1.f / sum;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < rows * VECTORS; e += THREADS) {
        const float* factor = factors + e / VECTORS * parts;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int p = 0; p < parts; p += TOGETHER) {
            if (p > 0 || e >= THREADS) load(e, p, x);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (p + i < parts) add_scaled(sum, x[i], factor[p + i]);
        }
        store4(out + head * D + e * 4, sum, inverses[e / VECTORS]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
#if CLUSTER > 1
    __cluster_dims__(1, CLUSTER, 1)
#endif
attention_decode(const u16* q, const KV* cache, const u8* scales, const int* __restrict__ items, const int* __restrict__ pages, float* partial,
                 float2* weights, int* counters, Out* out, i64 q_stride, i64 to_values, i64 n_kv_heads, float scale_log2) {
    let_next_begin();
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 item = blockIdx.y / CLUSTER;
    const int rank = blockIdx.y % CLUSTER;
    const int4 keys = reinterpret_cast<const int4*>(items)[2 * item], split = reinterpret_cast<const int4*>(items)[2 * item + 1];
    const int row = keys.x, first = keys.z, end = keys.w, parts = split.y;
    const bool empty = first >= end;

    // Groups of 16 keys are counted from the start of the part's first page. A warp's groups are DISTANCE apart.
    constexpr int DISTANCE = CLUSTER * WARPS;
    const int first_group = first / KEYS + rank * WARPS + warp, last_group = (end - 1) / KEYS;
    auto page_of = [&](int group) { return pages[keys.y + min(group, last_group) / (PAGE / KEYS)]; };
    int page[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; ++s) page[s] = empty ? 0 : page_of(first_group + s * DISTANCE);

    const int kv_head = blockIdx.x / HEAD_TILES, tile = blockIdx.x % HEAD_TILES;
    const int head = kv_head * GROUP + tile * BLOCK_ROWS, rows = min(BLOCK_ROWS, GROUP - tile * BLOCK_ROWS);
    const i64 n_heads = n_kv_heads * GROUP, stride = n_kv_heads * D;
    const u32 ring = static_cast<u32>(__cvta_generic_to_shared(shared)) + warp * RING;
    const KV* lane_chunk = cache + lane / ROW_LANES * stride + kv_head * D + lane % ROW_LANES * (16 / sizeof(KV));
#if KV8
    // Lane 0 fetches the scales of a group's keys, lane 1 those of its values.
    const u8* lane_scales = scales + (kv_head + lane % 2 * n_kv_heads) * (to_values / stride);
#endif
    auto fetch = [&](u32 stage, int group, int from) {
        const i64 slot = static_cast<i64>(from) * PAGE + group % (PAGE / KEYS) * KEYS;
        fetch_keys(stage, lane_chunk + slot * stride, stride, to_values, first - group * KEYS, end - group * KEYS);
#if KV8
        if (lane < 2) copy_async(stage + 2 * TILE + lane * 16, lane_scales + slot, true);
#endif
    };
    // The first group whose keys a kernel of this pass may store.
    const int first_new = empty || !split.w ? 0 : split.x + 1 < parts ? last_group + 1 : last_group;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (first_group + s * DISTANCE < first_new) fetch(ring + s * STAGE, first_group + s * DISTANCE, page[s]);
    Shared& rest = *reinterpret_cast<Shared*>(shared + WARPS * RING);
#if CLUSTER > 1
    const int senders = min(CLUSTER, (last_group - first / KEYS) / WARPS + 1);  // blocks that have a group
    const int slice = (rows * VECTORS - rank + CLUSTER - 1) / CLUSTER;
    if (threadIdx.x == 0) {
        barrier_init(rest.inbox_full, 1);
        barriers_are_there();
        arrive_expecting(rest.inbox_full, senders * (slice * sizeof(float4) + rows * sizeof(float2)));
    }
    cluster_arrive();  // the wait comes before the first `send_to`
#endif
    wait_for_previous();
    if (empty) return;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        const int group = first_group + s * DISTANCE;
        if (group >= first_new && group <= last_group) fetch(ring + s * STAGE, group, page[s]);
        copy_commit();
    }
    int next_page = page[STAGES - 1];

    const int column = lane % 4 * 2;  // of this lane's two query heads in a tile; its keys are lane / 4 and eight further
    u32 queries[Q_TILES][D / 16][2];
#pragma unroll
    for (int m = 0; m < Q_TILES; ++m) {
        const int r = m * 8 + lane / 4;
        const u16* mine = q + row * q_stride + (head + (r < rows ? r : 0)) * D + (KV8 ? 2 : 1) * column;
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            u32 pairs[2];  // of columns that follow one another
#pragma unroll
            for (int h = 0; h < 2; ++h)
                pairs[h] = r < rows ? *reinterpret_cast<const u32*>(mine + d * 16 + h * (KV8 ? 2 : 8)) : 0;
            queries[m][d][0] = KV8 ? __byte_perm(pairs[0], pairs[1], 0x5410) : pairs[0];  // the even ones of four columns
            queries[m][d][1] = KV8 ? __byte_perm(pairs[0], pairs[1], 0x7632) : pairs[1];
        }
    }

    float o[Q_TILES][D / 16][4] = {};
    float row_max[Q_TILES][2], row_sum[Q_TILES][2];
#pragma unroll
    for (int m = 0; m < Q_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[m][h] = -1e30f, row_sum[m][h] = 0.f;

    const u32 k_at = place(lane % 16, lane / 16), v_at = TILE + place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    u32 stage = ring, free_stage = ring + (STAGES - 1) * STAGE;
    for (int group = first_group; group <= last_group; group += DISTANCE) {
        copy_wait<STAGES - 2>();
        __syncwarp();  // the group is there, and no lane reads the previous group any more
        const int ahead = group + (STAGES - 1) * DISTANCE;
        if (ahead <= last_group) fetch(free_stage, ahead, next_page);
        copy_commit();
        next_page = page_of(ahead + DISTANCE);

        float s[Q_TILES][2][4] = {};  // two sums, so that the chain of dependent products is half as long
#if KV8
        const GroupScales scale(stage + 2 * TILE, lane, first - group * KEYS, end - group * KEYS);
#pragma unroll
        for (int d = 0; d < D / 16; d += 2) {
            u32 codes[4];
            ldmatrix(codes, advance(stage + k_at, d / 2));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 upper = codes[2 * i], lower = codes[2 * i + 1];  // rows lane / 4 and eight further
                const u32 a[4] = {widened(upper << 8, scale.keys[0]), widened(lower << 8, scale.keys[1]),
                                  widened(upper, scale.keys[0]), widened(lower, scale.keys[1])};
#pragma unroll
                for (int m = 0; m < Q_TILES; ++m) mma(s[m][i], a, queries[m][d + i][0], queries[m][d + i][1]);
            }
        }
#else
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            u32 a[4];
            ldmatrix(a, advance(stage + k_at, d));
#pragma unroll
            for (int m = 0; m < Q_TILES; ++m) mma(s[m][d % 2], a, queries[m][d][0], queries[m][d][1]);
        }
#endif
        bool raise = false;
        float largest[Q_TILES][2];
#pragma unroll
        for (int m = 0; m < Q_TILES; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = group * KEYS + lane / 4 + e / 2 * 8;
                s[m][0][e] = key >= first && key < end ? s[m][0][e] + s[m][1][e] : __int_as_float(0xff800000);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                largest[m][h] = fmaxf(s[m][0][h], s[m][0][2 + h]) * scale_log2;
                raise |= largest[m][h] > row_max[m][h] + RAISE;
            }
        }
        if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
            for (int m = 0; m < Q_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = largest[m][h];
#pragma unroll
                    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
                    x = fmaxf(x, row_max[m][h]);
                    const float shrink = exp2_fast(row_max[m][h] - x);
                    row_max[m][h] = x;
                    row_sum[m][h] *= shrink;
#pragma unroll
                    for (int d = 0; d < D / 16; ++d) o[m][d][h] *= shrink, o[m][d][2 + h] *= shrink;
                }
        }
        u32 p[Q_TILES][2];
#pragma unroll
        for (int m = 0; m < Q_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float a = exp2_fast(fmaf(s[m][0][2 * half], scale_log2, -row_max[m][0]));
                const float b = exp2_fast(fmaf(s[m][0][2 * half + 1], scale_log2, -row_max[m][1]));
                const u32 pair = pack(a, b);
                row_sum[m][0] += low(pair), row_sum[m][1] += high(pair);  // the rounded weights, so that they still sum to one
                p[m][half] = transposed(pair);
            }
#if KV8
#pragma unroll
        for (int d = 0; d < D / 16; d += 2) {
            u32 codes[4];
            ldmatrix_transposed(codes, advance(stage + v_at, d / 2));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 upper = codes[i], lower = codes[i + 2];  // keys 2 * (lane % 4) and the next, and eight further
                const u32 a[4] = {widened(upper << 8, scale.values[0]), widened(upper, scale.values[0]),
                                  widened(lower << 8, scale.values[1]), widened(lower, scale.values[1])};
#pragma unroll
                for (int m = 0; m < Q_TILES; ++m) mma(o[m][d + i], a, p[m][0], p[m][1]);
            }
        }
#else
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            u32 a[4];
            ldmatrix_transposed(a, advance(stage + v_at, d));
#pragma unroll
            for (int m = 0; m < Q_TILES; ++m) mma(o[m][d], a, p[m][0], p[m][1]);
        }
#endif
        free_stage = stage;
        stage = stage + STAGE == ring + RING ? ring : stage + STAGE;
    }

    // From here on the rings' memory holds the warps' results.
    copy_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int m = 0; m < Q_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = row_sum[m][h];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
            const int r = m * 8 + column + h;
            if (lane < 4) rest.weights[warp][r] = make_float2(row_max[m][h], total);
            float* mine = sums + (warp * 8 * Q_TILES + r) * SUMS_PITCH + lane / 4 * (KV8 ? 2 : 1);
#pragma unroll
            for (int d = 0; d < D / 16; ++d) mine[d * 16] = o[m][d][h], mine[d * 16 + (KV8 ? 1 : 8)] = o[m][d][2 + h];
        }
    __syncthreads();
    out += row * n_heads * D;
    // Joins the results of `count` warps or blocks for one float4. `weight` and `values` give those of each. `pass` gets the sum.
    auto joined = [&](int count, auto weight, auto values, auto pass) {
        float most = weight(0).x, total = 0.f;
        for (int i = 1; i < count; ++i) most = fmaxf(most, weight(i).x);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = 0; i < count; ++i) {
            const float factor = exp2_fast(weight(i).x - most);
            total = fmaf(factor, weight(i).y, total);
            add_scaled(sum, values(i), factor);
        }
        pass(sum, make_float2(most, total));
    };
    auto of_warps = [&](int e, auto pass) {
        const int r = e / VECTORS, c = e % VECTORS * 4;
        joined(
            WARPS, [&](int w) { return rest.weights[w][r]; },
            [&](int w) { return *reinterpret_cast<const float4*>(sums + (w * 8 * Q_TILES + r) * SUMS_PITCH + c); }, pass);
    };
#if CLUSTER > 1
    cluster_wait();
    for (int e = threadIdx.x; e < rows * VECTORS && rank < senders; e += THREADS)
        of_warps(e, [&](const float4& sum, const float2& weight) {
            send_to(e % CLUSTER, rest.inbox[rank][e / CLUSTER], sum, rest.inbox_full);
            for (int to = e % VECTORS; to < CLUSTER; to += VECTORS)
                send_to(to, rest.inbox_weights[rank][e / VECTORS], weight, rest.inbox_full);
        });
    wait(rest.inbox_full, 0);
    for (int i = threadIdx.x; i < slice; i += THREADS) {
        const int e = i * CLUSTER + rank;
        joined(
            senders, [&](int b) { return rest.inbox_weights[b][e / VECTORS]; }, [&](int b) { return rest.inbox[b][i]; },
            [&](const float4& sum, const float2& weight) { store4(out + head * D + e * 4, sum, 1.f / weight.y); });
    }
#else
    for (int e = threadIdx.x; e < rows * VECTORS; e += THREADS)
        of_warps(e, [&](const float4& sum, const float2& weight) {
            if (parts == 1) {
                store4(out + head * D + e * 4, sum, 1.f / weight.y);
            } else {
                *reinterpret_cast<float4*>(partial + (item * n_heads + head) * D + e * 4) = sum;
                if (e % VECTORS == 0) weights[item * n_heads + head + e / VECTORS] = weight;
            }
        });
    if (parts == 1) return;

    __syncthreads();
    if (threadIdx.x == 0)
        rest.is_last = is_last_of(reinterpret_cast<u32*>(counters) + static_cast<i64>(split.z) * gridDim.x + blockIdx.x, parts);
    __syncthreads();
    if (rest.is_last) combine(partial, weights, out, sums, rest.inverses, head, rows, split.z, parts, n_heads);
#endif
}
