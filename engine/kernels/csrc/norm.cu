// Residual add + RMSNorm or LayerNorm, one pass over memory.
//   y = x [+ bias] [+ residual];  out = normalise(y) * weight [+ shift];  with RESIDUAL 2, y is also written back to residual.
//   x, residual, out [T, C], bias, weight, shift [C], 16-bit; sums in fp32.
// ROW_THREADS threads hold a row in registers, VECTORS times eight values each, so the kernel reads x once. One warp takes a row
// of up to 1024 values and needs no barrier. A block takes several such rows.
// Floor: the bytes of all inputs and outputs, each moved once.
//   C: columns, a multiple of 8.  LAYER: 1 for LayerNorm, 0 for RMSNorm.  BIAS: 0 or 1.
//   RESIDUAL: 0 for none, 1 to add it, 2 to add it and write the sum back.
constexpr int ROW_WARPS = ROW_THREADS / 32;
constexpr int COLUMN_VECTORS = C / 8;
constexpr int VECTORS = (COLUMN_VECTORS + ROW_THREADS - 1) / ROW_THREADS;

extern "C" __global__ void __launch_bounds__(ROW_THREADS * ROWS, 1)
add_norm(const u16* __restrict__ x, u16* __restrict__ residual, const u16* __restrict__ bias, const u16* __restrict__ weight,
     const u16* __restrict__ shift, u16* __restrict__ out, i64 num_rows, float eps) {
    overlap();
    __shared__ float scratch[2][ROW_WARPS];
    const int lane = threadIdx.x % ROW_THREADS;
    const i64 row = static_cast<i64>(blockIdx.x) * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= num_rows) return;  // a warp has threads of one row only, so it returns as a whole
    x += row * C;
    residual += row * C;
    out += row * C;

    float y[VECTORS][8];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        const bool valid = COLUMN_VECTORS % ROW_THREADS == 0 || at < COLUMN_VECTORS;
        Vec8 v = {};
        if (valid) v = load8(x, at);
        unpack(v, y[i]);
        float more[8];
        if (BIAS && valid) {
            unpack(load8(bias, at), more);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[i][e] += more[e];
        }
        if (RESIDUAL && valid) {
            unpack(load8(residual, at), more);
#pragma unroll
            for (int e = 0; e < 8; ++e) y[i][e] += more[e];
        }
        if (RESIDUAL == 2 && valid) store8(residual, at, pack(y[i]));
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += LAYER ? y[i][e] : y[i][e] * y[i][e];
    }
    sum = block_sum<ROW_WARPS>(sum, scratch[0]);
    float mean = 0.f;
    if (LAYER) {  // the variance, in a second pass over the registers: E[y^2] - mean^2 would lose digits by cancellation
        mean = sum / C;
        sum = 0.f;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float d = i * ROW_THREADS + lane < COLUMN_VECTORS ? y[i][e] - mean : 0.f;
                sum += d * d;
            }
        sum = block_sum<ROW_WARPS>(sum, scratch[1]);
    }
    const float scale = rsqrtf(sum / C + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * ROW_THREADS + lane;
        if (COLUMN_VECTORS % ROW_THREADS != 0 && at >= COLUMN_VECTORS) break;
        float w[8], b[8];
        unpack(load8(weight, at), w);
        if (LAYER) unpack(load8(shift, at), b);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[i][e] = (y[i][e] - mean) * scale * w[e] + (LAYER ? b[e] : 0.f);
        store8(out, at, pack(y[i]));
    }
}
