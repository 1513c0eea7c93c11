// SwiGLU: act = silu(gate) * up over (rows, F), gate and up being the halves of gate_up (rows, 2F); and its gradient.
//
// A block owns a tile of 32 rows and 32*N columns of each half (256 rows where column sums are wanted), a lane N columns in
// 16 bytes, a warp whole rows of the tile, so that every access of a warp is one run of 512 bytes. The transposed fp8 form
// waits in shared memory until the tile is full.
//
// Measured on an H200 at (32768, 4864) bf16: forward 4325 GB/s and backward 4227, as fast as a copy; with fp8 in both
// layouts in place of the value 3715 and 3754 (tiles of 32 rows, so runs of 32 bytes: 2638 and 3421).
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), F, N (numbers per access), FORMS and E4M3 (forms.cuh)

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int SPAN = 32 * N, ACROSS = (F + SPAN - 1) / SPAN, PITCH = tile_pitch(SPAN);
constexpr int TILES = (FORMS & SUMS) ? SUMS_ROWS / TILE_ROWS : 1;
constexpr int TILE_BYTES = (FORMS & COL) ? TILE_ROWS * PITCH : 4;
constexpr int SUMS_FLOATS = (FORMS & SUMS) ? TILE_WARPS * SPAN : 4;

// 1 / (1 + exp(-x)); exp overflows to infinity for very negative x, which gives the right 0
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    swiglu_forward(OUTPUT_PARAMETERS(T, act), const T* gate_up, i64 rows) {
    __shared__ __align__(16) u8 tile[TILE_BYTES];
    __shared__ __align__(16) float shared[SUMS_FLOATS];
    constexpr int AT_ONCE = (FORMS & COL) ? 2 : 4;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * TILE_ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, act));
    float sums[N] = {};
    for (i64 first_row = block_row; first_row < min(rows, block_row + TILES * TILE_ROWS); first_row += TILE_ROWS) {
#pragma unroll 1
        for (int part = 0; part < TILE_ROWS / TILE_WARPS; part += AT_ONCE) {
            Pack<T, N> gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                i64 row = first_row + warp + (part + i) * TILE_WARPS;
                if (row < rows && column < F) {
                    gate[i].load(gate_up + row * 2 * F + column);
                    up[i].load(gate_up + row * 2 * F + F + column);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int in_tile = warp + (part + i) * TILE_WARPS;
                i64 row = first_row + in_tile;
                if (row >= rows || column >= F) continue;
                float g[N], v[N];
                gate[i].get(g);
                up[i].get(v);
#pragma unroll
                for (int j = 0; j < N; j++) v[j] *= g[j] * sigmoid(g[j]);
                sink.put(row * F + column, v, tile + in_tile * PITCH + lane * N);
#pragma unroll
                for (int j = 0; j < N; j++) sums[j] += v[j];
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_columns<TILE_ROWS, TILE_THREADS>(
                tile, PITCH, act_col, min(SPAN, F - first_column), [=](int c) { return first_column + c; }, first_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0)
        store_sums<TILE_WARPS>(sums, act_sums + block_row / SUMS_ROWS * F + first_column, F - first_column, shared);
    sink.finish();
}

// d_up = d_act * silu(gate); d_gate = d_act * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    swiglu_backward(OUTPUT_PARAMETERS(T, d_gate_up), const T* d_act, const T* gate_up, i64 rows) {
    __shared__ __align__(16) u8 tiles[2][TILE_BYTES];
    __shared__ __align__(16) float shared[SUMS_FLOATS];
    constexpr int AT_ONCE = (FORMS & COL) ? 1 : 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * TILE_ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_gate_up));
    float gate_sums[N] = {}, up_sums[N] = {};
    for (i64 first_row = block_row; first_row < min(rows, block_row + TILES * TILE_ROWS); first_row += TILE_ROWS) {
#pragma unroll 1
        for (int part = 0; part < TILE_ROWS / TILE_WARPS; part += AT_ONCE) {
            Pack<T, N> gate[AT_ONCE], up[AT_ONCE], d[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                i64 row = first_row + warp + (part + i) * TILE_WARPS;
                if (row < rows && column < F) {
                    gate[i].load(gate_up + row * 2 * F + column);
                    up[i].load(gate_up + row * 2 * F + F + column);
                    d[i].load(d_act + row * F + column);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int in_tile = warp + (part + i) * TILE_WARPS;
                i64 row = first_row + in_tile;
                if (row >= rows || column >= F) continue;
                float g[N], u[N], v[N];
                gate[i].get(g);
                up[i].get(u);
                d[i].get(v);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    float s = sigmoid(g[j]), silu = s * g[j];
                    g[j] = v[j] * u[j] * (s + silu * (1.0f - s));
                    u[j] = v[j] * silu;
                }
                sink.put(row * 2 * F + column, g, tiles[0] + in_tile * PITCH + lane * N);
                sink.put(row * 2 * F + F + column, u, tiles[1] + in_tile * PITCH + lane * N);
#pragma unroll
                for (int j = 0; j < N; j++) gate_sums[j] += g[j], up_sums[j] += u[j];
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            for (int half = 0; half < 2; half++)
                write_columns<TILE_ROWS, TILE_THREADS>(
                    tiles[half], PITCH, d_gate_up_col, min(SPAN, F - first_column),
                    [=](int c) { return half * F + first_column + c; }, first_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0) {
        float* to = d_gate_up_sums + block_row / SUMS_ROWS * 2 * F + first_column;
        store_sums<TILE_WARPS>(gate_sums, to, F - first_column, shared);
        store_sums<TILE_WARPS>(up_sums, to + F, F - first_column, shared);
    }
    sink.finish();
}
