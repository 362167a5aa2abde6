// Varlen attention, forward: softmax(Q K^T / sqrt(D)) V inside each sequence of a packed batch.
//   q [T, K * GROUP, D], k and v [T, K, D], out [T, K * GROUP, D], all 16-bit. Rows are strided, so that Q, K and V may be parts
//   of one fused buffer. With E4M3, `out` is e4m3, and values that are not finite become NaN.
//   tiles int2 [n]: the query tokens [x, y) that one block computes. x == y is padding: the block does nothing.
//   bounds int2 [T]: the rows [x, y) of the sequence that each token belongs to.
//   A token t sees keys max(bounds.x, t - left) .. min(bounds.y, t + right + 1): causal is right = 0, a sliding window a
//   smaller left, bidirectional neither.
//   PREFIX: tiles int4 [n]. [z, w) are the rows of a prefix; all tokens of the tile see them before the rows of their own
//   bounds. z == w is no prefix. Causal and without a window.
//   PAGED: tiles int4 [n]. The tokens [x, y) belong to one sequence; token t has position t + w in this sequence. Keys and values
//   of position p lie in row pages[z + p / PAGE] * PAGE + p % PAGE of k and v. `bounds` is not read. Causal.
//   BIAS: bias float [H, 2 * reach + 1]. Column reach + d is added to the score of a key d tokens after the query, with d limited
//   to -reach .. reach. Its unit is that of scores before scaling, so it is multiplied by sqrt(D) beforehand.
//
// One block computes a tile of BLOCK_M rows for one key head. A row is (token, query head of the group), so a block loads K and V
// once for all query heads that share them. A causal tile is only BLOCK_M / GROUP tokens deep, so short texts have far fewer
// masked-out products. A tile may hold several short sequences. Then it reads the keys of all of them, with a mask.
// Most blocks of keys need no mask, which a comparison of two scalars shows.
//
// A prefix's keys come first, in separate blocks. Masked zeros fill the last of these blocks. The softmax continues from the
// prefix to the tile's own keys. Prefix keys count from `first`, whole blocks before `begin`, so that one loop reads both ranges.
//
// With PAGED, keys are counted by their positions. Blocks begin at multiples of BLOCK_N, which divides PAGE, so no block crosses
// a page. A tile reads no page beyond those of the positions that its tokens see. Rows behind its last token become zeros.
//
// KV8 (with PAGED): k and v are in 8 bits, with scales u8 [2, K, S] (cache8.cuh). cp.async copies the codes of a block to a separate
// place. Then each thread widens the codes that it has fetched, into the tile that keys and values share.
//
// FlashAttention 2's order of work on mma.sync m16n8k16 and cp.async: a warp owns 16 * M_TILES rows, so that every K or V
// fragment read from shared memory feeds M_TILES products. K of the next block is fetched during softmax and P V, and V during
// Q K^T. Two blocks share an SM and fill each other's gaps.
// The running maximum is raised only when a score exceeds it by more than 2^8 (a warp votes). Rescaling the accumulator takes as
// much work as the softmax itself, and p <= 256 loses no precision in fp32 sums and in 16-bit p.
//
// Floor: 4 * D * (visible query-key pairs) flops per query head at the mma.sync rate (62 % of wgmma's on Hopper).
#define D HEAD_DIM

constexpr int WARPS = BLOCK_M / (16 * M_TILES);
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_TOKENS = BLOCK_M / GROUP;
constexpr int CHUNKS = D / 8;  // 16-byte chunks of a row
constexpr int OUT_CHUNKS = D * sizeof(Out) / 16;
constexpr bool SWIZZLED = D % 64 == 0;
constexpr int PITCH = SWIZZLED ? D : D + 8;
constexpr int N_TILES = BLOCK_N / 8, D_TILES = D / 8;
constexpr float RAISE = 8.f;  // in powers of two
constexpr int PAGE = 128;     // tokens of a page
static_assert(PAGE % BLOCK_N == 0, "a block of keys lies within one page");

// The byte offset of chunk `c` of row `r` in a tile in shared memory. Eight rows that ldmatrix reads together are in eight
// different 16-byte bank groups: by XOR if a row is a multiple of 128 bytes, otherwise by an odd pitch.
__device__ __forceinline__ u32 place(int r, int c) { return (r * PITCH + 8 * (SWIZZLED ? c ^ (r & 7) : c)) * 2; }

// `at` two chunks further, `steps` times. One XOR with a constant, so that no register holds each step's address.
__device__ __forceinline__ u32 advance(u32 at, int steps) {
    return SWIZZLED ? (at ^ (steps % 4 * 32)) + steps / 4 * 128 : at + steps * 32;
}

