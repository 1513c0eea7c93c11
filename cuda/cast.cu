// Copies of a value in other forms, and the scales of quantized forms.
//
// cast: a block owns a tile of 32 rows and 32*N columns (256 rows where column sums are wanted), a lane N columns.
// amax: the largest magnitude through atomicMax on the bits, whose result does not depend on the order.
//
// Measured on an H200: f32 to bf16 as fast as a copy; bf16 to fp8 in both layouts 74-78% of one.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype read), T (dtype of the output), C (columns), N, FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int SPAN = 32 * N, ACROSS = (C + SPAN - 1) / SPAN, PITCH = tile_pitch(SPAN);
constexpr int TILES = (FORMS & SUMS) ? SUMS_ROWS / TILE_ROWS : 1;
constexpr int AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(TILE_THREADS) cast(OUTPUT_PARAMETERS(T, out), const X* x, i64 rows) {
    __shared__ __align__(16) u8 tile[(FORMS & COL) ? TILE_ROWS * PITCH : 4];
    __shared__ __align__(16) float shared[(FORMS & SUMS) ? TILE_WARPS * SPAN : 4];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * TILE_ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, out));
    float sums[N] = {};
    for (i64 first_row = block_row; first_row < min(rows, block_row + TILES * TILE_ROWS); first_row += TILE_ROWS) {
#pragma unroll 1
        for (int part = 0; part < TILE_ROWS / TILE_WARPS; part += AT_ONCE) {
            Pack<X, N> read[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                i64 row = first_row + warp + (part + i) * TILE_WARPS;
                if (row < rows && column < C) read[i].load(x + row * C + column);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int in_tile = warp + (part + i) * TILE_WARPS;
                i64 row = first_row + in_tile;
                if (row >= rows || column >= C) continue;
                float v[N];
                read[i].get(v);
                sink.put(row * C + column, v, tile + in_tile * PITCH + lane * N);
#pragma unroll
                for (int j = 0; j < N; j++) sums[j] += v[j];
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_columns<TILE_ROWS, TILE_THREADS>(
                tile, PITCH, out_col, min(SPAN, C - first_column), [=](int c) { return first_column + c; }, first_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0)
        store_sums<TILE_WARPS>(sums, out_sums + block_row / SUMS_ROWS * C + first_column, C - first_column, shared);
    sink.finish();
}

// amax (1,), zero before, takes the bits of the largest magnitude of x (count,)
extern "C" __global__ void __launch_bounds__(TILE_THREADS) amax(u32* amax, const X* x, i64 count) {
    constexpr int AT_ONCE = 4;
    i64 step = static_cast<i64>(gridDim.x) * TILE_THREADS * N;
    u32 largest = 0;
    for (i64 first = (static_cast<i64>(blockIdx.x) * TILE_THREADS + threadIdx.x) * N; first < count;
         first += AT_ONCE * step) {
        Pack<X, N> read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * step < count) read[i].load(x + first + i * step);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i * step >= count) continue;
            float v[N];
            read[i].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, __float_as_uint(v[j]) & 0x7fffffffu);
        }
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) atomicMax(amax, largest);
}

extern "C" __global__ void amax_scale(float* scale, const float* amax, float limit) {
    *scale = scale_of(*amax, limit, 1.0f);
}

// one thread per cell; new_* may be the memory of the inputs
extern "C" __global__ void scale_update(float* new_scale, float* new_history, float* new_amax, const float* scale,
                                        const float* history, const float* amax, const float* limits, const float* apply,
                                        int cells, int depth) {
    int cell = blockIdx.x * blockDim.x + threadIdx.x;
    if (cell >= cells) return;
    float seen = amax[cell], largest = 0;
    bool used = isfinite(seen) && *apply != 0;
    for (int h = depth - 1; h >= 0; h--) {
        float kept = used ? (h ? history[static_cast<i64>(h - 1) * cells + cell] : seen)
                          : history[static_cast<i64>(h) * cells + cell];
        largest = fmaxf(largest, kept);
        if (new_history) new_history[static_cast<i64>(h) * cells + cell] = kept;
    }
    float old = scale[cell];
    if (new_scale) new_scale[cell] = used ? scale_of(largest, limits[cell], old) : old;
    if (new_amax) new_amax[cell] = 0;
}
