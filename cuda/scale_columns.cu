// A matrix times a gain for each column: y = gain x + bias + residual over (rows, C), and its gradients d_x = gain d_y and
// d_gain, the sums of d_y x over rows.
//
// Forward a lane owns N columns of 32 rows, backward a block 128 columns of 256 rows, of which it leaves one row of partial
// sums; a second kernel adds these in order. The order does not depend on the forms of d_x. Not measured yet against a copy.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), G (dtype of d_gain), C, N (numbers per access), FORMS and E4M3 (forms.cuh)

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "columns.cuh"

constexpr int LANES = N > 4 ? 128 / N : 32, SLOTS = TILE_THREADS / LANES, SPAN = LANES * N, ACROSS = (C + SPAN - 1) / SPAN;
constexpr int ROWS = (FORMS & COL) ? 128 : 64, PITCH = pair_pitch(SPAN), TILES = SUMS_ROWS / ROWS;
constexpr int FORWARD_ROWS = 32;

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    scale_columns_forward(T* y, const T* x, const float* gain, const T* bias, const T* residual, i64 rows) {
    int lane = threadIdx.x % LANES, column = blockIdx.x % ACROSS * SPAN + lane * N;
    i64 first = static_cast<i64>(blockIdx.x / ACROSS) * FORWARD_ROWS, end = min(rows, first + FORWARD_ROWS);
    if (column >= C) return;
    float g[N], b[N];
    load(gain + column, g);
    if (bias) load(bias + column, b);
#pragma unroll 2
    for (i64 row = first + threadIdx.x / LANES; row < end; row += SLOTS) {
        i64 at = row * C + column;
        float v[N], r[N];
        load(x + at, v);
        if (residual) load(residual + at, r);
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] *= g[j];
            if (bias) v[j] += b[j];
            if (residual) v[j] += r[j];
        }
        store(y + at, v);
    }
}

// `partial` (ceil(rows / 256), C) f32, or null where d_gain is not wanted
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    scale_columns_backward(OUTPUT_PARAMETERS(T, d_x), float* partial, const T* d_y, const T* x, const float* gain, i64 rows) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    __shared__ __align__(16) float shared[TILE_WARPS * SPAN];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * ROWS;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(TILES * ROWS)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_x));
    sink.begin_at(block_row * C + column);
    d_y += block_row * C + column;
    x += block_row * C + column;
    auto place = [=](int c) { return first_column + c < C ? first_column + c : -1; };
    float g[N] = {}, sums[N] = {}, products[N] = {};
    if (column < C) load(gain + column, g);
    for (int first_row = 0; first_row < block_rows; first_row += ROWS) {
#pragma unroll 2
        for (int part = slot; part < ROWS / 2; part += SLOTS) {
            int first = first_row + 2 * part, left = column < C ? block_rows - first : 0;  // rows from here on
            u32 bytes[2][(N + 3) / 4] = {};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                if (odd >= left) continue;
                i64 at = static_cast<i64>(first + odd) * C;
                float d[N], v[N];
                load(d_y + at, d);
                load(x + at, v);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    products[j] += d[j] * v[j];
                    d[j] *= g[j];
                }
                sink.put(at, d, bytes[odd]);
#pragma unroll
                for (int j = 0; j < N; j++) sums[j] += d[j];
            }
            store_pair<N>(tile + pair_at(part, lane * N, PITCH), bytes[0], bytes[1]);
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_transposed<ROWS, TILE_THREADS>(tile, PITCH, d_x_col, SPAN, place, block_row + first_row, rows);
            __syncthreads();
        }
    }
    if (partial) store_sums<LANES, N>(products, partial + block_row / SUMS_ROWS * C, place, shared);
    if constexpr ((FORMS & SUMS) != 0) store_sums<LANES, N>(sums, d_x_sums + block_row / SUMS_ROWS * C, place, shared);
    sink.finish();
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    scale_columns_sum(G* d_gain, const float* partial, int parts, int columns, int add) {
    sum_columns(d_gain, partial, parts, columns, add);
}
