// Rotary embedding ("half-rotate") of Q and K in place on the fused QKV buffer; with NORM, Qwen3's per-head RMSNorm before.
//   qkv [T, H + 2 K, D] 16-bit: heads 0 .. H - 1 take q_weight [D], the next K take k_weight (NORM); V is not touched.
//   table float2 [max_position_embeddings, D / 2]: cos and sin of each angle.  positions int [T]: each token's row of it.
// One block a token. D / 8 lanes hold a head, eight values each; the partner of a value is D / 2 away, so one shuffle
// fetches it. A thread does the same eight columns of PER_THREAD heads: it reads their angles once, and all its heads'
// loads are in flight together (one head a thread reached 60 % of the copy bandwidth).
// Floor: 4 * T * (H + K) * D bytes.
constexpr int LANES = HEAD_DIM / 8;
constexpr int ALL_HEADS = HEADS + KV_HEADS;
constexpr int SLOTS = (ALL_HEADS + PER_THREAD - 1) / PER_THREAD;  // head h is done by slot h % SLOTS

extern "C" __global__ void __launch_bounds__(THREADS)
rope(u16* __restrict__ qkv, const u16* __restrict__ q_weight, const u16* __restrict__ k_weight,
     const float2* __restrict__ table, const int* __restrict__ positions, float eps) {
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
        if (slot < SLOTS && head < ALL_HEADS) store8(rows + head * HEAD_DIM, lane, pack(x));
    }
}
