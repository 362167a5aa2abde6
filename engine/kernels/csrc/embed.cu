// Embedding gather: out[t] = words[ids[t]] (+ position_table[positions[t]]). C is a multiple of 8.
//   words [num_words, C]. An id outside of the table reads the table's nearest row: no read leaves the table.
//   LAST: 1 with `last` int [num_last]. For an id below 0 the token is entry -1 - id of `last`.
//   POSITIONS: 1 with a position table.    Floor: 4 * T * C bytes (6 with positions, which mostly come from cache).
// A thread copies the same eight columns of PER_THREAD tokens. It must wait for an id before it can load the id's row. So with
// one token for each thread too few loads are in flight.
extern "C" __global__ void __launch_bounds__(THREADS)
embed(const int* __restrict__ ids, const int* __restrict__ positions, const u16* __restrict__ words,
      const u16* __restrict__ position_table, const int* __restrict__ last, u16* __restrict__ out, i64 num_tokens,
      i64 num_words, i64 num_last) {
    overlap();
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    const i64 first = index / (C / 8) * static_cast<i64>(PER_THREAD);
    const int at = index % (C / 8);
    Vec8 loaded[PER_THREAD], added[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const i64 token = min(first + i, num_tokens - 1);
        int id = ids[token];
        if (LAST && id < 0) id = last[min(-1 - id, static_cast<int>(num_last) - 1)];
        id = max(0, min(id, static_cast<int>(num_words) - 1));
        loaded[i] = load8(words + static_cast<i64>(id) * C, at);
        if (POSITIONS) added[i] = load8(position_table + static_cast<i64>(positions[token]) * C, at);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        if (first + i >= num_tokens) return;
        if (POSITIONS) {
            float x[8], p[8];
            unpack(loaded[i], x);
            unpack(added[i], p);
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] += p[e];
            loaded[i] = pack(x);
        }
        store8(out + (first + i) * C, at, loaded[i]);
    }
}
