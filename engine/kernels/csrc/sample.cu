// Chooses one token for each row of logits: temperature, min-p, top-k, top-p, and a draw by one random number. The result is the
// same in any batch and in any run. It depends on maxima, on sums in a fixed order, and on sums of whole numbers.
//   logits [B, V], rows logits_stride apart; fp32 or 16 bits (FP32). V below 2^19.
//   choices int [B, 8]: temperature, top_p, min_p (bits of fp32), top_k, the random number as 64 bits (low word, high word), slot,
//   whether the log-probability is wanted (0 or 1).
//   out int [B, 4]: token, 1 if the row is finite, log-probability at temperature 1 if wanted (bits of fp32), 0.  last int [num_slots].
//   VECTOR: rows begin at multiples of 16 bytes, and V is a multiple of 8 (fp32: of 4).
//   UNROLL: groups of tokens that a warp of `sample_sums` loads at once.
//
// A group is 256 neighbouring tokens. `sample_sums` reads the logits once. For each group it writes the largest logit m (NaN if one is),
// the sum of exp(x - m) if the log-probability is wanted, and the sum of exp((x - m) / temperature) if a token is drawn: sums float
// [B, 3, groups]. With many rows an exponential of each logit takes about half as long as reading it.
// `sample_draw` has a block for each row. From the groups' sums it knows the largest logit, the total mass, and the groups that it
// has to read: one for a greedy row, one for a row with only a temperature, and for other rows the groups whose largest token is
// likely enough.
// It copies the likely tokens of these groups into shared memory, and sorts them by p. Then the k-th likeliest token and the least
// likely token of the nucleus follow from running sums. It sorts them again by id. The drawn token is the first whose mass, together
// with that of all smaller ids, passes the random number.
// If there are too many likely tokens, it reads the whole row instead, once for each digit of a search (`threshold`) for the least
// likely token. Then it sums up the mass of each group, and draws first a group and then a token.
// p is relative to the likeliest token's, so it is in [0, 1], and the order of the bits is that of p. A token's mass is p * 2^38.
// Floor: the bytes of the logits, once.
#if FP32
typedef float Logit;
#else
typedef u16 Logit;
#endif
typedef unsigned long long u64;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int GROUP = 256;
constexpr float LOG2_E = 1.4426950408889634f, LARGEST = 3.402823466e38f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float minus_infinity() { return -infinity(); }

constexpr int CHUNK = VECTOR ? FP32 ? 4 : 8 : 1;  // neighbouring logits of a lane

// The place of a lane's value e in its group, if the group has LANES lanes.
template <int LANES = 32>
__device__ __forceinline__ int place_of(int lane, int e) {
    return (e / CHUNK * LANES + lane) * CHUNK + e % CHUNK;
}

// A lane's logits of a group; -inf beyond the end of the row.
template <int LANES = 32>
__device__ __forceinline__ void load_group(const Logit* row, int group, int lane, int vocab, float (&x)[GROUP / LANES]) {
#pragma unroll
    for (int e = 0; e < GROUP / LANES; e += CHUNK) {
        const int at = group * GROUP + place_of<LANES>(lane, e);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) x[e + i] = minus_infinity();
        if (at >= vocab) continue;
#if VECTOR && FP32
        const float4 four = *reinterpret_cast<const float4*>(row + at);
        x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
#elif VECTOR
        unpack(*reinterpret_cast<const Vec8*>(row + at), x + e);
#elif FP32
        x[e] = row[at];
#else
        x[e] = low(row[at]);
#endif
    }
}

// The factor of logits for exp2. It is neither infinite nor 0, because 0 * inf would be NaN.
__device__ __forceinline__ float scale_of(float temperature) { return fmaxf(fminf(LOG2_E / temperature, LARGEST), 1e-30f); }

__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a ? a : b != b ? b : fmaxf(a, b);
#endif
}