__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group 0;"); }

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// A thread copies one 16-byte chunk of every ROW_STEP-th row. Some lanes idle if the number of a row's chunks is no power of two.
constexpr u32 lanes_of(int chunks) { return chunks <= 2 ? 2 : chunks <= 4 ? 4 : chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32; }
constexpr u32 ROW_LANES = lanes_of(CHUNKS);
constexpr int ROW_STEP = THREADS / ROW_LANES;
// The same for K and V, where a chunk may have 16 codes.
constexpr int KEY_CHUNKS = D * sizeof(KV) / 16;
constexpr u32 KEY_LANES = lanes_of(KEY_CHUNKS);
constexpr int KEY_STEP = THREADS / KEY_LANES;

// Loads BLOCK_N rows of K or V. `x` is this thread's chunk of its first row. `rows` rows exist from there on; others become zeros.
// Codes are not swizzled, because only the thread that fetches them reads them.
__device__ __forceinline__ void load_keys(u32 shared, const KV* x, int stride, int rows) {
    const u32 r = threadIdx.x / KEY_LANES, c = threadIdx.x % KEY_LANES;
    if (KEY_LANES != KEY_CHUNKS && c >= KEY_CHUNKS) return;
#pragma unroll
    for (int i = 0; i < BLOCK_N; i += KEY_STEP) {
        if (BLOCK_N % KEY_STEP != 0 && i + r >= BLOCK_N) break;
        const bool valid = i < rows;
        copy_async(shared + (KV8 ? ((i + r) * KEY_CHUNKS + c) * 16 : place(i + r, c)), x + (valid ? i * stride : 0), valid);
    }
}

#if KV8
static_assert(PAGED && BLOCK_N % KEY_STEP == 0, "a thread widens whole rows");
constexpr int KEY_ROWS = BLOCK_N / KEY_STEP;  // of a thread
constexpr u32 RAW = BLOCK_N * D;              // bytes of a block of codes

// The scales of this thread's rows of a block, for `load_keys` with the same `rows`.
__device__ __forceinline__ void load_scales(u32 (&scale)[KEY_ROWS], const u8* x, int rows) {
#pragma unroll
    for (int i = 0; i < KEY_ROWS; ++i) scale[i] = i * KEY_STEP < rows ? x[i * KEY_STEP] : 0;
}

// Writes the values of the codes that this thread has fetched to `raw` into the tile.
__device__ __forceinline__ void widen(u32 tile, u32 raw, const u32 (&scale)[KEY_ROWS]) {
    const u32 r = threadIdx.x / KEY_LANES, c = threadIdx.x % KEY_LANES;
    if (KEY_LANES != KEY_CHUNKS && c >= KEY_CHUNKS) return;
#pragma unroll
    for (int i = 0; i < KEY_ROWS; ++i) {
        const int row = i * KEY_STEP + r;
        const u32 both = scale16(scale[i]) * 0x10001;
        u32 codes[4], x[8];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3])
                     : "r"(raw + (row * KEY_CHUNKS + c) * 16)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = widened(__byte_perm(codes[e / 2], 0, e % 2 ? 0x3424 : 0x1404), both);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(tile + place(row, 2 * c + h)), "r"(x[4 * h]),
                         "r"(x[4 * h + 1]), "r"(x[4 * h + 2]), "r"(x[4 * h + 3])
                         : "memory");
    }
}
#endif

