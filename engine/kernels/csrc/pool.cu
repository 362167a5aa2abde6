// One vector per sequence, in two steps so that a few long sequences still fill the chip.
//   pool_mean: hidden [T, C] 16-bit -> out float [B, C]. A block takes 64 columns of one sequence. The blocks of the longest
//       sequence end last, so each thread keeps BATCH rows in flight.   Floor: 2 * T * C bytes.
//   pool_finish: takes the vectors from `rows` [B, C] 16-bit if FROM_ROWS, otherwise from `means` float [B, C]. Last-token and
//       cls pooling have gathered `rows` before. Row b keeps its first dims[b] values; the other columns become 0. Row b is
//       L2-normalised if normalize[b]. It becomes all NaN if one of the values that it keeps is not finite. It stays in
//       registers, as in norm.cu.   Floor: 6 * B * C bytes from rows, 8 * B * C from means.
constexpr int COLUMN_LANES = 8;  // neighbouring lanes that read one row, eight values each
constexpr int BATCH = 8;
constexpr int ROW_GROUPS = THREADS / COLUMN_LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
pool_mean(const u16* __restrict__ hidden, const int* __restrict__ cu_seqlens, float* __restrict__ out) {
    overlap();
    __shared__ float partial[THREADS / 32][COLUMN_LANES * 8];
    const int begin = cu_seqlens[blockIdx.x], end = cu_seqlens[blockIdx.x + 1];
    const int lane = threadIdx.x % COLUMN_LANES, at = blockIdx.y * COLUMN_LANES + lane;
    float sum[8] = {};
    for (int first = begin + threadIdx.x / COLUMN_LANES; at < C / 8 && first < end; first += BATCH * ROW_GROUPS) {
        Vec8 loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = first + i * ROW_GROUPS;
            loaded[i] = row < end ? load8(hidden + static_cast<i64>(row) * C, at) : Vec8{};
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            float x[8];
            unpack(loaded[i], x);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] += x[e];
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
        for (int step = COLUMN_LANES; step < 32; step *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], step);
    if (threadIdx.x % 32 < COLUMN_LANES)
#pragma unroll
        for (int e = 0; e < 8; ++e) partial[threadIdx.x / 32][lane * 8 + e] = sum[e];
    __syncthreads();
    const int column = blockIdx.y * COLUMN_LANES * 8 + threadIdx.x;
    if (threadIdx.x >= COLUMN_LANES * 8 || column >= C || begin == end) return;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) total += partial[i][threadIdx.x];
    out[static_cast<i64>(blockIdx.x) * C + column] = total / (end - begin);
}

constexpr int ROW_WARPS = ROW_THREADS / 32;
constexpr int VECTORS = (C / 4 + ROW_THREADS - 1) / ROW_THREADS;  // of four values, so that a warp's fp32 stores are contiguous

extern "C" __global__ void __launch_bounds__(ROW_THREADS * ROWS, 1)
pool_finish(const u16* __restrict__ rows, const float* __restrict__ means, const int* __restrict__ dims,
            const int* __restrict__ normalize, float* __restrict__ out, i64 num_rows) {
    overlap();
    __shared__ float scratch[2][ROW_WARPS];
    const int lane = threadIdx.x % ROW_THREADS;
    const i64 row = static_cast<i64>(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= num_rows) return;  // a warp has threads of one row only, so it returns as a whole
    const int width = dims[row];
    float x[VECTORS][4];
    float sum = 0.f, zero = 0.f;  // `zero` stays 0, or becomes NaN if a value is not finite
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        const bool valid = C / 4 % ROW_THREADS == 0 || at < C / 4;
        if (FROM_ROWS) {
            const uint2 pairs = valid ? reinterpret_cast<const uint2*>(rows + row * C)[at] : uint2{};
            x[i][0] = low(pairs.x), x[i][1] = high(pairs.x), x[i][2] = low(pairs.y), x[i][3] = high(pairs.y);
        } else {
            const float4 four = valid ? reinterpret_cast<const float4*>(means + row * C)[at] : float4{};
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (at * 4 + e >= width) x[i][e] = 0.f;
            sum += x[i][e] * x[i][e];
            zero += x[i][e] * 0.f;
        }
    }
    sum = block_sum<ROW_WARPS>(sum, scratch[0]);
    zero = block_sum<ROW_WARPS>(zero, scratch[1]);
    const float scale = (normalize[row] ? 1.f / fmaxf(sqrtf(sum), 1e-12f) : 1.f) + zero;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        if (C / 4 % ROW_THREADS != 0 && at >= C / 4) break;
        reinterpret_cast<float4*>(out + row * C)[at] =
            float4{x[i][0] * scale, x[i][1] * scale, x[i][2] * scale, x[i][3] * scale};
    }
}
