// Embedding gather from a table in codes: out[t] = row ids[t] of the table, each value rounded once.
//   packed: the table [N, K] in records (csrc/codes.cuh). out [T, K] in 16 bits. LAST and ids out of the table: as in embed.cu.
// Four neighbouring lanes have 64 columns of a token's row. They read the words of four lanes in the table's layout. Half of the
// pairs in them belong to the row 8 away.    Floor: T * K * (BITS / 4 + 2) bytes, and the scales.
extern "C" __global__ void __launch_bounds__(THREADS)
embed_packed(const int* __restrict__ ids, const int* __restrict__ packed, const int* __restrict__ last, u16* __restrict__ out,
             i64 num_tokens, i64 n, i64 k, i64 num_last) {
    overlap();
    const i64 four = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / 4, parts = k / 64;
    const bool is_there = four / parts < num_tokens;
    const i64 token = is_there ? four / parts : num_tokens - 1;  // all lanes stay, because they exchange pairs
    const int column = static_cast<int>(four % parts) * 64, lane = threadIdx.x % 4;
    int id = ids[token];
    if (LAST && id < 0) id = last[min(-1 - id, static_cast<int>(num_last) - 1)];
    id = max(0, min(id, static_cast<int>(n) - 1));
    const int row = id % 8;
    const bool is_far = id / 8 % 2;
    const unsigned char* const record = reinterpret_cast<const unsigned char*>(packed) + (id / 16 * (k / CHUNK) + column / CHUNK) * RECORD;
    Words words;
    words.load(record, column % CHUNK / 64, row * 4 + lane);
    u32 values[4][2];  // of 16 columns each: the pairs of the first and the second 8 columns
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const Scales scales = scales_in_memory(record, row, column % CHUNK + j * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 near = rounded(words, 4 * j + 2 * i, scales), far = rounded(words, 4 * j + 2 * i + 1, scales);
            values[j][i] = is_far ? far : near;
        }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        u32 eight[4] = {values[2 * part][0], values[2 * part][1], values[2 * part + 1][0], values[2 * part + 1][1]};
        transpose(eight, threadIdx.x % 32);
        u16* const to = out + token * k + column + part * 32 + lane * 8;
        if (is_there) *reinterpret_cast<Vec8*>(to) = {eight[0], eight[1], eight[2], eight[3]};
    }
}
