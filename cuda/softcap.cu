// Logits that approach a cap: y = cap * tanh(factor * x / cap), and d_x = factor * d_y * (1 - (y / cap)^2); without a cap
// factor * x and factor * d_y. y may be the memory of x, and d_x that of d_y.
//
// A thread owns PACKS accesses of N numbers, each as far from the next as a block is wide, all under way at once.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), N (numbers per access), CAPPED (1 or 0), FORMS (of d_x: value, fp8 rows, amax), E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int THREADS = 256, PACKS = 4, STEP = THREADS * N;

// `inner` is factor / cap
extern "C" __global__ void __launch_bounds__(THREADS)
    softcap_forward(T* y, const T* x, i64 count, float factor, float inner, float cap) {
    i64 first = static_cast<i64>(blockIdx.x) * PACKS * STEP + threadIdx.x * N;
    Pack<T, N> read[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; i++)
        if (first + i * STEP < count) read[i].load(x + first + i * STEP);
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        float v[N];
        read[i].get(v);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if constexpr (CAPPED)
                v[j] = cap * tanhf(inner * v[j]);
            else
                v[j] *= factor;
        }
        store(y + at, v);
    }
}

// `inverse` is 1 / cap
extern "C" __global__ void __launch_bounds__(THREADS)
    softcap_backward(OUTPUT_PARAMETERS(T, d_x), const T* d_y, const T* y, i64 count, float factor, float inverse) {
    i64 first = static_cast<i64>(blockIdx.x) * PACKS * STEP + threadIdx.x * N;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_x));
    Pack<T, N> read[PACKS][1 + CAPPED];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        read[i][0].load(d_y + at);
        if constexpr (CAPPED) read[i][CAPPED].load(y + at);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        float d[N], z[N];
        read[i][0].get(d);
        if constexpr (CAPPED) read[i][CAPPED].get(z);
#pragma unroll
        for (int j = 0; j < N; j++) {
            d[j] *= factor;
            if constexpr (CAPPED) {
                z[j] *= inverse;
                d[j] *= 1.0f - z[j] * z[j];
            }
        }
        sink.put(at, d, nullptr);
    }
    sink.finish();
}
