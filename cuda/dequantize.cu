// What fp8 rows of a weight that is held so stand for, in T.
//
// A thread owns N consecutive columns of a row, whose scale is one of the whole, of their tile of 128 by 128, or of 128
// columns of their row. e4m3 is decoded by shifting its bits into those of a float: the product with a power of two is exact, for
// subnormals too, so that cards without fp8 instructions read it as well. Not tuned: 1 byte read, 2 or 4 written.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of the value), C (columns), N, SCALES (0: one of the whole, 1: of tiles, 2: of
// blocks)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, TILE = 128, PITCH = (C + 4 * TILE - 1) / (4 * TILE) * 4;  // scales of a row of tiles
constexpr int BLOCKS = (C + TILE - 1) / TILE;

__device__ __forceinline__ float from_e4m3(u32 bits) {
    u32 size = bits & 0x7Fu, sign = (bits & 0x80u) << 24;
    float value = __uint_as_float(size << 20) * 0x1p120f;
    return __uint_as_float((size == 0x7Fu ? 0x7FC00000u : __float_as_uint(value)) | sign);
}

// out (rows, C) <- x (rows, C), scale (1,), (rows / 128, C / 128 to a multiple of 4) or (rows, C / 128)
extern "C" __global__ void __launch_bounds__(THREADS) dequantize(T* out, const u8* x, const float* scale, i64 size) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= size) return;
    i64 row = at / C;
    i64 block = (at - row * C) / TILE;
    float factor = scale[SCALES == 1 ? row / TILE * PITCH + block : SCALES == 2 ? row * BLOCKS + block : 0];
    u32 bytes[(N + 3) / 4];
    if constexpr (N == 8) {
        Words<2> read = *reinterpret_cast<const Words<2>*>(x + at);
        bytes[0] = read.at[0], bytes[1] = read.at[1];
    } else if constexpr (N == 4) {
        bytes[0] = *reinterpret_cast<const u32*>(x + at);
    } else {
        bytes[0] = x[at] | static_cast<u32>(x[at + 1]) << 8;
    }
    float v[N];
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = from_e4m3(bytes[j / 4] >> 8 * (j % 4) & 0xFFu) * factor;
    store(out + at, v);
}
