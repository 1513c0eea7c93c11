// What multiplies outputs: gain = magnitude / norm, norm^2 = |w|^2 + 2 s b p + s^2 b G b^T for each row w of
// the weight, b of B and p of W A^T; and their gradient.
//
// A warp owns a row, which it reads once, 16 bytes to a lane; what A and B add takes R^2 products, in f32.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of weight and B), G (dtype of the gradient), K, R, N (numbers per access)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256;

// weight (rows, K), through (rows, every), gram (every, every), of which R from `first` on, up (rows, R), magnitude (rows,)
extern "C" __global__ void __launch_bounds__(THREADS)
    output_gain(float* gain, float* norm, const T* weight, const float* through, const float* gram, const T* up,
              const float* magnitude, float scale, int first, int every, int rows) {
    int row = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    if (!weight) {
        if (lane == 0) gain[row] = magnitude ? magnitude[row] : 1.0f;
        return;
    }
    weight += static_cast<i64>(row) * K;
    through += static_cast<i64>(row) * every + first;
    gram += first * every + first;
    up += static_cast<i64>(row) * R;
    float sum = 0.0f, added = 0.0f;
#pragma unroll 4
    for (int k = lane * N; k < K; k += 32 * N) {
        float w[N];
        load(weight + k, w);
#pragma unroll
        for (int j = 0; j < N; j++) sum += w[j] * w[j];
    }
#pragma unroll 1
    for (int r = lane; r < R; r += 32) {
        float turned = 0.0f;
#pragma unroll 8
        for (int i = 0; i < R; i++) turned += gram[i * every + r] * to_float(up[i]);
        added += to_float(up[r]) * (2.0f * through[r] + scale * turned);
    }
    sum = warp_sum(sum) + scale * warp_sum(added);
    if (lane) return;
    float value = sqrtf(fmaxf(sum, 0.0f));
    if (norm) norm[row] = value;
    if (gain) gain[row] = magnitude[row] / value;
}

// d_magnitude (rows,) <- d_gain / norm, or d_gain where there is none
extern "C" __global__ void __launch_bounds__(THREADS)
    output_gain_backward(G* d_magnitude, const float* d_gain, const float* norm, int rows, int add) {
    int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    float value = norm ? d_gain[row] / norm[row] : d_gain[row];
    d_magnitude[row] = narrow<G>(add ? to_float(d_magnitude[row]) + value : value);
}
