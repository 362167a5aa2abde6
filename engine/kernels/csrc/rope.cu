// Rotary embedding ("half-rotate") of Q and K in place on the fused QKV buffer; with NORM, Qwen3's per-head RMSNorm before.
//   qkv [T, H + 2 K, D] 16-bit: heads 0 .. H - 1 take q_weight [D], the next K take k_weight (NORM); V is not touched.
//   table float2 [max_position_embeddings, D / 2]: cos and sin of each angle.  positions int [T]: each token's row of it.
// One block computes one token. D / 8 lanes hold a head, eight values each. The partner of a value is D / 2 away: one shuffle
// fetches it. A thread computes the same eight columns of PER_THREAD heads: it reads the angles once, and the loads of all its
// heads are in flight together (one head a thread reached 60 % of the copy bandwidth).
// STORE: the cache gets K (normed, rotated) and V of each token whose slot is not negative. K is then not written back to qkv.
//   cache [2, S, K, D]: keys, then values; cache_rows is S.  slots int [T]: each token's row of the cache, below 0 for none.
//   V is copied bit by bit, by the threads that rotate: its loads are in flight with those of Q and K.
//   KV8: cache is in 8 bits and has scales u8 [2, K, S] (cache8.cuh). Values are rounded to 16 bits first, then to 8 bits.
// Floor: 4 * T * (H + K) * D bytes; with STORE 4 * T * K * D more, with KV8 3 * T * K * D.
constexpr int LANES = HEAD_DIM / 8;
constexpr int ROTATED = HEADS + KV_HEADS, ALL_HEADS = ROTATED + STORE * KV_HEADS;
constexpr int SLOTS = (ALL_HEADS + PER_THREAD - 1) / PER_THREAD;  // slot h % SLOTS computes head h

extern "C" __global__ void __launch_bounds__(THREADS)
rope(u16* __restrict__ qkv, const u16* __restrict__ q_weight, const u16* __restrict__ k_weight,
     const float2* __restrict__ table, const int* __restrict__ positions, KV* __restrict__ cache, u8* __restrict__ scales,
     const int* __restrict__ slots, i64 cache_rows, float eps) {
    overlap();
    const int token = blockIdx.x, slot = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u16* rows = qkv + static_cast<i64>(token) * (HEADS + 2 * KV_HEADS) * HEAD_DIM;

    Vec8 loaded[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int head = slot + i * SLOTS;
        loaded[i] = Vec8{};
        if (slot < SLOTS && head < ALL_HEADS) loaded[i] = load8(rows + head * HEAD_DIM, lane);
    }
    const float4* angles = reinterpret_cast<const float4*>(table + static_cast<i64>(positions[token]) * (HEAD_DIM / 2));
#if STORE
    const int cache_row = slots[token];
#endif
    const float sign = lane < LANES / 2 ? -1.f : 1.f;
    float cosine[8], sine[8];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float4 two = angles[lane % (LANES / 2) * 4 + e];  // cos, sin, cos, sin
        cosine[2 * e] = two.x, sine[2 * e] = sign * two.y;
        cosine[2 * e + 1] = two.z, sine[2 * e + 1] = sign * two.w;
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int head = slot + i * SLOTS;
        float x[8];
        unpack(loaded[i], x);
#if NORM
        float w[8];
        unpack(load8(head < HEADS ? q_weight : k_weight, lane), w);
        float sum = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += x[e] * x[e];
        const float scale = rsqrtf(lanes_sum<LANES>(sum) / HEAD_DIM + eps);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= scale * w[e];
#endif
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = x[e] * cosine[e] + __shfl_xor_sync(0xffffffffu, x[e], LANES / 2) * sine[e];
        Vec8 result = pack(x);
        u16* to = rows + head * HEAD_DIM;
#if STORE
        if (head >= ROTATED) result = loaded[i];
        const bool is_v = head >= ROTATED;
        const i64 row = cache_row + (is_v ? cache_rows : 0);
        const int kv_head = head - (is_v ? ROTATED : HEADS);
        const bool is_stored = head >= HEADS && cache_row >= 0;
#if KV8
        float values[8];
        unpack(result, values);
        const u32 byte = scale_of_head<LANES>(values);  // shuffles: all lanes take part
        if (is_stored) {
            if (slot < SLOTS && head < ALL_HEADS) {
                reinterpret_cast<uint2*>(cache + (row * KV_HEADS + kv_head) * HEAD_DIM)[lane] = codes8(values, byte);
                if (lane == 0) scales[(is_v * KV_HEADS + kv_head) * cache_rows + cache_row] = byte;
            }
            to = nullptr;
        }
#else
        if (is_stored) to = cache + (row * KV_HEADS + kv_head) * HEAD_DIM;
#endif
#endif
        if (slot < SLOTS && head < ALL_HEADS && (!KV8 || to != nullptr)) store8(to, lane, result);
    }
}
