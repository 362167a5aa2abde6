// One vector per sequence, in two steps so that a few long sequences still fill the chip.
//   mean:   hidden [T, C] 16-bit -> sums float [B, C]. A block takes COLUMNS columns of one sequence.   Floor: 2 * T * C bytes.
//   finish: a row of `rows` (last-token and cls pooling have gathered theirs already) or of `sums`, cut to its first
//           dims[b] values, L2-normalised where normalize[b], and finite[b] = whether every value was.   Floor: 6 * B * C bytes.
constexpr int COLUMN_LANES = 8;  // times eight values: 64 columns, 128 bytes of a row, a block
constexpr int ROW_GROUPS = THREADS / COLUMN_LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
pool_mean(const u16* __restrict__ hidden, const int* __restrict__ cu_seqlens, float* __restrict__ out) {
    __shared__ float partial[ROW_GROUPS][COLUMN_LANES * 8 + 1];
    const int begin = cu_seqlens[blockIdx.x], end = cu_seqlens[blockIdx.x + 1];
    const int lane = threadIdx.x % COLUMN_LANES, group = threadIdx.x / COLUMN_LANES;
    const int at = blockIdx.y * COLUMN_LANES + lane;
    float sum[8] = {};
    if (at < C / 8)
        for (int row = begin + group; row < end; row += ROW_GROUPS) {
            float x[8];
            unpack(load8(hidden + static_cast<i64>(row) * C, at), x);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[e] += x[e];
        }
#pragma unroll
    for (int e = 0; e < 8; ++e) partial[group][lane * 8 + e] = sum[e];
    __syncthreads();
    const int column = blockIdx.y * COLUMN_LANES * 8 + threadIdx.x;
    if (threadIdx.x >= COLUMN_LANES * 8 || column >= C || begin == end) return;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) total += partial[i][threadIdx.x];
    out[static_cast<i64>(blockIdx.x) * C + column] = total / (end - begin);
}

extern "C" __global__ void __launch_bounds__(THREADS)
pool_finish(const u16* __restrict__ rows, const float* __restrict__ sums, const int* __restrict__ dims,
       const int* __restrict__ normalize, float* __restrict__ out, int* __restrict__ finite) {
    __shared__ float scratch[THREADS / 32];
    const i64 row = blockIdx.x;
    const int width = dims[row];
    auto value = [&](int i) {
        return FROM_ROWS ? low(static_cast<u32>(rows[row * C + i])) : sums[row * C + i];
    };
    float sum = 0.f;
    bool is_finite = true;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float x = value(i);
        sum += x * x;
        is_finite &= fabsf(x) < __int_as_float(0x7f800000);
    }
    is_finite = __syncthreads_and(is_finite);
    sum = block_sum<THREADS / 32>(sum, scratch);
    const float scale = normalize[row] ? 1.f / fmaxf(sqrtf(sum), 1e-12f) : 1.f;
    for (int i = threadIdx.x; i < C; i += THREADS) out[row * C + i] = i < width ? value(i) * scale : 0.f;
    if (threadIdx.x == 0) finite[row] = is_finite;
}
