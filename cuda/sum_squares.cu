// The sums of squares of a gradient by tiles of 128 rows, and the numbers of a step that follow from all of them.
//
// The order of a tile's sum depends on the tile alone, not on the grid or on the rows around it: shards of whole tiles have
// the bits of the whole matrix. A block owns PIECE elements of one tile: thread t adds up accesses t, t + 512, ... of these,
// then warps and the block add up in a butterfly. Where a tile has several pieces, their sums go to scratch, and a warp
// adds up those of each tile. The norm is one block's sum over all tiles, in f64.
//
// Measured on one H200: 63.2 us for the embedding of 0.5B in bf16 (4309 GB/s, 104% of a copy), 240.7 us of 7B (4529, 106%).
//
// Architectures: 80 86 89 90 100 120
// Constants: G (dtype of the gradient), PIECE

#include "common.cuh"
#include "constants"

constexpr int THREADS = 512, AT_ONCE = 4, NORM_THREADS = 1024;
constexpr int N = 16 / sizeof(G), ROUND = THREADS * N * AT_ONCE;
static_assert(PIECE % ROUND == 0, "a piece is whole rounds of accesses");

// the sum of a block in thread 0
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float warps[THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
    return threadIdx.x < 32 ? warp_sum(x) : 0;
}

// sums (tiles * pieces,) <- grad (count,) in tiles of `tile` elements, a multiple of 8 where there are several
extern "C" __global__ void __launch_bounds__(THREADS)
    square(float* sums, const G* grad, i64 count, i64 tile, int pieces, int accumulate) {
    i64 start = blockIdx.x / pieces * tile, end = min(start + tile, count);
    i64 first = start + static_cast<i64>(blockIdx.x % pieces) * PIECE;
    int size = static_cast<int>(max(min(end - first, static_cast<i64>(PIECE)), static_cast<i64>(0)));
    int whole = size / N * N;  // the last tile may end within an access
    const G* from = grad + first;
    float total = 0;
#pragma unroll
    for (int round = 0; round < PIECE; round += ROUND) {
        Pack<G, N> read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int at = round + (i * THREADS + threadIdx.x) * N;
            // plain loads would go one after the other on 8.6 and 8.9, which are compiled to fewer registers
            if (at < whole) read[i].template load_early<true>(from + at);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (round + (i * THREADS + threadIdx.x) * N >= whole) break;
            float v[N];
            read[i].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) total = fmaf(v[j], v[j], total);
        }
    }
    if (whole + threadIdx.x < size) {
        float v = to_float(from[whole + threadIdx.x]);
        total = fmaf(v, v, total);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = accumulate ? sums[blockIdx.x] + total : total;
}

// partials (tiles,) <- sums (tiles, pieces); a warp owns a tile
extern "C" __global__ void __launch_bounds__(THREADS)
    add(float* partials, const float* sums, int tiles, int pieces, int accumulate) {
    int tile = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (tile >= tiles) return;
    float total = 0;
    for (int i = lane; i < pieces; i += 32) total += sums[static_cast<i64>(tile) * pieces + i];
    total = warp_sum(total);
    if (lane == 0) partials[tile] = accumulate ? partials[tile] + total : total;
}

// norm, scale, apply (1,) <- partials (count,), loss_total, num_tokens (1,): see the reference's grad_scale. One block.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    grad_scale(float* norm, float* scale, float* apply, const float* partials, int count, const float* loss_total,
               const int* num_tokens, double grad_clip) {
    __shared__ double tree[NORM_THREADS];
    double sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += NORM_THREADS) sum += partials[i];
    tree[threadIdx.x] = sum;
    for (int half = NORM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    }
    if (threadIdx.x) return;
    int tokens = *num_tokens;
    float total = static_cast<float>(sqrt(tree[0])), mean = tokens ? total / static_cast<float>(tokens) : 0;
    double clip = grad_clip != 0 && mean > grad_clip ? grad_clip / mean : 1;
    if (norm) *norm = mean;
    if (scale) *scale = tokens ? static_cast<float>(clip / tokens) : 0;
    if (apply) *apply = isfinite(total) && isfinite(*loss_total);
}

// new_last_norm, scale, apply (1,) <- norm, last_norm, loss_total, num_tokens (1,): see the reference's last_norm_scale
extern "C" __global__ void last_norm_scale(float* new_last_norm, float* scale, float* apply, const float* norm,
                                           const float* last_norm, const float* loss_total, const int* num_tokens,
                                           double grad_clip) {
    if (threadIdx.x) return;
    float last = isfinite(*norm) ? *norm : *last_norm;
    int tokens = *num_tokens;
    double clip = grad_clip != 0 && last > grad_clip ? grad_clip / last : 1;
    if (new_last_norm) *new_last_norm = last;
    if (scale) *scale = tokens ? static_cast<float>(clip / tokens) : 0;
    if (apply) *apply = isfinite(*loss_total);
}

// new_apply (1,) <- apply, or 0 if loss_total / num_tokens is above the limit: see the reference's apply_if_below
extern "C" __global__ void apply_if_below(float* new_apply, const float* apply, const float* loss_total,
                                          const int* num_tokens, const float* limit) {
    if (threadIdx.x) return;
    int tokens = *num_tokens;
    *new_apply = tokens > 0 && *loss_total / static_cast<float>(tokens) > *limit ? 0 : *apply;
}

// out (1,) <- apply (1,) if all partials (count,) are finite, else 0. One block.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    apply_if_finite(float* out, const float* partials, int count, const float* apply) {
    __shared__ int bad;
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += NORM_THREADS)
        if (!isfinite(partials[i])) bad = 1;
    __syncthreads();
    if (threadIdx.x == 0) *out = bad ? 0 : *apply;
}
