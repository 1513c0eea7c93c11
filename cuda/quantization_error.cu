// How well fp8 rows stand for their value: largest magnitude, sums of squares of value and error, and counts of numbers
// clipped, flushed to zero, and in all; see the reference. Two stages in fixed order: a row of six numbers per block, and
// one block that adds those up. Runs once in many steps; it reads value and copy once, 8 numbers to an access.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype of the value), C (columns), N, E4M3, PER

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, WARPS = THREADS / 32, FIELDS = 6;
constexpr float LIMIT = E4M3 ? 448.0f : 57344.0f, CLIPPED = E4M3 ? 464.0f : 61440.0f;

constexpr int TENSOR = 0, ROW = 1, BLOCK = 2, TILE = 3, SIDE = 128;  // PER: what one scale is for

// the scale of the N numbers from `first` on, as scale_shape of llmq/tensor.py lays scales out
__device__ __forceinline__ float scale_at(const float* scale, i64 first, i64 rows) {
    if constexpr (PER == TENSOR) return *scale;
    i64 row = first / C;
    int column = static_cast<int>(first % C);
    if constexpr (PER == ROW) return scale[row];
    if constexpr (PER == BLOCK) return scale[column / SIDE * rows + row];
    return scale[row / SIDE * ((C + 4 * SIDE - 1) / (4 * SIDE) * 4) + column / SIDE];
}

// an fp8 number: its bits, moved to where f32 has them, need only another exponent bias, which a product changes
__device__ __forceinline__ float from_fp8(u32 byte) {
    float magnitude = E4M3 ? __uint_as_float((byte & 0x7f) << 20) * 0x1p120f : __uint_as_float((byte & 0x7f) << 21) * 0x1p112f;
    return byte & 0x80 ? -magnitude : magnitude;
}

// the sum (field 0: the maximum) over the block in thread 0
__device__ __forceinline__ void block_total(float (&field)[FIELDS]) {
    __shared__ float warps[FIELDS][WARPS];
#pragma unroll
    for (int f = 0; f < FIELDS; f++) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, field[f], step);
            field[f] = f ? field[f] + other : fmaxf(field[f], other);
        }
        if (threadIdx.x % 32 == 0) warps[f][threadIdx.x / 32] = field[f];
    }
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll
    for (int f = 0; f < FIELDS; f++)
#pragma unroll
        for (int w = 1; w < WARPS; w++) field[f] = f ? field[f] + warps[f][w] : fmaxf(field[f], warps[f][w]);
}

// parts (blocks, 6) <- x, copy (count,), scale
extern "C" __global__ void __launch_bounds__(THREADS)
    error_parts(float* parts, const X* x, const u8* copy, const float* scale, i64 count) {
    float field[FIELDS] = {};
    i64 step = static_cast<i64>(gridDim.x) * THREADS * N;
    for (i64 first = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N; first < count; first += step) {
        float v[N], unit = scale_at(scale, first, count / C);
        load(x + first, v);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (!isfinite(v[j])) continue;
            float raw = from_fp8(copy[first + j]), difference = v[j] - raw * unit, size = fabsf(v[j]);
            field[0] = fmaxf(field[0], size);
            field[1] += v[j] * v[j];
            field[2] += difference * difference;
            field[3] += fabsf(raw) == LIMIT && size > fabsf(raw * unit) / LIMIT * CLIPPED;
            field[4] += v[j] != 0 && raw == 0;
        }
        field[5] += N;
    }
    block_total(field);
    if (threadIdx.x == 0)
#pragma unroll
        for (int f = 0; f < FIELDS; f++) parts[blockIdx.x * FIELDS + f] = field[f];
}

// result (6,) <- error (6,), parts (blocks, 6); one block. `result` may be the memory of `error`.
extern "C" __global__ void __launch_bounds__(THREADS)
    error_total(float* result, const float* error, const float* parts, int blocks) {
    float field[FIELDS] = {};
    for (int i = threadIdx.x; i < blocks; i += THREADS)
#pragma unroll
        for (int f = 0; f < FIELDS; f++) {
            float part = parts[i * FIELDS + f];
            field[f] = f ? field[f] + part : fmaxf(field[f], part);
        }
    block_total(field);
    if (threadIdx.x == 0)
#pragma unroll
        for (int f = 0; f < FIELDS; f++) result[f] = f ? error[f] + field[f] : fmaxf(error[f], field[f]);
}
