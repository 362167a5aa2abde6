// The two activations between a transformer's wide linear layers, eight values a thread.
//   swiglu: gate_up [T, 2 * I] -> out [T, I], silu(gate) * up.            Floor: 6 * T * I bytes.
//   gelu:   x [T, I] + bias [I], in place, exact (erf).                   Floor: 4 * T * I bytes.
//   I, the width, is a multiple of 8.
// erff made gelu bound by arithmetic (65 % of the copy bandwidth); the tail below is exact to 1.5e-7 and is not.
__device__ __forceinline__ float gelu_of(float x) {
    // Abramowitz and Stegun 7.1.26: 1 - erf(z) = poly(t) exp(-z^2), t = 1 / (1 + p z), z >= 0.
    const float z = fabsf(x) * 0.70710678f;
    const float t = __fdividef(1.f, fmaf(0.3275911f, z, 1.f));
    const float poly = t * fmaf(t, fmaf(t, fmaf(t, fmaf(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f);
    const float tail = 0.5f * x * poly * __expf(-z * z);  // x * P(beyond |x|), without cancellation
    return x < 0.f ? tail : x - tail;
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu(const u16* __restrict__ gate_up, u16* __restrict__ out, i64 num_rows) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;  // of eight values: 32 bits reach 2^35 of them
    if (index >= num_rows * (I / 8)) return;
    const i64 row = index / (I / 8);
    const int at = index % (I / 8);
    float gate[8], up[8];
    unpack(load8(gate_up + row * (2 * I), at), gate);
    unpack(load8(gate_up + row * (2 * I) + I, at), up);
#pragma unroll
    for (int e = 0; e < 8; ++e) up[e] *= gate[e] / (1.f + __expf(-gate[e]));
    store8(out + row * I, at, pack(up));
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu(u16* __restrict__ x, const u16* __restrict__ bias, i64 num_rows) {
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= num_rows * (I / 8)) return;
    float y[8], b[8];
    unpack(load8(x, index), y);
    unpack(load8(bias, index % (I / 8)), b);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = gelu_of(y[e] + b[e]);
    store8(x, index, pack(y));
}
