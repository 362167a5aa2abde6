// Chooses one token for each row of logits: temperature, min-p, top-k, top-p, and a draw by one random number. The result is the
// same in any batch and in any run. It depends on maxima and on sums of whole numbers, whose order does not matter.
//   logits [B, V], rows logits_stride apart; fp32 or 16 bits (FP32). V below 2^23.
//   choices int [B, 8]: temperature, top_p, min_p (bits of fp32), top_k, the random number as 64 bits (low word, high word), slot, 0.
//   out int [B, 4]: token, 1 if the row is finite, log-probability at temperature 1 (bits of fp32), 0.  last int [num_slots].
//   VECTOR: rows begin at multiples of 16 bytes, and V is a multiple of 8 (fp32: of 4).
//   UNROLL: groups of tokens that a warp of `sample_sums` loads at once.
//
// A group is 256 neighbouring tokens. `sample_sums` reads the logits once. For each group it writes the largest logit m and the sums
// of exp(x - m) and of exp((x - m) / temperature): sums float [B, 3, groups]. A NaN or +inf makes a sum NaN.
// `sample_draw` has a block for each row. From the groups' sums it knows the largest logit, the total mass, and the groups that it
// has to read: one for a greedy row, one for a row with only a temperature, and for other rows the groups whose largest token is
// likely enough.
// It copies the likely tokens of these groups into shared memory. If there are too many, it reads the whole row instead, once for
// each digit of a search.
// One search (`threshold`) finds the k-th likeliest token, the least likely token of the nucleus, and the drawn token. The drawn
// token is the first whose mass, together with that of all smaller ids, passes the random number. The search counts digits of 10
// bits.
// p is relative to the likeliest token's, so it is in [0, 1], and the order of the bits is that of p. A token's mass is p * 2^40.
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

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The place of a lane's value e in its group, in the distribution of `load_group`.
__device__ __forceinline__ int place_of(int lane, int e) {
    if (!VECTOR) return e * 32 + lane;
    return FP32 ? e / 4 * 128 + lane * 4 + e % 4 : lane * 8 + e;
}

// Eight logits a lane; -inf beyond the end of the row.
__device__ __forceinline__ void load_group(const Logit* row, int group, int lane, int vocab, float (&x)[8]) {
    const int first = group * GROUP;
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = minus_infinity();
#if VECTOR && FP32
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = first + place_of(lane, 4 * i);
        if (at < vocab) {
            const float4 four = *reinterpret_cast<const float4*>(row + at);
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    }
#elif VECTOR
    const int at = first + lane * 8;
    if (at < vocab) unpack(*reinterpret_cast<const Vec8*>(row + at), x);
#else
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int at = first + place_of(lane, e);
#if FP32
        if (at < vocab) x[e] = row[at];
#else
        if (at < vocab) x[e] = low(row[at]);
#endif
    }
#endif
}

// The factor of logits for exp2. It is neither infinite nor 0, because 0 * inf would be NaN.
__device__ __forceinline__ float scale_of(float temperature) { return fmaxf(fminf(LOG2_E / temperature, LARGEST), 1e-30f); }

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
sample_sums(const Logit* __restrict__ logits, const int* __restrict__ choices, float* __restrict__ sums, i64 vocab_,
            i64 logits_stride) {
    overlap();
    const int vocab = static_cast<int>(vocab_), groups = (vocab + GROUP - 1) / GROUP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * (SUM_THREADS / 32 * UNROLL) + warp;
    const Logit* row = logits + blockIdx.y * logits_stride;
    float x[UNROLL][8];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) load_group(row, first + i * (SUM_THREADS / 32), lane, vocab, x[i]);
    const float temperature = __int_as_float(choices[blockIdx.y * 8]);
    const bool two_sums = temperature > 0.f && temperature != 1.f;
    const float scale = scale_of(temperature);
    float* to = sums + static_cast<i64>(blockIdx.y) * 3 * groups;
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
        const int group = first + i * (SUM_THREADS / 32);
        if (group >= groups) return;  // a warp returns as a whole
        float most = x[i][0];
