// RMSNorm of each query and key head over its HD channels (Qwen3), values unchanged; and its gradient.
//
// LANES lanes own a head of a row, N channels in each lane; a warp takes 32 / LANES heads at a time, and heads of all rows
// lie side by side, so a warp reads one run of memory. In backward a lane keeps the sums for its channels of both weights
// in registers over all of its heads; a block writes one partial row [q | k], and `sum_weights` adds the rows in order.
//
// Measured on an H200 in bf16, 18 heads of 64 and 36 of 128: forward 94-95% of a copy, backward 82 and 86%.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the weights' gradients), HQ, HKV, HD, N, LANES (a power of two >= HD / N), VALUE (0 or 1: out wanted)

#include "common.cuh"
#include "constants"
#include "columns.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, HEADS = HQ + 2 * HKV, NORMED = HQ + HKV;
constexpr int AT_ONCE = 32 / LANES, STEPS = 2;  // heads per warp and access, accesses in flight
static_assert(LANES <= 32 && LANES * N >= HD, "a head fits the lanes of one warp");

// head `task` of all rows' heads: (row, head)
extern "C" __global__ void __launch_bounds__(THREADS)
    qk_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, float eps, i64 rows) {
    int lane = threadIdx.x % LANES, channel = lane * N;
    u32 tasks = static_cast<u32>(rows) * HEADS, first = (blockIdx.x * WARPS + threadIdx.x / 32) * AT_ONCE * STEPS;
    first += threadIdx.x % 32 / LANES;
    Pack<T, N> read[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 task = first + i * AT_ONCE;
        if (task < tasks && channel < HD) read[i].load(qkv + static_cast<i64>(task) * HD + channel);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 task = first + i * AT_ONCE;
        bool real = task < tasks && channel < HD;
        int head = static_cast<int>(task % HEADS);
        float v[N], sum = 0;
        read[i].get(v);
        if (real) {
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
        }
        float s = 1.0f / sqrtf(warp_sum<LANES>(sum) * (1.0f / HD) + eps);
        if (!real) continue;
        if (head < NORMED) {
            if (rstd && lane == 0) rstd[static_cast<i64>(task / HEADS) * NORMED + head] = s;
            float w[N];
            load((head < HQ ? q_weight : k_weight) + channel, w);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= s * w[j];
        }
        if constexpr (VALUE) store(out + static_cast<i64>(task) * HD + channel, v);
    }
}

// Per head with n = x * rstd and g = d_out * weight: d_qkv = rstd * (g - n * mean(g * n)); partial (blocks, 2 * HD) <- the
// sums of d_out * n over query and over key heads. A block owns `per_block` rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    qk_norm_backward(T* d_qkv, float* partial, const T* d_out, const T* qkv, const T* q_weight, const T* k_weight,
                     const float* rstd, int per_block, i64 rows) {
    constexpr int SLOTS = WARPS * AT_ONCE;
    __shared__ __align__(16) float shared[SLOTS][LANES * N];
    int lane = threadIdx.x % LANES, channel = lane * N, slot = threadIdx.x / LANES;
    i64 block_row = static_cast<i64>(blockIdx.x) * per_block, base = block_row * HEADS * HD + channel;
    u32 end = static_cast<u32>(min(rows - block_row, static_cast<i64>(per_block))) * HEADS;  // tasks of the block
    rstd += block_row * NORMED;
    float sums[2][N] = {};
    // every lane makes the same number of turns: a shuffle needs its whole warp
    for (u32 start = 0; start < end; start += SLOTS * STEPS) {
        Pack<T, N> read[STEPS], d_read[STEPS];
        float s[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 task = start + slot + i * SLOTS;
            if (task < end && channel < HD) {
                int head = static_cast<int>(task % HEADS);
                d_read[i].load(d_out + base + task * HD);
                if (head < NORMED) {
                    read[i].load(qkv + base + task * HD);
                    s[i] = rstd[task / HEADS * NORMED + head];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            u32 task = start + slot + i * SLOTS;
            int head = static_cast<int>(task % HEADS);
            bool real = task < end && channel < HD, normed = real && head < NORMED;
            float n[N], d[N], w[N], dot = 0;
            d_read[i].get(d);
            if (normed) {
                load((head < HQ ? q_weight : k_weight) + channel, w);
                read[i].get(n);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    n[j] *= s[i];
                    float both = d[j] * n[j];
                    sums[0][j] += head < HQ ? both : 0.0f;
                    sums[1][j] += head < HQ ? 0.0f : both;
                    dot = fmaf(both, w[j], dot);
                }
            }
            float mean = warp_sum<LANES>(dot) * (1.0f / HD);
            if (!VALUE || !real) continue;
            if (normed) {
#pragma unroll
                for (int j = 0; j < N; j++) d[j] = s[i] * (d[j] * w[j] - n[j] * mean);
            }
            store(d_qkv + base + task * HD, d);
        }
    }
    if (!partial) return;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        __syncthreads();
        store(shared[slot] + channel, sums[part]);
        __syncthreads();
        for (int c = threadIdx.x; c < HD; c += THREADS) {
            float total = 0;
            for (int i = 0; i < SLOTS; i++) total += shared[i][c];
            partial[(static_cast<i64>(blockIdx.x) * 2 + part) * HD + c] = total;
        }
    }
}

// d_weight (HD,) <- partial (parts, 2 * HD), from the query half (offset 0) or the key half (offset HD)
extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weights(G* d_weight, const float* partial, int parts, int offset, int add) {
    sum_columns(d_weight, partial + offset, parts, HD, 2 * HD, add);
}
