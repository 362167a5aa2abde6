// Functions that the kernels share. For sm_90 and later: barriers in shared memory, TMA, and the shared memory of a cluster.
// For all chips: the overlap of kernels, which does nothing before sm_90, and a transpose.

// Waits until the previous kernel has ended. Kernels overlap: before this call a kernel may do only work that does not depend on
// the previous kernel. Every thread makes this call. Before sm_90 it does nothing.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u32 opaque[32];
};

__device__ __forceinline__ u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

__device__ __forceinline__ void barrier_init(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals));
}
// The thread that has initialised barriers calls this before other threads, TMA, or other blocks of the cluster use the barriers.
__device__ __forceinline__ void barriers_are_there() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" ::"r"(
            address(&barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void fetch(u32 shared, const TensorMap& map, int column, int row, u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(address(&barrier))
        : "memory");
}
__device__ __forceinline__ void fetch(u32 shared, const TensorMap& map, int column, int head, int token, u64& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
        "l"(&map), "r"(column), "r"(head), "r"(token), "r"(address(&barrier))
        : "memory");
}

// Copies consecutive bytes, a multiple of 16. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 bytes, u64& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
                 "r"(bytes), "r"(address(&barrier))
                 : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Returns the address in block `rank` of the cluster that corresponds to `shared` in this block.
__device__ __forceinline__ u32 address_in(u32 rank, u32 shared) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}
// Not .aligned: the threads of a warp may arrive at different times.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The next of LENGTH stages, and the parity of the phase to wait for at the barrier of this stage.
template <int LENGTH>
struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == LENGTH) stage = 0, parity ^= 1;
    }
};

// Arrives at the barrier of block `rank` of the cluster, with the scope of a block. Cluster scope would wait for all of memory.
// It is not needed: only TMA and wgmma access the data that another block fetches for this one. A block fetches its scales itself.
__device__ __forceinline__ void arrive_at(u64& barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, address(&barrier))) : "memory");
}

// Fetches all boxes of a block into its ring, in one thread. W does not depend on the kernel before, so the ring fills with W before
// that kernel has ended. `fetch_w` waits for the stage and announces the bytes of both operands.
template <int LENGTH, typename FetchW, typename FetchX>
__device__ __forceinline__ void fetch_all(Ring<LENGTH>& ring, int steps, FetchW fetch_w, FetchX fetch_x) {
    const int ahead = min(LENGTH, steps);
    for (int step = 0; step < ahead; ++step) {
        fetch_w(step);
        ring.advance();
    }
    wait_for_previous();
    for (int step = 0; step < ahead; ++step) fetch_x(step, step);
    for (int step = ahead; step < steps; ++step) {
        fetch_w(step);
        fetch_x(ring.stage, step);
        ring.advance();
    }
}

// Writes x to the place in block `rank` of the cluster that corresponds to `to` in this block. The barrier of block `rank` counts
// the bytes.
__device__ __forceinline__ void send_to(int rank, float4& to, const float4& x, u64& barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_in(rank, address(&to))),
                 "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)),
                 "r"(address_in(rank, address(&barrier)))
                 : "memory");
}

__device__ __forceinline__ void send_to(int rank, float2& to, const float2& x, u64& barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in(rank, address(&to))),
                 "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(address_in(rank, address(&barrier)))
                 : "memory");
}

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Returns the wgmma descriptor of a matrix. Its rows have 128 bytes and are swizzled in groups of eight.
__device__ __forceinline__ u64 descriptor(u32 shared) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, GROUP_OF_8 = (1024ull >> 4) << 32;
    return SWIZZLE_128 | GROUP_OF_8 | (shared >> 4);
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Lists of registers for wgmma's text.
#define REGS_4 "%0, %1, %2, %3"
#define REGS_8 REGS_4 ", %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32 REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_48 REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_64 REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#ifdef OPERANDS
// The parts of wgmma's text that depend on the operands, and the type of its sums: 0 bf16, 1 fp16, 2 e4m3, 3 int8, 4 bf16 with A
// in registers.
#if OPERANDS == 3
typedef int Sum;
#define KIND "k32.s32.s8.s8"
#define TAIL ""
#define OUT_1(x) "+r"(x)
#else
typedef float Sum;
#if OPERANDS == 2
#define KIND "k32.f32.e4m3.e4m3"
#define TAIL ", 1, 1"
#elif OPERANDS == 1
#define KIND "k16.f32.f16.f16"
#define TAIL ", 1, 1, 0, 0"
#elif OPERANDS == 4
#define KIND "k16.f32.bf16.bf16"
#define TAIL ", 1, 1, 0"
#else
#define KIND "k16.f32.bf16.bf16"
#define TAIL ", 1, 1, 0, 0"
#endif
#define OUT_1(x) "+f"(x)
#endif
#if OPERANDS == 4
typedef const u32 (&Operand)[4];
#define IN_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#else
typedef u64 Operand;  // a descriptor
#define IN_A "l"(a)
#endif
#define OUT_4(x, i) OUT_1(x[i]), OUT_1(x[i + 1]), OUT_1(x[i + 2]), OUT_1(x[i + 3])
#define OUT_16(x, i) OUT_4(x, i), OUT_4(x, i + 4), OUT_4(x, i + 8), OUT_4(x, i + 12)
#define OUT_64(x, i) OUT_16(x, i), OUT_16(x, i + 16), OUT_16(x, i + 32), OUT_16(x, i + 48)

// x += A B^T by one wgmma with N columns. `a` is an `Operand`, `b` a descriptor. If `accumulate` is 0, the old value of x is ignored.
// The other arguments are the list of x's registers, the numbers of the operands that follow them, and the operands of x.
#define PRODUCT(N, REGS, A, B, ACCUMULATE, ...)                                                                                \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATE ", 0; wgmma.mma_async.sync.aligned.m64n" N KIND " {" REGS "}, " A \
                 ", " B ", p" TAIL ";}"                                                                                        \
                 : __VA_ARGS__                                                                                                 \
                 : IN_A, "l"(b), "r"(accumulate))

// Keeps the compiler from moving reads and writes of `x` across this point: wgmma writes `x` asynchronously.
template <int COUNT>
__device__ __forceinline__ void pin(Sum (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : OUT_1(x[i])::"memory");
}
#endif
#endif
#endif

// Lets the next kernel begin and run up to its `wait_for_previous`. When all blocks of this kernel have made this call, blocks of
// the next kernel start wherever a multiprocessor has resources left.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For a kernel that needs the previous kernel's results at once.
__device__ __forceinline__ void overlap() {
    let_next_begin();
    wait_for_previous();
}

// Transposes a 4 x 4 matrix of registers: four registers in each of four neighbouring lanes.
__device__ __forceinline__ void transpose(u32 (&x)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = received;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = received;
    }
}
