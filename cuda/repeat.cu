// Random weights of a bench: out <- a block of numbers, over and over.
//
// A thread owns N consecutive numbers. The block, of some MiB, stays in the L2 cache. One pass of writes.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype of the block), T (dtype written), N

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256;

// out (count,) <- block (size,), whose number `first` is the first one
extern "C" __global__ void __launch_bounds__(THREADS) repeat(T* out, const X* block, i64 first, i64 size, i64 count) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= count) return;
    i64 from = (first + at) % size;
    float v[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        v[j] = to_float(block[from]);
        from = from + 1 == size ? 0 : from + 1;
    }
    store(out + at, v);
}