// The sum of exp2((x - base) * scale) over a group. With fewer lanes it is added up in the same order: a lane has the parts of V lanes.
template <int LANES>
__device__ __forceinline__ float group_sum(const float (&x)[GROUP / LANES], float base, float scale) {
    constexpr int V = 32 / LANES;
    float part[V] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
        for (int i = 0; i < V; ++i) part[i] += exp2_fast((x[(e / CHUNK * V + i) * CHUNK + e % CHUNK] - base) * scale);
#pragma unroll
    for (int step = V / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; ++i) part[i] += part[i + step];
    return lanes_sum<LANES>(part[0]);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
sample_sums(const Logit* __restrict__ logits, const int* __restrict__ choices, float* __restrict__ sums, i64 vocab_,
            i64 logits_stride) {
    overlap();
    // With few lanes for a group, fewer values go from lane to lane. Narrow loads need neighbouring lanes.
    constexpr int LANES = VECTOR ? 32 / UNROLL : 32, LOADS = UNROLL * LANES / 32;
    const int vocab = static_cast<int>(vocab_), groups = (vocab + GROUP - 1) / GROUP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES;
    const int first = (blockIdx.x * (SUM_THREADS / 32) + warp) * UNROLL + threadIdx.x % 32 / LANES;
    const Logit* row = logits + blockIdx.y * logits_stride;
    float x[LOADS][GROUP / LANES];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) load_group<LANES>(row, first + i, lane, vocab, x[i]);
    const float temperature = __int_as_float(choices[blockIdx.y * 8]);
    const bool draws = temperature > 0.f, wants_logprob = choices[blockIdx.y * 8 + 7] != 0;
    const float scale = scale_of(temperature);
    float* to = sums + static_cast<i64>(blockIdx.y) * 3 * groups;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int group = first + i;
        float most = x[i][0];
#pragma unroll
        for (int e = 1; e < GROUP / LANES; ++e) most = max_or_nan(most, x[i][e]);
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) most = max_or_nan(most, __shfl_xor_sync(ALL_LANES, most, step));
        const float base = most == minus_infinity() ? 0.f : most;
        const float scaled = draws ? group_sum<LANES>(x[i], base, scale) : 0.f;
        const float plain = !wants_logprob ? 0.f : temperature == 1.f ? scaled : group_sum<LANES>(x[i], base, LOG2_E);
        if (lane == 0 && group < groups) {
            to[group] = most;
            if (wants_logprob) to[groups + group] = plain;
            if (draws) to[2 * groups + group] = scaled;
        }
    }
}

constexpr int WARPS = DRAW_THREADS / 32;
constexpr int DIGIT = 10, BINS = 1 << DIGIT;
constexpr int EACH = BINS / DRAW_THREADS;  // bins of a thread
static_assert(EACH * DRAW_THREADS == BINS, "each thread has as many bins");
// A bin counts the parts of a weight apart, because an addition of 64 bits in shared memory is a loop, not an instruction.
// A row has fewer than 2^(32 - PART) tokens, so no sum of parts overflows. The last part takes all higher bits.
constexpr int PARTS = 3, PART = 13;
constexpr int MASS = PARTS * PART - 1;  // p 1 has the mass 2^MASS

struct Shared {
    u32 bins[PARTS][BINS];
    u64 items[MOST_CANDIDATES];  // tokens: the bits of p and the mirrored id; or the masses of groups
    u64 scratch[WARPS];
    u64 left, mass;
    int index, count;
};

// p * 2^MASS, rounded down, from the bits of p, which is at most 1.
__device__ __forceinline__ u64 mass_of(u32 key) {
    return static_cast<u64>((key & 0x7fffffu) | 0x800000u) << (MASS - 23) >> min(127 - (key >> 23), 63u);
}
// The mass, or 0 for a key below `least`. The key is selected before, because a branch for each token would take longer.
__device__ __forceinline__ u64 mass_from(u32 least, u32 key) { return mass_of(key >= least ? key : 0u); }
// As `mass_of`, for the sum of a group, which may be above 1.
__device__ __forceinline__ u64 group_mass_of(float sum) {
    const u32 key = __float_as_uint(sum);
    return key <= 127u << 23 ? mass_of(key) : static_cast<u64>((key & 0x7fffffu) | 0x800000u) << (MASS - 23 + (key >> 23) - 127);
}

