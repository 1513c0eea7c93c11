// cache (B, S, KEPT) <- the last KEPT numbers of each row of rot (rows, WIDTH): keys and values of a token, at its sequence
// and position. A sequence below 0 is padding. A block copies a row.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, WIDTH, KEPT, N

#include "common.cuh"
#include "constants"

extern "C" __global__ void __launch_bounds__(128)
    cache_write(T* cache, const T* rot, const int* positions, const int* sequences, i64 length) {
    i64 row = blockIdx.x, sequence = sequences[row];
    if (sequence < 0) return;
    T* to = cache + (sequence * length + positions[row]) * KEPT;
    const T* from = rot + row * WIDTH + WIDTH - KEPT;
    for (int column = threadIdx.x * N; column < KEPT; column += 128 * N) {
        Pack<T, N> read;
        read.load(from + column);
        read.store(to + column);
    }
}
