// RMSNorm over the last axis: x = res * rstd * (weight + OFFSET) with rstd = 1 / sqrt(mean(res^2) + eps); and its gradient.
//
// GROUP warps own a row and hold it in registers (VPT accesses to a lane), GROUPS groups make a block, ROWS rows belong to
// a block. Backward keeps the weight's gradient of its rows in registers too, writes one partial row of it per block
// (`parts` of them, a function of the shapes) and leaves their sum to `sum_weight`: the order never changes.
// d_out may be the memory of d_res. A transposed copy may be that of more rows (`tall`) than are here. A block transposes only when all of its rows are there.
//
// Measured on an H200 in bf16, at (32768, 896) and (16384, 3584): forward 95 and 97% of a copy, backward 90 and 92%; with
// fp8 in both layouts forward 83 and 77%, backward 82 and 77% (docs/kernels/memory-bound.md says what was tried).
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the weight's gradient), C, N, GROUP, VPT, GROUPS, ROWS, BLOCKS (to a multiprocessor, at least),
// AHEAD (0 or 1: the next row is read while one is worked on), FORMS, E4M3, RESIDUAL (0 or 1), OFFSET

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "columns.cuh"

constexpr int THREADS = 32 * GROUP * GROUPS, PITCH = tile_pitch(C), STEP = 32 * GROUP * N;
static_assert(VPT * STEP >= C, "a row fits the group's registers");

// the sum over a group's threads; `slot` alternates so that one barrier is enough
__device__ __forceinline__ float group_sum(float x, float (*shared)[GROUPS][GROUP], int slot) {
    x = warp_sum(x);
    if constexpr (GROUP > 1) {
        int group = threadIdx.x / (32 * GROUP), warp = threadIdx.x / 32 % GROUP;
        if (threadIdx.x % 32 == 0) shared[slot][group][warp] = x;
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * GROUP) : "memory");
        x = 0;
#pragma unroll
        for (int w = 0; w < GROUP; w++) x += shared[slot][group][w];
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rmsnorm_forward(OUTPUT_PARAMETERS(T, x), float* rstd, const T* res, const T* weight, float eps, i64 rows,
                    i64 tall) {
    extern __shared__ __align__(16) u8 tile[];  // [ROWS][PITCH] where the transposed form is wanted
    __shared__ float shared[2][GROUPS][GROUP];
    int group = threadIdx.x / (32 * GROUP), column = threadIdx.x % (32 * GROUP) * N;
    i64 block_row = static_cast<i64>(blockIdx.x) * ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, x));
    Pack<T, N> next[VPT];
    auto begin_reading = [&](int r) {
        if (r >= ROWS || block_row + r >= rows) return;
        const T* from = res + (block_row + r) * C + column;
#pragma unroll
        for (int k = 0; k < VPT; k++)
            if (column + k * STEP < C) next[k].load_early<AHEAD>(from + k * STEP);
    };
    if constexpr (AHEAD) begin_reading(group);
    for (int r = group; r < ROWS; r += GROUPS) {
        i64 row = block_row + r;
        if (row >= rows) break;
        Pack<T, N> read[VPT];
        float sum = 0, v[N];
        if constexpr (!AHEAD) begin_reading(r);
#pragma unroll
        for (int k = 0; k < VPT; k++) read[k] = next[k];
        if constexpr (AHEAD) begin_reading(r + GROUPS);
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            if (column + k * STEP >= C) break;
            read[k].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
        }
        float s = 1.0f / sqrtf(group_sum(sum, shared, r / GROUPS % 2) * (1.0f / C) + eps);
        if (rstd && threadIdx.x % (32 * GROUP) == 0) rstd[row] = s;
        if constexpr (FORMS == 0) continue;
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            int at = column + k * STEP;
            if (at >= C) break;
            float w[N];
            load_weights<OFFSET>(weight + at, w);
            read[k].get(v);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= s * w[j];
            sink.put(row * C + at, v, tile + tile_at<ROWS>(r, at, PITCH));
        }
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        write_columns<ROWS, THREADS>(tile, PITCH, x_col, C, [](int c) { return c; }, block_row, rows, tall);
    }
    sink.finish();
}

