// Copies of a value in other forms, and the scales of quantized forms.
//
// cast: a block owns a tile of 32 rows and 32*N columns, one of 64 rows and 128 columns to transpose, 256 rows where column
// sums are wanted; a lane owns N columns of two neighbouring rows at a time.
// amax_scale: the largest magnitude through atomicMax on the bits, whose result does not depend on the order.
//
// Measured on an H200: f32 to bf16 as fast as a copy; bf16 to fp8 in both layouts 88 and 93% of one (tiles of 128 by 128: 81
// and 91%); amax_scale as fast as a copy that moves as many bytes.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype read), T (dtype of the output), C (columns), N, FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int LANES = TILE_LANES<N>, SLOTS = TILE_SLOTS<N>, SPAN = LANES * N, ACROSS = (C + SPAN - 1) / SPAN;
constexpr int ROWS = tile_rows(64), PITCH = pair_pitch(SPAN), TILES = (FORMS & SUMS) ? SUMS_ROWS / ROWS : 1;
constexpr int AT_ONCE = 2;  // pairs of rows

extern "C" __global__ void __launch_bounds__(TILE_THREADS, (FORMS & COL) ? 4 : 1)
    cast(OUTPUT_PARAMETERS(T, out), const X* x, i64 rows, i64 tall) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    __shared__ __align__(16) float shared[(FORMS & SUMS) ? TILE_WARPS * SPAN : 4];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * ROWS;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(TILES * ROWS)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, out));
    sink.begin_at(block_row * C + column);
    x += block_row * C + column;
    auto place = [=](int c) { return first_column + c < C ? first_column + c : -1; };
    float sums[N] = {};
    for (int first_row = 0; first_row < block_rows; first_row += ROWS) {
#pragma unroll 1
        for (int part = slot; part < ROWS / 2; part += AT_ONCE * SLOTS) {
            int left = column < C ? block_rows - first_row - 2 * part : 0;  // rows from here on
            Pack<X, N> read[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; i++) {
                int row = i / 2 * 2 * SLOTS + i % 2;
                if (row < left) read[i / 2][i % 2].load(x + (first_row + 2 * part + row) * C);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                u32 bytes[2][(N + 3) / 4] = {};
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    int row = 2 * i * SLOTS + odd;
                    if (row >= left) continue;
                    float v[N];
                    read[i][odd].get(v);
                    sink.put((first_row + 2 * part + row) * C, v, bytes[odd]);
#pragma unroll
                    for (int j = 0; j < N; j++) sums[j] += v[j];
                }
                store_pair<N>(tile + pair_at(part + i * SLOTS, lane * N, PITCH), bytes[0], bytes[1]);
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_transposed<ROWS, TILE_THREADS>(tile, PITCH, out_col, SPAN, place, block_row + first_row, rows, tall);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0) store_sums<LANES, N>(sums, out_sums + block_row / SUMS_ROWS * C, place, shared);
    sink.finish();
}

// Zero before and after every call, of which those on one stream run one after the other. STREAMS as in launch.py.
constexpr int STREAMS = 64;
__device__ u32 largest_of_blocks[STREAMS], blocks_done[STREAMS];

// scale (1,) <- the largest magnitude of x (count,), from the last block to finish
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    amax_scale(float* scale, const X* x, float limit, i64 count, int stream) {
    constexpr int AT_ONCE = 4;
    __shared__ u32 warps[TILE_WARPS];
    i64 step = static_cast<i64>(gridDim.x) * TILE_THREADS * N;
    u32 largest = 0;
#pragma unroll 1
    for (i64 first = (static_cast<i64>(blockIdx.x) * TILE_THREADS + threadIdx.x) * N; first < count;
         first += AT_ONCE * step) {
        Pack<X, N> read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            read[i] = {};
            if (first + i * step < count) read[i].load(x + first + i * step);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float v[N];
            read[i].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) largest = max(largest, __float_as_uint(v[j]) & 0x7fffffffu);
        }
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll
    for (int w = 1; w < TILE_WARPS; w++) largest = max(largest, warps[w]);
    atomicMax(&largest_of_blocks[stream], largest);
    __threadfence();
    if (atomicInc(&blocks_done[stream], gridDim.x - 1) == gridDim.x - 1)
        *scale = scale_of(__uint_as_float(atomicExch(&largest_of_blocks[stream], 0)), limit, 1.0f);
}

// amax (1,), zero before, takes the bits of the largest magnitude of x (count,) in T
extern "C" __global__ void __launch_bounds__(TILE_THREADS) amax(u32* amax, const X* x, i64 count) {
    i64 step = static_cast<i64>(gridDim.x) * TILE_THREADS * N;
    u32 most = 0;
#pragma unroll 4
    for (i64 at = (static_cast<i64>(blockIdx.x) * TILE_THREADS + threadIdx.x) * N; at < count; at += step) {
        Pack<X, N> read;
        read.load(x + at);
        float v[N];
        read.get(v);
#pragma unroll
        for (int j = 0; j < N; j++) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
    }
    most = __float_as_uint(to_float(narrow<T>(__uint_as_float(warp_max(most)))));
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, most);
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
