// W [N, K] in 4, 5, 6 or 8 bits: the kernels' format of records, for sources that define GROUP, BITS, FLOATS, ZEROS and MINS.
//   Records are [N / 16, K / CHUNK]. The records of 16 rows follow one another along K. A record is
//   16 rows x CHUNK columns: the low 4 bits of the codes, the bits above them, the scales. A value is (code - zero) * scale, or
//   with MINS code * scale + min.
//     low [CHUNK / 64][32 lanes][4 words], high [CHUNK / 64][32 lanes][BITS - 4 words]: the bits of a lane's A operands of four
//     successive m16n8k16. Pair p of a lane (0 to 15) is register p % 4 of product p / 4 (row lane / 4 + p % 2 * 8, columns
//     lane % 4 * 2 + p / 2 % 2 * 8). A word with B bits of a code has 16 / B pairs. Element e of its pair q is at bit B q + 16 e.
//     scales [8][CHUNK / GROUP][1 + ZEROS][2]: of rows r and r + 8, the scales in fp16, then the zeros as 16-bit whole numbers,
//     or the mins in fp16.
//   GROUP: columns that share a scale, 16, 32, 64 or 128.  ZEROS: 0 if every zero is 2^(BITS - 1).  MINS: 1 if there are mins
//   instead of zeros.  FLOATS: 1 if the codes are numbers, which have no zeros and no mins: with 4 bits in e2m1, with 8 bits in
//   e4m3. The latter stand for e4m3 / 256: so fp16 holds the scales of usual matrices, which are about 1e-4 without the divisor.
//   Other codes of 8 bits are stored as code - 128, in two's complement. They have no other zero, because bf16 does not hold all
//   differences of two codes.
// A pair of codes becomes a pair of bf16 or fp16, exactly. One logical operation for the low bits, and one for the high bits if
// there are any, make 128 + code (bf16) or 1024 + code (fp16). One fma subtracts 128 + zero.
#ifdef ZEROS
static_assert(GROUP == 16 || GROUP == 32 || GROUP == 64 || GROUP == 128, "a record has whole groups");
static_assert(BITS == 4 || BITS == 5 || BITS == 6 || BITS == 8, "a word has the same bits of whole pairs");
static_assert(ZEROS || !MINS, "mins take the place of zeros");
static_assert(!FLOATS || ((BITS == 4 || BITS == 8) && !ZEROS), "e2m1 has 4 bits, e4m3 has 8, and both have no zeros");
static_assert(BITS < 8 || !ZEROS, "a code of 8 bits has the zero 128");
constexpr int CHUNK = GROUP > 64 ? GROUP : 64, HALVES = CHUNK / 64, GROUPS = CHUNK / GROUP;
constexpr int HIGH = BITS - 4;                          // bits of a code above the low four
constexpr int LANE_SCALES = 4 * GROUPS * (1 + ZEROS);   // bytes
constexpr int LOW_CODES = 512 * HALVES, CODES = LOW_CODES + 128 * HIGH * HALVES, RECORD = CODES + 8 * LANE_SCALES;
static_assert(LANE_SCALES <= 16, "one copy brings a lane's scales");
__device__ __forceinline__ u32 load_word(u32 shared) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared));
    return x;
}
__device__ __forceinline__ void load_words(u32 (&x)[4], u32 shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared));
}
__device__ __forceinline__ void load_pair(u32 (&x)[2], u32 shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(shared));
}
// For the kernels that fetch records with cp.async, and whose blocks exchange sums in memory.
__device__ __forceinline__ u32 address_of(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 shared, const void* global) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ float float_of_half(u32 bits) {  // the low 16 bits
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(bits));
    return x;
}
constexpr u32 ABOVE = HALF ? 0x64006400u : 0x43004300u;     // a pair of 1024 or 128: the lowest bit of the mantissa is worth 1
constexpr u32 ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
constexpr u32 SIGNS = 0x80008000u;
constexpr u32 MIDDLES = 0x00010001u << (BITS - 1);          // the zeros of both halves if ZEROS is 0
// a & b | c
template <u32 B>
__device__ __forceinline__ u32 and_or(u32 a, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(B), "r"(c));
    return d;
}
// x moved to the left, or to the right if `by` is negative.
__device__ __forceinline__ u32 moved(u32 x, int by) { return by < 0 ? x >> -by : x << by; }
// The pair of -(ABOVE + zero) for one zero in both halves of `zeros`.
__device__ __forceinline__ u32 minus_of(u32 zeros) { return zeros | ABOVE | SIGNS; }
// The pair of ABOVE + code: bits 0 to 3 and 16 to 19 of `codes`.
__device__ __forceinline__ u32 above_of(u32 codes) { return and_or<0x000f000fu>(codes, ABOVE); }

