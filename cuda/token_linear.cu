// y (M, ROWS) = weight (ROWS, K) x^T + bias + residual for the M <= 4 tokens of a step of generation, bound by reading the
// weight. NORM: of rmsnorm(x) * (norm + OFFSET) in place of x. GATED: weight (2 ROWS, K) has gates, then ups, and y is
// activation(gate) * up.
// Between the three maps values are rounded to T, as three kernels would; sums are f32, in an order of the shape alone.
//
// SPLIT warps share a row (with its gate), and each lane has UNROLL accesses of 16 bytes under way. No kernel of a program
// writes a weight, so the first accesses are made before the kernel before this one is done. With a norm, each block
// normalises x for itself, into shared memory. Numbers, and what was tried: docs/kernels/generation.md.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, K, M, N (numbers per access), SPLIT, NORM, OFFSET, GATED, ACTIVATION (activation.cuh), BIAS, RESIDUAL

#include "activation.cuh"
#include "common.cuh"
#include "constants"

constexpr int WARPS = 8, THREADS = 32 * WARPS, HALVES = GATED ? 2 : 1, AT_ONCE = WARPS / SPLIT, STRIDE = SPLIT * 32 * N;
constexpr int PIECES = (K + STRIDE - 1) / STRIDE, MOST = (M == 1 ? 8 : 4) / HALVES, UNROLL = PIECES < MOST ? PIECES : MOST;
constexpr int LINE = 128 / sizeof(T);
constexpr int STEPS = (PIECES + UNROLL - 1) / UNROLL;

// to (M, K) = rmsnorm(x) * (norm + OFFSET), rounded; sums of warps meet in `squares`, which may be used again afterwards
__device__ __forceinline__ void normalise(T* to, float (*squares)[HALVES][M], const T* x, const T* norm, float eps) {
    float v[N], w[N];
#pragma unroll
    for (int m = 0; m < M; m++) {
        float sum = 0;
        for (int i = threadIdx.x * N; i < K; i += THREADS * N) {
            load(x + m * K + i, v);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32][0][m] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += squares[i][0][m];
        float s = 1.0f / sqrtf(sum * (1.0f / K) + eps);
        for (int i = threadIdx.x * N; i < K; i += THREADS * N) {
            load(x + m * K + i, v);
            load_weights<OFFSET>(norm + i, w);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= s * w[j];
            Pack<T, N> rounded;
            rounded.set(v);
#pragma unroll
            for (int j = 0; j < Pack<T, N>::WORDS; j++) reinterpret_cast<u32*>(to + m * K + i)[j] = rounded.at[j];
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    token_linear(T* y, const T* weight, const T* x, const T* norm, const T* bias, const T* residual, float eps, int rows) {
    extern __shared__ __align__(16) u8 memory[];  // (M, K) of T with a norm
    __shared__ float parts[WARPS][HALVES][M];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = (warp % SPLIT * 32 + lane) * N;
    Pack<T, N> w[HALVES][UNROLL];
    auto fetch = [&](int row, int step) {
        if (row >= rows) return;
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            int at = begin + (step * UNROLL + i) * STRIDE;
            if (at >= K) continue;
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                w[h][i].template load_early<true>(weight + (static_cast<i64>(h) * rows + row) * K + at);
        }
    };
    int row = blockIdx.x * AT_ONCE + warp / SPLIT;
    let_next_begin();
    fetch(row, 0);
    if constexpr (NORM)
        for (int i = threadIdx.x * LINE; i < K; i += THREADS * LINE) expect_line(norm + i);
    if (BIAS && lane == 0 && row < rows) expect_line(bias + row / 2 * 2);
    await_previous();
    const T* read = x;
    if constexpr (NORM) {
        T* normed = reinterpret_cast<T*>(memory);
        normalise(normed, parts, x, norm, eps);
        read = normed;
    }
    for (int first = blockIdx.x * AT_ONCE; first < rows; first += gridDim.x * AT_ONCE, row += gridDim.x * AT_ONCE) {
        float sum[HALVES][M] = {};
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                int at = begin + (step * UNROLL + i) * STRIDE;
                if (at >= K) continue;
                float a[HALVES][N], b[N];
#pragma unroll
                for (int h = 0; h < HALVES; h++) w[h][i].get(a[h]);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    load(read + m * K + at, b);
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
#pragma unroll
                        for (int j = 0; j < N; j++) sum[h][m] = fmaf(a[h][j], b[j], sum[h][m]);
                }
            }
            if (step + 1 < STEPS)
                fetch(row, step + 1);
            else
                fetch(row + gridDim.x * AT_ONCE, 0);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int m = 0; m < M; m++) sum[h][m] = warp_sum(sum[h][m]);
        if constexpr (SPLIT > 1) {
            if (lane == 0) {
#pragma unroll
                for (int h = 0; h < HALVES; h++)
#pragma unroll
                    for (int m = 0; m < M; m++) parts[warp][h][m] = sum[h][m];
            }
            __syncthreads();
#pragma unroll
            for (int h = 0; h < HALVES; h++)
#pragma unroll
                for (int m = 0; m < M; m++) {
                    sum[h][m] = 0;
#pragma unroll
                    for (int i = 0; i < SPLIT; i++) sum[h][m] += parts[warp / SPLIT * SPLIT + i][h][m];
                }
            __syncthreads();  // before the next row's parts
        }
        if (lane != 0 || warp % SPLIT || row >= rows) continue;
#pragma unroll
        for (int m = 0; m < M; m++) {
            float value[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                value[h] = sum[h][m];
                if (BIAS) value[h] += to_float(bias[h * rows + row]);
            }
            if constexpr (GATED) {
                float gate = to_float(narrow<T>(value[0])), up = to_float(narrow<T>(value[1]));
                value[0] = Activated<ACTIVATION>(gate).value * up;
            }
            if (RESIDUAL) value[0] += to_float(residual[m * rows + row]);
            y[m * rows + row] = narrow<T>(value[0]);
        }
    }
}
