// The next token of each sequence <- logits (B, VP) of T: the largest one, or the largest of logit / temperature + noise among
// those that top-k, top-p and min-p leave; and its position.
//
// CLUSTER blocks own a row (one on cards without clusters). They read it again for every question they ask of it, from L1:
// how many logits, or how much probability, is at or above a number. 32 answers find the smallest logit that stays, a bit
// of it at a time; the blocks exchange one number each through distributed shared memory. Numbers are compared as integers
// in the order of floats. Noise has an address (seed, sequence, position, column), as in llmq/ops/reference/generation.py.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, V, VP, N (a multiple of 4), CLUSTER, GREEDY, TOP_K, TOP_P (whether they cut)

#include "common.cuh"
#include "constants"
#include "cluster.cuh"
#include "random.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;

// a float's bits as an integer of the same order
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Largest {
    static constexpr u64 NONE = 0;
    static __device__ __forceinline__ u64 of(u64 a, u64 b) { return a > b ? a : b; }
};

struct Sum {  // of floats, by their bits
    static constexpr u64 NONE = 0;
    static __device__ __forceinline__ u64 of(u64 a, u64 b) {
        return __float_as_uint(__uint_as_float(static_cast<u32>(a)) + __uint_as_float(static_cast<u32>(b)));
    }
};

template <typename Join>
__device__ __forceinline__ u64 warp_joined(u64 x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        u32 low = __shfl_xor_sync(0xffffffffu, static_cast<u32>(x), step);
        u32 high = __shfl_xor_sync(0xffffffffu, static_cast<u32>(x >> 32), step);
        x = Join::of(x, static_cast<u64>(high) << 32 | low);
    }
    return x;
}

// What all threads of all blocks have, joined, in all of them. Calls take turns with two sets of shared memory, so that one
// barrier is enough: who writes a set has passed the barrier after which the others had read it.
template <typename Join>
__device__ __forceinline__ u64 joined(u64 x, int& turn) {
    __shared__ u64 warps[2][WARPS];
    __shared__ float blocks[2][2][CLUSTER];
    turn ^= 1;
    x = warp_joined<Join>(x);
    if (threadIdx.x % 32 == 0) warps[turn][threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_joined<Join>(threadIdx.x % 32 < WARPS ? warps[turn][threadIdx.x % 32] : Join::NONE);
    if constexpr (CLUSTER == 1) return x;
    if (threadIdx.x < CLUSTER) {
        store_remote(remote(&blocks[turn][0][cluster_rank()], threadIdx.x), __uint_as_float(static_cast<u32>(x)));
        store_remote(remote(&blocks[turn][1][cluster_rank()], threadIdx.x), __uint_as_float(static_cast<u32>(x >> 32)));
    }
    cluster_arrive();
    cluster_wait();
    x = Join::NONE;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        u64 high = __float_as_uint(blocks[turn][1][i]);
        x = Join::of(x, high << 32 | __float_as_uint(blocks[turn][0][i]));
    }
    return x;
}

// The sum over the row of 1, or of exp(z - largest), where z is at or above `least`
template <bool COUNTS>
__device__ __forceinline__ float at_least(const T* row, float inverse, u32 least, float largest, int& turn) {
    float sum = 0;
    for (int column = (cluster_rank() * THREADS + threadIdx.x) * N; column < V; column += THREADS * CLUSTER * N) {
        float x[N];
        load(row + column, x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float z = x[j] * inverse;
            if (column + j < V && ordered(z) >= least) sum += COUNTS ? 1.0f : expf(z - largest);
        }
    }
    return __uint_as_float(static_cast<u32>(joined<Sum>(__float_as_uint(sum), turn)));
}

// the largest number, in the order of floats, at or above which there is `needed` of the row, and no smaller than `floor`
template <bool COUNTS>
__device__ __forceinline__ u32 cut(const T* row, float inverse, float needed, u32 floor, float largest, int& turn) {
    u32 found = 0;
    for (u32 bit = 0x80000000u; bit; bit >>= 1)
        if (at_least<COUNTS>(row, inverse, max(found | bit, floor), largest, turn) >= needed) found |= bit;
    return max(found, floor);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS)
    sample(int* next_tokens, int* next_positions, const T* logits, const int* positions, const int* samples, u32 seed_low,
           u32 seed_high, float inverse, float top_k, float top_p, float log_min_p) {
    let_next_begin();
    await_previous();
    i64 sequence = blockIdx.x / CLUSTER;
    const T* row = logits + sequence * VP;
    int turn = 0, position = positions[sequence];
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();  // every block of the cluster has begun
    u64 best = 0;
    for (int column = (cluster_rank() * THREADS + threadIdx.x) * N; column < V; column += THREADS * CLUSTER * N) {
        float x[N];
        load(row + column, x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            u64 place = static_cast<u64>(ordered(x[j] * inverse)) << 32 | ~static_cast<u32>(column + j);
            if (column + j < V && place > best) best = place;
        }
    }
    best = joined<Largest>(best, turn);
    if constexpr (!GREEDY) {
        u32 top = static_cast<u32>(best >> 32), least = 0;
        float largest = __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
        if constexpr (TOP_K) least = cut<true>(row, inverse, top_k, 0, largest, turn);
        if constexpr (TOP_P) {
            float needed = top_p * at_least<false>(row, inverse, least, largest, turn);
            least = cut<false>(row, inverse, needed, least, largest, turn);
        }
        least = max(least, ordered(largest + log_min_p));
        Key key = {static_cast<u32>(position), seed_low, static_cast<u32>(samples[sequence]) ^ seed_high};
        best = 0;
        for (int column = (cluster_rank() * THREADS + threadIdx.x) * N; column < V; column += THREADS * CLUSTER * N) {
            float x[N];
            u32 word[4];
            load(row + column, x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (j % 4 == 0) philox(static_cast<u64>(column + j) / 4, FOR_SAMPLING, key, word);
                float z = x[j] * inverse, u = (static_cast<float>(word[j % 4]) + 0.5f) * 2.3283064365386963e-10f;
                float drawn = z - logf(-log1pf(-u));
                u64 place = static_cast<u64>(ordered(drawn)) << 32 | ~static_cast<u32>(column + j);
                if (column + j < V && ordered(z) >= least && place > best) best = place;
            }
        }
        best = joined<Largest>(best, turn);
    }
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        if (next_tokens) next_tokens[sequence] = static_cast<int>(~static_cast<u32>(best));
        if (next_positions) next_positions[sequence] = position + 1;
    }
}