#pragma unroll
        for (int e = 1; e < 8; ++e) most = fmaxf(most, x[i][e]);  // passes over NaN
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        const float base = most == minus_infinity() ? 0.f : most;
        float plain = 0.f, scaled = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) plain += exp2_fast((x[i][e] - base) * LOG2_E);
        plain = lanes_sum<32>(plain);
        if (two_sums) {
#pragma unroll
            for (int e = 0; e < 8; ++e) scaled += exp2_fast((x[i][e] - base) * scale);
            scaled = lanes_sum<32>(scaled);
        }
        if (lane == 0) {
            to[group] = most;
            to[groups + group] = plain;
            to[2 * groups + group] = two_sums ? scaled : plain;
        }
    }
}

constexpr int WARPS = DRAW_THREADS / 32;
constexpr int DIGIT = 10, BINS = 1 << DIGIT;
constexpr int EACH = BINS / DRAW_THREADS;  // bins of a thread
static_assert(EACH * DRAW_THREADS == BINS, "each thread has as many bins");

struct Shared {
    u64 bins[BINS];
    u64 scratch[WARPS];
    u64 above;
    int bin, count;
    u32 keys[MOST_CANDIDATES], ids[MOST_CANDIDATES];
};

// p * 2^40, rounded down; p is below 2^17.
__device__ __forceinline__ u64 mass_of(float p) {
    const u32 bits = __float_as_uint(p);
    const int shift = static_cast<int>(bits >> 23) - 110;
    const u64 digits = (bits & 0x7fffffu) | 0x800000u;
    return shift >= 0 ? digits << shift : shift > -24 ? digits >> -shift : 0;
}
__device__ __forceinline__ u64 mass_of(u32 key) { return mass_of(__uint_as_float(key)); }

// The sum over the block. Every thread gets the result.
template <class T, class Join>
__device__ __forceinline__ T reduce(T x, Join join, Shared& shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, step));
    T* scratch = reinterpret_cast<T*>(shared.scratch);
    __syncthreads();  // the results of an earlier call have been read
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    for (int i = 1; i < WARPS; ++i) x = join(x, scratch[i]);
    return x;
}
__device__ __forceinline__ u64 total_of(u64 x, Shared& shared) {
    return reduce(x, [](u64 a, u64 b) { return a + b; }, shared);
}

// Adds to a bin. Every lane of the warp calls it. With equal tokens many lanes add to one bin, and atomic additions to one bin
// happen one after another. So the lanes of the first two bins are added up before.
__device__ __forceinline__ void add(u64* bins, u32 bin, u64 weight) {
    const int lane = threadIdx.x % 32;
    bool pending = weight > 0;
#pragma unroll
    for (int round = 0; round < 2; ++round) {
        const u32 waiting = __ballot_sync(ALL_LANES, pending);
        if (waiting == 0) return;
        const int leader = __ffs(waiting) - 1;
        const u32 leading = __shfl_sync(ALL_LANES, bin, leader);  // outside of &&, which not every lane would evaluate
        const bool same = pending && bin == leading;
        if (__popc(__ballot_sync(ALL_LANES, same)) < 4) continue;
        u64 sum = same ? weight : 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (lane == leader) atomicAdd(&bins[bin], sum);
        pending = pending && !same;
    }
    if (pending) atomicAdd(&bins[bin], weight);
}

struct Found {
    u32 key;
    u64 above;  // the weight of all larger keys
};