// d_out = d_res + rstd * (g - n * mean(g * n)), n = res * rstd, g = d_x * (weight + OFFSET); partial (parts, C) <- sum of d_x * n.
// A block owns `per_block` rows, a multiple of 256 where column sums are wanted.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rmsnorm_backward(OUTPUT_PARAMETERS(T, d_out), float* partial, const T* d_x, const T* d_res, const T* res,
                     const T* weight, const float* rstd, int per_block, i64 rows, i64 tall) {
    extern __shared__ __align__(16) u8 tile[];  // [ROWS][PITCH] where the transposed form is wanted
    __shared__ float shared[2][GROUPS][GROUP];
    int group = threadIdx.x / (32 * GROUP), column = threadIdx.x % (32 * GROUP) * N;
    i64 block_row = static_cast<i64>(blockIdx.x) * per_block, begin = block_row * C + column;
    int end = static_cast<int>(min(rows - block_row, static_cast<i64>(per_block)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_out));
    sink.begin_at(begin);
    d_x += begin, d_res += begin, res += begin, rstd += block_row, weight += column;
    float d_weight[VPT][N] = {};
    int slot = 0;
    struct Row {
        Pack<T, N> res[VPT], d_x[VPT];
        float rstd;
    } next;
    auto begin_reading = [&](int row) {
        if (row >= end) return;
        next.rstd = rstd[row];
#pragma unroll
        for (int k = 0; k < VPT; k++) {
            int at = row * C + k * STEP;
            if (column + k * STEP >= C) break;
            next.res[k].load_early<AHEAD>(res + at);
            next.d_x[k].load_early<AHEAD>(d_x + at);
        }
    };
    if constexpr (AHEAD) begin_reading(group);
    for (int first = 0; first < end; first += ROWS) {
        for (int r = group; r < ROWS; r += GROUPS, slot ^= 1) {
            int row = first + r;
            if (row >= end) break;
            if constexpr (!AHEAD) begin_reading(row);
            Row own = next;
            Pack<T, N> through[VPT];
#pragma unroll
            for (int k = 0; k < VPT; k++)
                if (RESIDUAL && FORMS != 0 && column + k * STEP < C) through[k].load_early<AHEAD>(d_res + row * C + k * STEP);
            if constexpr (AHEAD) begin_reading(row + GROUPS);  // also across tiles: ROWS is a multiple of GROUPS
            float dot = 0, s = own.rstd;
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                if (column + k * STEP >= C) break;
                float n[N], d[N], w[N];
                load_weights<OFFSET>(weight + k * STEP, w);
                own.res[k].get(n);
                own.d_x[k].get(d);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    n[j] *= s;
                    dot = fmaf(d[j] * w[j], n[j], dot);
                    d_weight[k][j] = fmaf(d[j], n[j], d_weight[k][j]);
                }
            }
            if constexpr (FORMS == 0) continue;
            float mean = group_sum(dot, shared, slot) * (1.0f / C);
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                if (column + k * STEP >= C) break;
                float n[N], d[N], w[N];
                load_weights<OFFSET>(weight + k * STEP, w);
                own.res[k].get(n);
                own.d_x[k].get(d);
#pragma unroll
                for (int j = 0; j < N; j++) d[j] = s * (d[j] * w[j] - n[j] * s * mean);
                if constexpr (RESIDUAL) {
                    through[k].get(n);
#pragma unroll
                    for (int j = 0; j < N; j++) d[j] += n[j];
                }
                sink.put(row * C + k * STEP, d, tile + tile_at<ROWS>(r, column + k * STEP, PITCH));
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            write_columns<ROWS, THREADS>(
                tile, PITCH, d_out_col, C, [](int c) { return c; }, block_row + first, rows, tall);
            __syncthreads();
        }
    }
    sink.finish();
    if (!partial) return;
    // groups are added in order, through the block's own row of the partial sums
    float* own = partial + static_cast<i64>(blockIdx.x) * C;
    for (int g = 0; g < GROUPS; g++) {
        if (g == group) {
#pragma unroll
            for (int k = 0; k < VPT; k++) {
                int at = column + k * STEP;
                if (at >= C) break;
                if (g) {
                    float before[N];
                    load(own + at, before);
#pragma unroll
                    for (int j = 0; j < N; j++) d_weight[k][j] += before[j];
                }
                store(own + at, d_weight[k]);
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weight(G* d_weight, const float* partial, int parts, int add) {
    sum_columns(d_weight, partial, parts, C, add);
}
