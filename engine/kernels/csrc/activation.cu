// The activations between a transformer's wide linear layers, eight values a thread.
//   swiglu: gate_up [T, 2 * I] -> out [T, I], silu(gate) * up.            Floor: 6 * T * I bytes.
//   geglu, geglu_tanh: the same with gelu(gate), exact or in the tanh form.
//   gelu:   gelu(x [T, I] + bias [I]), in place, exact (erf).             Floor: 4 * T * I bytes.
//   I: the width, a multiple of 8. INTERLEAVED 1: eight columns of gate alternate with eight columns of up. INTERLEAVED 0: gate
//   is the left half, up the right half.

// gelu(x) = max(x, 0) - |x| q, where q is the probability that a standard normal variable exceeds |x|. No digits cancel.
// q = erfc(z) / 2 with z = |x| / sqrt(2), by formula 7.1.26 of Abramowitz and Stegun. The constants contain the factor 1 / 2 and,
// in 1 / (1 + p z), the factor 1 / sqrt(2). The absolute error of gelu is about 2e-7.
// Tried: erff. Arithmetic is then the limit, at 65 % of the bandwidth of a copy.
__device__ __forceinline__ float gelu_of(float x) {
    float t, power;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.23164190f, fabsf(x), 1.f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * x * -0.72134752f));
    const float q = fmaf(t, fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f), 0.127414796f);
    return fmaf(-fabsf(x), q * t * power, fmaxf(x, 0.f));
}

// The tanh form: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. It uses (1 + tanh(y)) / 2 = sigmoid(2 y).
__device__ __forceinline__ float gelu_tanh_of(float x) { return x / (1.f + __expf(-1.5957691216f * x * fmaf(0.044715f * x, x, 1.f))); }

template <float (*activation)(float)>
__device__ __forceinline__ void gated(const u16* __restrict__ gate_up, u16* __restrict__ out, i64 num_rows) {
    overlap();
    const u32 index = blockIdx.x * THREADS + threadIdx.x;  // the index of a group of eight values: 32 bits suffice for 2^35 values
    if (index >= num_rows * (I / 8)) return;
    const i64 row = index / (I / 8);
    const int at = index % (I / 8);
    float gate[8], up[8];
    unpack(load8(gate_up + row * (2 * I), INTERLEAVED ? 2 * at : at), gate);
    unpack(load8(gate_up + row * (2 * I), INTERLEAVED ? 2 * at + 1 : I / 8 + at), up);
#pragma unroll
    for (int e = 0; e < 8; ++e) up[e] *= activation(gate[e]);
    store8(out + row * I, at, pack(up));
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu(const u16* __restrict__ gate_up, u16* __restrict__ out, i64 num_rows) { gated<silu_of>(gate_up, out, num_rows); }

extern "C" __global__ void __launch_bounds__(THREADS)
geglu(const u16* __restrict__ gate_up, u16* __restrict__ out, i64 num_rows) { gated<gelu_of>(gate_up, out, num_rows); }

extern "C" __global__ void __launch_bounds__(THREADS)
geglu_tanh(const u16* __restrict__ gate_up, u16* __restrict__ out, i64 num_rows) { gated<gelu_tanh_of>(gate_up, out, num_rows); }

extern "C" __global__ void __launch_bounds__(THREADS)
gelu(u16* __restrict__ x, const u16* __restrict__ bias, i64 num_rows) {
    overlap();
    const u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= num_rows * (I / 8)) return;
    float y[8], b[8];
    unpack(load8(x, index), y);
    unpack(load8(bias, index % (I / 8)), b);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = gelu_of(y[e] + b[e]);
    store8(x, index, pack(y));
}