// A lane's codes of 64 columns.
struct Words {
    u32 low[4], high[HIGH > 0 ? HIGH : 1];
    // Loads part `half` of a record in shared memory.
    __device__ __forceinline__ void load(u32 record, int half) {
        const u32 lane = threadIdx.x % 32;
        load_words(low, record + half * 512 + lane * 16);
#if BITS == 8
        load_words(high, record + LOW_CODES + half * 512 + lane * 16);
#elif BITS == 6
        load_pair(high, record + LOW_CODES + half * 256 + lane * 8);
#elif BITS == 5
        high[0] = load_word(record + LOW_CODES + half * 128 + lane * 4);
#endif
    }
    // Loads lane `lane`'s codes of part `half` of a record in memory.
    __device__ __forceinline__ void load(const unsigned char* record, int half, int lane) {
        const Vec8 its = reinterpret_cast<const Vec8*>(record + half * 512)[lane];
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = its.word[i];
#pragma unroll
        for (int i = 0; i < HIGH; ++i) high[i] = reinterpret_cast<const u32*>(record + LOW_CODES + half * 128 * HIGH)[lane * HIGH + i];
    }
    // The bits above the low four of pair `pair`, at bits `at` and at + 16, among other bits.
    __device__ __forceinline__ u32 high_of(int pair, int at = 4) const {
        constexpr int PAIRS = 16 / (HIGH > 0 ? HIGH : 1);
        const u32 word = high[pair / PAIRS];
        return moved(word, at - HIGH * (pair % PAIRS));
    }
    // The pair of codes - zeros, or of floats, exact. `minus`: from `minus_of`.
    __device__ __forceinline__ u32 values_of(int pair, u32 minus) const {
        const u32 word = low[pair / 4];
        const int at = 4 * (pair % 4);
#if FLOATS && BITS == 8
        // Read as bf16, e4m3 is 2^120 times too small. Read as fp16, it is e4m3 / 256.
        constexpr int MANTISSA = HALF ? 7 : 4;
        // The low four bits are the mantissa and the lowest bit of the exponent.
        u32 value = and_or<0x00070007u << (MANTISSA + 4)>(high_of(pair, MANTISSA + 4), moved(word, MANTISSA - at) & (0x000f000fu << MANTISSA));
        value = and_or<SIGNS>(high_of(pair, 12), value);
        return HALF ? value : fma_pair(value, 0x77807780u, SIGNS);
#elif FLOATS
        // Exponent and mantissa of e2m1, read as those of bf16 or fp16, are 2^126 or 2^14 times too small.
        constexpr int MANTISSA = HALF ? 9 : 6;
        const u32 magnitude = moved(word, MANTISSA - at) & (0x00070007u << MANTISSA);
        return fma_pair(and_or<SIGNS>(word << (12 - at), magnitude), HALF ? 0x74007400u : 0x7e807e80u, SIGNS);
#else
        u32 above = above_of(word >> at);
#if BITS == 8
        // The low seven bits, minus 128 if the highest bit is set.
        const u32 upper = high_of(pair);
        above = and_or<0x00700070u>(upper, above);
        return fma_pair(and_or<0x00800080u>(upper, ABOVE), ONES | SIGNS, above);
#else
        if (HIGH > 0) above = and_or<((1u << HIGH) - 1) * 0x00100010u>(high_of(pair), above);
        return fma_pair(above, ONES, minus);
#endif
#endif
    }
};
// The scales and the zeros or mins of rows r and r + 8 of one group: the first word, and with ZEROS the next word.
struct Scales {
    float of[2], mins[2];
    u32 minus[2];
    __device__ __forceinline__ Scales() {}
    __device__ __forceinline__ Scales(u32 scales, u32 zeros) {
        of[0] = float_of_half(scales), of[1] = float_of_half(scales >> 16);
        if (MINS) mins[0] = float_of_half(zeros), mins[1] = float_of_half(zeros >> 16), zeros = 0;
        minus[0] = minus_of(__byte_perm(zeros, 0, 0x1010)), minus[1] = minus_of(__byte_perm(zeros, 0, 0x3232));
    }
};
// The scales of row `row` and row + 8 of a record in memory, `row` from 0 to 7, for a column.
__device__ __forceinline__ Scales scales_in_memory(const unsigned char* record, int row, int column) {
    const u32* const its = reinterpret_cast<const u32*>(record + CODES + row * LANE_SCALES) + column / GROUP * (1 + ZEROS);
    return Scales(its[0], ZEROS ? its[1] : MIDDLES);
}
// Scales as pairs of 16 bits. A pair of codes minus the middle code becomes values by one fma.
struct PairScales {
    u32 of[2], plus[2], minus[2];
    __device__ __forceinline__ PairScales() {}
    __device__ __forceinline__ PairScales(const Scales& scales) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            of[i] = pack(scales.of[i], scales.of[i]);
            minus[i] = scales.minus[i], plus[i] = SIGNS;  // plus -0: a product, rounded
            if (MINS) {
                const float of_middle = fmaf(1 << (BITS - 1), scales.of[i], scales.mins[i]);
                minus[i] = minus_of(MIDDLES), plus[i] = pack(of_middle, of_middle);
            }
        }
    }
};
// The values of a pair, rounded after the scale has been rounded.
__device__ __forceinline__ u32 scaled(const Words& words, int pair, const PairScales& scales) {
    return fma_pair(words.values_of(pair, scales.minus[pair % 2]), scales.of[pair % 2], scales.plus[pair % 2]);
}
// The values of a pair, rounded once.
__device__ __forceinline__ u32 rounded(const Words& words, int pair, const Scales& scales) {
    const u32 codes = words.values_of(pair, scales.minus[pair % 2]);
    const float scale = scales.of[pair % 2], min = scales.mins[pair % 2];
    return MINS ? pack(fmaf(low(codes), scale, min), fmaf(high(codes), scale, min)) : pack(low(codes) * scale, high(codes) * scale);
}
#endif
