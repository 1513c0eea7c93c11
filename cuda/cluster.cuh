// Clusters of CLUSTER blocks (sm_90 and later), which write into each other's shared memory; CLUSTER is 1 on other cards.
//
// A barrier of the cluster has two halves: what a block wrote before `cluster_arrive` every block sees after
// `cluster_wait`. Before the first remote store one such barrier has to pass: the other block may not have begun.

// an address in the shared memory of a block of the cluster
struct Far {
    u32 at;
};

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// *own of this block's shared memory as the block of that rank has it
__device__ __forceinline__ Far remote(const void* own, u32 rank) {
    u32 here = static_cast<u32>(__cvta_generic_to_shared(own)), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return {there};
}
__device__ __forceinline__ void store_remote(Far to, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to.at), "f"(value) : "memory");
}
#else
#define CLUSTERED
static_assert(CLUSTER == 1, "clusters begin with sm_90");
__device__ __forceinline__ u32 cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ Far remote(const void*, u32) { return {}; }
template <typename X>
__device__ __forceinline__ void store_remote(Far, const X&) {}
#endif