// The largest key whose weight, together with that of all larger keys, is at least `target`. A target above the total is the total.
// Keys are below 2^(shift + 10); `shift` is a multiple of 10. `each` calls its argument with a key and a weight for each item. All
// lanes of a warp make the call together, with weight 0 if a lane has no item. The total weight and `target` are above 0.
template <class Each>
__device__ __forceinline__ Found threshold(Each each, u64 target, int shift, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 above = 0;
    u32 prefix = 0;
    for (bool is_first = true; shift >= 0; shift -= DIGIT, is_first = false) {
        for (int i = threadIdx.x; i < BINS; i += DRAW_THREADS) shared.bins[i] = 0;
        __syncthreads();
        each([&](u32 key, u64 weight) __attribute__((always_inline)) {
            add(shared.bins, key >> shift & (BINS - 1), key >> (shift + DIGIT) == prefix ? weight : 0);
        });
        __syncthreads();
        const int top = BINS - 1 - EACH * static_cast<int>(threadIdx.x);  // a thread's bins, from the largest key down
        u64 own = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) own += shared.bins[top - i];
        u64 sum = own;  // of all lanes up to this one
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(ALL_LANES, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) shared.scratch[warp] = sum;
        __syncthreads();
        u64 before = above, total = above;
        for (int i = 0; i < WARPS; ++i) {
            if (i < warp) before += shared.scratch[i];
            total += shared.scratch[i];
        }
        if (is_first) target = min(target, total);
        before += sum - own;
        if (before < target && target <= before + own) {  // in one thread
            int bin = top;
#pragma unroll
            for (int i = 0; i < EACH - 1; ++i)
                if (bin == top - i && before + shared.bins[bin] < target) before += shared.bins[bin--];
            shared.bin = bin;
            shared.above = before;
        }
        __syncthreads();
        prefix = prefix << DIGIT | static_cast<u32>(shared.bin);
        above = shared.above;
    }
    __syncthreads();  // `bins` and `scratch` may be used again
    return {prefix, above};
}

// The source of a row's tokens. `each` calls its argument with the bits of p and the id. All lanes of a warp make the call
// together, with p 0 if a lane has no token.
struct Row {
    const Logit* row;
    int vocab, groups;
    float largest, scale;

    __device__ __forceinline__ u32 key_of(float x) const { return __float_as_uint(exp2_fast((x - largest) * scale)); }
    template <class F>
    __device__ __forceinline__ void each(F f) const {
        const int lane = threadIdx.x % 32;
        for (int group = threadIdx.x / 32; group < groups; group += WARPS) {
            float x[8];
            load_group(row, group, lane, vocab, x);
#pragma unroll
            for (int e = 0; e < 8; ++e) f(key_of(x[e]), static_cast<u32>(group * GROUP + place_of(lane, e)));
        }
    }
};
struct List {
    const u32 *keys, *ids;
    int count;

    template <class F>
    __device__ __forceinline__ void each(F f) const {
        for (int start = threadIdx.x / 32 * 32; start < count; start += DRAW_THREADS) {
            const int i = start + threadIdx.x % 32;
            f(i < count ? keys[i] : 0u, i < count ? ids[i] : 0u);
        }
    }
};

struct Options {
    u32 least;     // bits of the least p that min-p keeps; 1, the smallest above 0, without min-p
    u64 top_k;     // 0: all
    float top_p;   // 1: all
    u64 total;     // the mass of all tokens, for top-p if neither min-p nor top-k removes any
    bool removes;  // min-p or top-k comes before top-p
    u64 uniform;
};

__device__ __forceinline__ u64 share_of(float part, u64 mass) {
    return static_cast<u64>(ceil(static_cast<double>(part) * static_cast<double>(mass)));
}

