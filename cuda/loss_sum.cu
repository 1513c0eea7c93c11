// The sum of losses in the fixed tree of the reference, and the numbers of trained tokens and of hits.
//
// The tree: losses padded with zeros to a power of two; the second half is added to the first until one is left. `fold`
// does five levels of it in registers, over a grid, for more losses than `finish`, one block, takes.
//
// Architectures: 80 86 89 90 100 120
// Constants: none

#include "common.cuh"
#include "constants"

constexpr int IGNORED = -100, THREADS = 1024, HELD = 8192;

// five levels for the element that 32 others, `size` apart, fall on; `at(i)` is element i
template <typename F, typename I>
__device__ __forceinline__ float folded(F at, I i, I size) {
    float v[16];
#pragma unroll
    for (int j = 0; j < 16; j++) v[j] = at(i + j * size) + at(i + (j + 16) * size);
#pragma unroll
    for (int half = 8; half > 0; half /= 2)
#pragma unroll
        for (int j = 0; j < half; j++) v[j] += v[j + half];
    return v[0];
}

// to (size,) <- from (count,), count at most 32 * size
extern "C" __global__ void __launch_bounds__(256) fold(float* to, const float* from, i64 size, i64 count) {
    i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i < size) to[i] = folded([&](i64 at) { return at < count ? from[at] : 0.0f; }, i, size);
}

// total, tokens, num_hits (1,) <- values (count,), whose tree has `size` leaves: at most 32 * HELD; targets and, where
// num_hits is wanted, hits (num_targets,)
extern "C" __global__ void __launch_bounds__(THREADS)
    finish(float* total, int* tokens, int* num_hits, const float* values, const int* targets, const int* hits,
           int size, i64 count, i64 num_targets, int add_total, int add_tokens, int add_hits) {
    __shared__ float tree[HELD];
    __shared__ int trained, found;
    if (threadIdx.x == 0) trained = found = 0;
    int num_values = static_cast<int>(count);  // no more than `size`; 64 bits each for 32 addresses would not fit
    auto at = [&](int i) { return i < num_values ? values[i] : 0.0f; };
    int small = size >= 32 ? size / 32 : size;
    for (int i = threadIdx.x; i < small; i += THREADS) tree[i] = size >= 32 ? folded(at, i, small) : at(i);
    for (int half = small / 2; half > 0; half /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < half; i += THREADS) tree[i] += tree[i + half];
    }
    __syncthreads();
    int own = 0, own_hits = 0;
    for (i64 i = threadIdx.x; i < num_targets; i += THREADS) {
        own += targets[i] != IGNORED;
        if (num_hits) own_hits += hits[i];
    }
    atomicAdd(&trained, own);
    if (num_hits) atomicAdd(&found, own_hits);
    __syncthreads();
    if (threadIdx.x) return;
    if (total) *total = add_total ? *total + tree[0] : tree[0];
    if (tokens) *tokens = add_tokens ? *tokens + trained : trained;
    if (num_hits) *num_hits = add_hits ? *num_hits + found : found;
}
