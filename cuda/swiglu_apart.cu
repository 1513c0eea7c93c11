// SwiGLU of gate and up in memory of their own: act = silu(gate) * up, and its gradient, which may take their memory.
//
// A thread owns PACKS accesses of N numbers, each as far from the next as a block is wide.
//
// Measured on an H100 at (8192, 4864) bf16: forward 2916 GB/s and backward 2944, where CuPy's copy has 2834; in a step at
// (8192, 18944) 3097 and 3047.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), N (numbers per access)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, PACKS = 2, STEP = THREADS * N;

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_apart_forward(T* act, const T* gate, const T* up, i64 count) {
    i64 first = static_cast<i64>(blockIdx.x) * PACKS * STEP + threadIdx.x * N;
    Pack<T, N> read[PACKS][2];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at < count) read[i][0].load(gate + at), read[i][1].load(up + at);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        float g[N], u[N];
        read[i][0].get(g), read[i][1].get(u);
#pragma unroll
        for (int j = 0; j < N; j++) u[j] *= g[j] * sigmoid(g[j]);
        store(act + at, u);
    }
}

// d_up = d_act * silu(gate); d_gate = d_act * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_apart_backward(T* d_gate, T* d_up, const T* d_act, const T* gate, const T* up, i64 count) {
    i64 first = static_cast<i64>(blockIdx.x) * PACKS * STEP + threadIdx.x * N;
    Pack<T, N> read[PACKS][3];
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at < count) read[i][0].load(gate + at), read[i][1].load(up + at), read[i][2].load(d_act + at);
    }
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        i64 at = first + i * STEP;
        if (at >= count) break;
        float g[N], u[N], d[N];
        read[i][0].get(g), read[i][1].get(u), read[i][2].get(d);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float s = sigmoid(g[j]), silu = s * g[j];
            g[j] = d[j] * u[j] * (s + silu * (1.0f - s));
            u[j] = d[j] * silu;
        }
        if (d_gate) store(d_gate + at, g);  // of all that was read: where up is d_up, it has been read then
        if (d_up) store(d_up + at, u);
    }
}