// The id of the token that is drawn from `source`.
template <class Source>
__device__ __forceinline__ int draw(const Source& source, const Options& options, int vocab, Shared& shared) {
    const int id_shift = vocab > 1 << 20 ? 20 : vocab > 1 << 10 ? 10 : 0;
    const u32 mirror = (1u << (id_shift + DIGIT)) - 1;  // the lowest id has the largest key
    u32 least = options.least;
    int id = 0;
    // The k-th likeliest token, then the last of the nucleus, then the token drawn.
#pragma unroll 1
    for (int step = options.top_k > 0 ? 0 : options.top_p < 1.f ? 1 : 2; step < 3; ++step) {
        if (step == 1 && !(options.top_p < 1.f)) continue;
        u64 target = options.top_k;
        if (step > 0) {
            u64 mass = options.total;
            if (step == 2 || options.removes) {
                mass = 0;
                source.each([&](u32 key, u32) __attribute__((always_inline)) { mass += key >= least ? mass_of(key) : 0; });
                mass = total_of(mass, shared);
            }
            target = step == 2 ? __umul64hi(options.uniform, mass) + 1 : max(share_of(options.top_p, mass), static_cast<u64>(1));
        }
        auto items = [&](auto f) __attribute__((always_inline)) {
            source.each([&](u32 key, u32 id) __attribute__((always_inline)) {
                f(step == 2 ? mirror - min(id, mirror) : key, step == 0 ? key > 0 : key >= least ? mass_of(key) : 0);
            });
        };
        const u32 found = threshold(items, target, step == 2 ? id_shift : 20, shared).key;
        if (step == 2)
            id = static_cast<int>(mirror - found);
        else
            least = max(least, found);
    }
    return id;
}

