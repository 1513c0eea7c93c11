// An activation of x (rows, F), as it lies between the maps of an MLP without a gate; and its gradient.
//
// Blocks and lanes own what they do in swiglu.cu: a tile of 32 rows and 32*N columns, of 128 rows and 128 columns to
// transpose, 256 rows where column sums are wanted; N columns of two neighbouring rows at a time. Not measured yet.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), F, N (numbers per access), ACTIVATION (activation.cuh), FORMS and E4M3 (forms.cuh)

#include "activation.cuh"
#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int LANES = TILE_LANES<N>, SLOTS = TILE_SLOTS<N>, SPAN = LANES * N, ACROSS = (F + SPAN - 1) / SPAN;
constexpr int ROWS = tile_rows(128), PITCH = pair_pitch(SPAN), TILES = (FORMS & SUMS) ? SUMS_ROWS / ROWS : 1;
constexpr int AT_ONCE = 2;  // pairs of rows

// out <- the activation's value; or, where there is d, d times its slope
template <bool BACKWARD>
__device__ __forceinline__ void activate(const Output<T>& out, const T* d, const T* x, i64 rows) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    __shared__ __align__(16) float shared[(FORMS & SUMS) ? TILE_WARPS * SPAN : 4];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * TILES * ROWS, begin = block_row * F + column;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(TILES * ROWS)));
    Sink<T, FORMS, E4M3> sink(out);
    sink.begin_at(begin);
    x += begin;
    if constexpr (BACKWARD) d += begin;
    auto place = [=](int c) { return first_column + c < F ? first_column + c : -1; };
    float sums[N] = {};
    for (int first_row = 0; first_row < block_rows; first_row += ROWS) {
#pragma unroll 1
        for (int part = slot; part < ROWS / 2; part += AT_ONCE * SLOTS) {
            int first = first_row + 2 * part, left = column < F ? block_rows - first : 0;  // rows from here on
            Pack<T, N> read[AT_ONCE][2], factor[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; i++) {
                int row = i / 2 * 2 * SLOTS + i % 2;
                if (row >= left) continue;
                read[i / 2][i % 2].load(x + (first + row) * F);
                if constexpr (BACKWARD) factor[i / 2][i % 2].load(d + (first + row) * F);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                u32 bytes[2][(N + 3) / 4] = {};
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    int row = 2 * i * SLOTS + odd;
                    if (row >= left) continue;
                    float v[N], by[N];
                    read[i][odd].get(v);
                    if constexpr (BACKWARD) factor[i][odd].get(by);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        Activated<ACTIVATION> found(v[j]);
                        v[j] = BACKWARD ? by[j] * found.slope() : found.value;
                    }
                    sink.put((first + row) * F, v, bytes[odd]);
#pragma unroll
                    for (int j = 0; j < N; j++) sums[j] += v[j];
                }
                store_pair<N>(tile + pair_at(part + i * SLOTS, lane * N, PITCH), bytes[0], bytes[1]);
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_transposed<ROWS, TILE_THREADS>(tile, PITCH, out.col, SPAN, place, block_row + first_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0) store_sums<LANES, N>(sums, out.sums + block_row / SUMS_ROWS * F, place, shared);
    sink.finish();
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    activation_forward(OUTPUT_PARAMETERS(T, act), const T* x, i64 rows) {
    activate<false>(OUTPUT(T, act), nullptr, x, rows);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    activation_backward(OUTPUT_PARAMETERS(T, d_x), const T* d_act, const T* x, i64 rows) {
    activate<true>(OUTPUT(T, d_x), d_act, x, rows);
}
