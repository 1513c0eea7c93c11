// Soft-cap of logits: y = cap * tanh(factor * x / cap), or factor * x where the cap is infinite; and its gradient
// d_x = factor * d_y * (1 - (y / cap)^2). y may be the memory of x, and d_x that of d_y.
//
// A thread owns N neighbouring numbers, in 16 bytes. Not tuned.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), N

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) softcap_forward(T* y, const T* x, float cap, float factor, i64 size) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= size) return;
    float v[N];
    load(x + at, v);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] *= factor;
    if (isfinite(cap)) {
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = cap * tanhf(v[j] / cap);
    }
    store(y + at, v);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softcap_backward(T* d_x, const T* d_y, const T* y, float cap, float factor, i64 size) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= size) return;
    float d[N], v[N];
    load(d_y + at, d);
    load(y + at, v);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float part = v[j] / cap;  // 0 without a cap
        d[j] *= factor * (1.0f - part * part);
    }
    store(d_x + at, d);
}