#if PREFIX || PAGED
typedef int4 Tile;
#else
typedef int2 Tile;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention(const u16* __restrict__ q, const KV* __restrict__ k, const KV* __restrict__ v, Out* __restrict__ out,
          const Tile* __restrict__ tiles, const int2* __restrict__ bounds, i64 q_stride, i64 kv_stride, i64 out_stride,
          i64 left_, i64 right_, float scale_log2, const float* __restrict__ bias, i64 reach_,
          const int* __restrict__ pages, const u8* __restrict__ scales) {
    overlap();
    extern __shared__ __align__(128) unsigned char shared[];
    const Tile tile = tiles[blockIdx.y];
    if (tile.x == tile.y) return;
    const int kv_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 q_tile = static_cast<u32>(__cvta_generic_to_shared(shared));
    const u32 k_tile = q_tile + BLOCK_M * PITCH * 2, v_tile = k_tile + (KV8 ? 0 : BLOCK_N * PITCH * 2);
#if KV8
    const u32 k_raw = k_tile + BLOCK_N * PITCH * 2, v_raw = k_raw + RAW;
    u32 k_scales[KEY_ROWS], v_scales[KEY_ROWS];
    const i64 of_values = (v - k) / D;                           // from a key's scale to its value's
    scales += kv_head * (of_values / gridDim.x) + threadIdx.x / KEY_LANES;  // now of this thread's first row
#else
    const u32 k_raw = k_tile, v_raw = v_tile;
#endif
    const int stride = static_cast<int>(kv_stride), left = static_cast<int>(left_), right = static_cast<int>(right_);

    // The keys that some row of the tile sees, and those that every row sees. Both ends grow with the token.
#if PAGED
    constexpr int prefix = 0;
    auto first_key = [&](int token) { return max(0, token + tile.w - left); };
    auto last_key = [&](int token) { return token + tile.w + 1; };
#elif PREFIX  // causal and without a window: this knowledge saves registers
    const int prefix = tile.w - tile.z;
    auto first_key = [&](int token) { return bounds[token].x; };
    auto last_key = [&](int token) { return token + 1; };
#else
    constexpr int prefix = 0;
    auto first_key = [&](int token) { return max(bounds[token].x, token - left); };
    auto last_key = [&](int token) { return min(bounds[token].y, token + right + 1); };
#endif
    const int begin = first_key(tile.x), end = last_key(tile.y - 1);
    const int all_begin = first_key(tile.y - 1), all_end = last_key(tile.x);

    const int chunk = threadIdx.x % ROW_LANES, first_row = threadIdx.x / ROW_LANES;
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += ROW_STEP) {
        const int r = i + first_row, token = tile.x + r / GROUP;
        const bool valid = r < TILE_TOKENS * GROUP && token < tile.y;
        const u16* row = q + (valid ? token : tile.x) * q_stride + (kv_head * GROUP + r % GROUP) * D;
        if (ROW_LANES == CHUNKS || chunk < CHUNKS) copy_async(q_tile + place(r, chunk), row + chunk * 8, valid);
    }

    // Keys from `first` on belong to the prefix, and those from `begin` on to the tile. A block holds keys of one kind, up to `stop`.
#if PAGED
    const int first = begin & -BLOCK_N;
#else
    const int first = begin - ((prefix + BLOCK_N - 1) & -BLOCK_N);
#endif
    auto in_prefix = [&](int key) { return PREFIX && key < begin; };
    auto stop = [&](int key) { return in_prefix(key) ? begin - (-prefix & (BLOCK_N - 1)) : end; };

    // This thread's chunk of the next block of keys. The values are always at the same distance from the keys.
    const int key_row = threadIdx.x / KEY_LANES;
    auto chunk_of = [&](int row) {
        return k + (row + key_row) * kv_stride + kv_head * D + threadIdx.x % KEY_LANES * (16 / sizeof(KV));
    };
#if PAGED
    pages += tile.z;
    auto row_of = [&](int key) { return pages[key / PAGE] * PAGE + key % PAGE; };  // of the first key of a block
    const KV* next = chunk_of(row_of(first));
#elif PREFIX
    const KV* next = chunk_of(prefix > 0 ? tile.z : begin);
#else
    const KV* next = chunk_of(begin);
#endif
    const i64 to_values = v - k;
    load_keys(k_raw, next, stride, stop(first) - first - key_row);
    copy_commit();
#if KV8
    load_scales(k_scales, scales + row_of(first), stop(first) - first - key_row);