// The sum over the block. Every thread gets the result.
template <class T, class Join>
__device__ __forceinline__ T reduce(T x, Join join, Shared& shared) {
    T* scratch = reinterpret_cast<T*>(shared.scratch);
    auto lanes = [&](int count) {
#pragma unroll
        for (int step = count / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, step));
    };
    lanes(32);
    __syncthreads();  // the results of an earlier call have been read
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[threadIdx.x % WARPS];
    lanes(WARPS);
    return x;
}
__device__ __forceinline__ u64 total_of(u64 x, Shared& shared) {
    return reduce(x, [](u64 a, u64 b) { return a + b; }, shared);
}

__device__ __forceinline__ u64 lanes_total(u64 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The sum of x over the lanes up to this one.
template <int LANES = 32>
__device__ __forceinline__ u64 lanes_up_to(u64 x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, x, step);
        if (threadIdx.x % 32 >= step) x += other;
    }
    return x;
}

struct Sums {
    u64 before, total;  // of the threads before this one, and of all
};
__device__ __forceinline__ Sums scan(u64 x, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 sum = lanes_up_to(x);
    __syncthreads();  // the results of an earlier call have been read
    if (lane == 31) shared.scratch[warp] = sum;
    __syncthreads();
    const u64 sums = lanes_up_to<WARPS>(lane < WARPS ? shared.scratch[lane] : 0);
    const u64 warps = __shfl_sync(ALL_LANES, sums, max(warp - 1, 0)), total = __shfl_sync(ALL_LANES, sums, WARPS - 1);
    return {(warp > 0 ? warps : 0) + sum - x, total};
}

struct Place {
    int index;
    u64 left, mass;  // the target less 1 and less the mass of all items before; the item's own mass
};
// The first of `count` items whose mass, together with that of all items before it, is at least `target(total)`, 1 to the total.
template <class Mass, class Target>
__device__ __forceinline__ Place find(int count, Mass mass, Target target, Shared& shared) {
    const int each = (count + DRAW_THREADS - 1) / DRAW_THREADS;
    const int first = threadIdx.x * each, end = min(first + each, count);
    u64 own = 0;
    for (int i = first; i < end; ++i) own += mass(shared.items[i]);
    const Sums sums = scan(own, shared);
    const u64 wanted = target(sums.total);
    u64 before = sums.before;
    if (before < wanted && wanted <= before + own) {  // in one thread
        int i = first;
        u64 last = mass(shared.items[i]);
        while (before + last < wanted) before += last, last = mass(shared.items[++i]);
        shared.index = i, shared.left = wanted - 1 - before, shared.mass = last;
    }
    __syncthreads();
    return {shared.index, shared.left, shared.mass};
}

