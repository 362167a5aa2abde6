// Keys and values of a cache in 8 bits, for sources that define KV8. engine/kernels/cache8.py describes the format.
//   values [2, S, K, D] e4m3.  scales [2, K, S], one byte for the D keys, or the D values, of a token and head.
// The bits of codes are moved into 16-bit floats, so no instruction of sm_89 is needed. Then the exponent field lacks the
// difference of the two biases. The scale, a power of two, includes this difference, so one exact product gives the value.
#ifndef KV8
#define KV8 0
#endif
typedef unsigned char u8;
#if KV8
typedef u8 KV;

// Two values in 16 bits, from the codes in the upper bytes of the two halves of `codes` and from the halves of `scales`.
__device__ __forceinline__ u32 widened(u32 codes, u32 scales) {
    const u32 pair = (codes & 0x80008000u) | (HALF ? codes >> 1 & 0x3f803f80u : codes >> 4 & 0x07f007f0u);
    u32 values;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(pair), "r"(scales), "r"(0x80008000u));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(pair), "r"(scales), "r"(0x80008000u));
#endif
    return values;
}

// The scale as a 16-bit float. A stored byte is the exponent of bf16. It is 0 for a key that does not exist, whose codes are 0.
__device__ __forceinline__ u32 scale16(u32 byte) { return HALF ? (byte ? byte - 224 << 10 : 0) : byte << 7; }

// The scale of a head whose values are in LANES lanes, eight in each. 255 if one of the values is not finite.
template <int LANES>
__device__ __forceinline__ u32 scale_of_head(const float (&x)[8]) {
    u32 most = 0;  // the bits of the largest absolute value; the bits of NaN and infinity are above all others
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (most >= 0x7f800000u) return 255;
    // 448 is 1.75 * 2^8: the sum carries into the exponent if the mantissa is above 1.75.
    return min(max(static_cast<int>(most + 0x1fffffu >> 23) - 135, -22), 7) + 247;
}

// e4m3, rounded to nearest even, at most 448.
__device__ __forceinline__ u32 code_of(float x) {
    const float size = fminf(fabsf(x), 448.f);
    const u32 bits = __float_as_uint(size);
    const u32 normal = (bits + 0x7ffffu + (bits >> 20 & 1) >> 20) - (120 << 3);
    const u32 tiny = __float_as_uint(size + 16384.f) - __float_as_uint(16384.f);  // in units of 2^-9
    return (size < 0.015625f ? tiny : normal) | (__float_as_uint(x) >> 24 & 0x80u);
}
// The codes of eight values of a head. They are 0 if the head is not finite: 0 times its scale, infinity, is NaN.
__device__ __forceinline__ uint2 codes8(const float (&x)[8], u32 scale) {
    if (scale == 255) return make_uint2(0, 0);
    const float inverse = __uint_as_float((127 + 247 - scale) << 23);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e) word[e / 4] |= code_of(x[e] * inverse) << e % 4 * 8;
    return make_uint2(word[0], word[1]);
}
#else
typedef u16 KV;
#endif