#endif

    float o[M_TILES][D_TILES][4] = {};
    float row_max[M_TILES][2], row_sum[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) row_max[m][h] = -1e30f, row_sum[m][h] = 0.f;

    // The places of this lane's rows of the first ldmatrix of each tile.
    const int warp_row = warp * 16 * M_TILES;
    const u32 q_at = q_tile + place(warp_row + lane % 16, lane / 16);
    const u32 k_at = k_tile + place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const u32 v_at = v_tile + place(lane % 16, lane / 16);
    for (int key = first; key < end; key += BLOCK_N) {
        copy_wait();
        __syncthreads();  // K is there, and no thread reads the previous V any more
        load_keys(v_raw, next + to_values, stride, stop(key) - key - key_row);
        copy_commit();
#if KV8
        load_scales(v_scales, scales + of_values + row_of(key), stop(key) - key - key_row);
        widen(k_tile, k_raw, k_scales);
        __syncthreads();
#endif

        float s[M_TILES][N_TILES][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
            u32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
                ldmatrix(a[m], advance(q_at, d) + m * 16 * PITCH * 2);
#pragma unroll
            for (int n = 0; n < N_TILES; n += 2) {
                u32 b[4];
                ldmatrix(b, advance(k_at, d) + n * 8 * PITCH * 2);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma(s[m][n], a[m], b[0], b[1]);
                    mma(s[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }

        copy_wait();
        __syncthreads();  // V is there, and no thread reads this K any more
#if PAGED
        if (key + BLOCK_N < end) next = chunk_of(row_of(key + BLOCK_N));
#else
        next += BLOCK_N * stride;
        if (PREFIX && key + BLOCK_N == begin) next = chunk_of(begin);
#endif
        if (key + BLOCK_N < end) load_keys(k_raw, next, stride, stop(key + BLOCK_N) - key - BLOCK_N - key_row);
        copy_commit();
#if KV8
        if (key + BLOCK_N < end) load_scales(k_scales, scales + row_of(key + BLOCK_N), stop(key + BLOCK_N) - key - BLOCK_N - key_row);
        widen(v_tile, v_raw, v_scales);
        __syncthreads();
#endif

#if BIAS
        const int reach = static_cast<int>(reach_);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = warp_row + m * 16 + lane / 4 + h * 8;
                const float* mine = bias + (kv_head * GROUP + row % GROUP) * (2 * reach + 1) + reach;
                const int from = key + lane % 4 * 2 - tile.x - row / GROUP;
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) s[m][n][2 * h + e] += mine[max(-reach, min(reach, from + n * 8 + e))];
            }
#endif
        if (in_prefix(key) ? key + BLOCK_N > stop(key) : key < all_begin || key + BLOCK_N > all_end) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = warp_row + m * 16 + lane / 4 + h * 8;
                    const int token = min(tile.x + row / GROUP, tile.y - 1);
                    const int seen = in_prefix(key) ? key : first_key(token);
                    const int span = (in_prefix(key) ? stop(key) : last_key(token)) - seen;
                    const int from = seen - key - lane % 4 * 2;
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (static_cast<u32>(n * 8 + e - from) >= static_cast<u32>(span))
                                s[m][n][2 * h + e] = __int_as_float(0xff800000);
                }
        }

        // This thread's largest score of a row; its three neighbours hold the rest of the row.
        auto largest = [&](int m, int h) {
            float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < N_TILES; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            return x * scale_log2;
        };
        bool raise = false;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) raise |= largest(m, h) > row_max[m][h] + RAISE;
        if (__any_sync(0xffffffffu, raise)) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = largest(m, h);
                    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
                    x = fmaxf(x, row_max[m][h]);
                    const float shrink = exp2_fast(row_max[m][h] - x);
                    row_max[m][h] = x;
                    row_sum[m][h] *= shrink;
#pragma unroll
                    for (int n = 0; n < D_TILES; ++n) o[m][n][2 * h] *= shrink, o[m][n][2 * h + 1] *= shrink;
                }
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale_log2, -row_max[m][e / 2]));

#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; ++n) {
            u32 p[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    p[m][e] = pack(s[m][2 * n + e / 2][e % 2 * 2], s[m][2 * n + e / 2][e % 2 * 2 + 1]);
                    row_sum[m][e % 2] += low(p[m][e]) + high(p[m][e]);  // the rounded weights, so that they still sum to one
                }
#pragma unroll
            for (int d = 0; d < D_TILES; d += 2) {
                u32 b[4];
                ldmatrix_transposed(b, advance(v_at, d / 2) + n * 16 * PITCH * 2);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma(o[m][d], p[m], b[0], b[1]);
                    mma(o[m][d + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    // Results go through the warp's own rows of the Q tile, which no other warp reads. So rows are written in whole 16-byte chunks.
    copy_wait();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = 1.f / lanes_sum<4>(row_sum[m][h]);
            const int row = warp_row + m * 16 + lane / 4 + h * 8;
#pragma unroll
            for (int d = 0; d < D_TILES; ++d) {
                const float a = o[m][d][2 * h] * inverse, b = o[m][d][2 * h + 1] * inverse;
#if E4M3
                const u32 to = q_tile + place(row, d / 2) + d % 2 * 8 + lane % 4 * 2;
                asm volatile("{.reg .b16 p; cvt.u16.u32 p, %1; st.shared.b16 [%0], p;}" ::"r"(to), "r"(pack_e4m3(a, b)));
#else
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(q_tile + place(row, d) + lane % 4 * 4), "r"(pack(a, b)));
#endif
            }
        }
    __syncwarp();
    out += kv_head * GROUP * D;
#pragma unroll
    for (int i = 0; i < 16 * M_TILES * OUT_CHUNKS; i += 32) {
        const int r = warp_row + (i + lane) / OUT_CHUNKS, c = (i + lane) % OUT_CHUNKS;
        const int token = tile.x + r / GROUP;
        if (r < TILE_TOKENS * GROUP && token < tile.y) {
            const Vec8 chunk = *reinterpret_cast<const Vec8*>(shared + place(r, c));
            reinterpret_cast<Vec8*>(out + token * out_stride + (r % GROUP) * D)[c] = chunk;
        }
    }
}
