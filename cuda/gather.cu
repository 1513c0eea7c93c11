// out (B, C) <- x (B, T, C) at index (B,): one position of each sequence. A block copies a row.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, C, N

#include "common.cuh"
#include "constants"

extern "C" __global__ void __launch_bounds__(128) gather_rows(T* out, const T* x, const int* index, i64 length) {
    i64 from = blockIdx.x * length + index[blockIdx.x];
    for (int column = threadIdx.x * N; column < C; column += 128 * N) {
        Pack<T, N> read;
        read.load(x + from * C + column);
        read.store(out + static_cast<i64>(blockIdx.x) * C + column);
    }
}
