// RMSNorm of the query heads of a row as one vector of Q numbers, and of its key heads as one of K (OLMo 2), values
// unchanged; and its gradient.
//
// A block owns a row at a time, and reads it twice, the second time from L1 or L2. Backward owns `per_block` rows, keeps the
// weights' gradients in registers and writes one partial row of them, which `sum_weight` adds in order.
// d_qkv may be the memory of d_out. Not measured.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the weights' gradients), Q, K, N, THREADS

#include "common.cuh"
#include "constants"
#include "columns.cuh"

constexpr int NORMED = Q + K, WIDTH = Q + 2 * K, WARPS = THREADS / 32, STEP = THREADS * N, VPT = (NORMED + STEP - 1) / STEP;
static_assert(Q % N == 0 && K % N == 0, "an access is of queries, of keys or of values");

// both sums over the block; `shared` is another one at the next call, so that one barrier is enough
__device__ __forceinline__ void block_sums(float (&sums)[2], float (*shared)[WARPS]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums[i] = warp_sum(sums[i]);
        if (threadIdx.x % 32 == 0) shared[i][threadIdx.x / 32] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums[i] = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sums[i] += shared[i][w];
    }
}

__device__ __forceinline__ const T* weight_at(const T* q_weight, const T* k_weight, int column) {
    return column < Q ? q_weight + column : k_weight + (column - Q);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    wide_qk_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, float eps) {
    __shared__ float shared[2][WARPS];
    i64 row = blockIdx.x;
    qkv += row * WIDTH;
    float s[2] = {};
    for (int column = threadIdx.x * N; column < NORMED; column += STEP) {
        float v[N], sum = 0;
        load(qkv + column, v);
#pragma unroll
        for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
        (column < Q ? s[0] : s[1]) += sum;
    }
    block_sums(s, shared);
    s[0] = 1.0f / sqrtf(s[0] * (1.0f / Q) + eps);
    s[1] = 1.0f / sqrtf(s[1] * (1.0f / K) + eps);
    if (rstd && threadIdx.x < 2) rstd[2 * row + threadIdx.x] = threadIdx.x ? s[1] : s[0];
    if (!out) return;
    out += row * WIDTH;
    for (int column = threadIdx.x * N; column < WIDTH; column += STEP) {
        float v[N], w[N];
        load(qkv + column, v);
        if (column < NORMED) {
            load(weight_at(q_weight, k_weight, column), w);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= (column < Q ? s[0] : s[1]) * w[j];
        }
        store(out + column, v);
    }
}

// With n = x * rstd and g = d_out * weight: d_qkv = rstd * (g - n * mean(g * n)), the mean over queries or over keys;
// partial (parts, Q), then (parts, K) <- the sums of d_out * n.
extern "C" __global__ void __launch_bounds__(THREADS)
    wide_qk_norm_backward(T* d_qkv, float* partial, const T* d_out, const T* qkv, const T* q_weight, const T* k_weight,
                          const float* rstd, int per_block, i64 rows) {
    __shared__ float shared[2][2][WARPS];
    i64 begin = static_cast<i64>(blockIdx.x) * per_block, end = min(rows, begin + per_block);
    float d_weight[VPT][N] = {};
    for (i64 row = begin; row < end; row++) {
        const T *d_from = d_out + row * WIDTH, *from = qkv + row * WIDTH;
        float s[2] = {rstd[2 * row], rstd[2 * row + 1]}, mean[2] = {};
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            int column = k * STEP + threadIdx.x * N;
            if (column >= NORMED) break;
            float n[N], d[N], w[N], dot = 0;
            load(from + column, n);
            load(d_from + column, d);
            load(weight_at(q_weight, k_weight, column), w);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float both = d[j] * (n[j] * (column < Q ? s[0] : s[1]));
                d_weight[k][j] += both;
                dot = fmaf(both, w[j], dot);
            }
            (column < Q ? mean[0] : mean[1]) += dot;
        }
        if (!d_qkv) continue;
        block_sums(mean, shared[row % 2]);
        mean[0] *= 1.0f / Q;
        mean[1] *= 1.0f / K;
        T* to = d_qkv + row * WIDTH;
        for (int column = threadIdx.x * N; column < WIDTH; column += STEP) {
            float n[N], d[N], w[N];
            load(d_from + column, d);
            if (column < NORMED) {
                float own = column < Q ? s[0] : s[1], along = column < Q ? mean[0] : mean[1];
                load(from + column, n);
                load(weight_at(q_weight, k_weight, column), w);
#pragma unroll
                for (int j = 0; j < N; j++) d[j] = own * (d[j] * w[j] - n[j] * own * along);
            }
            store(to + column, d);
        }
    }
    if (!partial) return;
    float *of_q = partial + static_cast<i64>(blockIdx.x) * Q;
    float *of_k = partial + static_cast<i64>(gridDim.x) * Q + static_cast<i64>(blockIdx.x) * K;
#pragma unroll
    for (int k = 0; k < VPT; k++) {
        int column = k * STEP + threadIdx.x * N;
        if (column >= NORMED) break;
        store(column < Q ? of_q + column : of_k + (column - Q), d_weight[k]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weight(G* d_weight, const float* partial, int parts, int columns, int add) {
    sum_columns(d_weight, partial, parts, columns, add);
}