// Sorts the first `count` items, the largest first: a bitonic sort, whose short steps are between the lanes of a warp.
__device__ __forceinline__ void sort(int count, Shared& shared) {
    u64* items = shared.items;
    int size = 32;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += DRAW_THREADS) items[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int run = 32; run <= size; run *= 2) {  // pairs of sorted runs of half this size become one
#pragma unroll 1
        for (int step = run / 2; step >= 32; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += DRAW_THREADS) {
                const int a = 2 * i - (i & (step - 1));
                const u64 x = items[a], y = items[a + step];
                if ((x < y) == ((a & run) == 0)) items[a] = y, items[a + step] = x;
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < size; i += DRAW_THREADS) {
            u64 x = items[i];
            auto merge = [&](int run, int width) __attribute__((always_inline)) {
#pragma unroll
                for (int step = width / 2; step > 0; step /= 2) {
                    const u64 other = __shfl_xor_sync(ALL_LANES, x, step);
                    if ((x < other) == (((i & step) == 0) == ((i & run) == 0))) x = other;
                }
            };
            if (run == 32) {
#pragma unroll
                for (int first = 2; first < 32; first *= 2) merge(first, first);
            }
            merge(run, 32);
            items[i] = x;
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void add(u32 (&bins)[PARTS][BINS], u32 bin, u64 weight) {
    constexpr u32 MASK = (1u << PART) - 1;
    const u32 parts[PARTS] = {static_cast<u32>(weight) & MASK, static_cast<u32>(weight >> PART) & MASK,
                              static_cast<u32>(weight >> 2 * PART)};
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
        if (parts[i] > 0) atomicAdd(&bins[i][bin], parts[i]);
}

// The largest key whose weight, together with that of all larger keys, is at least `target`. A target above the total is the total.
// `digits`: the number of leading digits to find, 1 to 3. The other digits of the result are 0. `each` calls its argument with a key
// and a weight for each of a thread's items. The total weight and `target` are above 0. There are fewer than 2^(32 - PART) items.
template <class Each>
__device__ __forceinline__ u32 threshold(Each each, u64 target, int digits, Shared& shared) {
    u64 above = 0;
    u32 prefix = 0;
    for (int digit = 0; digit < digits; ++digit) {
        const int shift = (2 - digit) * DIGIT;
        for (int i = threadIdx.x; i < PARTS * BINS; i += DRAW_THREADS) (&shared.bins[0][0])[i] = 0;
        __syncthreads();
        // A thread first adds up items of one bin that follow one another. Additions to one bin happen one after another, so a row
        // of equal tokens would take long.
        u32 bin = 0;
        u64 sum = 0;
        each([&](u32 key, u64 weight) __attribute__((always_inline)) {
            const u32 its = key >> shift & (BINS - 1);
            if (weight == 0 || key >> (shift + DIGIT) != prefix) return;
            if (its != bin) add(shared.bins, bin, sum), bin = its, sum = 0;
            sum += weight;
        });
        add(shared.bins, bin, sum);
        __syncthreads();
        const int top = BINS - 1 - EACH * static_cast<int>(threadIdx.x);  // a thread's bins, from the largest key down
        u64 weights[EACH], own = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            weights[i] = 0;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) weights[i] += static_cast<u64>(shared.bins[part][top - i]) << part * PART;
            own += weights[i];
        }
        const Sums sums = scan(own, shared);
        if (digit == 0) target = min(target, sums.total);
        u64 before = above + sums.before;
        if (before < target && target <= before + own) {  // in one thread
            int i = 0;
#pragma unroll
            for (int next = 1; next < EACH; ++next)
                if (i == next - 1 && before + weights[i] < target) before += weights[i], i = next;
            shared.index = top - i, shared.left = before;
        }
        __syncthreads();
        prefix = prefix << DIGIT | static_cast<u32>(shared.index);
        above = shared.left;
    }
    return prefix << (3 - digits) * DIGIT;
}

struct Row {
    const Logit* row;
    int vocab, groups;
    float largest, scale;

    __device__ __forceinline__ u32 key_of(float x) const { return __float_as_uint(exp2_fast((x - largest) * scale)); }
    // A number that no logit with this key, or with a larger key, is below. The margins cover the rounding of `key_of`.
    __device__ __forceinline__ float logit_of(u32 key) const {
        const float exponent = fmaxf(__log2f(__uint_as_float(key)), -126.f);  // smaller p are 0
        return __fadd_rd(largest, (exponent - 1e-4f) * (1.f + 1e-6f) / scale);
    }

    // Calls f with a group and a lane's logits of it, for a warp's share of all groups.
    template <class F>
    __device__ __forceinline__ void each_group(F f) const {
        const int lane = threadIdx.x % 32;
        for (int group = threadIdx.x / 32; group < groups; group += WARPS) {
            float x[8];
            load_group(row, group, lane, vocab, x);
            f(group, x);
        }
    }
    // The mass of a lane's tokens whose p is at least `least`.
    __device__ __forceinline__ u64 lane_mass(const float (&x)[8], u32 least) const {
        u64 mass = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) mass += mass_from(least, key_of(x[e]));
        return mass;
    }
};

