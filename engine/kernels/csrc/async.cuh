// What kernels for sm_90 and later share: barriers in shared memory, TMA, a cluster's shared memory, kernels that overlap.
#if __CUDA_ARCH__ >= 900
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u32 opaque[32];
};

__device__ __forceinline__ u32 address(const void* shared) { return static_cast<u32>(__cvta_generic_to_shared(shared)); }

__device__ __forceinline__ void barrier_init(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals));
}
// Before anyone but this thread, TMA and the cluster's other blocks among them, uses what was initialised.
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

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Where block `rank` of the cluster has what this block has at `shared`.
__device__ __forceinline__ u32 address_in(u32 rank, u32 shared) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_sync() {  // also of a warp whose threads come apart
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// Which of so many places is next, and the parity of the phase to wait for there.
template <int LENGTH>
struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == LENGTH) stage = 0, parity ^= 1;
    }
};

// Of another block of the cluster. Not of cluster scope: that waits for all memory, and nothing is read or written here but by TMA
// and wgmma.
__device__ __forceinline__ void arrive_at(u64& barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, address(&barrier))) : "memory");
}

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
#endif
#endif

// A kernel launched to overlap with the one before it may begin with what does not depend on that one; it waits here before it
// touches anything else, and every one of its threads does. Elsewhere this is nothing.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may begin as far as that. Where all blocks have said so, its blocks take what room there is left.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Of a kernel with nothing to begin with.
__device__ __forceinline__ void overlap() {
    let_next_begin();
    wait_for_previous();
}

// Four registers of each of four neighbouring lanes, transposed.
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
