// y = factor * x + residual, or without a residual factor * x, of which y may be the memory. The product is rounded before
// the sum, as in the reference.
//
// A thread owns PACKS accesses of N numbers, each as far from the next as a block is wide, all under way at once.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), N (numbers per access), RESIDUAL (1 or 0), FORMS (of y: value, fp8 rows, amax), E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int THREADS = 256, PACKS = 4, STEP = THREADS * N;

extern "C" __global__ void __launch_bounds__(THREADS)
    scale(OUTPUT_PARAMETERS(T, y), const T* x, const T* residual, i64 count, float factor) {
    i64 first = static_cast<i64>(blockIdx.x) * PACKS * STEP + threadIdx.x * N;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, y));
    Pack<T, N> read[PACKS][1 + RESIDUAL];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        read[i][0].load(x + at);
        if constexpr (RESIDUAL) read[i][RESIDUAL].load(residual + at);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        float v[N], r[N];
        read[i][0].get(v);
        if constexpr (RESIDUAL) read[i][RESIDUAL].get(r);
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] *= factor;
            if constexpr (RESIDUAL) v[j] += r[j];
        }
        sink.put(at, v, nullptr);
    }
    sink.finish();
}
