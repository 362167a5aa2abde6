// Keys and values of a cache in 8 bits, for sources that define KV8. engine/kernels/cache8.py describes the format.
//   values [2, S, K, D] e4m3 (KV8 1) or int8 (KV8 2).
//   scales [2, K, S], one byte for the D keys, or the D values, of a token and head.
// e4m3: the bits of codes are moved into 16-bit floats, so no instruction of sm_89 is needed. Then the exponent field lacks the
// difference of the two biases. The scale, a power of two, includes this difference, so one exact product gives the value.
// int8: the low seven bits become the mantissa of 128 + bits (bf16) or 1024 + bits (fp16). One exact fma subtracts this number
// without the bits, and 128 more if the code is negative. The scale multiplies the difference, exactly.
#ifndef KV8
#define KV8 0
#endif
typedef unsigned char u8;
#if KV8
typedef u8 KV;

// Two values in 16 bits, from the codes in the upper bytes of the two halves of `codes` and from the halves of `scales`.
__device__ __forceinline__ u32 widened(u32 codes, u32 scales) {
#if KV8 == 2
    constexpr u32 NONE = HALF ? 0x64006400u : 0x43004300u, MINUS_ONES = HALF ? 0xbc00bc00u : 0xbf80bf80u;
    const u32 c = codes >> 8;
    const u32 pair = fma_pair(c & 0x00800080u | NONE, MINUS_ONES, c & 0x007f007fu | NONE);
#else
    const u32 pair = (codes & 0x80008000u) | (HALF ? codes >> 1 & 0x3f803f80u : codes >> 4 & 0x07f007f0u);
#endif
    return fma_pair(pair, scales, 0x80008000u);
}

// The scale as a 16-bit float. It is 0 for a key that does not exist, whose codes are 0. A stored byte is the exponent of bf16.
// Scales of int8 may be subnormal in fp16.
__device__ __forceinline__ u32 scale16(u32 byte) {
    if (!HALF) return byte << 7;
    if (byte == 0) return 0;
    if (KV8 == 1) return byte - 224 << 10;
    return byte == 255 ? 0x7c00 : byte > 112 ? byte - 112 << 10 : 1 << byte - 103;
}

// The largest code is MOST, MANTISSA * 2^EXPONENT, where MANTISSA has the bits of 2 - 2^-23 less CARRY.
constexpr float MOST = KV8 == 2 ? 127.f : 448.f;
constexpr u32 CARRY = KV8 == 2 ? 0x1ffffu : 0x1fffffu;
constexpr int EXPONENT = KV8 == 2 ? 6 : 8;
constexpr int LEAST_POWER = KV8 == 2 ? -24 : -22, MOST_POWER = KV8 == 2 ? 9 : 7, POWER_BIAS = KV8 == 2 ? 127 : 247;

// The scale of a head whose values are in LANES lanes, eight in each. 255 if one of the values is not finite.
template <int LANES>
__device__ __forceinline__ u32 scale_of_head(const float (&x)[8]) {
    u32 most = 0;  // the bits of the largest absolute value; the bits of NaN and infinity are above all others
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (most >= 0x7f800000u) return 255;
    // The sum carries into the exponent if the mantissa is above MANTISSA.
    return min(max(static_cast<int>(most + CARRY >> 23) - 127 - EXPONENT, LEAST_POWER), MOST_POWER) + POWER_BIAS;
}

// Rounded to nearest even, at most MOST.
__device__ __forceinline__ u32 code_of(float x) {
#if KV8 == 2
    return __float2int_rn(fminf(fmaxf(x, -MOST), MOST)) & 0xff;
#else
    const float size = fminf(fabsf(x), MOST);
    const u32 bits = __float_as_uint(size);
    const u32 normal = (bits + 0x7ffffu + (bits >> 20 & 1) >> 20) - (120 << 3);
    const u32 tiny = __float_as_uint(size + 16384.f) - __float_as_uint(16384.f);  // in units of 2^-9
    return (size < 0.015625f ? tiny : normal) | (__float_as_uint(x) >> 24 & 0x80u);
#endif
}
// The codes of eight values of a head. They are 0 if the head is not finite: 0 times its scale, infinity, is NaN.
__device__ __forceinline__ uint2 codes8(const float (&x)[8], u32 scale) {
    if (scale == 255) return make_uint2(0, 0);
    const float inverse = __uint_as_float((127 + POWER_BIAS - scale) << 23);
    u32 word[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e) word[e / 4] |= code_of(x[e] * inverse) << e % 4 * 8;
    return make_uint2(word[0], word[1]);
}
#else
typedef u16 KV;
#endif