struct Options {
    u32 least;     // bits of the least p that min-p keeps; 1, the smallest above 0, without min-p
    int top_k;     // 0: all
    float top_p;   // 1: all
    u64 total;     // the mass of all tokens, for top-p if neither min-p nor top-k removes any
    bool removes;  // min-p or top-k comes before top-p
    u64 uniform;

    // The target of the drawn token.
    __device__ __forceinline__ u64 drawn(u64 mass) const { return __umul64hi(uniform, mass) + 1; }
    // The target of the last token of the nucleus.
    __device__ __forceinline__ u64 nucleus(u64 mass) const {
        return max(static_cast<u64>(ceil(static_cast<double>(top_p) * static_cast<double>(mass))), static_cast<u64>(1));
    }
};

// The id of the token that is drawn among the first `count` items.
__device__ __forceinline__ int draw(int count, const Options& options, Shared& shared) {
    auto key_of = [](u64 item) { return static_cast<u32>(item >> 32); };
    u32 least = options.least;
    sort(count, shared);  // by p
    if (options.top_k > 0) least = max(least, key_of(shared.items[min(options.top_k, count) - 1]));
    if (options.top_p < 1.f) {
        auto mass = [&](u64 item) { return mass_from(least, key_of(item)); };
        auto target = [&](u64 total) { return min(options.nucleus(options.removes ? total : options.total), total); };
        least = max(least, key_of(shared.items[find(count, mass, target, shared).index]));
    }
    __syncthreads();  // `items` has been read
    for (int i = threadIdx.x; i < count; i += DRAW_THREADS) shared.items[i] = shared.items[i] << 32 | shared.items[i] >> 32;
    sort(count, shared);  // by id, the lowest first
    auto mass = [&](u64 item) { return mass_from(least, static_cast<u32>(item)); };
    const Place drawn = find(count, mass, [&](u64 total) { return options.drawn(total); }, shared);
    return static_cast<int>(~key_of(shared.items[drawn.index]));
}

// The group that is drawn. `items` has the groups' masses.
__device__ __forceinline__ Place drawn_group(int groups, const Options& options, Shared& shared) {
    __syncthreads();  // `items` has been written
    return find(groups, [](u64 mass) { return mass; }, [&](u64 total) { return options.drawn(total); }, shared);
}

// The id of the token at a place among the groups' masses. Only tokens with p of at least `least` have a mass.
__device__ __forceinline__ int pick(const Row& source, const Place& place, u32 least) {
    const int lane = threadIdx.x % 32;
    float x[8];
    load_group(source.row, place.index, lane, source.vocab, x);
    const u64 total = lanes_total(source.lane_mass(x, least));
    u64 target = place.left;
    if (place.mass != total) {  // the group's mass was approximate
        const double part = static_cast<double>(target) / static_cast<double>(place.mass);
        target = min(static_cast<u64>(part * static_cast<double>(total)), total - 1);
    }
    u64 base = 0;
    int found = -1;
#pragma unroll
    for (int run = 0; run < 8; run += CHUNK) {
        u64 mass[CHUNK], own = 0;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) own += mass[e] = mass_from(least, source.key_of(x[run + e]));
        const u64 sum = base + lanes_up_to(own);
        u64 passed = sum - own;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            if (passed <= target && target < passed + mass[e]) found = place_of(lane, run + e);  // true for one token
            passed += mass[e];
        }
        base = __shfl_sync(ALL_LANES, sum, 31);
    }
    return place.index * GROUP + __shfl_sync(ALL_LANES, found, __ffs(__ballot_sync(ALL_LANES, found >= 0)) - 1);
}

