// out (M, N) = alpha x (M, K) weight (N, K)^T + bias (N,) + residual (M, N) for at most 4 rows of x: what generation does one
// token at a time, bound by reading the weight. SPLIT warps share a row of the weight, each lane has UNROLL accesses of 16
// bytes under way, and x comes from L1. Sums are f32, in an order that depends on the shape alone, and are rounded once.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, D (type of out and residual), K, M, N (numbers per access), SPLIT, BIAS, RESIDUAL

#include "common.cuh"
#include "constants"

constexpr int WARPS = 8, ROWS = WARPS / SPLIT, STRIDE = SPLIT * 32 * N, UNROLL = M == 1 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    thin_matmul(D* out, const T* weight, const T* x, const D* residual, const T* bias, float alpha, i64 rows, i64 weight_pitch,
                i64 x_pitch, i64 out_pitch) {
    __shared__ float parts[WARPS][M];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 row = static_cast<i64>(blockIdx.x) * ROWS + warp / SPLIT;
    const T* from = weight + min(row, rows - 1) * weight_pitch;
    float sum[M] = {};
    for (int begin = (warp % SPLIT * 32 + lane) * N; begin < K; begin += UNROLL * STRIDE) {
        Pack<T, N> w[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (begin + i * STRIDE < K) w[i].template load_early<true>(from + begin + i * STRIDE);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (begin + i * STRIDE >= K) continue;
            float a[N], b[N];
            w[i].get(a);
#pragma unroll
            for (int m = 0; m < M; m++) {
                load(x + m * x_pitch + begin + i * STRIDE, b);
#pragma unroll
                for (int j = 0; j < N; j++) sum[m] = fmaf(a[j], b[j], sum[m]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) sum[m] = warp_sum(sum[m]);
    if constexpr (SPLIT > 1) {
#pragma unroll
        for (int m = 0; m < M; m++)
            if (lane == 0) parts[warp][m] = sum[m];
        __syncthreads();
        if (warp % SPLIT) return;
#pragma unroll
        for (int m = 0; m < M; m++)
            for (int i = 1; i < SPLIT; i++) sum[m] += parts[warp + i][m];
    }
    if (lane != 0 || row >= rows) return;
#pragma unroll
    for (int m = 0; m < M; m++) {
        float value = alpha * sum[m];
        if (BIAS) value += to_float(bias[row]);
        if (RESIDUAL) value += to_float(residual[m * out_pitch + row]);
        out[m * out_pitch + row] = narrow<D>(value);
    }
}
