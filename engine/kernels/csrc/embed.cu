// Embedding gather: out[t] = words[ids[t]] (+ positions[p], p being the token's place in its sequence). C a multiple of 8.
//   POSITIONS: 1 with a position table.    Floor: 4 * T * C bytes (6 with positions, which mostly come from cache).
extern "C" __global__ void __launch_bounds__(THREADS)
embed(const int* __restrict__ ids, const int2* __restrict__ bounds, const u16* __restrict__ words,
      const u16* __restrict__ positions, u16* __restrict__ out, i64 num_tokens) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;  // of eight values
    if (index >= num_tokens * (C / 8)) return;
    const i64 token = index / (C / 8);
    const int at = index % (C / 8);
    Vec8 v = load8(words + static_cast<i64>(ids[token]) * C, at);
    if (POSITIONS) {
        float x[8], p[8];
        unpack(v, x);
        unpack(load8(positions + (token - bounds[token].x) * C, at), p);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] += p[e];
        v = pack(x);
    }
    store8(out + token * C, at, v);
}