// The id of the token that is drawn from a row with more likely tokens than fit into `items`.
__device__ __forceinline__ int draw(const Row& source, const Options& options, Shared& shared) {
    u32 least = options.least;
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {  // the k-th likeliest token, then the last of the nucleus
        if (step == 0 ? options.top_k == 0 : !(options.top_p < 1.f)) continue;
        u64 target = options.top_k;
        if (step == 1) {
            u64 mass = options.total;
            if (options.removes) {
                mass = 0;
                source.each_group([&](int, const float(&x)[8]) { mass += source.lane_mass(x, least); });
                mass = total_of(mass, shared);
            }
            target = options.nucleus(mass);
        }
        auto items = [&](auto f) __attribute__((always_inline)) {
            source.each_group([&](int, const float(&x)[8]) __attribute__((always_inline)) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const u32 key = source.key_of(x[e]);
                    f(key, step == 0 ? key > 0 : mass_from(least, key));
                }
            });
        };
        least = max(least, threshold(items, target, 3, shared));
    }
    source.each_group([&](int group, const float(&x)[8]) {
        const u64 mass = lanes_total(source.lane_mass(x, least));
        if (threadIdx.x % 32 == 0) shared.items[group] = mass;
    });
    return pick(source, drawn_group(source.groups, options, shared), least);
}

// Makes items of the tokens with p of at least `least`, and of some just below, in any order. Returns their number. If it is larger
// than MOST_CANDIDATES, some are missing.
__device__ __forceinline__ int gather(const Row& source, const float* group_largest, u32 least, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    const float bound = source.logit_of(least);
    bool full = false;
    for (int start = 0; start < source.groups && !full; start += DRAW_THREADS) {
        const int mine = start + lane * WARPS + warp;  // neighbouring groups go to different warps
        u32 wanted = __ballot_sync(ALL_LANES, mine < source.groups && group_largest[mine] >= bound);
        for (; wanted != 0; wanted &= wanted - 1) {
            const int group = start + (__ffs(wanted) - 1) * WARPS + warp;
            float x[8];
            load_group(source.row, group, lane, source.vocab, x);
            u32 hits[8];
            int count = 0, at = 0;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                hits[e] = __ballot_sync(ALL_LANES, x[e] >= bound);
                count += __popc(hits[e]);
            }
            if (lane == 0) at = atomicAdd(&shared.count, count);
            at = __shfl_sync(ALL_LANES, at, 0);
            full = at + count > MOST_CANDIDATES;
            if (full) break;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (hits[e] == 0) continue;
                if (hits[e] >> lane & 1) {
                    const u32 id = static_cast<u32>(group * GROUP + place_of(lane, e));
                    shared.items[at + __popc(hits[e] & ((1u << lane) - 1))] = static_cast<u64>(source.key_of(x[e])) << 32 | ~id;
                }
                at += __popc(hits[e]);
            }
        }
    }
    __syncthreads();
    return shared.count;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2)