// Copies the tokens with p of at least `least` into shared memory, in any order. Returns their number, which may be larger than
// MOST_CANDIDATES: then the copies are of no use.
__device__ __forceinline__ int gather(const Row& source, const float* group_largest, u32 least, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    for (int start = 0; start < source.groups; start += DRAW_THREADS) {
        const int mine = start + lane * WARPS + warp;  // neighbouring groups go to different warps
        u32 wanted = __ballot_sync(ALL_LANES, mine < source.groups && source.key_of(group_largest[mine]) >= least);
        for (; wanted != 0; wanted &= wanted - 1) {
            const int group = start + (__ffs(wanted) - 1) * WARPS + warp;
            float x[8];
            load_group(source.row, group, lane, source.vocab, x);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const u32 key = source.key_of(x[e]), hits = __ballot_sync(ALL_LANES, key >= least);
                if (hits == 0) continue;
                int at = 0;
                if (lane == 0) at = atomicAdd(&shared.count, __popc(hits));
                at = __shfl_sync(ALL_LANES, at, 0) + __popc(hits & ((1u << lane) - 1));
                if (key >= least && at < MOST_CANDIDATES) {
                    shared.keys[at] = key;
                    shared.ids[at] = static_cast<u32>(group * GROUP + place_of(lane, e));
                }
            }
        }
    }
    __syncthreads();
    return shared.count;
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1)
sample_draw(const Logit* __restrict__ logits, const int* __restrict__ choices, const float* __restrict__ sums,
            int* __restrict__ last, int* __restrict__ out, i64 vocab_, i64 logits_stride, i64 num_slots) {
    overlap();
    __shared__ Shared shared;
    const int vocab = static_cast<int>(vocab_), groups = (vocab + GROUP - 1) / GROUP;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Logit* row = logits + blockIdx.x * logits_stride;
    const float* largest = sums + static_cast<i64>(blockIdx.x) * 3 * groups;  // [groups], as the next two
    const float *plain = largest + groups, *scaled = plain + groups;
    const int* choice = choices + blockIdx.x * 8;
    const float temperature = __int_as_float(choice[0]), top_p = __int_as_float(choice[1]), min_p = __int_as_float(choice[2]);
    const int top_k = choice[3];
    const u64 uniform = static_cast<u64>(static_cast<u32>(choice[5])) << 32 | static_cast<u32>(choice[4]);

    float most = minus_infinity();
    bool bad = false;
    for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) {
        most = fmaxf(most, largest[group]);
        bad = bad || !(plain[group] >= 0.f);
    }
    most = reduce(most, [](float a, float b) { return fmaxf(a, b); }, shared);
    bad = __syncthreads_or(bad) || most == minus_infinity();
    int token = 0;
    float logprob = 0.f;
    if (!bad) {
        float sum = 0.f;
        int first = groups;  // the first group that has the largest logit
        for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) {
            sum += plain[group] * exp2_fast((largest[group] - most) * LOG2_E);
            if (largest[group] == most) first = min(first, group);
        }
        sum = reduce(sum, [](float a, float b) { return a + b; }, shared);
        if (!(temperature > 0.f)) {
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
            const bool keeps_all = !has_k && !has_p && !has_min;
            Row source{row, vocab, groups, most, scale_of(temperature)};
            auto likeliest = [&](int group) { return source.key_of(largest[group]); };
            auto group_mass = [&](int group) { return mass_of(scaled[group] * __uint_as_float(likeliest(group))); };
            u64 total = 0;
            for (int group = threadIdx.x; group < groups; group += DRAW_THREADS) total += group_mass(group);
            total = total_of(total, shared);
            Options options{has_min ? __float_as_uint(fminf(min_p, 1.f)) : 1u, has_k ? static_cast<u64>(top_k) : 0, top_p, total,
                            has_k || has_min, uniform};
            // A search among the groups. If all tokens are kept, it finds the group of the drawn token. Otherwise it finds a p to
            // begin with. The k likeliest tokens are at least as likely as the k-th of the groups' likeliest tokens. For top-p
            // alone this p is a guess: the groups whose likeliest token is above it have a little more mass than needed.
            u64 target = __umul64hi(uniform, total), enough = 0;
            if (has_k)
                enough = options.top_k;
            else if (has_p)
                enough = share_of(top_p, total);
            Found found{options.least, 0};
            if (keeps_all || has_k || !has_min) {
                const int shift = keeps_all ? (groups > BINS ? 20 : 0) : 20;
                const u32 mirror = (1u << (shift + DIGIT)) - 1;
                auto items = [&](auto f) __attribute__((always_inline)) {
                    for (int start = warp * 32; start < groups; start += DRAW_THREADS) {
                        const int group = start + lane;
                        const bool valid = group < groups;
                        const u32 key = valid ? likeliest(group) : 0;
                        const u64 weight = valid ? has_k ? key > 0 : group_mass(group) : 0;
                        f(keeps_all ? mirror - min(static_cast<u32>(group), mirror) : key, weight);
                    }
                };
                found = threshold(items, keeps_all ? target + 1 : has_k ? enough : enough + (total - enough) / 2 + 1, shift, shared);
                if (keeps_all) found.key = mirror - found.key;
            }
            int first_id = 0, count = MOST_CANDIDATES + 1;
            if (keeps_all) {
                // The rest of the random number is a share of the group's mass.
                const int group = static_cast<int>(found.key);
                first_id = group * GROUP;
                const double left = static_cast<double>(target - min(target, found.above)) / static_cast<double>(group_mass(group));
                options.uniform = static_cast<u64>(left * 18446744073709551616.0);  // saturates
                source = Row{row + first_id, min(GROUP, vocab - first_id), 1, largest[group], source.scale};
            } else {
                u32 least = max(options.least, found.key);
                while (true) {
                    count = gather(source, largest, least, shared);
                    if (count > MOST_CANDIDATES || least <= options.least) break;
                    u64 gathered = static_cast<u64>(count);
                    if (!has_k) {
                        gathered = 0;
                        for (int i = threadIdx.x; i < count; i += DRAW_THREADS) gathered += mass_of(shared.keys[i]);
                        gathered = total_of(gathered, shared);
                    }
                    if (gathered >= enough) break;
                    const u32 sixteen = 4u << 23;  // in the bits of p: p / 16
                    least = least > options.least + sixteen ? least - sixteen : options.least;
                }
            }
            token = count > MOST_CANDIDATES ? first_id + draw(source, options, source.vocab, shared)
                                            : draw(List{shared.keys, shared.ids, count}, options, vocab, shared);
            token = min(token, vocab - 1);
        }
        float x;
#if FP32
        x = row[token];
#else
        x = low(row[token]);
#endif
        logprob = x - most - logf(sum);
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
