// y = factor * x + residual, each operation rounded by itself: results equal the reference bit for bit. y may be the memory
// of x or of residual.
//
// A thread owns N neighbouring numbers, in 16 bytes. Not tuned.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), N

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    scale(T* y, const T* x, const T* residual, float factor, i64 size) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= size) return;
    float v[N], r[N];
    load(x + at, v);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = __fmul_rn(v[j], factor);
    if (residual) {
        load(residual + at, r);
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = __fadd_rn(v[j], r[j]);
    }
    store(y + at, v);
}