sample_draw(const Logit* __restrict__ logits, const int* __restrict__ choices, const float* __restrict__ sums,
            int* __restrict__ last, int* __restrict__ out, i64 vocab_, i64 logits_stride, i64 num_slots) {
    overlap();
    __shared__ Shared shared;
    const int vocab = static_cast<int>(vocab_), groups = (vocab + GROUP - 1) / GROUP;
    const int lane = threadIdx.x % 32;
    const Logit* row = logits + blockIdx.x * logits_stride;
    const float* largest = sums + static_cast<i64>(blockIdx.x) * 3 * groups;  // [groups], as the next two
    const float *plain = largest + groups, *scaled = plain + groups;
    const int* choice = choices + blockIdx.x * 8;
    const float temperature = __int_as_float(choice[0]), top_p = __int_as_float(choice[1]), min_p = __int_as_float(choice[2]);
    const int top_k = choice[3];
    const bool wants_logprob = choice[7] != 0;
    const u64 uniform = static_cast<u64>(static_cast<u32>(choice[5])) << 32 | static_cast<u32>(choice[4]);

    float most = minus_infinity();
    bool bad = false;
    for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) {
        most = fmaxf(most, largest[group]);
        bad = bad || !(largest[group] < infinity());
    }
    most = reduce(most, [](float a, float b) { return fmaxf(a, b); }, shared);
    bad = __syncthreads_or(bad) || most == minus_infinity();
    int token = 0;
    float logprob = 0.f;
    if (!bad) {
        if (!(temperature > 0.f)) {
            int first = groups;  // the first group that has the largest logit
            for (int group = threadIdx.x; group < groups; group += DRAW_THREADS)
                if (largest[group] == most) first = min(first, group);
            first = reduce(first, [](int a, int b) { return min(a, b); }, shared);
            float x[8];
            load_group(row, first, lane, vocab, x);  // every warp finds the same
            int place = GROUP - 1;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (x[e] == most) place = min(place, place_of(lane, e));
#pragma unroll
            for (int step = 16; step > 0; step /= 2) place = min(place, __shfl_xor_sync(ALL_LANES, place, step));
            token = first * GROUP + place;
        } else {
            const bool has_k = top_k > 0 && top_k < vocab, has_p = top_p < 1.f, has_min = min_p > 0.f;
            Row source{row, vocab, groups, most, scale_of(temperature)};
            auto likeliest = [&](int group) { return source.key_of(largest[group]); };
            auto group_mass = [&](int group) { return group_mass_of(scaled[group] * __uint_as_float(likeliest(group))); };
            Options options{has_min ? __float_as_uint(fminf(min_p, 1.f)) : 1u, has_k ? top_k : 0, top_p, 0,
                            has_k || has_min, uniform};
            if (!has_k && !has_p && !has_min) {
                for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) shared.items[group] = group_mass(group);
                const Place place = drawn_group(groups, options, shared);
                source.largest = largest[place.index];  // the group may have only tokens with mass 0 beside the row's likeliest
                token = pick(source, place, options.least);
            } else {
                // The first p comes from the groups' sums. The k likeliest tokens are at least as likely as the k-th of the
                // groups' likeliest tokens. For top-p alone this p is a guess: the groups whose likeliest token is above it have
                // a little more mass than needed.
                u32 least = options.least;
                u64 enough = options.top_k;
                if (!options.removes) {
                    u64 total = 0;
                    for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) total += group_mass(group);
                    options.total = total_of(total, shared);
                    enough = options.nucleus(options.total);
                }
                if (has_k || !has_min) {
                    auto items = [&](auto f) __attribute__((always_inline)) {
                        for (int group = threadIdx.x; group < groups; group += DRAW_THREADS)
                            f(likeliest(group), has_k ? likeliest(group) > 0 : group_mass(group));
                    };
                    const u64 target = has_k ? enough : enough + (options.total - enough) / 2 + 1;
                    least = max(least, threshold(items, target, 1, shared));
                }
                int count;
                while (true) {
                    count = gather(source, largest, least, shared);
                    if (count > MOST_CANDIDATES || least <= options.least) break;
                    u64 gathered = static_cast<u64>(count);
                    if (!has_k) {
                        gathered = 0;
                        for (int i = threadIdx.x; i < count; i += DRAW_THREADS)
                            gathered += mass_of(static_cast<u32>(shared.items[i] >> 32));
                        gathered = total_of(gathered, shared);
                    }
                    if (gathered >= enough) break;
                    const u32 sixteen = 4u << 23;  // in the bits of p: p / 16
                    least = least > options.least + sixteen ? least - sixteen : options.least;
                }
                token = count > MOST_CANDIDATES ? draw(source, options, shared) : draw(count, options, shared);
            }
            token = min(token, vocab - 1);
        }
        if (wants_logprob) {
            float sum = 0.f;
            for (int group = threadIdx.x; group < groups; group += DRAW_THREADS)
                sum += plain[group] * exp2_fast((largest[group] - most) * LOG2_E);
            sum = reduce(sum, [](float a, float b) { return a + b; }, shared);
#if FP32
            const float x = row[token];
#else
            const float x = low(row[token]);
#endif
            logprob = x - most - logf(sum);
        }
    }
    if (threadIdx.x == 0) {
        int* result = out + blockIdx.x * 4;
        result[0] = token;
        result[1] = !bad;
        result[2] = __float_as_int(logprob);
        result[3] = 0;
        const int slot = choice[6];
        if (slot >= 0 && slot < num_slots) last[slot] = token;
    }
}
