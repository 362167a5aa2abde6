// Rows with their columns in another order, after an RMSNorm if NORM is 1: out[t, j] = y[t, order[j]].
//   y = x, or x / sqrt(mean(x^2) + eps) * norm with sums in fp32.
//   x [T, C], rows x_stride apart; norm [C]; out [T, C]. 16-bit. order int [C].
// A block brings a row into shared memory, because it would be slow to collect single values from the L2 cache.
//   C: columns, a multiple of 8.
// Floor: 4 T C bytes.
constexpr int VECTORS = (C / 8 + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
reorder(const u16* __restrict__ x, const u16* __restrict__ norm, const int* __restrict__ order, u16* __restrict__ out, i64 x_stride,
        float eps) {
    extern __shared__ __align__(16) unsigned char row[];
    float4* const products = reinterpret_cast<float4*>(row);  // with NORM: x * norm
    float* const scratch = reinterpret_cast<float*>(row) + C;
    u16* const values = reinterpret_cast<u16*>(row);
    let_next_begin();
    int4 its[VECTORS][2];  // the order is a weight, and is loaded while the kernel before runs
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = min(i * THREADS + static_cast<int>(threadIdx.x), C / 8 - 1);
        its[i][0] = reinterpret_cast<const int4*>(order)[2 * at], its[i][1] = reinterpret_cast<const int4*>(order)[2 * at + 1];
    }
    wait_for_previous();
    const u16* const from = x + blockIdx.x * x_stride;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at >= C / 8) break;
        const Vec8 v = load8(from, at);
        if (!NORM) {
            store8(values, at, v);
            continue;
        }
        float y[8], w[8];
        unpack(v, y);
        unpack(load8(norm, at), w);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(y[e], y[e], sum), y[e] *= w[e];
        products[2 * at] = {y[0], y[1], y[2], y[3]}, products[2 * at + 1] = {y[4], y[5], y[6], y[7]};
    }
    float scale = 1.f;
    if (NORM)
        scale = rsqrtf(block_sum<THREADS / 32>(sum, scratch) / C + eps);  // its barrier is the row's, too
    else
        __syncthreads();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at >= C / 8) break;
        auto pair = [&](int a, int b) {
            if (!NORM) return values[a] | static_cast<u32>(values[b]) << 16;
            const float* const all = reinterpret_cast<const float*>(products);
            return pack(all[a] * scale, all[b] * scale);
        };
        const int4 first = its[i][0], second = its[i][1];
        const Vec8 y = {pair(first.x, first.y), pair(first.z, first.w), pair(second.x, second.y), pair(second.z, second.w)};
        store8(out + static_cast<i64>(blockIdx.x) * C, at, y);
    }
}
