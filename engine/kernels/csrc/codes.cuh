// W [N, K] in 4 bits: the kernels' format of records, for sources that define GROUP, ZEROS and MINS.
//   Records are [N / 16, K / CHUNK]. The records of 16 rows follow one another along K. A record is
//   16 rows x CHUNK columns: codes, then scales. A value is (code - zero) * scale, or with MINS code * scale + min.
//     codes [CHUNK / 64][32 lanes][4 words]: the words of a lane are its A operands of four successive m16n8k16. Nibble
//     i + 4 e of a word is register i (row lane / 4 + i % 2 * 8, columns lane % 4 * 2 + i / 2 * 8), element e.
//     scales [8][CHUNK / GROUP][1 + ZEROS][2]: of rows r and r + 8, the scales in fp16, then the zeros as 16-bit whole numbers,
//     or the mins in fp16.
//   GROUP: columns that share a scale, 32, 64 or 128.  ZEROS: 0 if every zero is 8.  MINS: 1 if there are mins instead of zeros.
#ifdef ZEROS
static_assert(GROUP == 32 || GROUP == 64 || GROUP == 128, "a record has whole groups");
static_assert(ZEROS || !MINS, "mins take the place of zeros");
constexpr int CHUNK = GROUP > 64 ? GROUP : 64, HALVES = CHUNK / 64, GROUPS = CHUNK / GROUP;
constexpr int LANE_SCALES = 4 * GROUPS * (1 + ZEROS);  // bytes
constexpr int CODES = 512 * HALVES, RECORD = CODES + 8 * LANE_SCALES;
__device__ __forceinline__ u32 load_word(u32 shared) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared));
    return x;
}
__device__ __forceinline__ void load_words(u32 (&x)[4], u32 shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared));
}
__device__ __forceinline__ float float_of_half(u32 bits) {  // the low 16 bits
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(bits));
    return x;
}
constexpr u32 ABOVE = HALF ? 0x64006400u : 0x43004300u;     // a pair of 1024 or 128: the lowest bit of the mantissa is worth 1
constexpr u32 ONES = HALF ? 0x3c003c00u : 0x3f803f80u;
constexpr u32 SIGNS = 0x80008000u;
// The pair of -(ABOVE + zero) for one zero in both halves of `zeros`.
__device__ __forceinline__ u32 minus_of(u32 zeros) { return zeros | ABOVE | SIGNS; }
// The pair of ABOVE + code: bits 0 to 3 and 16 to 19 of `codes`.
__device__ __forceinline__ u32 above_of(u32 codes) {
    u32 above;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(above) : "r"(codes), "r"(0x000f000fu), "r"(ABOVE));
    return above;
}
// A pair of codes - zeros, exact. `minus`: from `minus_of`.
__device__ __forceinline__ u32 codes_of(u32 codes, u32 minus) {
    const u32 above = above_of(codes);
    u32 pair;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(above), "r"(ONES), "r"(minus));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(above), "r"(ONES), "r"(minus));
#endif
    return pair;
}
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
constexpr u32 EIGHTS = 0x00080008u;
#endif
